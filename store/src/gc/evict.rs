//! Eviction: a local store is a cache of what is elsewhere, and stays within its size.
//!
//! The size that counts is the size after all leases have ended: bytes that only wait for that must
//! not cost further snapshots. Snapshots are chosen first, by counting in memory, then deleted,
//! then collected once. So the dry run is the same run without its writes.

use super::GcOptions;
use super::plan::{Leases, MOST, Packs, Plan};
use super::run::Run;
use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{Evictable, Pin, PinnedSnapshot};
use pfr_schema::api::GcReport;
use pfr_schema::{Digest, RepositoryName};
use pfr_service::few;

/// Snapshots asked for at once: all there are.
const ALL: usize = 1_000_000;
/// Pinned snapshots named when nothing else is left.
const NAMED: usize = 10;
/// How often snapshots are chosen at most: again if some of those chosen were pinned, used or
/// deleted since they were listed.
const ROUNDS: usize = 4;

impl Store {
    /// Collects garbage, then deletes the least recently used snapshots until the packs fit into
    /// `max_bytes` or only pinned ones are left; the report's `error` says the latter. Bytes that
    /// leases still cover go when they end, and do not count. For a store that is a cache: nothing
    /// asks whether a snapshot is anywhere else.
    ///
    /// # Errors
    /// As [`Store::gc`].
    #[boxed]
    pub async fn evict(&self, max_bytes: u64, options: &GcOptions, progress: &mut (dyn FnMut(&GcReport) + Send)) -> Result<GcReport> {
        let mut run = Run::start(self, options, progress).await?;
        let fitted = run.fit(max_bytes).await;
        run.note(fitted);
        run.finish().await
    }

    /// Notes that a snapshot is used: eviction takes the least recently used ones first.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`], [`Error::RepositoryUnknown`].
    #[boxed]
    pub async fn touch(&self, repository: &RepositoryName, digest: &Digest) -> Result<()> {
        self.metadata.touch_snapshot(repository.clone(), *digest).await
    }

    /// The same in every repository that has the snapshot. Best effort: a failure does no harm.
    #[boxed]
    pub async fn touch_everywhere(&self, digest: &Digest) {
        for repository in self.all_repositories().await.unwrap_or_default() {
            match self.touch(&repository, digest).await {
                Ok(()) | Err(Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_)) => {}
                Err(error) => tracing::debug!(%error, %repository, %digest, "recording the use of a snapshot failed"),
            }
        }
    }

    /// Keeps a snapshot from eviction for a reason, or no longer for that one: other reasons stay.
    /// Returns whether any reason is left.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`], [`Error::RepositoryUnknown`].
    #[boxed]
    pub async fn pin(&self, repository: &RepositoryName, digest: &Digest, reason: Pin, pinned: bool) -> Result<bool> {
        self.metadata.pin_snapshot(repository.clone(), *digest, reason, pinned).await
    }

    /// Deletes a snapshot unless it was pinned, used or deleted since it was listed.
    async fn evict_snapshot(&self, snapshot: Evictable) -> Result<bool> {
        let evicted = self.metadata.evict_snapshot(snapshot).await?;
        self.flush_journal().await?;
        Ok(evicted)
    }

    /// Takes the names of a snapshot away from a plan; returns how many objects go with them. One
    /// that was deleted meanwhile is no error.
    pub(super) async fn release(&self, plan: &mut Plan<'_>, snapshot: &Evictable) -> Result<u64> {
        match self.snapshot(&snapshot.repository, &snapshot.digest).await {
            Ok(row) => plan.release(row.object, 1 + row.tags.len() as u64).await,
            Err(Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_)) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// The snapshots to give up, the least recently used first, and what is left then if that is
    /// still too much.
    async fn too_much(&self, max_bytes: u64, batch: usize) -> Result<(Vec<Evictable>, Option<u64>)> {
        // Most stores fit, and asking that costs little.
        if self.metadata.disk_bytes().await? <= max_bytes {
            return Ok((Vec::new(), None));
        }
        let now = self.options.clock.now();
        let mut plan = Plan::new(self, batch, Leases::None);
        plan.entries(self.metadata.queue(false, MOST).await?.iter()).await?;
        let packs = Packs::load(self).await?;
        let (mut chosen, mut candidates) = (Vec::new(), self.metadata.evictable(ALL).await?.into_iter());
        loop {
            let disk = packs.fates(&plan, now, false).disk();
            if disk <= max_bytes {
                return Ok((chosen, None));
            }
            let Some(next) = candidates.next() else { return Ok((chosen, Some(disk))) };
            self.release(&mut plan, &next).await?;
            chosen.push(next);
        }
    }

    /// Snapshots that eviction leaves, and why; by repository, the newest first in each.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn pinned(&self) -> Result<Vec<PinnedSnapshot>> {
        self.metadata.pinned(ALL).await
    }
}

impl Run<'_> {
    async fn fit(&mut self, max_bytes: u64) -> Result<()> {
        let batch = self.options.batch;
        if self.options.dry_run {
            let (chosen, left) = self.store.too_much(max_bytes, batch).await?;
            self.plan(&chosen).await;
            return self.only_pinned(left, max_bytes).await;
        }
        for _ in 0..ROUNDS {
            let (chosen, left) = self.store.too_much(max_bytes, batch).await?;
            let mut all = true;
            for snapshot in &chosen {
                // Pinned, used or deleted since it was listed: the next round chooses another.
                let evicted = self.store.evict_snapshot(snapshot.clone()).await?;
                all &= evicted;
                if evicted {
                    self.report.evicted += 1;
                    tracing::info!(repository = %snapshot.repository, snapshot = %snapshot.digest, "evicted the least recently used snapshot");
                }
            }
            self.steps().await;
            if all {
                return self.only_pinned(left, max_bytes).await;
            }
        }
        Ok(())
    }

    async fn only_pinned(&mut self, left: Option<u64>, max_bytes: u64) -> Result<()> {
        let Some(left) = left else { return Ok(()) };
        let pinned = self.store.pinned().await?;
        let name = |row: &PinnedSnapshot| format!("{}@{}", row.repository, row.snapshot.digest);
        let words = format!(
            "{left} bytes are left and {max_bytes} allowed, but the rest is pinned (by hand, or until it is pushed): {}",
            few(pinned.iter().map(name), NAMED)
        );
        self.report.error.get_or_insert(words);
        Ok(())
    }
}
