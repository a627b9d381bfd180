//! Writes the files of a snapshot directory: the one place with temporary names, renames and syncs.
//!
//! Blobs are not synced one by one: [`Writer::sync`] makes all of them durable at once, before
//! [`Writer::publish`] publishes the page manifest, whose presence means that everything is there.
//! Until it is present no name of a blob means anything, so a new blob has its name from the start:
//! a rename of each costs as much as to make it. The next pull hashes what a killed one has left.
//! Any other file appears under its name only when it is complete, and so do blobs of a directory
//! that has a page manifest, and those that take the place of another file.
//!
//! Every name is opened in the open directory above it, and links are not followed: so all files
//! lie below the directory that the user named.

mod folders;

use crate::directory::files::hash;
use crate::directory::layout;
use crate::error::{Error, Result};
use crate::plan::Item;
use bytes::Bytes;
use folders::Folders;
use pfr_schema::Digest;
use pfr_schema::codec::Decoder;
use pfr_schema::frame::Header;
use pfr_service::durable::{self, Unfinished};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes into one directory, which it keeps locked.
#[derive(Debug)]
pub(super) struct Writer {
    root: PathBuf,
    folders: Folders,
    /// Blobs that do not lie in `blobs/`.
    named: HashMap<Digest, PathBuf>,
    /// Whether `blobs/` was there when this began, or has something since. If not, no blob is
    /// looked for in it.
    has_blobs: AtomicBool,
    /// Whether the directory may say of itself that it is complete.
    says_complete: bool,
}

impl Writer {
    /// Makes and locks the directory.
    pub fn open(root: &Path, named: HashMap<Digest, PathBuf>) -> Result<Self> {
        durable::create_dir_all(root).map_err(Error::io("make", root))?;
        let lock = File::open(root).map_err(Error::io("open", root))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let unfinished = root.join(layout::UNFINISHED);
                match std::fs::remove_dir_all(&unfinished) {
                    Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("clear", &unfinished)(error)),
                    _ => Self::locked(root, lock.into(), named),
                }
            }
            Err(Errno::WOULDBLOCK) => {
                let reason = "another pull is writing into it; wait for that, or pull into another directory".into();
                Err(Error::Refused { path: root.to_owned(), reason })
            }
            Err(errno) => Err(Error::io("lock", root)(errno.into())),
        }
    }

    /// Looks at what a directory has that is locked.
    fn locked(root: &Path, lock: OwnedFd, named: HashMap<Digest, PathBuf>) -> Result<Self> {
        let folders = Folders::below(root, lock)?;
        // A link or a file counts as there. The first look for a blob says what it is.
        let has_blobs = !matches!(folders.find(Path::new(layout::BLOBS)), Ok(None));
        let mut says_complete = false;
        for entry in std::fs::read_dir(root).map_err(Error::io("list", root))? {
            let name = entry.map_err(Error::io("list", root))?.file_name();
            says_complete |= name.to_str().is_some_and(layout::says_complete);
        }
        Ok(Self { root: root.to_owned(), folders, named, has_blobs: has_blobs.into(), says_complete })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a blob below the root.
    fn place(&self, digest: &Digest) -> PathBuf {
        self.named.get(digest).cloned().unwrap_or_else(|| layout::blob(digest))
    }

    /// Whether a blob has a place outside of `blobs/`.
    pub fn names(&self, digest: &Digest) -> bool {
        self.named.contains_key(digest)
    }

    /// From now on, blobs are looked for that were written meanwhile.
    pub fn look_for_written_blobs(&self) {
        self.has_blobs.store(true, Ordering::Relaxed);
    }

    /// Whether a blob is there, and complete. Reads and hashes it. In a new directory, blobs that
    /// were written since it was opened count only after [`Self::look_for_written_blobs`].
    pub fn holds(&self, item: &Item) -> Result<bool> {
        if !self.has_blobs.load(Ordering::Relaxed) && !self.names(&item.digest) {
            return Ok(false);
        }
        let place = self.place(&item.digest);
        let path = self.root.join(&place);
        let Some(file) = self.read(&place)? else { return Ok(false) };
        let metadata = file.metadata().map_err(Error::io("look at", &path))?;
        if !metadata.is_file() || item.size.is_some_and(|size| size != metadata.len()) {
            return Ok(false);
        }
        let (digest, _) = hash(item.digest.algorithm(), file).map_err(Error::io("read", &path))?;
        Ok(digest == item.digest)
    }

    /// Opens what lies at `place`; `None` if there is nothing, or a link.
    fn read(&self, place: &Path) -> Result<Option<File>> {
        let (parent, name) = split(place)?;
        let Some(folder) = self.folders.find(parent)? else { return Ok(None) };
        // Does not wait: a pipe may have no writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&*folder, &name, flags, Mode::empty()) {
            Ok(file) => Ok(Some(file.into())),
            Err(Errno::NOENT | Errno::LOOP) => Ok(None),
            Err(errno) => Err(Error::io("open", &self.root.join(place))(errno.into())),
        }
    }

    /// Writes the bytes of a blob, which were verified.
    pub fn write(&self, digest: &Digest, raw: &[u8]) -> Result<()> {
        if self.says_complete || self.names(digest) || !self.write_new(&layout::blob(digest), raw)? {
            return self.write_bytes(&self.place(digest), raw);
        }
        Ok(())
    }

    /// Writes a file that has its name from the start. Returns `false`, and has done nothing, if
    /// there is something of this name, a link included.
    fn write_new(&self, place: &Path, raw: &[u8]) -> Result<bool> {
        let (folder, name) = split(place)?;
        let folder = self.folders.make(folder)?;
        // Paths are put together for errors only: there is one of these calls for each blob.
        let failed = |error| Error::io("write", &self.root.join(place))(error);
        let mut file = match Unfinished::create_new(folder, name, 0o666) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
            created => created.map_err(failed)?,
        };
        let written = file.file().write_all(raw);
        // Also after a failure: a later request may have given the name to a whole file meanwhile,
        // and a part of a file is what a killed pull leaves too.
        file.keep();
        written.map_err(failed)?;
        Ok(true)
    }

    /// Writes bytes to a file of this directory.
    pub fn write_bytes(&self, name: &Path, bytes: &[u8]) -> Result<()> {
        let mut temporary = self.begin(name)?;
        temporary.append(bytes)?;
        temporary.rename()
    }

    /// Copies a blob to a second place.
    pub fn copy(&self, digest: &Digest, target: &Path) -> Result<()> {
        let place = self.place(digest);
        let absent = || Error::io("open", &self.root.join(&place))(ErrorKind::NotFound.into());
        let mut from = self.read(&place)?.ok_or_else(absent)?;
        let mut temporary = self.begin(target)?;
        std::io::copy(&mut from, temporary.file.file()).map_err(Error::io("copy to", &temporary.path))?;
        temporary.rename()
    }

    /// Makes everything written so far durable, on every file system that some of it lies on.
    ///
    /// # Errors
    /// [`Error::Refused`] if a directory was replaced meanwhile: some files lie elsewhere.
    pub fn sync(&self) -> Result<()> {
        self.folders.sync()?;
        self.folders.check_places()
    }

    /// Writes bytes to a file directly in this directory, durably.
    pub fn publish(&self, name: &Path, bytes: &[u8]) -> Result<()> {
        let mut temporary = self.begin(name)?;
        temporary.append(bytes)?;
        temporary.publish()
    }

    /// Begins a file at `target`, below the root. The lock makes its temporary name ours: a file
    /// that a killed pull has left there is overwritten.
    fn begin(&self, target: &Path) -> Result<Temporary> {
        let (to, name) = split(target)?;
        let to = (self.folders.make(to)?, name.clone());
        let (from, place) = match target.strip_prefix(layout::ATTACHMENTS) {
            Ok(_) => {
                let unfinished = Path::new(layout::UNFINISHED);
                ((self.folders.make(unfinished)?, name.clone()), unfinished.join(&name))
            }
            // No blob and no document of ours is called so.
            Err(_) => {
                let mut temporary = name;
                temporary.push(".tmp");
                ((Arc::clone(&to.0), temporary.clone()), target.with_file_name(temporary))
            }
        };
        let (path, target) = (self.root.join(place), self.root.join(target));
        let file = Unfinished::create(from.0, from.1, 0o666).map_err(Error::io("write", &path))?;
        Ok(Temporary { file, to, path, target })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // If it is there it is empty, or the next pull clears it.
        let _ = std::fs::remove_dir(self.root.join(layout::UNFINISHED));
    }
}

/// The directory and the name of a file below the root.
fn split(place: &Path) -> Result<(&Path, OsString)> {
    match (place.parent(), place.file_name()) {
        (Some(parent), Some(name)) => Ok((parent, name.to_owned())),
        _ => Err(Error::Internal(format!("{} is no file's name", place.display()))),
    }
}

/// A file under a temporary name, with the open folder and the name that it will have.
struct Temporary {
    file: Unfinished,
    to: (Arc<OwnedFd>, OsString),
    /// Its two names, for messages.
    path: PathBuf,
    target: PathBuf,
}

impl Temporary {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.file().write_all(bytes).map_err(Error::io("write", &self.path))
    }

    fn rename(self) -> Result<()> {
        self.file.rename(&*self.to.0, &self.to.1).map_err(Error::io("rename to", &self.target))
    }

    fn publish(self) -> Result<()> {
        self.file.publish(&*self.to.0, &self.to.1).map_err(Error::io("sync", &self.target))
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
        Ok(Self { digest, temporary: writer.begin(&writer.place(&digest))?, decoder })
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
    use pfr_testkit::disk::SmallDisk;

    #[test]
    fn no_attachment_is_in_the_way_of_another_while_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("out");
        // Left by a killed pull.
        std::fs::create_dir_all(root.join(layout::UNFINISHED)).unwrap();
        std::fs::write(root.join(layout::UNFINISHED).join("old"), "half").unwrap();
        let writer = Writer::open(&root, HashMap::new()).unwrap();
        let long = "x".repeat(255);
        let titles = ["x", "x.tmp", "x.tmp.tmp", layout::UNFINISHED, &long];
        let mut begun: Vec<(Temporary, &str)> =
            titles.iter().map(|title| (writer.begin(&Path::new(layout::ATTACHMENTS).join(title)).unwrap(), *title)).collect();
        begun.iter_mut().for_each(|(temporary, title)| temporary.append(title.as_bytes()).unwrap());
        begun.into_iter().for_each(|(temporary, _)| temporary.rename().unwrap());
        drop(writer);
        for title in titles {
            assert_eq!(std::fs::read_to_string(root.join(layout::ATTACHMENTS).join(title)).unwrap(), title);
        }
        let left: Vec<_> = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [layout::ATTACHMENTS]);
    }

    #[test]
    fn nothing_is_written_through_a_link_to_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let digest = Digest::sha256(b"x");
        let (hex, item) = (digest.hex(), Item { digest, kind: pfr_schema::Kind::Blob, size: Some(1), elements: None });
        for link in ["blobs", "blobs/sha256", &format!("blobs/sha256/{}", &hex[..2]), layout::ATTACHMENTS] {
            let (root, elsewhere) = (dir.path().join(link.replace('/', "-")), dir.path().join("elsewhere"));
            std::fs::create_dir_all(root.join(link).parent().unwrap()).unwrap();
            std::fs::create_dir_all(&elsewhere).unwrap();
            std::os::unix::fs::symlink(&elsewhere, root.join(link)).unwrap();
            let named = if link == layout::ATTACHMENTS { vec![(digest, Path::new(link).join("x"))] } else { Vec::new() };
            let writer = Writer::open(&root, named.into_iter().collect()).unwrap();
            let refusals = [writer.holds(&item).unwrap_err(), writer.write_bytes(&writer.place(&digest), b"x").unwrap_err()];
            for refusal in refusals {
                assert!(matches!(&refusal, Error::Refused { path, .. } if *path == root.join(link)), "{link}: {refusal}");
            }
            assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0, "{link}");
        }
    }

    #[test]
    fn a_directory_that_was_replaced_meanwhile_is_noticed() {
        let digest = Digest::sha256(b"x");
        let leaf = format!("blobs/sha256/{}", &digest.hex()[..2]);
        for replaced in ["blobs", "blobs/sha256", &leaf] {
            for by in ["nothing", "a directory", "a link"] {
                let dir = tempfile::tempdir().unwrap();
                let (root, moved) = (dir.path().join("out"), dir.path().join("moved"));
                let writer = Writer::open(&root, HashMap::new()).unwrap();
                writer.write(&digest, b"x").unwrap();
                writer.sync().unwrap();
                std::fs::rename(root.join(replaced), &moved).unwrap();
                match by {
                    "a directory" => std::fs::create_dir_all(root.join(&leaf)).unwrap(),
                    "a link" => std::os::unix::fs::symlink(&moved, root.join(replaced)).unwrap(),
                    _ => {}
                }
                let refusal = writer.sync().unwrap_err();
                assert!(matches!(&refusal, Error::Refused { .. }), "{replaced} by {by}: {refusal}");
            }
        }
    }

    /// Names in the folder of a blob.
    fn beside(blob: &Path) -> Vec<OsString> {
        std::fs::read_dir(blob.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn a_blob_that_takes_the_place_of_a_file_is_not_written_into_it() {
        for (what, before) in [("nothing", None), ("what a killed pull left", Some("ha")), ("other bytes", Some("other"))] {
            for complete in [false, true] {
                let dir = tempfile::tempdir().unwrap();
                let (root, digest) = (dir.path().join("out"), Digest::sha256(b"whole"));
                let (blob, elsewhere) = (root.join(layout::blob(&digest)), dir.path().join("elsewhere"));
                std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
                if complete {
                    std::fs::write(root.join(layout::PAGE_MANIFEST), "{}").unwrap();
                }
                if let Some(before) = before {
                    std::fs::write(&blob, before).unwrap();
                    // The same file under a second name, as a copy of the directory by links has.
                    std::fs::hard_link(&blob, &elsewhere).unwrap();
                }
                let writer = Writer::open(&root, HashMap::new()).unwrap();
                let item = Item { digest, kind: pfr_schema::Kind::Blob, size: Some(5), elements: None };
                assert!(!writer.holds(&item).unwrap(), "{what}");
                writer.write(&digest, b"whole").unwrap();
                // As after a request that was cut.
                writer.write(&digest, b"whole").unwrap();
                assert!(writer.holds(&item).unwrap(), "{what}");
                assert_eq!(beside(&blob), [blob.file_name().unwrap()], "{what}");
                if let Some(before) = before {
                    assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), before);
                }
            }
        }
    }

    #[test]
    fn a_part_of_a_blob_that_a_full_disk_left_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::mount(&dir.path().join("disk"), 6) else { return };
        let (root, filler, raw) = (disk.path().join("out"), disk.path().join("filler"), vec![7_u8; 2 << 20]);
        let digest = Digest::sha256(&raw);
        let blob = root.join(layout::blob(&digest));
        std::fs::write(&filler, vec![0_u8; 5 << 20]).unwrap();
        let writer = Writer::open(&root, HashMap::new()).unwrap();
        assert!(matches!(writer.write(&digest, &raw), Err(Error::Io { .. })));
        // A failed write never takes a name away: another one may have given it to a whole file.
        assert!(std::fs::metadata(&blob).unwrap().len() < raw.len() as u64);
        std::fs::remove_file(&filler).unwrap();
        writer.write(&digest, &raw).unwrap();
        assert!(std::fs::read(&blob).unwrap() == raw);
        assert_eq!(beside(&blob), [blob.file_name().unwrap()]);
    }

    #[test]
    fn in_a_new_directory_no_blob_is_looked_for_but_one_with_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let (blob, tokens) = (Digest::sha256(b"x"), Digest::sha256(b"y"));
        std::fs::write(dir.path().join(layout::TOKENS), "y").unwrap();
        let writer = Writer::open(dir.path(), HashMap::from([(tokens, layout::TOKENS.into())])).unwrap();
        let item = |digest| Item { digest, kind: pfr_schema::Kind::Blob, size: Some(1), elements: None };
        assert!(!writer.says_complete);
        assert!(writer.holds(&item(tokens)).unwrap() && !writer.holds(&item(blob)).unwrap());
        writer.write(&blob, b"x").unwrap();
        assert!(!writer.holds(&item(blob)).unwrap());
        writer.look_for_written_blobs();
        assert!(writer.holds(&item(blob)).unwrap() && !writer.holds(&item(Digest::sha256(b"z"))).unwrap());
        drop(writer);
        let again = Writer::open(dir.path(), HashMap::new()).unwrap();
        assert!(again.holds(&item(blob)).unwrap());
    }

    #[test]
    fn a_link_in_the_place_of_a_blob_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (root, digest) = (dir.path().join("out"), Digest::sha256(b"x"));
        let blob = root.join(layout::blob(&digest));
        std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
        std::fs::write(dir.path().join("victim"), "y").unwrap();
        std::os::unix::fs::symlink(dir.path().join("victim"), &blob).unwrap();
        let writer = Writer::open(&root, HashMap::new()).unwrap();
        assert!(!writer.holds(&Item { digest, kind: pfr_schema::Kind::Blob, size: Some(1), elements: None }).unwrap());
        writer.write(&digest, b"x").unwrap();
        assert_eq!(std::fs::read(&blob).unwrap(), b"x");
        assert_eq!(std::fs::read(dir.path().join("victim")).unwrap(), b"y");
    }
}
