//! Room on disk for what is copied there.

use crate::error::{Error, Result};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a file system that stay free: for metadata of the store, and for other programs.
const RESERVE: u64 = 64 << 20;

/// Whether the file system of a folder has room for `needed` bytes more.
pub(crate) fn room(folder: &Path, needed: u64) -> Result<()> {
    enough(free(folder)?, needed)
}

/// The room for a store. Copies that begin at the same time are not granted the same bytes. Cheap
/// to clone; all clones are one.
#[derive(Clone, Debug)]
pub(crate) struct Room(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    folder: PathBuf,
    /// Bytes that were granted and are not written yet.
    granted: Mutex<u64>,
}

impl Room {
    /// The room for the store in this folder.
    pub fn of(folder: PathBuf) -> Self {
        Self(Arc::new(Inner { folder, granted: Mutex::default() }))
    }

    /// Grants `needed` bytes until they are written, or until the grant is dropped.
    ///
    /// # Errors
    /// [`Error::NoRoom`] if the file system has fewer besides those that were granted before.
    pub fn take(&self, needed: u64) -> Result<Granted> {
        // Locked while the file system is asked: bytes that are written meanwhile would be missed.
        let mut granted = self.0.granted.lock();
        enough(free(&self.0.folder)?.saturating_sub(*granted), needed)?;
        *granted += needed;
        drop(granted);
        Ok(Granted { room: self.clone(), left: needed })
    }
}

/// Bytes that may be written.
#[derive(Debug)]
pub(crate) struct Granted {
    room: Room,
    left: u64,
}

impl Granted {
    /// So many of them are written: from now on the file system counts them.
    pub fn written(&mut self, bytes: u64) {
        let bytes = bytes.min(self.left);
        self.left -= bytes;
        *self.room.0.granted.lock() -= bytes;
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        self.written(self.left);
    }
}

/// Free bytes of the file system of a folder.
fn free(folder: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(folder).map_err(|e| Error::io(format!("free space of {}", folder.display()))(e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn enough(free: u64, needed: u64) -> Result<()> {
    let needed = needed.saturating_add(RESERVE);
    if needed > free { Err(Error::NoRoom { what: "disk", needed, free }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granted_bytes_are_not_granted_again_before_they_are_written_or_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let room = Room::of(dir.path().to_owned());
        // Other programs write to this file system too, so leave a margin.
        let most = free(dir.path()).unwrap() / 3 * 2;
        let mut granted = room.take(most).unwrap();
        assert!(matches!(room.take(most), Err(Error::NoRoom { what: "disk", .. })), "the file system has them once");
        granted.written(most);
        let again = room.take(most).expect("the file system counts what is written");
        drop(granted);
        assert!(room.take(most).is_err(), "a grant gives back no more than what was left of it");
        drop(again);
        room.take(most).expect("given back");
    }
}
