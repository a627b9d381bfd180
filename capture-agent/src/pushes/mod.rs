//! Pushes in the background: a queue on disk, worked off with patience, taken up again after a restart.

use crate::config::Config;
use crate::error::Result;
use pfr_schema::Digest;
use pfr_schema::agent::PushJob;
use pfr_store::Store;

/// The queue. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Pushes;

impl Pushes {
    /// Opens the queue and goes on with it.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub async fn open(_config: &Config, _store: Store) -> Result<Self> {
        todo!()
    }

    /// Adds a push of a snapshot of the local store to `reference` (with host). On disk when it returns.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub async fn add(&self, _snapshot: Digest, _reference: &str) -> Result<PushJob> {
        todo!()
    }

    /// Waits until a push is done or has failed for good.
    pub async fn wait(&self, _id: &str) -> Option<PushJob> {
        todo!()
    }

    /// All of them, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<PushJob> {
        todo!()
    }
}
