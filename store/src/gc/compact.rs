//! Packs less than half alive: their live frames go together into new packs, as they are.

use super::copy::{Fault, Target};
use super::run::Run;
use crate::Store;
use crate::error::Result;
use crate::metadata::{PackId, PackRow};
use std::collections::HashSet;

/// Packs claimed at a time.
const CLAIM: usize = 4;
/// Space besides the frames that a new pack wants: its index, and what its rows take in the log.
const BESIDES: u64 = 512 << 10;

impl Run<'_> {
    /// Copies until no pack is sparse, or the rest is claimed by other runs.
    pub(super) async fn compact(&mut self) {
        let (mut target, mut seen) = (None, HashSet::<PackId>::new());
        loop {
            let claim = if self.is_tight() { 1 } else { CLAIM };
            let claimed = self.store.metadata.claim_sparse_packs(claim, self.store.options.lease).await;
            let Some(mut claimed) = self.note(claimed) else { break };
            // What could not be moved is left to a later run, however short claims are.
            claimed.retain(|pack| seen.insert(pack.id));
            if claimed.is_empty() || claimed.iter().any(|pack| !self.store.fits(pack.live_bytes)) {
                break;
            }
            for pack in claimed {
                self.empty(&pack, &mut target).await;
            }
            if self.is_tight()
                && let Some(target) = target.take()
            {
                // The space of one pack is for copying the next.
                self.close(target).await;
                self.retire().await;
                self.drain().await;
            }
        }
        if let Some(target) = target {
            self.close(target).await;
        }
    }

    /// Copies what lives in a pack, and closes the new one when it is full. Only between two packs, so that a claim holds until all of it is moved.
    async fn empty(&mut self, pack: &PackRow, target: &mut Option<Target>) {
        let damage = match self.store.copy_live(pack, target).await {
            Ok(damage) => damage,
            Err(Fault::Source(error)) => {
                self.note(Err::<(), _>(error));
                Vec::new()
            }
            Err(Fault::Target(error)) => {
                self.note(Err::<(), _>(error));
                if let Some(target) = target.take() {
                    target.writer.abandon().await;
                }
                return;
            }
        };
        if !damage.is_empty() {
            for bad in &damage {
                tracing::warn!(blob = %bad.digest, pack = bad.pack, reason = bad.reason, "a frame is bad: it is not moved");
            }
            let quarantined = self.store.metadata.quarantine(damage).await;
            self.note(quarantined);
        }
        if target.as_ref().is_some_and(|t| t.writer.is_full())
            && let Some(target) = target.take()
        {
            self.close(target).await;
        }
    }

    async fn close(&mut self, target: Target) {
        let (bytes, sources) = (target.bytes, target.sources.len() as u64);
        let closed: Result<()> = target.writer.finish_compaction(target.moved).await;
        if self.note(closed).is_some() {
            self.report.packs_compacted += sources;
            self.report.moved_bytes += bytes;
        }
        self.progress().await;
    }
}

impl Store {
    /// Whether a pack with so many bytes of frames has space on the disk of the packs.
    fn fits(&self, frame_bytes: u64) -> bool {
        self.packs_disk.as_ref().is_none_or(|disk| disk.fits(frame_bytes + BESIDES))
    }
}
