//! Folders of a storage that is a directory, and their names in it.

use crate::Store;
use crate::error::{Error, Result};
use object_store::path::Path;

impl Store {
    /// Called when an object was written, before it counts as stored. Checks that it was not
    /// written to a disk below one that is not mounted any more, and makes the name of its folder
    /// durable. The object store syncs the folders that it makes. One that is there already it
    /// takes as it is, although another writer may have made it a moment ago, or one that was
    /// killed. A folder goes only with its store, so once a process is enough.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub(crate) async fn settle(&self, object: &Path) -> Result<()> {
        self.directory_is_there().await?;
        let Some((folder, _)) = object.as_ref().split_once('/') else { return Ok(()) };
        if self.packs_dir.is_none() || self.settled.lock().contains(folder) {
            return Ok(());
        }
        self.sync_names().await?;
        self.settled.lock().insert(folder.to_owned());
        Ok(())
    }

    /// Makes the names in the directory of the packs durable, if they are in one.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub(crate) async fn sync_names(&self) -> Result<()> {
        let Some(dir) = self.packs_dir.clone() else { return Ok(()) };
        let synced = pfr_service::task::spawn_blocking(move || pfr_service::durable::sync_dir(&dir)).await;
        synced?.map_err(|e| Error::Unavailable { what: "packs", reason: e.to_string() })
    }
}
