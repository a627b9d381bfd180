//! Eviction: a local store is a cache of what is elsewhere, and stays within its size.
//!
//! What counts is what the store will take up once leases have ended: bytes that only wait for that must not cost further snapshots.

use super::GcOptions;
use super::run::Run;
use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{Evictable, ObjectId, PackState, Pin};
use pfr_schema::api::GcReport;
use pfr_schema::{Digest, RepositoryName};
use std::collections::HashSet;

/// Snapshots asked for at once: all there are.
const ALL: usize = 1_000_000;
/// Packs asked for at a time.
const PACKS: usize = 1000;
/// Pinned snapshots named when nothing else is left.
const NAMED: usize = 10;

/// A snapshot, and what it costs to keep it and everything that is worth more.
struct Kept {
    repository: RepositoryName,
    digest: Digest,
    /// As it was listed, unless it is pinned.
    evictable: Option<Evictable>,
    /// Frame bytes that it and all before it reach.
    reach: u64,
}

impl Store {
    /// Collects garbage, then deletes the least recently used snapshots until the packs fit into `max_bytes` or only pinned ones are left; the
    /// report's `error` says the latter. Bytes that leases still cover go when they end, and do not count. For a store that is a cache: nothing asks
    /// whether a snapshot is anywhere else.
    ///
    /// # Errors
    /// As [`Store::gc`].
    pub async fn evict(&self, max_bytes: u64, options: &GcOptions, progress: &mut (dyn FnMut(&GcReport) + Send)) -> Result<GcReport> {
        let mut run = Run::start(self, options, progress).await?;
        if options.dry_run {
            run.plan().await;
        } else {
            run.steps().await;
        }
        let fitted = run.fit(max_bytes).await;
        run.note(fitted);
        run.finish().await
    }

    /// Notes that a snapshot is used: eviction takes those first that were not for long.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`], [`Error::RepositoryUnknown`].
    pub async fn touch(&self, repository: &RepositoryName, digest: &Digest) -> Result<()> {
        self.metadata.touch_snapshot(repository.clone(), *digest).await
    }

    /// The same wherever the snapshot lies. Best effort: that it is not noted does no harm.
    pub async fn touch_everywhere(&self, digest: &Digest) {
        for repository in self.all_repositories().await.unwrap_or_default() {
            match self.touch(&repository, digest).await {
                Ok(()) | Err(Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_)) => {}
                Err(error) => tracing::debug!(%error, %repository, %digest, "the use of a snapshot is not noted"),
            }
        }
    }

    /// Keeps a snapshot from eviction for a reason, or no longer for that one: who takes a pin back takes back its own. Returns whether any is left.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`], [`Error::RepositoryUnknown`].
    pub async fn pin(&self, repository: &RepositoryName, digest: &Digest, reason: Pin, pinned: bool) -> Result<bool> {
        self.metadata.pin_snapshot(repository.clone(), *digest, reason, pinned).await
    }

    /// Deletes a snapshot unless it was pinned, used or deleted since it was listed.
    async fn evict_snapshot(&self, snapshot: Evictable) -> Result<bool> {
        let evicted = self.metadata.evict_snapshot(snapshot).await?;
        self.flush_journal().await?;
        Ok(evicted)
    }

    /// Bytes of packs that are not those of objects: dead space, indexes.
    async fn overhead(&self) -> Result<u64> {
        let (mut overhead, mut after) = (0, None);
        loop {
            let packs = self.metadata.packs(after, PACKS).await?;
            let Some(last) = packs.last() else { return Ok(overhead) };
            after = Some(last.id);
            overhead += packs.iter().filter(|p| p.state == PackState::Live).map(|p| p.bytes.saturating_sub(p.live_bytes)).sum::<u64>();
        }
    }

    /// All snapshots, those to be kept longest first: pinned ones, then the most recently used.
    async fn in_order_of_worth(&self) -> Result<Vec<Kept>> {
        let evictable = self.metadata.evictable(ALL).await?;
        let unpinned: HashSet<(&RepositoryName, &Digest)> = evictable.iter().map(|s| (&s.repository, &s.digest)).collect();
        let mut names = Vec::new();
        for repository in self.all_repositories().await? {
            let snapshots = self.all_snapshots(&repository).await?;
            let pinned = snapshots.iter().filter(|s| !unpinned.contains(&(&repository, &s.digest)));
            names.extend(pinned.map(|s| (repository.clone(), s.digest, None)));
        }
        names.extend(evictable.iter().rev().map(|s| (s.repository.clone(), s.digest, Some(s.clone()))));
        let (mut kept, mut seen, mut reach) = (Vec::with_capacity(names.len()), HashSet::new(), 0);
        for (repository, digest, evictable) in names {
            // Whoever deleted it in the meantime has done our work.
            if let Ok(row) = self.snapshot(&repository, &digest).await {
                reach += self.reached_bytes(row.object, &mut seen).await?;
                kept.push(Kept { repository, digest, evictable, reach });
            }
        }
        Ok(kept)
    }

    /// Frame bytes of what `root` reaches and nothing in `seen` did.
    async fn reached_bytes(&self, root: ObjectId, seen: &mut HashSet<ObjectId>) -> Result<u64> {
        let (mut bytes, mut level) = (0, vec![root]);
        while !level.is_empty() {
            level.retain(|id| seen.insert(*id));
            let rows = self.rows(std::mem::take(&mut level)).await?;
            bytes += rows.iter().map(|row| row.frame_len).sum::<u64>();
            level.extend(rows.into_iter().flat_map(|row| row.children));
        }
        Ok(bytes)
    }
}

impl Run<'_> {
    async fn fit(&mut self, max_bytes: u64) -> Result<()> {
        // Most stores fit, and asking that costs little.
        if self.store.metadata.disk_bytes().await? <= max_bytes {
            return Ok(());
        }
        let mut kept = self.store.in_order_of_worth().await?;
        let mut overhead = self.store.overhead().await?;
        while overhead + kept.last().map_or(0, |k| k.reach) > max_bytes {
            let Some(last) = kept.pop() else { return Ok(()) };
            let Some(evictable) = last.evictable.clone() else {
                kept.push(last);
                self.report.error = Some(only_pinned(&kept, overhead, max_bytes));
                return Ok(());
            };
            if self.options.dry_run {
                self.report.evicted += 1;
                self.report.freed_bytes += last.reach - kept.last().map_or(0, |k| k.reach);
                self.progress().await;
                continue;
            }
            // Pinned, used or deleted since the look: the next one.
            if !self.store.evict_snapshot(evictable).await? {
                continue;
            }
            tracing::info!(repository = %last.repository, snapshot = %last.digest, "evicted the least recently used snapshot");
            self.report.evicted += 1;
            self.steps().await;
            overhead = self.store.overhead().await?;
        }
        Ok(())
    }
}

fn only_pinned(kept: &[Kept], overhead: u64, max_bytes: u64) -> String {
    let names: Vec<String> = kept.iter().take(NAMED).map(|k| format!("{}@{}", k.repository, k.digest)).collect();
    let more = if kept.len() > NAMED { format!(" and {} more", kept.len() - NAMED) } else { String::new() };
    format!(
        "{} bytes are left and {max_bytes} allowed, but the rest is pinned (by hand, or until it is pushed): {}{more}",
        overhead + kept.last().map_or(0, |k| k.reach),
        names.join(", ")
    )
}
