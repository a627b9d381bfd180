//! Leaving a pack that is no longer sound: its good frames are copied, as they lie, into a new one.

use crate::Store;
use crate::error::Result;
use crate::gc::{CopyFault, CopyTarget};
use crate::metadata::PackRow;

/// Copies what lies in `pack` and is not damaged, the way compaction does. What lies in another pack by then is dead space in the new one.
pub(super) async fn evacuate(store: &Store, pack: &PackRow) -> Result<()> {
    let mut target: Option<CopyTarget> = None;
    let damage = match store.copy_live(pack, &mut target).await {
        Ok(damage) => damage,
        Err(CopyFault::Source(error) | CopyFault::Target(error)) => {
            if let Some(target) = target {
                target.writer.abandon().await;
            }
            return Err(error);
        }
    };
    if !damage.is_empty() {
        store.metadata.quarantine(damage).await?;
    }
    match target {
        Some(target) => target.writer.finish_compaction(store, target.moved).await,
        None => Ok(()),
    }
}
