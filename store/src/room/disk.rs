//! The file system of a directory: its free space, and how much of that stays free.

use crate::error::{Error, Result};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// The default floor is this, or a twentieth of a small file system.
const FLOOR: u64 = 64 << 20;
/// Files and directories that can still be made when growth stops: deletions write objects of the
/// journal.
const FILES: u64 = 64;

/// Whether this process is the superuser of the machine, and not only of a namespace: ext4 keeps a
/// twentieth of its blocks for that one. Space that it releases from the reserve of a full disk
/// goes to these blocks, where other users could not use it.
static SUPERUSER: LazyLock<bool> = LazyLock::new(|| {
    let root = std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    let mapped = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    root && mapped.lines().any(|line| line.split_whitespace().take(2).eq(["0", "0"]))
});

/// Blocks that the superuser may take. Those that ext4 keeps for itself are free, but no user may
/// take them: a fiftieth, at most 4,096; of `f_blocks`, which leaves out tables and journal, a
/// fortieth is as much.
fn of_superuser(stat: &rustix::fs::StatVfs) -> u64 {
    if *SUPERUSER { stat.f_bfree.saturating_sub((stat.f_blocks / 40).min(4096)) } else { 0 }
}

/// The space of a file system.
#[derive(Clone, Copy, Debug)]
pub(super) struct Space {
    /// Bytes in all.
    pub total: u64,
    /// Bytes that this process may still take.
    pub available: u64,
    /// Files and directories that can still be made, where the file system counts them.
    pub inodes: Option<u64>,
}

/// A directory on some file system.
#[derive(Debug)]
pub(crate) struct Disk {
    dir: PathBuf,
    floor: Option<u64>,
    /// Bytes that are being written.
    coming: Arc<AtomicU64>,
}

/// Counts bytes that are being written, until it is dropped.
#[derive(Debug)]
pub(crate) struct Coming {
    all: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Disk {
    pub(crate) fn new(dir: &Path, floor: Option<u64>) -> Self {
        Self { dir: dir.to_owned(), floor, coming: Arc::default() }
    }

    /// The space of its file system; `None`, and no limit, if that is not known.
    pub(super) fn space(&self) -> Option<Space> {
        match rustix::fs::statvfs(&self.dir) {
            // Some file systems do not say how large they are.
            Ok(stat) if stat.f_blocks == 0 => None,
            Ok(stat) => Some(Space {
                total: stat.f_blocks.saturating_mul(stat.f_frsize),
                available: stat.f_bavail.max(of_superuser(&stat)).saturating_mul(stat.f_frsize),
                // Btrfs and others make them as needed, and say 0 of 0.
                inodes: (stat.f_files > 0).then_some(stat.f_favail),
            }),
            Err(error) => {
                tracing::debug!(%error, dir = %self.dir.display(), "reading the free space of the disk failed");
                None
            }
        }
    }

    /// Bytes that growth leaves free.
    pub(super) fn floor(&self, space: &Space) -> u64 {
        self.floor.unwrap_or_else(|| FLOOR.min(space.total / 20))
    }

    /// Refuses growth by `bytes` if less than the floor would be left.
    ///
    /// # Errors
    /// [`Error::Full`].
    pub(crate) fn admit(&self, bytes: u64) -> Result<()> {
        let Some(space) = self.space() else { return Ok(()) };
        let floor = self.floor(&space);
        let left = space.available.saturating_sub(bytes).saturating_sub(self.coming.load(Ordering::Relaxed));
        if left < floor {
            let free = space.available;
            return Err(Error::Full(format!("{free} bytes are free, and the last {floor} are kept for deleting and collecting")));
        }
        match space.inodes {
            Some(files) if files < FILES => {
                Err(Error::Full(format!("{files} more files can be made, and the last {FILES} are kept for deleting and collecting")))
            }
            _ => Ok(()),
        }
    }

    /// Admits `bytes`, and counts them until they are written.
    ///
    /// # Errors
    /// [`Error::Full`].
    pub(crate) fn take(&self, bytes: u64) -> Result<Coming> {
        self.admit(bytes)?;
        self.coming.fetch_add(bytes, Ordering::Relaxed);
        Ok(Coming { all: Arc::clone(&self.coming), bytes })
    }

    /// Whether so many bytes fit, whatever the floor.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        self.space().is_none_or(|space| space.available >= bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_64_mib_or_a_twentieth_unless_it_is_given() {
        let space = |total| Space { total, available: total, inodes: None };
        let dir = Path::new("/");
        assert_eq!(Disk::new(dir, None).floor(&space(1 << 40)), 64 << 20);
        assert_eq!(Disk::new(dir, None).floor(&space(64 << 20)), (64 << 20) / 20);
        assert_eq!(Disk::new(dir, Some(7)).floor(&space(1 << 40)), 7);
    }

    #[test]
    fn bytes_on_their_way_count_until_they_are_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let available = Disk::new(dir.path(), None).space().expect("it is known").available;
        // Other programs write to this file system too, so leave a margin.
        let disk = Disk::new(dir.path(), Some(available / 2));
        let coming = disk.take(available / 3).expect("above the floor");
        assert!(matches!(disk.take(available / 3), Err(Error::Full(_))), "together they are below it");
        drop(coming);
        disk.take(available / 3).expect("it is written");
    }
}
