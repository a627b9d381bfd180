//! Deletes bytes, then the rows that name them: in this order, so that a kill in between leaves a
//! row, and never bytes without one.

use super::run::Run;
use crate::Store;
use crate::error::Result;
use crate::metadata::{PackId, PackRow};
use futures::StreamExt as _;
use std::collections::HashSet;

/// Packs deleted before their rows go.
const BATCH: usize = 256;
/// Deletions in flight.
const AT_ONCE: usize = 8;

impl Run<'_> {
    /// Deletes the packs that were emptied longer ago than the grace period.
    pub(super) async fn delete_emptied(&mut self) {
        let mut failed: HashSet<PackId> = HashSet::new();
        loop {
            // Those that failed come first again: ask for so many more.
            let packs = self.store.metadata.emptied_packs(self.options.grace, BATCH + failed.len()).await;
            let Some(mut packs) = self.note(packs) else { return };
            packs.retain(|pack| !failed.contains(&pack.id));
            if packs.is_empty() {
                return;
            }
            let mut gone = self.delete(packs, &mut failed).await;
            if let Err(error) = self.store.sync_deletions(gone.iter().map(|pack| pack.key.as_str())).await {
                // They could come back after a power cut, so their rows stay.
                failed.extend(gone.drain(..).map(|pack| pack.id));
                self.note(Err::<(), _>(error));
            }
            let forgotten = self.store.metadata.forget_packs(gone.iter().map(|pack| pack.id).collect()).await;
            if self.note(forgotten).is_none() {
                return;
            }
            self.report.packs_deleted += gone.len() as u64;
            self.report.deleted_bytes += gone.iter().map(|pack| pack.bytes).sum::<u64>();
            self.progress().await;
        }
    }

    async fn delete(&mut self, packs: Vec<PackRow>, failed: &mut HashSet<PackId>) -> Vec<PackRow> {
        let store = self.store;
        let mut deletions = futures::stream::iter(packs)
            .map(|pack| async move {
                let deleted = delete(store, &pack).await;
                (pack, deleted)
            })
            .buffer_unordered(AT_ONCE);
        let mut gone = Vec::new();
        while let Some((pack, deleted)) = deletions.next().await {
            match self.note(deleted) {
                Some(bytes) => gone.push(PackRow { bytes, ..pack }),
                None => drop(failed.insert(pack.id)),
            }
        }
        gone
    }
}

/// Deletes a pack's bytes, and the remains of an interrupted upload of it; returns how many bytes
/// they were. It is no error if they are gone already.
async fn delete(store: &Store, pack: &PackRow) -> Result<u64> {
    let bytes = store.bytes_on_storage(pack).await.unwrap_or_else(|error| {
        tracing::debug!(%error, pack = pack.id, "the report of this collection counts a deleted pack as 0 bytes");
        0
    });
    // The unfinished first: an upload that completes in between is then found under its name.
    store.remove_unfinished(&pack.key).await?;
    store.delete_pack(&pack.key).await?;
    Ok(bytes)
}
