//! Proof that the storage is the store's own: an object that is on it before the first pack has a row, and never goes.
//!
//! A bucket that was deleted, a directory whose disk is not mounted and a wrong disk have one thing in common with a lost pack: what is asked for
//! is "not found". Only where the marker is found does that mean lost; else the storage is out of reach, and nothing is concluded from it.

use crate::Store;
use crate::error::{Error, Result};
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};

/// Key of the marker.
pub(crate) const KEY: &str = "pf-store";
/// What it says to people; nothing reads it.
const WORDS: &str =
    "Packs and the journal of a pf store lie beside this. Without this file nothing that is missing here is taken for lost.\n";

impl Store {
    /// Makes sure of the marker before a store gets its first pack. Asks metadata once a process.
    pub(crate) async fn mark(&self) -> Result<()> {
        let mark = || async {
            if !self.metadata.packs(None, 1).await?.is_empty() {
                return Ok(());
            }
            self.packs.put(&Path::from(KEY), PutPayload::from_static(WORDS.as_bytes())).await.map(|_| ()).map_err(Error::packs)
        };
        self.marked.get_or_try_init(mark).await.copied()
    }

    /// That the storage is there and the store's own. To be asked before something that is not found is believed to be lost.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it does not answer, or answers and lacks the marker though packs should be there.
    pub(crate) async fn storage_is_there(&self) -> Result<()> {
        match self.packs.head(&Path::from(KEY)).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::NotFound { .. }) if self.metadata.packs(None, 1).await?.is_empty() => Ok(()),
            Err(object_store::Error::NotFound { .. }) => Err(Error::Unavailable {
                what: "storage",
                reason: format!(
                    "there is no {KEY} on it, so this is not the storage of this store, or all of it is gone: is it mounted, is it the right bucket?"
                ),
            }),
            Err(error) => Err(Error::packs(error)),
        }
    }
}
