//! A file that holds space for later. Its blocks are allocated: truncating it gives them back to
//! the file system.

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

/// Bytes of a reserve beside a small database.
pub(super) const MIN: u64 = 1 << 20;
/// Maximum bytes of a reserve: as many as may wait for a WAL checkpoint, so that one is always
/// possible.
pub(super) const MAX: u64 = 16 << 20;
/// Bytes of a reserve on the smallest disks.
const LEAST: u64 = 512 << 10;
/// It takes at most one part in this many of the file system.
const PART: u64 = 16;
/// The smallest number of bytes to allocate.
const PIECE: u64 = 64 << 10;

/// The largest reserve on a file system of `total` bytes.
pub(super) fn largest(total: u64) -> u64 {
    (total / PART).clamp(LEAST, MAX) / PIECE * PIECE
}

/// The complete reserve of a database that takes `used` bytes.
pub(super) fn size(total: u64, used: u64) -> u64 {
    used.saturating_mul(2).max(MIN).min(largest(total)).div_ceil(PIECE) * PIECE
}

/// The file.
#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
}

impl Reserve {
    pub(super) fn beside(database: &Path) -> Self {
        let mut path = database.as_os_str().to_owned();
        path.push("-reserve");
        Self { path: path.into() }
    }

    /// Bytes that it holds.
    pub(super) fn len(&self) -> u64 {
        std::fs::metadata(&self.path).map_or(0, |metadata| metadata.len())
    }

    /// Keeps it from being grown, in this process and others, until the file is dropped. None if it
    /// is not there and cannot be made.
    pub(super) fn lock_shared(&self) -> Option<File> {
        let file = self.open().ok()?;
        file.lock_shared().ok()?;
        Some(file)
    }

    /// Takes at most `bytes` away from it, and leaves `keep`; whether any were taken.
    pub(super) fn cut(&self, bytes: u64, keep: u64) -> bool {
        let len = self.len();
        let left = len.saturating_sub(bytes).max(keep);
        if left >= len {
            return false;
        }
        let cut = || {
            let file = OpenOptions::new().write(true).open(&self.path)?;
            file.set_len(left)?;
            // A journaling file system hands freed blocks out once their release is durable.
            file.sync_all()
        };
        match cut() {
            Ok(()) => {
                tracing::info!(reserve = %self.path.display(), bytes = len - left, left, "the disk is full: space of the reserve is released");
                true
            }
            Err(error) => {
                tracing::warn!(%error, reserve = %self.path.display(), "releasing the disk reserve failed");
                false
            }
        }
    }

    /// Grows it to `size` or by what is `available`, unless it is locked.
    pub(super) fn grow(&self, size: u64, available: u64) {
        let len = self.len();
        let mut more = size.saturating_sub(len).min(available);
        if len >= size || more < PIECE.min(size - len) {
            return;
        }
        let Ok(file) = self.open() else { return };
        if file.try_lock().is_err() {
            return;
        }
        while more > 0 {
            match allocate(&file, len, more) {
                Ok(()) => return,
                Err(error) if is_full(&error) && more > PIECE => more /= 2,
                Err(error) => {
                    tracing::debug!(%error, reserve = %self.path.display(), "filling the disk reserve failed");
                    return;
                }
            }
        }
    }

    fn open(&self) -> io::Result<File> {
        OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&self.path)
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Allocates `more` bytes at the end of the file. Leaves the file as it was if that fails.
fn allocate(mut file: &File, len: u64, more: u64) -> io::Result<()> {
    let done = match fallocate(file, FallocateFlags::empty(), len, more) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => fill(&mut file, len, more),
        other => other.map_err(io::Error::from),
    };
    if done.is_err() {
        // Gives back the part that was allocated.
        file.set_len(len)?;
    }
    done
}

fn fill(file: &mut &File, len: u64, more: u64) -> io::Result<()> {
    file.seek(SeekFrom::Start(len))?;
    let piece = vec![0xff; PIECE as usize];
    let mut left = more;
    while left > 0 {
        let now = left.min(PIECE);
        file.write_all(&piece[..now as usize])?;
        left -= now;
    }
    // Without this the write could fail later, unseen.
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn a_reserve_is_twice_the_database_within_16_mib_and_a_sixteenth_of_the_disk() {
        assert_eq!(size(1 << 40, 0), MIN);
        assert_eq!(size(1 << 40, 3 << 20), 6 << 20);
        assert_eq!(size(1 << 40, 1 << 30), MAX);
        assert_eq!(size(64 << 20, 1 << 30), 4 << 20);
        assert_eq!(size(1 << 20, 1 << 30), LEAST);
    }

    #[test]
    fn its_blocks_are_allocated_also_where_they_must_be_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let reserve = Reserve::beside(&dir.path().join("metadata.sqlite"));
        reserve.grow(MIN, u64::MAX);
        let blocks = || std::fs::metadata(&reserve.path).expect("it is there").blocks() * 512;
        assert!(blocks() >= MIN, "{} bytes are allocated", blocks());
        let file = OpenOptions::new().write(true).open(&reserve.path).expect("it opens");
        fill(&mut &file, MIN, MIN).expect("it is written");
        assert!(blocks() >= 2 * MIN && reserve.len() == 2 * MIN);
    }

    #[test]
    fn it_grows_by_what_there_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let reserve = Reserve::beside(&dir.path().join("metadata.sqlite"));
        reserve.grow(MIN, 128 << 10);
        assert_eq!(reserve.len(), 128 << 10);
        reserve.grow(MIN, 0);
        assert_eq!(reserve.len(), 128 << 10);
        reserve.grow(MIN, u64::MAX);
        assert_eq!(reserve.len(), MIN);
    }
}
