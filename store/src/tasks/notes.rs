//! Notes about a background task for all processes that use a store: until when it is paused, and
//! when it last succeeded. Each note is a small object beside the packs. So it needs no table,
//! every replica sees it, and it survives restarts and a rebuild of the database.

use crate::Store;
use crate::error::{Error, Result};
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};

/// Folder of the notes on storage.
pub(crate) const PREFIX: &str = "tasks";

/// The subject of a note.
#[derive(Clone, Copy, Debug)]
pub(super) enum Note {
    /// The task does not run before this time.
    PausedUntil,
    /// When the last successful run ended.
    SucceededAt,
}

impl Note {
    fn path(self, task: &str) -> Path {
        let what = match self {
            Self::PausedUntil => "paused-until",
            Self::SucceededAt => "succeeded-at",
        };
        Path::from(format!("{PREFIX}/{task}.{what}"))
    }
}

impl Store {
    /// The time in a note, in milliseconds since 1970; `None` if there is no note.
    pub(super) async fn read_note(&self, task: &str, note: Note) -> Result<Option<u64>> {
        let bytes = match self.packs.get(&note.path(task)).await {
            Ok(found) => found.bytes().await,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => Err(error),
        };
        let bytes = match bytes.map_err(Error::packs) {
            Err(Error::Altered { .. }) => return Ok(None),
            bytes => bytes?,
        };
        // Ignore content that does not parse: a person may have written it.
        Ok(std::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok()))
    }

    /// Writes a note. Notes are overwritten and never deleted: a power cut may undo a deletion, and
    /// the old note would apply again.
    pub(super) async fn write_note(&self, task: &str, note: Note, at: u64) -> Result<()> {
        let text = format!("{at}\n");
        self.packs.put(&note.path(task), PutPayload::from(text.into_bytes())).await.map(|_| ()).map_err(Error::packs)
    }
}
