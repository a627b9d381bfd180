//! The lock of a data directory: one registry serves it, and nothing serves it while it is rebuilt.
//!
//! The directory itself is locked, so no file must be made on a full disk. The lock ends with the process. Collection, `scrub` and `fsck`
//! need no lock: they may run beside a registry.

use crate::config::Config;
use crate::error::Error;
use std::fs::{File, TryLockError};
use std::path::Path;

/// File that says which process holds the lock.
const HOLDER: &str = "serve.pid";

/// A data directory that is this process's until it is dropped.
#[derive(Debug)]
pub struct DataLock {
    _dir: File,
}

impl DataLock {
    /// Takes the data directory, which is made if it is not there. None where the metadata are in a database for many: any number of
    /// registries may share that.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process has it, [`Error::Store`] if it cannot be made or opened.
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
                // Empty first: on a full disk there is no number rather than the last one's.
                if let Err(error) = std::fs::write(data.join(HOLDER), "").and_then(|()| note_holder(data)) {
                    tracing::debug!(%error, "the number of this process is not noted in the data directory");
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
