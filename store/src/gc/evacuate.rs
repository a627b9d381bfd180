//! Leaving a pack that is no longer sound, whatever share of it lives: its good blobs go into a new
//! one.

use super::copy::Fault;
use crate::Store;
use crate::error::Result;
use crate::metadata::PackRow;

impl Store {
    /// Copies the live blobs of a pack to a new one, verified. Bad blobs are quarantined and stay.
    /// The old pack is emptied when no blob uses it any more.
    pub(crate) async fn evacuate(&self, pack: &PackRow) -> Result<()> {
        let mut target = None;
        let source = self.source(pack).await?;
        let copied = self.copy_live(pack, source, &mut target).await;
        let damage = match copied {
            Ok(damage) => damage,
            Err(Fault::Source(error) | Fault::Target(error)) => {
                if let Some(target) = target {
                    target.writer.abandon().await;
                }
                return Err(error);
            }
        };
        if !damage.is_empty() {
            self.metadata.quarantine(damage).await?;
        }
        match target {
            Some(target) => target.writer.finish_compaction(target.moved).await,
            None => Ok(()),
        }
    }
}
