//! A directory as an object store, which writes parts of uploads in aligned pieces.
//!
//! `object_store` writes each piece of a part with a call of its own: each header, payload and
//! checksum of a frame. Here pieces are joined: a write ends at a multiple of [`WRITE`].

use bytes::Bytes;
use futures::FutureExt as _;
use futures::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, RenameOptions, Result, UploadPart,
};
use pfr_service::durable::{self, Unfinished};
use rustix::io::pwritev;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, IoSlice};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::runtime::Handle;

/// Bytes of a part, at whose multiples parts begin and end. Few enough to lie in the processor's
/// cache until they are written.
pub(super) const PART: usize = 2 << 20;
/// No write passes a multiple of so many bytes. Larger ones make the page cache take larger pieces
/// of memory: half of the processor time apart, and twice as much in whole pulls on a virtual
/// machine (decision 64).
const WRITE: u64 = 64 << 10;

/// The objects of a directory, with fsync.
///
/// # Errors
/// Those of the file system.
pub(crate) fn in_directory(dir: &std::path::Path) -> Result<Arc<dyn ObjectStore>> {
    Ok(Arc::new(Files(LocalFileSystem::new_with_prefix(dir)?.with_fsync(true))))
}

#[derive(Debug)]
struct Files(LocalFileSystem);

impl fmt::Display for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[async_trait::async_trait]
impl ObjectStore for Files {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.0.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        if !opts.attributes.is_empty() {
            // Files have none: this is its refusal.
            return self.0.put_multipart_opts(location, opts).await;
        }
        let place = self.0.path_to_filesystem(location)?;
        Ok(Box::new(blocking(move || Upload::begin(place)).await?))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.0.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.0.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.0.rename_opts(from, to, options).await
    }
}

/// A file that is being written. Dropping it deletes the file.
#[derive(Debug)]
struct Upload {
    /// None once the upload has ended. A part that is being written shares it.
    file: Option<Arc<Unfinished>>,
    folder: Arc<OwnedFd>,
    name: OsString,
    /// For messages.
    place: PathBuf,
    /// Where the next part begins.
    offset: u64,
    /// Bytes of the parts that were written. A part whose write failed, or never began, would leave
    /// a hole.
    written: Arc<AtomicU64>,
}

impl Upload {
    /// Makes the file beside its place. Its name there is that of `object_store`, which lists hide
    /// and collection deletes: `<name>#<number>`, numbered from 1 without gaps.
    fn begin(place: PathBuf) -> io::Result<Self> {
        let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else { return Err(ErrorKind::InvalidInput.into()) };
        let folder = match File::open(parent) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                durable::create_dir_all(parent).map_err(about(parent))?;
                File::open(parent)
            }
            opened => opened,
        };
        let folder = Arc::new(OwnedFd::from(folder.map_err(about(parent))?));
        let mut number = 1_u32;
        let file = loop {
            let mut temporary = name.to_owned();
            temporary.push(format!("#{number}"));
            match Unfinished::create_new(Arc::clone(&folder), temporary, 0o666) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                made => break made.map_err(about(&place))?,
            }
        };
        Ok(Self { file: Some(Arc::new(file)), folder, name: name.to_owned(), place, offset: 0, written: Arc::default() })
    }

    /// Ends the upload. Fails if it has ended, or if a part was not waited for.
    fn end(&mut self) -> Result<Unfinished> {
        let file = self.file.take().and_then(Arc::into_inner);
        file.ok_or_else(|| failed(io::Error::other("the upload has ended, or a part of it is still being written")))
    }
}

#[async_trait::async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (file, place, offset) = (self.file.clone(), self.place.clone(), self.offset);
        let (length, written) = (data.content_length() as u64, Arc::clone(&self.written));
        self.offset += length;
        let write = move || -> io::Result<()> {
            let file = file.ok_or_else(|| io::Error::other("the upload has ended"))?;
            write_all(data.as_ref(), offset, &mut |slices, at| Ok(pwritev(file.as_file(), slices, at)?)).map_err(about(&place))?;
            written.fetch_add(length, Ordering::Relaxed);
            Ok(())
        };
        blocking(write).boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let (file, folder, name, place) = (self.end()?, Arc::clone(&self.folder), self.name.clone(), self.place.clone());
        let is_whole = self.written.load(Ordering::Relaxed) == self.offset;
        let publish = move || {
            let published = if is_whole { file.publish(&*folder, &name) } else { Err(io::Error::other("a part of it was not written")) };
            published.map_err(about(&place))
        };
        blocking(publish).await?;
        Ok(PutResult { e_tag: None, version: None, extensions: Default::default() })
    }

    async fn abort(&mut self) -> Result<()> {
        let (file, place) = (self.end()?, self.place.clone());
        blocking(move || file.delete().map_err(about(&place))).await
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        // Deleting a large file takes a while.
        match Handle::try_current() {
            Ok(_) => drop(pfr_service::task::spawn_blocking(move || drop(file))),
            Err(_) => drop(file),
        }
    }
}

/// Writes all pieces, each call up to the next multiple of [`WRITE`]. A write may be short.
fn write_all(pieces: &[Bytes], mut at: u64, write: &mut dyn FnMut(&[IoSlice<'_>], u64) -> io::Result<usize>) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = pieces.iter().filter(|piece| !piece.is_empty()).map(|piece| IoSlice::new(piece)).collect();
    let mut left = &mut slices[..];
    while !left.is_empty() {
        let mut room = (WRITE - at % WRITE) as usize;
        let mut some: Vec<IoSlice<'_>> = Vec::with_capacity(8);
        for slice in left.iter() {
            if room == 0 {
                break;
            }
            let taken = slice.len().min(room);
            some.push(IoSlice::new(&slice[..taken]));
            room -= taken;
        }
        match write(&some, at) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => {
                at += written as u64;
                IoSlice::advance_slices(&mut left, written);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Names the file in an error, which stays of its kind.
fn about(path: &std::path::Path) -> impl Fn(io::Error) -> io::Error {
    let path = path.to_owned();
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn failed(error: io::Error) -> Error {
    Error::Generic { store: "file", source: error.into() }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T> {
    pfr_service::task::spawn_blocking(work).await?.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error;
    use object_store::ObjectStoreExt as _;
    use pfr_testkit::disk::SmallDisk;
    use proptest::prelude::*;

    fn names(dir: &std::path::Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Waits for what is deleted on another thread.
    async fn is_empty(dir: &std::path::Path) {
        while !names(dir).is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn parts_follow_each_other_in_a_file_that_gets_its_name_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let store = in_directory(dir.path()).unwrap();
        let at = Path::from("ff/key.pfpack");
        let folder = dir.path().join("ff");
        let mut upload = store.put_multipart(&at).await.unwrap();
        // More pieces than one call takes, and empty ones.
        let pieces: Vec<Bytes> = (0..3000_usize).map(|n| Bytes::from(vec![n as u8; n % 7])).collect();
        let (first, second) = pieces.split_at(2500);
        upload.put_part(first.iter().cloned().collect()).await.unwrap();
        upload.put_part(PutPayload::new()).await.unwrap();
        assert_eq!(names(&folder), ["key.pfpack#1"]);
        assert!(store.head(&at).await.is_err(), "it is visible before its end");
        upload.put_part(second.iter().cloned().collect()).await.unwrap();
        upload.complete().await.unwrap();
        assert_eq!(names(&folder), ["key.pfpack"]);
        assert_eq!(std::fs::read(folder.join("key.pfpack")).unwrap(), pieces.concat());
        assert!(upload.complete().await.is_err() && upload.abort().await.is_err() && upload.put_part("late".into()).await.is_err());
        drop(upload);
        assert_eq!(store.get(&at).await.unwrap().bytes().await.unwrap(), pieces.concat());
    }

    #[tokio::test]
    async fn an_upload_that_is_given_up_leaves_no_file_and_is_in_no_way_of_another() {
        let dir = tempfile::tempdir().unwrap();
        let store = in_directory(dir.path()).unwrap();
        let at = Path::from("ff/key.pfpack");
        let folder = dir.path().join("ff");
        let mut given_up = store.put_multipart(&at).await.unwrap();
        let mut dropped = store.put_multipart(&at).await.unwrap();
        assert_eq!(names(&folder), ["key.pfpack#1", "key.pfpack#2"]);
        given_up.put_part("of one".into()).await.unwrap();
        given_up.abort().await.unwrap();
        assert_eq!(names(&folder), ["key.pfpack#2"]);
        // A part that nothing waits for may still be written, so the file is not complete.
        let part = dropped.put_part("of another".into());
        assert!(dropped.complete().await.is_err());
        drop(part);
        is_empty(&folder).await;
        let mut cut = store.put_multipart(&at).await.unwrap();
        cut.put_part("cut".into()).await.unwrap();
        drop(cut);
        is_empty(&folder).await;
    }

    #[tokio::test]
    async fn a_file_that_lacks_a_part_never_gets_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = in_directory(dir.path()).unwrap();
        let at = Path::from("ff/key.pfpack");
        let mut upload = store.put_multipart(&at).await.unwrap();
        upload.put_part("first".into()).await.unwrap();
        // As if its task had been ended before it began.
        drop(upload.put_part("second".into()));
        upload.put_part("third".into()).await.unwrap();
        let refusal = upload.complete().await.unwrap_err();
        assert!(refusal.to_string().contains("key.pfpack"), "{refusal}");
        is_empty(&dir.path().join("ff")).await;
    }

    #[tokio::test]
    async fn a_disk_that_is_full_in_the_middle_of_a_part_is_said_to_be_full_and_loses_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::mount(&dir.path().join("disk"), 3) else { return };
        let store = in_directory(disk.path()).unwrap();
        let mut upload = store.put_multipart(&Path::from("ff/key.pfpack")).await.unwrap();
        let part = || PutPayload::from_iter((0..16).map(|_| Bytes::from(vec![7; PART / 16])));
        upload.put_part(part()).await.unwrap();
        let full = error::Error::packs(upload.put_part(part()).await.unwrap_err());
        assert!(matches!(&full, error::Error::Full(said) if said.contains("key.pfpack")), "{full}");
        upload.abort().await.unwrap();
        let mut again = store.put_multipart(&Path::from("ff/key.pfpack")).await.unwrap();
        again.put_part(part()).await.unwrap();
        again.complete().await.unwrap();
        assert_eq!(names(&disk.path().join("ff")), ["key.pfpack"]);
    }

    proptest! {
        #[test]
        fn all_bytes_are_written_in_their_places_however_short_the_writes_are(
            lengths in prop::collection::vec(0..300_usize, 0..20),
            shorts in prop::collection::vec(1..700_usize, 1..20),
            interrupted: bool,
            room in 0..6000_usize,
        ) {
            let pieces: Vec<Bytes> = lengths.iter().enumerate().map(|(n, length)| Bytes::from(vec![n as u8 + 1; *length])).collect();
            let all = pieces.concat();
            let (mut disk, mut shorts, mut calls) = (Vec::new(), shorts.into_iter().cycle(), 0);
            let mut write = |slices: &[IoSlice<'_>], at: u64| -> io::Result<usize> {
                assert_eq!(at, 40 + disk.len() as u64);
                let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
                calls += 1;
                if interrupted && calls % 2 == 1 {
                    return Err(ErrorKind::Interrupted.into());
                }
                let most = shorts.next().unwrap_or(1).min(bytes.len()).min(room - disk.len());
                if most == 0 {
                    return Err(ErrorKind::StorageFull.into());
                }
                disk.extend_from_slice(&bytes[..most]);
                Ok(most)
            };
            let written = write_all(&pieces, 40, &mut write);
            if all.len() <= room {
                prop_assert!(written.is_ok());
                prop_assert_eq!(disk, all);
            } else {
                prop_assert_eq!(written.unwrap_err().kind(), ErrorKind::StorageFull);
                prop_assert_eq!(&disk[..], &all[..room]);
            }
        }
    }

    #[test]
    fn a_write_of_nothing_is_an_error_and_no_endless_loop() {
        let pieces = [Bytes::from_static(b"x")];
        assert_eq!(write_all(&pieces, 0, &mut |_, _| Ok(0)).unwrap_err().kind(), ErrorKind::WriteZero);
        write_all(&[Bytes::new()], 0, &mut |_, _| panic!("nothing is written")).unwrap();
    }
}
