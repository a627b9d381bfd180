//! Opens files below a root directory. A link that leads out of it is refused, and so is anything
//! but a regular file.

use crate::error::{Error, Result};
use parking_lot::Mutex;
use pfr_schema::{Algorithm, Digest, Hasher};
use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Bytes read at a time.
pub(crate) const STEP: usize = 1 << 20;

/// A directory that files are read from.
#[derive(Debug)]
pub struct Root {
    path: PathBuf,
    real: PathBuf,
    /// Directories that were checked and lie within the root: a few hundred at most.
    inside: Mutex<std::collections::HashSet<PathBuf>>,
}

impl Root {
    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` does not exist, [`Error::Refused`] if it is not a directory.
    pub fn open(path: &Path) -> Result<Self> {
        let real = path.canonicalize().map_err(Error::io("open", path))?;
        if !real.is_dir() {
            return Err(Error::Refused { path: path.to_owned(), reason: "is not a directory".into() });
        }
        Ok(Self { path: path.to_owned(), real, inside: Mutex::default() })
    }

    /// The path as the caller gave it, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a regular file has this name.
    ///
    /// # Errors
    /// [`Error::Refused`] for anything but a regular file within the directory; [`Error::Io`].
    pub fn exists(&self, relative: &Path) -> Result<bool> {
        Ok(self.length(relative)?.is_some())
    }

    /// Bytes of a regular file; `None` if there is nothing of that name.
    ///
    /// # Errors
    /// [`Error::Refused`] for anything but a regular file within the directory; [`Error::Io`].
    pub fn length(&self, relative: &Path) -> Result<Option<u64>> {
        let path = self.path.join(relative);
        match std::fs::symlink_metadata(&path) {
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(Error::io("look at", &path)(error)),
            Ok(metadata) => {
                self.check_parent(&path)?;
                let metadata = if metadata.is_symlink() { self.follow(&path)?.1 } else { metadata };
                regular(&path, &metadata).map(|()| Some(metadata.len()))
            }
        }
    }

    /// Opens a regular file, and returns its current length.
    ///
    /// # Errors
    /// [`Error::Refused`] for anything but a regular file within the directory; [`Error::Io`].
    pub fn file(&self, relative: &Path) -> Result<(File, u64)> {
        let path = self.path.join(relative);
        self.check_parent(&path)?;
        // Without NONBLOCK, opening a named pipe would wait for its writer before it can be
        // refused.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let open = |path: &Path| OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = match open(&path) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => open(&self.follow(&path)?.0),
            result => result,
        };
        let file = file.map_err(Error::io("open", &path))?;
        let metadata = file.metadata().map_err(Error::io("look at", &path))?;
        regular(&path, &metadata)?;
        Ok((file, metadata.len()))
    }

    /// Reads a document of at most `limit` bytes.
    ///
    /// # Errors
    /// [`Error::Document`] if it is longer, and the errors of [`Self::file`].
    pub fn read(&self, relative: &Path, limit: u64) -> Result<Vec<u8>> {
        let path = self.path.join(relative);
        let (file, length) = self.file(relative)?;
        let too_large = |found| pfr_schema::FormatError::TooLarge { what: "a document, in bytes", found, limit };
        if length > limit {
            return Err(Error::document(&path)(too_large(length)));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        file.take(limit + 1).read_to_end(&mut bytes).map_err(Error::io("read", &path))?;
        if bytes.len() as u64 > limit {
            return Err(Error::document(&path)(too_large(bytes.len() as u64)));
        }
        Ok(bytes)
    }

    /// Names in a directory, sorted; none if it is not there.
    ///
    /// # Errors
    /// [`Error::Refused`] for a name that is not text, or a directory that lies outside;
    /// [`Error::Io`].
    pub fn names(&self, relative: &Path) -> Result<Vec<String>> {
        let path = self.path.join(relative);
        let entries = match std::fs::read_dir(&path) {
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            other => other.map_err(Error::io("list", &path))?,
        };
        self.check_inside(&path)?;
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(Error::io("list", &path))?.file_name();
            let reason = || format!("the name {name:?} is not text");
            names.push(name.to_str().ok_or_else(|| Error::Refused { path: path.clone(), reason: reason() })?.to_owned());
        }
        names.sort();
        Ok(names)
    }

    fn check_parent(&self, path: &Path) -> Result<()> {
        path.parent().map_or(Ok(()), |parent| self.check_inside(parent))
    }

    fn check_inside(&self, directory: &Path) -> Result<()> {
        let mut inside = self.inside.lock();
        if inside.contains(directory) {
            return Ok(());
        }
        self.real_path(directory)?;
        inside.insert(directory.to_owned());
        Ok(())
    }

    fn follow(&self, link: &Path) -> Result<(PathBuf, Metadata)> {
        let real = self.real_path(link)?;
        let metadata = std::fs::symlink_metadata(&real).map_err(Error::io("look at", link))?;
        Ok((real, metadata))
    }

    fn real_path(&self, path: &Path) -> Result<PathBuf> {
        let real = path.canonicalize().map_err(Error::io("follow", path))?;
        if real.starts_with(&self.real) {
            return Ok(real);
        }
        Err(Error::Refused { path: path.to_owned(), reason: "is a link that leaves the directory; copy what it points at".into() })
    }
}

/// Hashes all bytes of `reader`, and counts them.
pub(crate) fn hash(algorithm: Algorithm, reader: impl io::Read) -> io::Result<(Digest, u64)> {
    let mut hasher = Hasher::new(algorithm);
    let length = io::copy(&mut io::BufReader::with_capacity(STEP, reader), &mut hasher)?;
    Ok((hasher.finish(), length))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn regular(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let what = if metadata.is_dir() { "a directory" } else { "neither a file nor a directory" };
    Err(Error::Refused { path: path.to_owned(), reason: format!("is {what}, expected a regular file") })
}
