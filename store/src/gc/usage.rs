//! What takes up room in a store, and until when.

use super::plan::{Leases, MOST, Packs, Plan};
use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::metadata::{PackRow, PackState};
use pfr_schema::api::{UnfinishedPacks, Usage};
use std::time::Duration;

/// Objects looked at in one query.
const BATCH: usize = 8000;

impl Store {
    /// What takes up room: what snapshots hold, what a collection would free now or later, and what
    /// only compaction gives back. Costs what a collection costs, and nothing is changed. `grace`
    /// is the grace period of this store's collections.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`].
    #[boxed]
    pub async fn usage(&self, grace: Duration) -> Result<Usage> {
        let now = self.options.clock.now();
        let mut plan = Plan::new(self, BATCH, Leases::All);
        let due = self.metadata.queue(true, MOST).await?;
        plan.entries(due.iter()).await?;
        let garbage = plan.bytes;
        let leased = plan.protected().await?;
        let mut usage = Usage { garbage_bytes: garbage, leased, ..Usage::default() };
        let (mut in_use, mut last) = (0, None);
        let packs = Packs::load(self).await?;
        for pack in packs.iter() {
            match pack.state {
                PackState::Live => {
                    in_use += pack.live_bytes;
                    usage.dead_bytes += pack.bytes.saturating_sub(pack.live_bytes);
                }
                PackState::Emptied => {
                    usage.draining_bytes += self.bytes_on_storage(pack).await?;
                    last = last.max(pack.draining_since);
                }
                PackState::Writing => {}
            }
        }
        usage.unfinished = self.unfinished_among(packs.iter().filter(|pack| pack.state == PackState::Writing)).await?;
        let millis = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        usage.draining_ends_at = last.map(|since| since.saturating_add(millis)).filter(|until| *until > now);
        usage.live_bytes = in_use.saturating_sub(usage.garbage_bytes + usage.leased.bytes);
        usage.disk_bytes = in_use + usage.dead_bytes + usage.draining_bytes + usage.unfinished.bytes;
        (usage.snapshots, usage.pinned) = self.metadata.count_snapshots().await?;
        usage.quota = self.metadata.quota().await?;
        Ok(usage)
    }

    /// The uploads that have not ended and whose lease lasts beyond `at`.
    pub(super) async fn unfinished_packs(&self, at: u64) -> Result<UnfinishedPacks> {
        let packs = self.metadata.writing_packs(MOST).await?;
        self.unfinished_among(packs.iter().filter(|pack| pack.keep_until > at)).await
    }

    async fn unfinished_among(&self, uploads: impl Iterator<Item = &PackRow>) -> Result<UnfinishedPacks> {
        let (mut unfinished, mut last) = (UnfinishedPacks::default(), 0);
        for pack in uploads {
            unfinished.packs += 1;
            unfinished.bytes += self.bytes_on_storage(pack).await?;
            last = last.max(pack.keep_until);
        }
        unfinished.expires_at = Some(last).filter(|until| *until > self.options.clock.now());
        Ok(unfinished)
    }

    /// Bytes of packs, as [`Self::bytes_on_storage`].
    pub(super) async fn bytes_of(&self, packs: &[PackRow]) -> Result<u64> {
        let mut bytes = 0;
        for pack in packs {
            bytes += self.bytes_on_storage(pack).await?;
        }
        Ok(bytes)
    }

    /// Bytes of a pack. The row of an upload that never ended has none.
    pub(super) async fn bytes_on_storage(&self, pack: &PackRow) -> Result<u64> {
        if pack.bytes > 0 { Ok(pack.bytes) } else { self.unfinished_bytes(&pack.key).await }
    }
}
