//! Writing files of a snapshot directory: the one place with temporary names, renames and syncs.
//!
//! A file appears under its name only whole. Blobs are not synced one by one: [`Writer::sync`] makes all of them durable at once,
//! before the page manifest, whose presence says that everything is there, is published by [`Writer::publish`].

use crate::directory::layout;
use crate::error::{Error, Result};
use crate::plan::Item;
use bytes::Bytes;
use pfr_schema::codec::{Codec, Decoder};
use pfr_schema::frame::Header;
use pfr_schema::{Digest, Hasher};
use pfr_store::Whole;
use rustix::fs::{FlockOperation, OFlags};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Bytes hashed at a time.
const STEP: usize = 1 << 20;

/// Writes into one directory, which it keeps locked.
#[derive(Debug)]
pub(super) struct Writer {
    root: PathBuf,
    lock: File,
    /// Blobs that do not lie in `blobs/`.
    named: HashMap<Digest, PathBuf>,
}

impl Writer {
    /// Makes and locks the directory.
    pub fn open(root: &Path, named: HashMap<Digest, PathBuf>) -> Result<Self> {
        std::fs::create_dir_all(root).map_err(Error::io("make", root))?;
        let lock = File::open(root).map_err(Error::io("open", root))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let unfinished = root.join(layout::UNFINISHED);
                match std::fs::remove_dir_all(&unfinished) {
                    Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("clear", &unfinished)(error)),
                    _ => Ok(Self { root: root.to_owned(), lock, named }),
                }
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let reason = "another pull is writing into it; wait for that, or pull into another directory".into();
                Err(Error::Refused { path: root.to_owned(), reason })
            }
            Err(errno) => Err(Error::io("lock", root)(errno.into())),
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a blob belongs.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.root.join(self.named.get(digest).cloned().unwrap_or_else(|| layout::blob(digest)))
    }

    /// Whether a blob has a place outside of `blobs/`.
    pub fn names(&self, digest: &Digest) -> bool {
        self.named.contains_key(digest)
    }

    /// Whether a blob is there, every byte of it.
    pub fn holds(&self, item: &Item) -> Result<bool> {
        let path = self.path(&item.digest);
        match std::fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_file() && item.size.is_none_or(|size| size == metadata.len()) => {}
            _ => return Ok(false),
        }
        let mut file = File::open(&path).map_err(Error::io("open", &path))?;
        let (mut hasher, mut buffer) = (Hasher::new(item.digest.algorithm()), vec![0; STEP]);
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(hasher.finish() == item.digest),
                Ok(n) => hasher.update(&buffer[..n]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io("read", &path)(error)),
            }
        }
    }

    /// Writes a verified frame.
    pub fn write(&self, whole: &Whole) -> Result<()> {
        let digest = whole.header.digest;
        let mut temporary = self.begin(self.path(&digest))?;
        if whole.header.codec == Codec::Raw {
            for piece in &whole.payload {
                temporary.append(piece)?;
            }
        } else {
            temporary.append(&whole.raw().map_err(|source| Error::Received { digest, source })?)?;
        }
        temporary.rename()
    }

    /// Writes bytes to a file of this directory.
    pub fn write_bytes(&self, name: &Path, bytes: &[u8]) -> Result<()> {
        let mut temporary = self.begin(self.root.join(name))?;
        temporary.append(bytes)?;
        temporary.rename()
    }

    /// Copies a blob to a second place.
    pub fn copy(&self, digest: &Digest, target: &Path) -> Result<()> {
        let path = self.path(digest);
        let mut from = File::open(&path).map_err(Error::io("open", &path))?;
        let mut temporary = self.begin(self.root.join(target))?;
        std::io::copy(&mut from, &mut temporary.file).map_err(Error::io("copy to", &temporary.path))?;
        temporary.rename()
    }

    /// Makes everything written so far durable.
    pub fn sync(&self) -> Result<()> {
        rustix::fs::syncfs(&self.lock).map_err(|errno| Error::io("sync", &self.root)(errno.into()))
    }

    /// Writes bytes to a file directly in this directory, durably.
    pub fn publish(&self, name: &Path, bytes: &[u8]) -> Result<()> {
        let mut temporary = self.begin(self.root.join(name))?;
        temporary.append(bytes)?;
        temporary.file.sync_all().map_err(Error::io("sync", &temporary.path))?;
        temporary.rename()?;
        self.lock.sync_all().map_err(Error::io("sync", &self.root))
    }

    fn begin(&self, target: PathBuf) -> Result<Temporary> {
        let path = match target.strip_prefix(self.root.join(layout::ATTACHMENTS)) {
            Ok(title) => self.root.join(layout::UNFINISHED).join(title),
            // No blob and no document of ours is called so.
            Err(_) => {
                let mut name = target.clone().into_os_string();
                name.push(".tmp");
                name.into()
            }
        };
        Temporary::begin(path, target)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // If it is there it is empty, or the next pull clears it.
        let _ = std::fs::remove_dir(self.root.join(layout::UNFINISHED));
    }
}

/// A file under a temporary name, removed unless it is renamed.
struct Temporary {
    file: File,
    path: PathBuf,
    target: PathBuf,
    renamed: bool,
}

impl Temporary {
    /// The writer's lock makes `path` ours; what a killed pull has left there is overwritten.
    fn begin(path: PathBuf, target: PathBuf) -> Result<Self> {
        let open = || {
            let flags = OFlags::NOFOLLOW.bits() as i32;
            OpenOptions::new().write(true).create(true).truncate(true).custom_flags(flags).open(&path)
        };
        let file = match open() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                for parent in [&path, &target].into_iter().filter_map(|path| path.parent()) {
                    std::fs::create_dir_all(parent).map_err(Error::io("make", parent))?;
                }
                open()
            }
            other => other,
        };
        Ok(Self { file: file.map_err(Error::io("write", &path))?, path, target, renamed: false })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io("write", &self.path))
    }

    fn rename(mut self) -> Result<()> {
        std::fs::rename(&self.path, &self.target).map_err(Error::io("rename to", &self.target))?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // What cannot be removed is overwritten by the next try.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A large blob that arrives in pieces; nothing of it is visible until [`Self::finish`].
pub(super) struct Large {
    digest: Digest,
    temporary: Temporary,
    decoder: Decoder,
}

impl Large {
    pub fn begin(writer: &Writer, header: &Header) -> Result<Self> {
        let digest = header.digest;
        let decoder = Decoder::new(header.codec, header.raw_len).map_err(|source| Error::Received { digest, source })?;
        Ok(Self { digest, temporary: writer.begin(writer.path(&digest))?, decoder })
    }

    pub fn append(&mut self, piece: &Bytes) -> Result<()> {
        let Self { digest, temporary, decoder } = self;
        let mut written = Ok(());
        let mut sink = |raw: &[u8]| {
            if written.is_ok() {
                written = temporary.append(raw);
            }
        };
        decoder.update(piece, &mut sink).map_err(|source| Error::Received { digest: *digest, source })?;
        written
    }

    /// Call only for a frame that was verified.
    pub fn finish(self) -> Result<()> {
        let digest = self.digest;
        self.decoder.finish().map_err(|source| Error::Received { digest, source })?;
        self.temporary.rename()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_attachment_is_in_the_way_of_another_while_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("out");
        // What a killed pull has left.
        std::fs::create_dir_all(root.join(layout::UNFINISHED)).unwrap();
        std::fs::write(root.join(layout::UNFINISHED).join("old"), "half").unwrap();
        let writer = Writer::open(&root, HashMap::new()).unwrap();
        let long = "x".repeat(255);
        let titles = ["x", "x.tmp", "x.tmp.tmp", layout::UNFINISHED, &long];
        let mut begun: Vec<(Temporary, &str)> =
            titles.iter().map(|title| (writer.begin(root.join(layout::ATTACHMENTS).join(title)).unwrap(), *title)).collect();
        begun.iter_mut().for_each(|(temporary, title)| temporary.append(title.as_bytes()).unwrap());
        begun.into_iter().for_each(|(temporary, _)| temporary.rename().unwrap());
        drop(writer);
        for title in titles {
            assert_eq!(std::fs::read_to_string(root.join(layout::ATTACHMENTS).join(title)).unwrap(), title);
        }
        let left: Vec<_> = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [layout::ATTACHMENTS]);
    }
}
