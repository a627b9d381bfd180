//! The lock of a data directory: at most one registry serves it, and none while it is rebuilt.
//!
//! The lock is on the directory itself, so it works on a full disk too. It ends with the process.
//! `gc`, `scrub` and `fsck` need no lock: they may run beside a registry.

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
    /// Locks the data directory, and creates it if it does not exist. Waits a few seconds for a
    /// process that was killed and has not ended yet. Returns `None` if the metadata are in
    /// PostgreSQL: any number of registries may share a database.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process holds the lock, [`Error::Store`] if the directory
    /// cannot be created or opened.
    pub async fn take(config: &Config) -> Result<Option<Self>, Error> {
        if !config.database.is_empty() {
            return Ok(None);
        }
        let data = &config.data;
        pfr_store::storage::make_dir(data)?;
        let failed = |error: std::io::Error| Error::Store(pfr_store::Error::of_dir(data, &error));
        let dir = File::open(data).map_err(failed)?;
        let lock = || match dir.try_lock() {
            Ok(()) => Ok(Some(())),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(failed(error)),
        };
        if pfr_service::lock::wait(data, lock).await?.is_none() {
            return Err(Error::Locked { data: data.clone(), holder: holder(data) });
        }
        // Truncate first: if the disk is full, the file is then empty and does not name an earlier
        // process.
        if let Err(error) = std::fs::write(data.join(HOLDER), "").and_then(|()| note_holder(data)) {
            tracing::debug!(%error, "writing the process id to the data directory failed");
        }
        Ok(Some(Self { _dir: dir }))
    }
}

fn note_holder(data: &Path) -> std::io::Result<()> {
    std::fs::write(data.join(HOLDER), format!("{}\n", std::process::id()))
}

fn holder(data: &Path) -> Option<u32> {
    std::fs::read_to_string(data.join(HOLDER)).ok()?.trim().parse().ok()
}
