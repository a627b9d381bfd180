//! The lock of a data directory: one registry serves it, and none serves it while it is rebuilt.
//!
//! The directory itself is locked, so that a full disk needs no new file. The lock ends with the
//! process. `gc`, `scrub` and `fsck` need no lock: they may run beside a registry.

use crate::config::Config;
use crate::error::Error;
use std::fs::{File, TryLockError};
use std::path::Path;

/// The file with the id of the process that holds the lock.
const HOLDER: &str = "serve.pid";

/// A data directory that belongs to this process until it is dropped.
#[derive(Debug)]
pub struct DataLock {
    _dir: File,
}

impl DataLock {
    /// Locks the data directory, and creates it if it does not exist. None where the metadata are
    /// in PostgreSQL: any number of registries may share that.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process has it, [`Error::Store`] if it cannot be created or
    /// opened.
    pub fn take(config: &Config) -> Result<Option<Self>, Error> {
        if !config.database.is_empty() {
            return Ok(None);
        }
        let data = &config.data;
        pfr_store::storage::make_dir(data)?;
        let failed = |error: std::io::Error| {
            Error::Store(pfr_store::Error::Unavailable { what: "directory", reason: format!("{}: {error}", data.display()) })
        };
        let dir = File::open(data).map_err(failed)?;
        match dir.try_lock() {
            Ok(()) => {
                // Truncates first: on a full disk the file is empty and does not name an earlier
                // process.
                if let Err(error) = std::fs::write(data.join(HOLDER), "").and_then(|()| note_holder(data)) {
                    tracing::debug!(%error, "the process id cannot be written to the data directory");
                }
                Ok(Some(Self { _dir: dir }))
            }
            Err(TryLockError::WouldBlock) => Err(Error::Locked { data: data.clone(), holder: holder(data) }),
            Err(TryLockError::Error(error)) => Err(failed(error)),
        }
    }
}

fn note_holder(data: &Path) -> std::io::Result<()> {
    std::fs::write(data.join(HOLDER), format!("{}\n", std::process::id()))
}

fn holder(data: &Path) -> Option<u32> {
    std::fs::read_to_string(data.join(HOLDER)).ok()?.trim().parse().ok()
}
