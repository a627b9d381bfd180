//! Packs less than half alive: their live frames go together into new packs, unchanged.

use super::copy::{Fault, Source, Target};
use super::run::Run;
use crate::Store;
use crate::error::Result;
use crate::metadata::{PackId, PackRow};
use futures::StreamExt as _;
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
            // A pack that could not be emptied is left to a later run, however short claims are.
            claimed.retain(|pack| seen.insert(pack.id));
            if claimed.is_empty() || claimed.iter().any(|pack| !self.store.fits(pack.live_bytes)) {
                break;
            }
            let store = self.store;
            let mut sources = store.sources(claimed);
            while let Some((pack, source)) = sources.next().await {
                let Some(source) = self.note(source) else { continue };
                let emptied = self.empty(&pack, source, &mut target).await;
                self.note(emptied);
            }
            if self.is_tight()
                && let Some(target) = target.take()
            {
                // The space of one pack is for copying the next.
                let closed = self.close(target).await;
                self.note(closed);
                self.empty_packs().await;
                self.delete_emptied().await;
            }
        }
        if let Some(target) = target {
            let closed = self.close(target).await;
            self.note(closed);
        }
    }

    /// Copies the live frames of a pack, and closes the new one when it is full. Only between two
    /// packs, so that a claim holds until all of it is moved.
    ///
    /// # Errors
    /// The error that the new pack is lost for. The pack is then abandoned.
    pub(super) async fn empty(&mut self, pack: &PackRow, source: Source, target: &mut Option<Target>) -> Result<()> {
        let damage = match self.store.copy_live(pack, source, target).await {
            Ok(damage) => damage,
            Err(Fault::Source(error)) => {
                self.note(Err::<(), _>(error));
                Vec::new()
            }
            Err(Fault::Target(error)) => {
                if let Some(target) = target.take() {
                    target.writer.abandon().await;
                }
                return Err(error);
            }
        };
        if !damage.is_empty() {
            for bad in &damage {
                tracing::warn!(blob = %bad.digest, pack = bad.pack, reason = bad.reason, "compaction: a frame is damaged, it is not copied");
            }
            let quarantined = self.store.metadata.quarantine(damage).await;
            self.note(quarantined);
        }
        match target.take_if(|target| target.writer.is_full()) {
            Some(target) => self.close(target).await,
            None => Ok(()),
        }
    }

    /// Completes a new pack and points the copied blobs to it.
    pub(super) async fn close(&mut self, target: Target) -> Result<()> {
        let (bytes, sources, merges) = (target.bytes, target.sources.len() as u64, target.merges);
        target.writer.finish_compaction(target.moved).await?;
        self.report.packs_merged += if merges { sources } else { 0 };
        self.report.packs_compacted += if merges { 0 } else { sources };
        self.report.moved_bytes += bytes;
        self.progress().await;
        Ok(())
    }
}

impl Store {
    /// Whether a pack with so many bytes of frames has space on the disk of the packs.
    fn fits(&self, frame_bytes: u64) -> bool {
        self.packs_disk.as_ref().is_none_or(|disk| disk.fits(frame_bytes + BESIDES))
    }
}
