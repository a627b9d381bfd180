//! A layout in one tar file.
//!
//! A file that is read is never unpacked: its headers are read once, and then only ranges of the
//! members that a layout has. So a name in it means nothing to the file system. A file that is
//! written has a temporary name until it is complete.

use super::folder::{check_version, open_file};
use super::layout::{Layout, failed, malformed};
use super::spool::{Body, Spool, Written, pieces};
use crate::error::{Error, Result, blocking};
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt as _};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use pfr_schema::export::{Entry, INDEX_BYTES, INDEX_FILE, Index, LAYOUT_FILE};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode};
use pfr_service::durable::Unfinished;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a header, and of what members are padded to.
const BLOCK: usize = 512;
/// Members of a file that is read at most.
const MEMBERS: usize = 200_000;
/// Bytes of a name at most. Those of a layout are shorter, so longer ones are not kept.
const NAME: usize = 255;
/// Bytes of an extended header at most.
const EXTENDED: u64 = 64 << 10;

/// Where the members of a file that is read are.
type Members = HashMap<String, Range<u64>>;

/// A tar file.
#[derive(Debug)]
pub(crate) struct Tar {
    path: PathBuf,
    name: String,
    state: State,
}

#[derive(Debug)]
enum State {
    Reading {
        file: Arc<File>,
        members: Members,
    },
    /// None once it is complete, or could not be written.
    Writing(Arc<Mutex<Option<Writer>>>),
}

/// A file that is being written.
#[derive(Debug)]
struct Writer {
    file: Unfinished,
    folder: Arc<OwnedFd>,
    blobs: HashSet<Digest>,
    index: Index,
}

impl Tar {
    /// To read from.
    pub async fn open(path: PathBuf) -> Result<Self> {
        let name = path.display().to_string();
        let (tar, shown) = (path.clone(), name.clone());
        let (file, members) = blocking(move || {
            let file = open_file(&tar).map_err(Error::io("open", &tar))?;
            let len = file.metadata().map_err(Error::io("read", &tar))?.len();
            let read = |at: u64, bytes: &mut [u8]| file.read_exact_at(bytes, at);
            let members = members(len, &read).map_err(|fault| match fault {
                Fault::Io(error) => Error::io("read", &tar)(error),
                Fault::Format(reason) => failed(&shown, ErrorCode::InvalidDocument, reason),
            })?;
            let version = range_of(&members, LAYOUT_FILE.0, &shown)?;
            let mut bytes = vec![0; usize::try_from(version.end - version.start).unwrap_or(usize::MAX).min(4096)];
            read(version.start, &mut bytes).map_err(Error::io("read", &tar))?;
            check_version(&shown, &bytes)?;
            Ok((file, members))
        })
        .await?;
        Ok(Self { path, name, state: State::Reading { file: Arc::new(file), members } })
    }

    /// To write.
    pub async fn create(path: PathBuf) -> Result<Self> {
        let target = path.clone();
        let writer = blocking(move || Writer::create(&target)).await?;
        let name = path.display().to_string();
        Ok(Self { path, name, state: State::Writing(Arc::new(Mutex::new(Some(writer)))) })
    }

    /// Runs `work` on the file that is being written.
    fn write<T: Send + 'static>(&self, work: impl FnOnce(&mut Writer) -> io::Result<T> + Send + 'static) -> BoxFuture<'_, Result<T>> {
        let State::Writing(writer) = &self.state else {
            return async { Err(Error::Internal("a tar file is written that was opened to be read".into())) }.boxed();
        };
        let (writer, path) = (Arc::clone(writer), self.path.clone());
        blocking(move || {
            let mut slot = writer.lock();
            let Some(open) = slot.as_mut() else {
                return Err(Error::Internal("a tar file is written that has ended".into()));
            };
            let done = work(open);
            if done.is_err() {
                // Its last member may be cut, so it gets no name.
                *slot = None;
            }
            done.map_err(Error::io("write", &path))
        })
        .boxed()
    }
}

/// The range of a member that a layout must have.
fn range_of(members: &Members, member: &str, name: &str) -> Result<Range<u64>> {
    let found = members.get(member).cloned();
    found.ok_or_else(|| failed(name, ErrorCode::MissingBlobs, format!("it has no file {member}; is it a tar file of an OCI layout?")))
}

fn blob(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm().name(), digest.hex())
}

/// Refuses a path that is taken.
fn check_absent(path: &Path) -> Result<()> {
    let reason = "it exists; a tar file is written once, a directory takes further exports";
    match path.symlink_metadata() {
        Ok(_) => Err(Error::Refused { path: path.to_owned(), reason: reason.to_owned() }),
        Err(_) => Ok(()),
    }
}

impl Writer {
    fn create(path: &Path) -> Result<Self> {
        check_absent(path)?;
        let unnamed = || Error::Refused { path: path.to_owned(), reason: "expected the name of a file".into() };
        let name = path.file_name().ok_or_else(unnamed)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = Arc::new(OwnedFd::from(File::open(parent).map_err(Error::io("open", parent))?));
        // Processes in other containers may have the same number.
        let mut hidden = OsString::from(format!(".{}-", uuid::Uuid::now_v7()));
        hidden.push(name);
        let file = Unfinished::create(Arc::clone(&folder), hidden, 0o666).map_err(Error::io("create", path))?;
        let mut writer = Self { file, folder, blobs: HashSet::new(), index: Index::default() };
        let begun = writer.member(LAYOUT_FILE.0, LAYOUT_FILE.1.len() as u64, &mut &*LAYOUT_FILE.1);
        begun.and_then(|()| writer.folders()).map_err(Error::io("write", path))?;
        Ok(writer)
    }

    fn folders(&mut self) -> io::Result<()> {
        for folder in ["blobs/", "blobs/sha256/"] {
            self.file.file().write_all(&header(folder, 0))?;
        }
        Ok(())
    }

    fn member(&mut self, name: &str, size: u64, bytes: &mut dyn io::Read) -> io::Result<()> {
        let file = self.file.file();
        file.write_all(&header(name, size))?;
        if io::copy(&mut bytes.take(size), file)? != size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.write_all(&[0; BLOCK][..padding(size)])
    }

    fn put(&mut self, written: &Written) -> io::Result<bool> {
        if !self.blobs.insert(written.digest) {
            return Ok(false);
        }
        let Body::Hidden(file) = &written.body else { return Err(io::Error::other("a blob of a tar file is elsewhere")) };
        let mut file = &**file;
        file.seek(SeekFrom::Start(0))?;
        self.member(&blob(&written.digest), written.size, &mut file)?;
        Ok(true)
    }
}

/// Bytes that are missing to a full block.
fn padding(size: u64) -> usize {
    (BLOCK - usize::try_from(size % BLOCK as u64).unwrap_or_default()) % BLOCK
}

/// The header of a member, or of a folder if the name ends in `/`. Names have 100 bytes at most.
fn header(name: &str, size: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    let is_folder = name.ends_with('/');
    put(0, name.as_bytes());
    put(100, if is_folder { b"0000755\0" } else { b"0000644\0" });
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    // Octal as far as that goes, and binary beyond 8 GiB.
    if size < 1 << 33 {
        put(124, format!("{size:011o}\0").as_bytes());
    } else {
        put(124, &[0x80, 0, 0, 0]);
        put(128, &size.to_be_bytes());
    }
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, if is_folder { b"5" } else { b"0" });
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// Why a file cannot be read.
#[derive(Debug)]
enum Fault {
    Io(io::Error),
    Format(String),
}

/// The ordinary files in a tar file of `len` bytes. Of two with one name the last counts. Links,
/// devices and folders are skipped.
fn members(len: u64, read: &dyn Fn(u64, &mut [u8]) -> io::Result<()>) -> std::result::Result<Members, Fault> {
    let (mut members, mut at, mut count) = (Members::new(), 0_u64, 0);
    let mut extended = Extended::default();
    let wrong = |at: u64, reason: &str| Fault::Format(format!("byte {at}: {reason}; expected a tar file that is not compressed"));
    while at.checked_add(BLOCK as u64).is_some_and(|end| end <= len) {
        let mut header = [0; BLOCK];
        read(at, &mut header).map_err(Fault::Io)?;
        if header.iter().all(|byte| *byte == 0) {
            return Ok(members);
        }
        count += 1;
        if count > MEMBERS {
            return Err(wrong(at, &format!("more than {MEMBERS} members")));
        }
        let sum: u32 = header.iter().enumerate().map(|(i, byte)| if (148..156).contains(&i) { 32 } else { u32::from(*byte) }).sum();
        if number(&header[148..156]) != Some(u64::from(sum)) {
            return Err(wrong(at, "the checksum of a header is wrong"));
        }
        let kind = header[156];
        let is_extension = matches!(kind, b'x' | b'g' | b'L' | b'K');
        let size = extended.size.filter(|_| !is_extension).or_else(|| number(&header[124..136]));
        let begin = at + BLOCK as u64;
        let end = size.and_then(|size| begin.checked_add(size)).filter(|end| *end <= len);
        let end = end.ok_or_else(|| wrong(at, "a member is longer than the file"))?;
        if is_extension {
            if end - begin > EXTENDED {
                return Err(wrong(at, "an extended header is too long"));
            }
            let mut bytes = vec![0; usize::try_from(end - begin).unwrap_or_default()];
            read(begin, &mut bytes).map_err(Fault::Io)?;
            extended.add(kind, &bytes);
        } else {
            let Extended { path, .. } = std::mem::take(&mut extended);
            if matches!(kind, b'0' | 0) {
                let name = path.unwrap_or_else(|| named(&header));
                let name = name.trim_start_matches("./");
                if name.len() <= NAME {
                    members.insert(name.to_owned(), begin..end);
                }
            }
        }
        at = end + padding(end - begin) as u64;
    }
    Err(wrong(at, "the file ends before its end mark"))
}

/// Values of extended headers for the next member.
#[derive(Default)]
struct Extended {
    path: Option<String>,
    size: Option<u64>,
}

impl Extended {
    fn add(&mut self, kind: u8, bytes: &[u8]) {
        match kind {
            b'L' => self.path = Some(text(bytes)),
            // Records `LENGTH KEY=VALUE\n`.
            b'x' => {
                for record in bytes.split(|byte| *byte == b'\n') {
                    let record = String::from_utf8_lossy(record);
                    match record.split_once(' ').and_then(|(_, pair)| pair.split_once('=')) {
                        Some(("path", path)) => self.path = Some(path.to_owned()),
                        Some(("size", size)) => self.size = size.parse().ok(),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
}

/// The name in a header, with its prefix.
fn named(header: &[u8; BLOCK]) -> String {
    let (name, prefix) = (text(&header[..100]), text(&header[345..500]));
    let is_posix = &header[257..263] == b"ustar\0";
    if is_posix && !prefix.is_empty() { format!("{prefix}/{name}") } else { name }
}

/// Text up to the first zero.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// A number in octal digits, or in binary.
fn number(field: &[u8]) -> Option<u64> {
    if let Some((0x80, rest)) = field.split_first().map(|(first, rest)| (*first, rest)) {
        let (high, low) = rest.split_at(rest.len().checked_sub(8)?);
        return high.iter().all(|byte| *byte == 0).then(|| low.iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte)));
    }
    let digits = text(field);
    let digits = digits.trim_matches(' ');
    if digits.is_empty() || !digits.bytes().all(|byte| (b'0'..=b'7').contains(&byte)) {
        return None;
    }
    u64::from_str_radix(digits, 8).ok()
}

impl Layout for Tar {
    fn name(&self) -> &str {
        &self.name
    }

    fn entries(&self) -> BoxFuture<'_, Result<Vec<Entry>>> {
        async move {
            let State::Reading { file, members } = &self.state else { return Ok(Vec::new()) };
            let range = range_of(members, INDEX_FILE, &self.name)?;
            if range.end - range.start > INDEX_BYTES {
                return Err(failed(&self.name, ErrorCode::TooLarge, format!("{INDEX_FILE} has more than {INDEX_BYTES} bytes")));
            }
            let bytes: Vec<Bytes> = pieces(Arc::clone(file), self.path.clone(), range).try_collect().await?;
            Ok(Index::parse(&bytes.concat()).map_err(malformed(&self.name, INDEX_FILE))?.manifests)
        }
        .boxed()
    }

    fn manifest<'a>(&'a self, entry: &'a Entry, most: u64) -> BoxFuture<'a, Result<Bytes>> {
        async move {
            let bytes: Vec<Bytes> = self.read(entry.digest, 0..entry.size.min(most)).try_collect().await?;
            Ok(bytes.concat().into())
        }
        .boxed()
    }

    fn read(&self, digest: Digest, range: Range<u64>) -> BoxStream<'static, Result<Bytes>> {
        let State::Reading { file, members } = &self.state else {
            return stream::iter([Err(Error::Internal("a tar file is read that is being written".into()))]).boxed();
        };
        let place = range_of(members, &blob(&digest), &self.name).and_then(|member| {
            let (begin, end) = (member.start.checked_add(range.start), member.start.checked_add(range.end));
            let place = begin.zip(end).filter(|(_, end)| *end <= member.end);
            place.ok_or_else(|| failed(&self.name, ErrorCode::Truncated, format!("its blob {digest} is shorter than its manifest says")))
        });
        match place {
            Ok((begin, end)) => pieces(Arc::clone(file), self.path.clone(), begin..end),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    fn spool(&self) -> Result<Spool> {
        Spool::hidden()
    }

    fn put(&self, blob: Written) -> BoxFuture<'_, Result<bool>> {
        self.write(move |writer| writer.put(&blob))
    }

    fn publish<'a>(&'a self, manifest: &'a Document, entry: Entry) -> BoxFuture<'a, Result<()>> {
        async move {
            self.put(self.spool()?.all(manifest.bytes.clone()).await?).await?;
            self.write(move |writer| {
                writer.index.add(entry);
                Ok(())
            })
            .await
        }
        .boxed()
    }

    fn finish(&self) -> BoxFuture<'_, Result<()>> {
        let State::Writing(writer) = &self.state else { return async { Ok(()) }.boxed() };
        let (writer, path, name) = (Arc::clone(writer), self.path.clone(), self.name.clone());
        blocking(move || {
            let Some(mut writer) = writer.lock().take() else {
                return Err(Error::Internal("a tar file is completed that has ended".into()));
            };
            // Another export may have been faster.
            check_absent(&path)?;
            let index = writer.index.to_bytes().map_err(malformed(&name, INDEX_FILE))?;
            let ended = writer.member(INDEX_FILE, index.len() as u64, &mut &*index);
            let ended = ended.and_then(|()| writer.file.file().write_all(&[0; 2 * BLOCK]));
            let published = ended.and_then(|()| writer.file.publish(&*writer.folder, path.file_name().unwrap_or(OsStr::new(""))));
            published.map_err(Error::io("write", &path))
        })
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(bytes: &[u8]) -> std::result::Result<Members, Fault> {
        members(bytes.len() as u64, &|at, out: &mut [u8]| {
            let at = usize::try_from(at).unwrap();
            out.copy_from_slice(bytes.get(at..at + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        })
    }

    fn member(name: &str, bytes: &[u8]) -> Vec<u8> {
        [&header(name, bytes.len() as u64)[..], bytes, &[0; BLOCK][..padding(bytes.len() as u64)]].concat()
    }

    /// A header with another kind and a right checksum.
    fn of_kind(kind: u8, name: &str, bytes: &[u8]) -> Vec<u8> {
        let mut all = member(name, bytes);
        all[156] = kind;
        all[148..156].fill(b' ');
        let sum: u32 = all[..BLOCK].iter().map(|byte| u32::from(*byte)).sum();
        all[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        all
    }

    #[test]
    fn only_ordinary_files_are_members_and_names_lead_nowhere() {
        let end = vec![0; 2 * BLOCK];
        let all = [
            member("./index.json", b"{}"),
            of_kind(b'2', "blobs/sha256/link", b""),
            member("../../etc/passwd", b"x"),
            of_kind(b'L', "././@LongLink", b"blobs/sha256/long\0"),
            member("cut", b"12345"),
            of_kind(b'x', "pax", b"21 path=blobs/sha256/p\n9 size=3\n"),
            member("short", b"abc"),
            end,
        ];
        let found = of(&all.concat()).unwrap();
        let mut names: Vec<&str> = found.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["../../etc/passwd", "blobs/sha256/long", "blobs/sha256/p", "index.json"]);
        assert_eq!(found["blobs/sha256/long"].end - found["blobs/sha256/long"].start, 5);
    }

    #[test]
    fn names_that_no_layout_has_take_no_memory() {
        let long = of_kind(b'L', "././@LongLink", "x".repeat(60_000).as_bytes());
        let all = [long, member("short", b"1"), member("index.json", b"{}"), vec![0; 2 * BLOCK]].concat();
        let found = of(&all).map_err(|fault| format!("{fault:?}")).unwrap();
        assert_eq!(found.into_keys().collect::<Vec<_>>(), ["index.json"]);
    }

    #[tokio::test]
    async fn a_file_with_a_cut_member_gets_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tar");
        let tar = Tar::create(path.clone()).await.unwrap();
        let cut = tar.spool().unwrap().all("half").await.unwrap();
        assert!(tar.put(Written { size: 8, ..cut }).await.is_err());
        let next = tar.spool().unwrap().all("next").await.unwrap();
        assert!(tar.put(next).await.is_err() && tar.finish().await.is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn cut_compressed_and_damaged_files_are_refused() {
        let whole = [member("index.json", b"{}"), vec![0; 2 * BLOCK]].concat();
        assert!(of(&whole).is_ok());
        let mut damaged = whole.clone();
        damaged[0] ^= 1;
        let long = header("index.json", 1 << 40);
        for (bytes, reason) in [
            (whole[..2 * BLOCK].to_vec(), "ends before its end mark"),
            (whole[..BLOCK].to_vec(), "longer than the file"),
            (Vec::new(), "ends before its end mark"),
            (damaged, "checksum"),
            ([&long[..], &[0; 4096]].concat(), "longer than the file"),
            ([0x1f, 0x8b].repeat(2000), "not compressed"),
        ] {
            let Err(Fault::Format(found)) = of(&bytes) else { panic!("accepted: {reason}") };
            assert!(found.contains(reason), "{found}");
        }
        assert_eq!(number(&header("x", 1 << 40)[124..136]), Some(1 << 40));
        assert_eq!(number(&header("x", 12345)[124..136]), Some(12345));
    }

    proptest! {
        #[test]
        fn members_lie_within_the_file(bytes in proptest::collection::vec(any::<u8>(), 0..1200), size in any::<u64>()) {
            let all = [&header("a", size)[..], &bytes].concat();
            for bytes in [&bytes, &all] {
                if let Ok(found) = of(bytes) {
                    prop_assert!(found.values().all(|range| range.start <= range.end && range.end <= bytes.len() as u64));
                }
            }
        }
    }
}
