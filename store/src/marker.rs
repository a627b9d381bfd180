//! The marker shows that the storage belongs to this store: an object that is written before the
//! first pack has a row, and that is never deleted.
//!
//! A bucket that was deleted, a directory whose disk is not mounted and a wrong disk look like a
//! lost pack: every request answers "not found". Only if the marker is found does that mean that a
//! pack is lost. Otherwise the storage is out of reach, and nothing follows from it.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use futures::TryStreamExt as _;
use futures::future::ready;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore as _, ObjectStoreExt as _, PutPayload};
use pfr_schema::journal::{Key, PREFIX};

/// Key of the marker.
pub(crate) const KEY: &str = "pf-store";
/// Its content, for people; no program reads it.
const WORDS: &str =
    "Packs and the journal of a pf store lie beside this. Without this file nothing that is missing here is taken for lost.\n";

impl Store {
    /// Checks the database before a process writes its first pack. Writes the marker if the store
    /// is new; otherwise the storage must have it.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: it is not the storage of this store, or it or the database cannot be
    /// reached. The next call checks again.
    pub(crate) async fn mark(&self) -> Result<()> {
        let mark = || async {
            self.names_are_known().await?;
            self.decide_clear().await?;
            if self.is_new().await? { self.put_marker().await } else { self.storage_is_there().await }
        };
        self.marked.get_or_try_init(mark).await.copied()
    }

    /// Whether the storage may lack the marker, which is written before the first row of a pack. A
    /// store of which all packs were collected is not new: its journal had an object for each name.
    async fn is_new(&self) -> Result<bool> {
        if !self.metadata.packs(None, 1).await?.is_empty() {
            return Ok(false);
        }
        let journal = self.metadata.journal_state(1).await?;
        Ok(journal.summary == 0 && journal.objects == 0)
    }

    /// Writes the marker, and before it the domain's wrapped key, if there is no pack yet.
    pub(crate) async fn put_marker(&self) -> Result<()> {
        if !self.metadata.packs(None, 1).await?.is_empty() {
            return Ok(());
        }
        self.put_key().await?;
        self.packs.put(&Path::from(KEY), PutPayload::from_static(WORDS.as_bytes())).await.map(|_| ()).map_err(Error::packs)
    }

    /// Called once before requests are served. Checks the database, and journals the changes of a
    /// process that ended before it had done so. A full disk does not prevent the start: none of
    /// these changes was acknowledged, and a client that repeats one waits for the journal.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: the database is to be rebuilt, or is another store's, or cannot be
    /// reached.
    pub async fn begin_serving(&self) -> Result<()> {
        self.names_are_known().await?;
        match self.flush_journal().await {
            Err(error @ Error::Full(_)) => {
                tracing::warn!(%error, "journal: changes of an earlier process cannot be written yet, the disk is full");
                Ok(())
            }
            other => other,
        }
    }

    /// Checks that the database is not an empty one over a storage with a journal. With such a
    /// database, numbers of changes would start again, so a rebuild could not tell new changes from
    /// old ones. A database that was half rebuilt has no number yet either.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: it is to be rebuilt, or it is another store's.
    #[boxed]
    pub async fn names_are_known(&self) -> Result<()> {
        if self.metadata.journal_state(1).await?.last > 0 {
            return Ok(());
        }
        // A summary without any tags and snapshots has the number 0.
        let has_names = |object: &ObjectMeta| ready(Key::parse(object.location.as_ref()).is_ok_and(|key| key.number > 0));
        match std::pin::pin!(self.packs.list(Some(&Path::from(PREFIX))).try_filter(has_names)).try_next().await {
            Ok(None) => return Ok(()),
            // Without the right to list, a rebuild is not possible either, so it cannot be asked
            // for.
            Err(object_store::Error::PermissionDenied { .. } | object_store::Error::NotImplemented { .. }) => return Ok(()),
            Err(error) => return Err(Error::packs(error)),
            Ok(Some(_)) => {}
        }
        // Another process may have written the first name in between.
        if self.metadata.journal_state(1).await?.last > 0 {
            return Ok(());
        }
        Err(Error::Unavailable {
            what: "metadata",
            reason: "the database has no tags or snapshots, and the journal on the storage has some: it was lost, or is not this store's, or was \
                     not rebuilt to the end. Move it away, and rebuild the tables from the storage"
                .into(),
        })
    }

    /// Checks that the storage is there and belongs to this store. Call this before taking
    /// something that is not found for lost.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it does not answer, or answers and lacks the marker though the
    /// store is not new.
    pub(crate) async fn storage_is_there(&self) -> Result<()> {
        match self.packs.head(&Path::from(KEY)).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::NotFound { .. }) if self.is_new().await? => Ok(()),
            Err(object_store::Error::NotFound { .. }) => Err(Error::Unavailable {
                what: "storage",
                reason: format!(
                    "there is no {KEY} on it, so this is not the storage of this store, or all of it is gone: is it mounted, is it the right bucket?"
                ),
            }),
            Err(error) => Err(Error::packs(error)),
        }
    }

    /// [`Self::storage_is_there`] for a storage that is a directory. Its disk may be unmounted
    /// while this process runs: writes then succeed, and lie on the disk below, where nothing finds
    /// them when the other one is mounted again. A bucket that is gone refuses writes.
    ///
    /// # Errors
    /// As [`Self::storage_is_there`].
    pub(crate) async fn directory_is_there(&self) -> Result<()> {
        if self.packs_dir.is_some() { self.storage_is_there().await } else { Ok(()) }
    }
}
