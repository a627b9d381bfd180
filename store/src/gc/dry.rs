//! The dry run: the report that a collection would have now, with the same numbers of objects,
//! bytes and packs.

use super::plan::{Fates, Leases, MOST, Packs, Plan};
use super::run::{JOURNAL, Run};
use crate::error::Result;
use crate::metadata::{Evictable, PackRow, PackState, small};

impl Run<'_> {
    /// Adds up the objects and packs that would be deleted if these snapshots were evicted first.
    pub(super) async fn plan(&mut self, evicted: &[Evictable]) {
        let planned = self.count(evicted).await;
        self.note(planned);
    }

    async fn count(&mut self, evicted: &[Evictable]) -> Result<()> {
        let (now, end_sessions) = (self.store.options.clock.now(), self.options.end_sessions);
        let leases = if end_sessions { Leases::OfNoSession } else { Leases::All };
        let mut plan = Plan::new(self.store, self.options.batch, leases);
        let mut due = self.store.metadata.queue(!end_sessions, MOST).await?;
        if end_sessions {
            // When a session ends, the candidates that wait for it become due.
            due.retain(|queued| queued.due <= now || queued.session.is_some());
            self.report.sessions += self.store.metadata.unfinished(MOST).await?.len() as u64;
        }
        self.report.sessions += self.store.metadata.expired_sessions().await?;
        // In the order of a collection: first deleted snapshots, then uploads without a commit.
        self.report.released += plan.entries(due.iter().filter(|queued| queued.released)).await?;
        for snapshot in evicted {
            self.report.evicted += 1;
            self.report.released += self.store.release(&mut plan, snapshot).await?;
            self.show(&plan).await;
        }
        for queued in due.iter().filter(|queued| !queued.released) {
            self.report.unclaimed += plan.entry(queued).await?;
            self.show(&plan).await;
        }
        self.show(&plan).await;
        self.packs(&plan).await?;
        if plan.is_full() || due.len() == MOST {
            self.report.error = Some(format!("there are more than {MOST} objects to look at: the numbers are a lower bound"));
        }
        self.report.protected = Some(plan.protected().await?);
        self.report.unfinished = Some(self.store.unfinished_packs(if end_sessions { u64::MAX } else { now }).await?);
        // The deletion of each snapshot is an object of the journal.
        self.report.journal_deleted = self.store.superfluous_journal(evicted.len() as u64, JOURNAL).await?;
        Ok(())
    }

    async fn show(&mut self, plan: &Plan<'_>) {
        self.report.freed_bytes = plan.bytes;
        self.progress().await;
    }

    /// The small packs that would be merged, with the live bytes that they would have by then.
    async fn merged(&mut self, plan: &Plan<'_>, now: u64) -> Result<Vec<PackRow>> {
        let full = self.store.full_pack();
        let mut small = self.store.metadata.small_packs(full, MOST).await?;
        small.iter_mut().for_each(|pack| pack.live_bytes = plan.left(pack));
        small.retain(|pack| pack.live_bytes > 0 && pack.live_bytes * 2 >= pack.frame_bytes);
        let mut merged = Vec::new();
        for _ in 0..self.options.merges {
            let packs = small::take(&mut small, full, now);
            if packs.is_empty() {
                break;
            }
            merged.extend(packs);
        }
        self.report.packs_merged += merged.len() as u64;
        self.report.moved_bytes += merged.iter().map(|pack| pack.live_bytes).sum::<u64>();
        Ok(merged)
    }

    /// Adds up the packs that would be emptied, merged, compacted and deleted.
    async fn packs(&mut self, plan: &Plan<'_>) -> Result<()> {
        let now = self.store.options.clock.now();
        let packs = Packs::load(self.store).await?;
        let fates = packs.fates(plan, now, self.options.end_sessions);
        self.report.packs_emptied = fates.emptied.len() as u64;
        self.report.packs_abandoned = fates.abandoned.len() as u64;
        let mut emptied = fates.emptied;
        emptied.extend(fates.abandoned);
        let merged = if self.options.compact { self.merged(plan, now).await? } else { Vec::new() };
        emptied.extend(&merged);
        if self.options.compact {
            for (pack, _) in fates.sparse {
                let (moved, empties) = Fates::moved(self.store, plan, pack).await?;
                self.report.packs_compacted += u64::from(moved > 0);
                self.report.moved_bytes += moved;
                emptied.extend(empties.then_some(pack));
            }
        }
        let due = self.store.metadata.emptied_packs(self.options.grace, MOST).await?;
        self.report.packs_deleted = due.len() as u64;
        self.report.deleted_bytes = self.store.bytes_of(&due).await?;
        let mut all = 0;
        for pack in packs.iter().filter(|pack| pack.state == PackState::Emptied) {
            all += self.store.bytes_on_storage(pack).await?;
        }
        self.report.draining_bytes = all - self.report.deleted_bytes.min(all);
        let mut bytes = 0;
        for pack in &emptied {
            bytes += self.store.bytes_on_storage(pack).await?;
        }
        if self.options.grace.is_zero() {
            self.report.packs_deleted += emptied.len() as u64;
            self.report.deleted_bytes += bytes;
        } else {
            self.report.draining_bytes += bytes;
        }
        let until = |since: u64| since.saturating_add(self.grace_ms());
        let last = packs.iter().filter_map(|pack| pack.draining_since).max();
        let last = if emptied.is_empty() { last } else { Some(now) };
        self.report.draining_ends_at = last.filter(|_| self.report.draining_bytes > 0).map(until);
        Ok(())
    }
}
