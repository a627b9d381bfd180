//! What all processes over a store must know of a task: until when it is paused, and when it last
//! succeeded. Each is a small object beside the packs, so it needs no table, holds for every replica,
//! and survives restarts and a rebuilt database.

use crate::Store;
use crate::error::{Error, Result};
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};

/// Folder of the notes.
pub(crate) const PREFIX: &str = "tasks";

/// What a note is about.
#[derive(Clone, Copy, Debug)]
pub(super) enum Note {
    /// The task does not run before this time.
    PausedUntil,
    /// The end of its last run that succeeded.
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
            Ok(found) => found.bytes().await.map_err(Error::packs)?,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(Error::packs(error)),
        };
        // A note of another form is no note: a person may have written it.
        Ok(std::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok()))
    }

    /// Writes a note. It is replaced and never deleted: a deletion may be undone by a power cut.
    pub(super) async fn write_note(&self, task: &str, note: Note, at: u64) -> Result<()> {
        let text = format!("{at}\n");
        self.packs.put(&note.path(task), PutPayload::from(text.into_bytes())).await.map(|_| ()).map_err(Error::packs)
    }
}
