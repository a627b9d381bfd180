//! Room on the disk: growth stops while some space is left, so that work that frees space always
//! has some.
//!
//! | free space | pushes | deletions | collection, start |
//! |---|---|---|---|
//! | above the floor | yes | yes | yes |
//! | below the floor | refused | yes | yes |
//! | none | refused | from the reserve, down to a quarter of it | from the reserve, down to nothing |
//!
//! The reserve is a file beside the database. It is truncated when space is needed, and grown again
//! before any other work gets space. The file is locked (shared) while some work frees space, so
//! that no other process grows it meanwhile. docs/decisions/0017 has the reasons.

mod disk;
mod reserve;

pub(crate) use disk::Disk;
use disk::Space;

use crate::error::{Error, Result};
use reserve::Reserve;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Free bytes that a deletion works with: its pages in the log, the object of the journal, a
/// wal-index.
const DELETION: u64 = 256 << 10;
/// Free bytes that a step of collection works with, where the reserve has as many.
const COLLECTION: u64 = 4 << 20;
/// Bytes that collecting one object may take in the log: a few pages.
const OBJECT: u64 = 8 << 10;
/// Objects in the smallest step of a collection.
const SMALL_STEP: u64 = 64;
/// With less than this free a database may fail to open or to read, and says "disk I/O error".
const NOTHING: u64 = 512 << 10;

/// Work that frees space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freeing {
    /// The deletion of a tag or a snapshot. It leaves a quarter of the reserve: its bytes come back
    /// only by a collection.
    Deletion,
    /// A collection. It may use the whole reserve.
    Collection,
}

/// The disk of a database, and the reserve beside it.
#[derive(Debug)]
pub(crate) struct Room {
    disk: Disk,
    reserve: Reserve,
    /// The database and its log: a transaction writes no more than there are pages, and a
    /// checkpoint no more than the log has.
    files: [PathBuf; 2],
}

impl Room {
    /// The room beside a database file. Without a `floor` it depends on the size of the file
    /// system.
    pub(crate) fn beside(database: &Path, floor: Option<u64>) -> Self {
        let dir = database.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut log = database.as_os_str().to_owned();
        log.push("-wal");
        Self { disk: Disk::new(dir, floor), reserve: Reserve::beside(database), files: [database.to_owned(), log.into()] }
    }

    /// Maximum bytes of the reserve on this disk.
    pub(crate) fn largest(&self) -> u64 {
        self.disk.space().map_or(reserve::MIN, |space| reserve::largest(space.total))
    }

    /// Bytes of the complete reserve: twice those of the database, within the limits of the disk.
    fn whole(&self, space: &Space) -> u64 {
        let bytes = |file| std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        reserve::size(space.total, self.files.iter().map(bytes).sum())
    }

    /// Bytes of the reserve now.
    pub(crate) fn kept(&self) -> u64 {
        self.reserve.len()
    }

    /// Refuses growth while the disk has less than the floor. What the reserve lacks counts as
    /// taken.
    ///
    /// # Errors
    /// [`Error::Full`].
    pub(crate) fn admit(&self) -> Result<()> {
        self.refill();
        let missing = self.disk.space().map_or(0, |space| self.whole(&space).saturating_sub(self.kept()));
        self.disk.admit(missing)
    }

    /// Whether there is so little space that the log of the database must be short.
    pub(crate) fn is_low(&self) -> bool {
        self.disk.space().is_some_and(|space| space.available < self.disk.floor(&space).max(COLLECTION.min(reserve::largest(space.total))))
    }

    /// Whether an I/O error of the database comes from a full disk.
    pub(crate) fn is_spent(&self) -> bool {
        self.disk.space().is_some_and(|space| space.available < NOTHING || space.inodes == Some(0))
    }

    /// Whether so many bytes are free.
    pub(crate) fn has(&self, bytes: u64) -> bool {
        self.disk.fits(bytes)
    }

    /// Gives at most `bytes` of the reserve to the file system; returns whether there were any.
    pub(crate) fn give(&self, bytes: u64) -> bool {
        self.reserve.cut(bytes, 0)
    }

    /// Grows the reserve as far as the disk allows, unless some work frees space right now.
    pub(crate) fn refill(&self) {
        if let Some(space) = self.disk.space() {
            self.reserve.grow(self.whole(&space), space.available);
        }
    }

    /// Makes room for work that frees space.
    ///
    /// # Errors
    /// [`Error::Full`] for a deletion when only the part of the reserve is left that is for
    /// collections.
    pub(crate) fn make(self: &Arc<Self>, work: Freeing) -> Result<MadeRoom> {
        if !self.is_low() {
            return Ok(MadeRoom::default());
        }
        let made = MadeRoom { room: Some(Arc::clone(self)), lock: self.reserve.lock_shared() };
        made.again(work)?;
        Ok(made)
    }
}

/// Space that was made for work that frees space. When it is dropped, the reserve is grown again.
#[derive(Debug, Default)]
pub struct MadeRoom {
    /// None where there is plenty of space.
    room: Option<Arc<Room>>,
    lock: Option<File>,
}

impl MadeRoom {
    /// Makes as much room again. Called between steps.
    ///
    /// # Errors
    /// As the first time.
    pub(crate) fn again(&self, work: Freeing) -> Result<()> {
        let Some(room) = &self.room else { return Ok(()) };
        let Some(space) = room.disk.space() else { return Ok(()) };
        let whole = room.whole(&space);
        let (wanted, keep) = match work {
            Freeing::Deletion => (DELETION.min(whole / 4), whole / 4),
            Freeing::Collection => (COLLECTION.min(whole), 0),
        };
        if space.available < wanted {
            room.reserve.cut(wanted - space.available, keep);
        }
        let short = room.disk.space().is_some_and(|space| space.available < wanted / 4);
        if short && work == Freeing::Deletion {
            return Err(Error::Full(
                "the remaining space is reserved for garbage collection: collect without a grace period, then delete more".into(),
            ));
        }
        Ok(())
    }

    /// Whether the disk is nearly full: then space is freed before anything is written that can
    /// wait.
    #[must_use]
    pub fn is_tight(&self) -> bool {
        self.room.is_some()
    }

    /// Objects to collect in one transaction: no more than the log has space for.
    pub(crate) fn batch(&self, most: usize) -> usize {
        let available = self.room.as_ref().and_then(|room| room.disk.space()).map(|space| space.available);
        available.map_or(most, |bytes| most.min(usize::try_from((bytes / OBJECT).max(SMALL_STEP)).unwrap_or(most)))
    }
}

impl Drop for MadeRoom {
    fn drop(&mut self) {
        self.lock = None;
        if let Some(room) = &self.room {
            room.refill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_cut_for_deletions_to_a_quarter_and_for_collections_to_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let room = Room::beside(&dir.path().join("metadata.sqlite"), None);
        room.refill();
        let whole = room.kept();
        assert_eq!(whole, reserve::MIN);
        assert!(room.reserve.cut(whole, whole / 4) && !room.reserve.cut(1, whole / 4));
        assert_eq!(room.reserve.len(), whole / 4, "a deletion leaves a quarter");
        assert!(room.give(whole) && !room.give(1));
        assert_eq!(room.reserve.len(), 0, "a collection leaves nothing");
        room.refill();
        assert_eq!(room.reserve.len(), whole);
    }

    #[test]
    fn the_reserve_grows_with_the_database_and_its_log() {
        let dir = tempfile::tempdir().expect("a directory");
        let database = dir.path().join("metadata.sqlite");
        let room = Room::beside(&database, None);
        for (file, bytes) in [("metadata.sqlite", 2 << 20), ("metadata.sqlite-wal", 1 << 20)] {
            std::fs::File::create(dir.path().join(file)).and_then(|file| file.set_len(bytes)).expect("a file");
        }
        room.admit().expect("there is space");
        assert_eq!(room.kept(), room.largest().min(6 << 20));
    }

    #[test]
    fn the_reserve_is_not_grown_while_something_frees_space() {
        let dir = tempfile::tempdir().expect("a directory");
        // The floor is so high that the disk is always below it.
        let room = Arc::new(Room::beside(&dir.path().join("metadata.sqlite"), Some(u64::MAX)));
        room.refill();
        let whole = room.reserve.len();
        let made = room.make(Freeing::Collection).expect("there is room");
        assert!(made.is_tight());
        assert!(room.give(whole));
        room.refill();
        assert_eq!(room.reserve.len(), 0, "a collection is at work");
        drop(made);
        assert_eq!(room.reserve.len(), whole, "it is grown again at once");
    }
}
