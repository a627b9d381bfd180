//! Small packs are merged: their live frames go together into full packs, unchanged.
//!
//! `metadata/small.rs` says which packs, and why each byte is copied only a few times.

use super::copy::Target;
use super::run::Run;
use crate::error::{Error, Result};
use crate::metadata::{PackId, PackRow};
use futures::StreamExt as _;
use std::collections::HashSet;

impl Run<'_> {
    /// Merges until no tier is due, the rest is claimed by other runs, or the disk is nearly full:
    /// packs that are well can wait.
    pub(super) async fn merge(&mut self) {
        let (mut first, mut seen) = (None, HashSet::<PackId>::new());
        for _ in 0..self.options.merges {
            let merged = match self.merge_next(&mut first, &mut seen).await {
                Err(Error::Full(reason)) => {
                    tracing::debug!(reason, "small packs are not merged while the disk is nearly full");
                    Ok(false)
                }
                merged => merged,
            };
            if self.note(merged) != Some(true) {
                return;
            }
        }
    }

    /// Merges the packs that are due next, if any; returns whether there were. Packs that this run
    /// wrote, from the pack `first` on, are left to the next run.
    async fn merge_next(&mut self, first: &mut Option<PackId>, seen: &mut HashSet<PackId>) -> Result<bool> {
        let (store, full) = (self.store, self.store.full_pack());
        if let Some(disk) = &store.packs_disk {
            disk.admit(full.bytes)?;
        }
        let packs: Vec<PackRow> = store.metadata.claim_small_packs(full, *first, store.options.lease).await?;
        // A pack that could not be emptied is left to a later run, however short claims are.
        if packs.is_empty() || packs.iter().any(|pack| !seen.insert(pack.id)) {
            return Ok(false);
        }
        let mut target: Option<Target> = None;
        let mut sources = store.sources(packs);
        while let Some((pack, source)) = sources.next().await {
            let Some(source) = self.note(source) else { continue };
            if target.is_none() {
                let begun = Target::merging(store).await?;
                first.get_or_insert(begun.writer.id());
                target = Some(begun);
            }
            self.empty(&pack, source, &mut target).await?;
        }
        match target {
            Some(target) if target.moved.is_empty() => target.writer.abandon().await,
            Some(target) => self.close(target).await?,
            None => {}
        }
        Ok(true)
    }
}
