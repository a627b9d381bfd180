//! Directories below the one that is written into, opened one in the other so that no link leads
//! elsewhere.

use crate::error::{Error, Result};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, LazyLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Components of a path whose directory is kept open: `blobs/sha256` and its like, of which there
/// are few.
const KEPT: usize = 2;
/// Directories below those that all pulls of this process keep open together: a quarter of the
/// files that it may have open, for it needs files for other things too. A pull has one for the
/// first two hex digits of each digest, and to open it for each file costs as much as to write the
/// file.
static PLACES: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    Arc::new(Semaphore::new(usize::try_from(files / 4).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS)))
});

/// The root, and what was opened below it.
#[derive(Debug)]
pub(super) struct Folders {
    path: PathBuf,
    root: Arc<OwnedFd>,
    open: Mutex<Open>,
    /// As [`PLACES`].
    places: Arc<Semaphore>,
}

/// A directory that is kept open.
#[derive(Debug)]
struct Kept {
    folder: Arc<OwnedFd>,
    /// Its place among those of the process, if it needs one.
    _place: Option<OwnedSemaphorePermit>,
}

#[derive(Debug, Default)]
struct Open {
    kept: HashMap<PathBuf, Kept>,
    /// A directory of each file system that was written to: another one may be mounted anywhere
    /// below the root.
    filesystems: HashMap<u64, Arc<OwnedFd>>,
}

impl Folders {
    pub fn below(path: &Path, root: OwnedFd) -> Result<Self> {
        let places = Arc::clone(&PLACES);
        let folders = Self { path: path.to_owned(), root: Arc::new(root), open: Mutex::default(), places };
        folders.note(Path::new(""), &folders.root)?;
        Ok(folders)
    }

    /// The directory at `relative`, if it is there.
    pub fn find(&self, relative: &Path) -> Result<Option<Arc<OwnedFd>>> {
        self.walk(relative, false)
    }

    /// The directory at `relative`, made if it is not there.
    pub fn make(&self, relative: &Path) -> Result<Arc<OwnedFd>> {
        let made = self.walk(relative, true)?;
        made.ok_or_else(|| Error::io("make", &self.path.join(relative))(std::io::ErrorKind::NotFound.into()))
    }

    /// Makes everything below durable.
    pub fn sync(&self) -> Result<()> {
        let open = self.open.lock();
        open.filesystems.values().try_for_each(|folder| {
            rustix::fs::syncfs(&**folder).map_err(|errno| Error::io("sync the file system of", &self.path)(errno.into()))
        })
    }

    /// Looks whether the directories that are open still have their names.
    ///
    /// # Errors
    /// [`Error::Refused`] if one does not: what was written into it is not below the root.
    pub fn check_places(&self) -> Result<()> {
        for (at, Kept { folder, .. }) in &self.open.lock().kept {
            let path = || self.path.join(at);
            let held = rustix::fs::fstat(&**folder).map_err(|errno| Error::io("look at", &path())(errno.into()))?;
            let is_same = match rustix::fs::statat(&*self.root, at.as_path(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => false,
                Err(errno) => return Err(Error::io("look at", &path())(errno.into())),
            };
            if !is_same {
                let reason = "was moved or replaced while files were written into it; pull again".into();
                return Err(Error::Refused { path: path(), reason });
            }
        }
        Ok(())
    }

    fn walk(&self, relative: &Path, make: bool) -> Result<Option<Arc<OwnedFd>>> {
        if let Some(kept) = self.open.lock().kept.get(relative) {
            return Ok(Some(Arc::clone(&kept.folder)));
        }
        let (mut folder, mut at) = (Arc::clone(&self.root), PathBuf::new());
        for (depth, component) in relative.components().enumerate() {
            let Component::Normal(name) = component else {
                return Err(Error::Internal(format!("{} is no path below a directory", relative.display())));
            };
            at.push(name);
            let kept = self.open.lock().kept.get(&at).map(|kept| Arc::clone(&kept.folder));
            folder = match kept {
                Some(kept) => kept,
                None => {
                    let Some(opened) = self.step(&folder, &at, make)? else { return Ok(None) };
                    let opened = Arc::new(opened);
                    self.note(&at, &opened)?;
                    self.keep(depth, &at, &opened);
                    opened
                }
            };
        }
        Ok(Some(folder))
    }

    fn keep(&self, depth: usize, at: &Path, opened: &Arc<OwnedFd>) {
        let place = (depth >= KEPT).then(|| Arc::clone(&self.places).try_acquire_owned().ok()).flatten();
        if depth < KEPT || place.is_some() {
            self.open.lock().kept.insert(at.to_owned(), Kept { folder: Arc::clone(opened), _place: place });
        }
    }

    /// Opens the last component of `at` in the directory above it.
    fn step(&self, above: &OwnedFd, at: &Path, make: bool) -> Result<Option<OwnedFd>> {
        let name = at.file_name().unwrap_or_default();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(above, name, flags, Mode::empty());
        let path = || self.path.join(at);
        let opened = match open() {
            Err(Errno::NOENT) if make => match rustix::fs::mkdirat(above, name, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => open(),
                Err(errno) => return Err(Error::io("make", &path())(errno.into())),
            },
            other => other,
        };
        match opened {
            Ok(folder) => Ok(Some(folder)),
            Err(Errno::NOENT) => Ok(None),
            // Linux gives either error for a link.
            Err(Errno::LOOP | Errno::NOTDIR) => {
                let reason = "is a link, or no directory; nothing is written through links. Move it away, or pull into another directory";
                Err(Error::Refused { path: path(), reason: reason.into() })
            }
            Err(errno) => Err(Error::io("open", &path())(errno.into())),
        }
    }

    fn note(&self, at: &Path, folder: &Arc<OwnedFd>) -> Result<()> {
        let stat = rustix::fs::fstat(&**folder).map_err(|errno| Error::io("look at", &self.path.join(at))(errno.into()))?;
        let mut open = self.open.lock();
        open.filesystems.entry(stat.st_dev).or_insert_with(|| Arc::clone(folder));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders(root: &Path) -> Folders {
        Folders::below(root, std::fs::File::open(root).unwrap().into()).unwrap()
    }

    #[test]
    fn directories_are_made_one_in_the_other_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let folders = folders(dir.path());
        let place = Path::new("blobs/sha256/ab");
        assert!(folders.find(place).unwrap().is_none());
        folders.make(place).unwrap();
        assert!(dir.path().join(place).is_dir() && folders.find(place).unwrap().is_some());
        assert!(folders.make(Path::new("../x")).is_err());
    }

    #[test]
    fn all_pulls_together_keep_only_so_many_directories_open() {
        let (dir, places) = (tempfile::tempdir().unwrap(), Arc::new(Semaphore::new(3)));
        let below = |name: &str| {
            let root = dir.path().join(name);
            std::fs::create_dir(&root).unwrap();
            Folders { places: Arc::clone(&places), ..folders(&root) }
        };
        let same = |folders: &Folders, place: &str| {
            Arc::ptr_eq(&folders.make(Path::new(place)).unwrap(), &folders.find(Path::new(place)).unwrap().unwrap())
        };
        let (one, two) = (below("one"), below("two"));
        assert!(same(&one, "blobs/sha256/aa") && same(&one, "blobs/sha256/bb") && same(&two, "blobs/sha256/aa"));
        assert!(!same(&two, "blobs/sha256/bb") && !same(&one, "blobs/sha256/cc"), "more files are open than a process may have");
        assert!(same(&one, "attachments") && same(&two, "attachments"), "it is one of few");
        assert!(dir.path().join("one/blobs/sha256/cc").is_dir() && dir.path().join("two/blobs/sha256/bb").is_dir());
        // The places of a pull that has ended are free.
        drop(one);
        assert!(same(&two, "blobs/sha256/bb"));
    }

    #[test]
    fn every_file_system_below_is_synced() {
        let dir = tempfile::tempdir().unwrap();
        let folders = folders(dir.path());
        folders.make(Path::new("blobs/sha256")).unwrap();
        let count = || folders.open.lock().filesystems.len();
        assert_eq!(count(), 1);
        // Stands for a mount: the folder that is kept open lies on the file system of /proc.
        let other = Arc::new(OwnedFd::from(std::fs::File::open("/proc").unwrap()));
        folders.open.lock().kept.insert("blobs".into(), Kept { folder: other, _place: None });
        assert!(folders.find(Path::new("blobs/sys")).unwrap().is_some());
        assert_eq!(count(), 2);
        folders.sync().unwrap();
    }
}
