//! Files and folders that survive a power cut.
//!
//! The bytes of a file are on disk once the file is synced. Its name is on disk once its folder is
//! synced. So a file is written under a temporary name, synced, renamed, and its folder is synced:
//! after a power cut it is the complete old file or the complete new one.

use rustix::fs::{AtFlags, Mode, OFlags};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;

/// Extension of the temporary name that [`replace`] writes to. A crash may leave such a file
/// behind.
pub const UNFINISHED: &str = "new";

/// Creates a folder and its parents. All entries are durable when this returns, also that of a
/// folder that another process has just made, or one that was killed.
///
/// # Errors
/// Those of the file system.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    create(path, 0o777, &mut sync_dir)
}

/// Like [`create_dir_all`], for folders that only this user may enter.
///
/// # Errors
/// Those of the file system.
pub fn create_private_dir_all(path: &Path) -> io::Result<()> {
    create(path, 0o700, &mut sync_dir)
}

fn create(path: &Path, mode: u32, sync: &mut dyn FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let parent = parent(path);
    if path.is_dir() {
        // The folders above it were synced before it was made. If this process may not sync its
        // parent, it has not made it either.
        return match sync(parent) {
            Err(error) if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) => Ok(()),
            synced => synced,
        };
    }
    create(parent, mode, sync)?;
    match std::fs::DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        other => other?,
    }
    sync(parent)
}

/// The folder that has the entry of `path`.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the entries of a folder durable: new files, renames, deletions.
///
/// # Errors
/// Those of the file system.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Writes a file that only this user may read, or replaces it. The change is durable when this
/// returns.
///
/// # Errors
/// Those of the file system. The old file is then still there.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder = Arc::new(OwnedFd::from(File::open(parent(path))?));
    let mut unfinished = Unfinished::create(Arc::clone(&folder), Path::new(name).with_extension(UNFINISHED).into(), 0o600)?;
    unfinished.file().write_all(bytes)?;
    unfinished.publish(&*folder, name)
}

/// A file in an open folder, most often under a temporary name. It is deleted when it is dropped,
/// unless it was renamed or kept before.
#[derive(Debug)]
pub struct Unfinished {
    file: File,
    folder: Arc<OwnedFd>,
    name: OsString,
    /// Whether nothing is to be deleted any more.
    settled: bool,
}

impl Unfinished {
    /// Creates the file, or empties the one that a killed process left there. Links are not
    /// followed.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn create(folder: Arc<OwnedFd>, name: OsString, mode: u32) -> io::Result<Self> {
        Self::open(folder, name, OFlags::TRUNC, mode)
    }

    /// Creates the file, if there is nothing of its name.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`], and those of the file system.
    pub fn create_new(folder: Arc<OwnedFd>, name: OsString, mode: u32) -> io::Result<Self> {
        Self::open(folder, name, OFlags::EXCL, mode)
    }

    fn open(folder: Arc<OwnedFd>, name: OsString, how: OFlags, mode: u32) -> io::Result<Self> {
        let flags = how | OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&*folder, &name, flags, Mode::from_raw_mode(mode))?;
        Ok(Self { file: file.into(), folder, name, settled: false })
    }

    /// The file, to write to.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// The file, to write to at positions: several threads may do so at once.
    #[must_use]
    pub fn as_file(&self) -> &File {
        &self.file
    }

    /// Deletes the file, and says whether that failed.
    ///
    /// # Errors
    /// Those of the file system. The file is then still there.
    pub fn delete(mut self) -> io::Result<()> {
        // It has no name that could be deleted once more.
        self.settled = true;
        Ok(rustix::fs::unlinkat(&*self.folder, &self.name, AtFlags::empty())?)
    }

    /// Gives the file its name. Nothing is synced: for many files that are made durable together.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn rename(mut self, folder: impl AsFd, name: &OsStr) -> io::Result<()> {
        rustix::fs::renameat(&*self.folder, &self.name, folder, name)?;
        self.settled = true;
        Ok(())
    }

    /// Leaves the file under the name under which it was created. Nothing is synced. Only where a
    /// reader does not take the name for a complete file: a killed process leaves a part of it.
    pub fn keep(mut self) {
        self.settled = true;
    }

    /// Gives the file its name, durably.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn publish(self, folder: impl AsFd, name: &OsStr) -> io::Result<()> {
        self.file.sync_all()?;
        self.rename(&folder, name)?;
        Ok(rustix::fs::fsync(folder)?)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.settled {
            // The next attempt overwrites a file that cannot be deleted.
            let _ = rustix::fs::unlinkat(&*self.folder, &self.name, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    #[test]
    fn folders_are_created_with_their_parents_and_again() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/c");
        create_dir_all(&deep).unwrap();
        create_dir_all(&deep).unwrap();
        assert!(deep.is_dir());
        std::fs::write(dir.path().join("file"), b"").unwrap();
        assert!(create_dir_all(&dir.path().join("file/below")).is_err());
    }

    #[test]
    fn every_folder_that_gets_a_new_entry_is_synced() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("old")).unwrap();
        let mut synced: Vec<PathBuf> = Vec::new();
        let mut sync = |path: &Path| {
            synced.push(path.to_owned());
            sync_dir(path)
        };
        create(&dir.path().join("old/a/b/c"), 0o700, &mut sync).unwrap();
        assert_eq!(synced, ["", "old", "old/a", "old/a/b"].map(|path| dir.path().join(path)));
    }

    #[test]
    fn a_folder_that_is_there_may_not_be_durable_yet() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made by a process that was killed");
        std::fs::create_dir(&path).unwrap();
        let mut synced = Vec::new();
        let mut note = |parent: &Path| {
            synced.push(parent.to_owned());
            Ok(())
        };
        create(&path, 0o700, &mut note).unwrap();
        assert_eq!(synced, [dir.path()]);
        for (error, is_fine) in [(io::ErrorKind::PermissionDenied, true), (io::ErrorKind::StorageFull, false)] {
            assert_eq!(create(&path, 0o700, &mut |_| Err(error.into())).is_ok(), is_fine);
        }
    }

    #[test]
    fn other_users_may_not_enter_a_private_folder_or_the_folders_created_above_it() {
        let dir = tempfile::tempdir().unwrap();
        create_private_dir_all(&dir.path().join("a/b")).unwrap();
        for path in ["a", "a/b"] {
            let mode = dir.path().join(path).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{path}");
        }
    }

    #[test]
    fn a_file_is_replaced_completely_and_no_other_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.json");
        // Left by a process that was killed.
        std::fs::write(dir.path().join("job.new"), "half, and longer than the next").unwrap();
        for text in ["one", "two"] {
            replace(&path, text.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_abandoned_file_is_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Arc::new(OwnedFd::from(File::open(dir.path()).unwrap()));
        let mut unfinished = Unfinished::create(folder, "x.new".into(), 0o600).unwrap();
        unfinished.file().write_all(b"half").unwrap();
        drop(unfinished);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_is_kept_stays_under_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Arc::new(OwnedFd::from(File::open(dir.path()).unwrap()));
        let mut unfinished = Unfinished::create_new(folder, "page".into(), 0o600).unwrap();
        unfinished.file().write_all(b"whole").unwrap();
        unfinished.keep();
        assert_eq!(std::fs::read(dir.path().join("page")).unwrap(), b"whole");
    }

    #[test]
    fn a_file_of_another_is_not_taken_and_a_deletion_that_fails_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Arc::new(OwnedFd::from(File::open(dir.path()).unwrap()));
        let make = || Unfinished::create_new(Arc::clone(&folder), "x#1".into(), 0o600);
        let unfinished = make().unwrap();
        assert_eq!(make().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        unfinished.delete().unwrap();
        let unfinished = make().unwrap();
        std::fs::remove_file(dir.path().join("x#1")).unwrap();
        assert_eq!(unfinished.delete().unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
