//! A storage whose objects are encrypted: below everything that reads and writes packs, journal
//! and notes, which see plaintext and its lengths.
//!
//! Bytes are encrypted and decrypted on blocking threads. A ranged read asks for the segments that
//! the range touches, in one request.

use super::segments::{DomainKey, Opener, SEALED, SEGMENT, Sealer, is_whole, plain_len};
use super::upload::SealedUpload;
use super::{KEY, failed};
use crate::marker;
use crate::packs::read_at;
use bytes::{Buf as _, Bytes};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of segments that are read and decrypted at a time: all those of a read of 4 MiB.
const CHUNK: u64 = 65 * SEALED;

/// An object store that encrypts what is written to `inner`.
#[derive(Debug)]
pub(super) struct SealedObjects {
    inner: Arc<dyn ObjectStore>,
    key: Arc<DomainKey>,
    /// Whether a part of an upload may have any size.
    small_parts: bool,
}

impl SealedObjects {
    pub(super) fn new(inner: Arc<dyn ObjectStore>, key: Arc<DomainKey>, small_parts: bool) -> Self {
        Self { inner, key, small_parts }
    }

    /// The plaintext range that is asked for.
    async fn bounded(&self, location: &Path, range: GetRange) -> Result<Range<u64>> {
        range.is_valid().map_err(failed)?;
        match range {
            GetRange::Bounded(range) => Ok(range),
            other => other.as_range(self.head(location).await?.size).map_err(failed),
        }
    }
}

impl fmt::Display for SealedObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Encrypted({})", self.inner)
    }
}

/// The marker and the wrapped key must be readable without the key.
fn is_plain(location: &Path) -> bool {
    [marker::KEY, KEY].contains(&location.as_ref())
}

fn with_plain_len(mut meta: ObjectMeta) -> ObjectMeta {
    if !is_plain(&meta.location) {
        meta.size = plain_len(meta.size);
    }
    meta
}

#[async_trait::async_trait]
impl ObjectStore for SealedObjects {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        if is_plain(location) {
            return self.inner.put_opts(location, payload, opts).await;
        }
        let sealer = Sealer::new(&self.key, location.as_ref()).map_err(failed)?;
        let plain: Vec<Bytes> = payload.into_iter().collect();
        let sealed = blocking(move || sealer.seal(0, &plain, true)).await?.map_err(failed)?;
        self.inner.put_opts(location, sealed.into(), opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let sealer = Sealer::new(&self.key, location.as_ref()).map_err(failed)?;
        let upload = self.inner.put_multipart_opts(location, opts).await?;
        Ok(if is_plain(location) { upload } else { Box::new(SealedUpload::new(upload, sealer, self.small_parts)) })
    }

    async fn get_opts(&self, location: &Path, mut options: GetOptions) -> Result<GetResult> {
        if is_plain(location) {
            return self.inner.get_opts(location, options).await;
        }
        let is_head = options.head;
        let wanted = match options.range.take() {
            None => None,
            Some(range) => Some(self.bounded(location, range).await?),
        };
        // Sealed bytes of the segments that it touches.
        let first = wanted.as_ref().map_or(0, |wanted| wanted.start / SEGMENT);
        options.range = wanted.as_ref().map(|wanted| {
            let end = wanted.end.div_ceil(SEGMENT).saturating_mul(SEALED);
            GetRange::Bounded(first.saturating_mul(SEALED)..end)
        });
        let GetResult { payload, meta, range, attributes, extensions } = self.inner.get_opts(location, options).await?;
        let sealed_len = meta.size;
        let meta = with_plain_len(meta);
        let opener = Opener::new(Arc::clone(&self.key), location.as_ref());
        let is_all = wanted.is_none();
        let wanted = match wanted {
            None => 0..meta.size,
            Some(wanted) => GetRange::Bounded(wanted).as_range(meta.size).map_err(failed)?,
        };
        if is_head {
            return Ok(GetResult {
                payload: GetResultPayload::Stream(stream::empty().boxed()),
                range: wanted,
                meta,
                attributes,
                extensions,
            });
        }
        if is_all && !is_whole(sealed_len) {
            return Err(failed(opener.altered(meta.size, "its end")));
        }
        let opening = Opening {
            source: Source::new(payload, range),
            opener: Some(opener),
            number: first,
            skip: wanted.start - first * SEGMENT,
            left: wanted.end - wanted.start,
        };
        let payload = GetResultPayload::Stream(opening.stream());
        Ok(GetResult { payload, range: wanted, meta, attributes, extensions })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix).map_ok(with_plain_len).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let mut listed = self.inner.list_with_delimiter(prefix).await?;
        listed.objects = listed.objects.into_iter().map(with_plain_len).collect();
        Ok(listed)
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        // The key of an object depends on where it lies.
        Err(object_store::Error::NotImplemented { operation: "copy".into(), implementer: self.to_string() })
    }
}

/// Runs CPU-heavy work, or a read, off the async threads.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    Ok(pfr_service::task::spawn_blocking(work).await?)
}

/// Encrypted bytes that come from the inner storage.
enum Source {
    File { file: Arc<File>, range: Range<u64> },
    Stream { stream: BoxStream<'static, Result<Bytes>>, rest: Bytes, left: u64 },
}

impl Source {
    fn new(payload: GetResultPayload, range: Range<u64>) -> Self {
        match payload {
            GetResultPayload::File(file, _) => Self::File { file: Arc::new(file), range },
            GetResultPayload::Stream(stream) => Self::Stream { stream, rest: Bytes::new(), left: range.end - range.start },
        }
    }

    /// The next segments, whole but for the last of the object; none at the end.
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        match self {
            Self::File { file, range } => {
                let length = length(range.end - range.start);
                if length == 0 {
                    return Ok(None);
                }
                let (file, start) = (Arc::clone(file), range.start);
                let bytes = blocking(move || read_at(&file, start, length)).await?.map_err(failed)?;
                if bytes.len() < length {
                    return Err(failed("a file became shorter while it was read"));
                }
                range.start += length as u64;
                Ok(Some(bytes))
            }
            Self::Stream { stream, rest, left } => {
                let length = length(*left);
                if length == 0 {
                    return Ok(None);
                }
                let mut bytes = Vec::with_capacity(length);
                while bytes.len() < length {
                    if rest.is_empty() {
                        let next = stream.next().await;
                        *rest = next.ok_or_else(|| failed("the storage sent fewer bytes than it said"))??;
                        continue;
                    }
                    bytes.extend_from_slice(&rest.split_to(rest.len().min(length - bytes.len())));
                }
                *left -= length as u64;
                Ok(Some(bytes))
            }
        }
    }
}

fn length(left: u64) -> usize {
    usize::try_from(left.min(CHUNK)).unwrap_or(usize::MAX)
}

/// A range that is being decrypted.
struct Opening {
    source: Source,
    /// There, but while a blocking thread has it.
    opener: Option<Opener>,
    /// The number of the segment that comes next.
    number: u64,
    /// Plaintext bytes before the range, and within it.
    skip: u64,
    left: u64,
}

impl Opening {
    fn stream(self) -> BoxStream<'static, Result<Bytes>> {
        stream::try_unfold(self, |mut opening| async move { Ok(opening.next().await?.map(|bytes| (bytes, opening))) }).boxed()
    }

    /// The next bytes of the range. What follows it is decrypted too: so the last segment of an
    /// object that is read to its end is checked, even if it is empty.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        while let Some(mut bytes) = self.source.next().await? {
            let Some(mut opener) = self.opener.take() else { return Ok(None) };
            let (number, count) = (self.number, (bytes.len() as u64).div_ceil(SEALED));
            let (opener, opened) = blocking(move || {
                let opened = opener.open(number, &mut bytes).map(|()| Bytes::from(bytes));
                (opener, opened)
            })
            .await?;
            self.opener = Some(opener);
            self.number += count;
            let mut plain = opened.map_err(failed)?;
            let skipped = usize::try_from(self.skip).unwrap_or(usize::MAX).min(plain.len());
            plain.advance(skipped);
            self.skip -= skipped as u64;
            plain.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
            self.left -= plain.len() as u64;
            if !plain.is_empty() {
                return Ok(Some(plain));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encryption::segments::OVERHEAD;
    use object_store::local::LocalFileSystem;
    use object_store::memory::InMemory;
    use proptest::test_runner::TestRunner;

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 31 / 7 % 253) as u8).collect()
    }

    fn sealed(inner: &Arc<dyn ObjectStore>, small_parts: bool) -> SealedObjects {
        SealedObjects::new(Arc::clone(inner), Arc::new(DomainKey::new(&[7; 32]).expect("a key")), small_parts)
    }

    /// A directory, which gives files, and memory, which gives streams.
    fn places(dir: &tempfile::TempDir) -> [Arc<dyn ObjectStore>; 2] {
        [Arc::new(LocalFileSystem::new_with_prefix(dir.path()).expect("a directory")), Arc::new(InMemory::new())]
    }

    async fn read(store: &dyn ObjectStore, at: &Path) -> Vec<u8> {
        store.get(at).await.expect("there").bytes().await.expect("readable").to_vec()
    }

    #[test]
    fn any_range_reads_as_the_plaintext_does() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let dir = tempfile::tempdir().expect("a directory");
        let at = Path::from("ff/object");
        // Longer than what is decrypted at a time, and with an end of each kind.
        for (inner, length) in places(&dir).iter().zip([CHUNK as usize + 70_000, 5 * (64 << 10)]) {
            let (store, plain) = (sealed(inner, true), bytes(length));
            runtime.block_on(store.put(&at, plain.clone().into())).expect("written");
            let ranges = (0..length as u64 + 1000, 0..length as u64 + 1000);
            let check = |(one, other): (u64, u64)| {
                let range = one.min(other)..one.max(other);
                let got = runtime.block_on(store.get_range(&at, range.clone()));
                let end = range.end.min(length as u64);
                if range.start >= end {
                    assert!(got.is_err(), "{range:?} has no byte");
                } else {
                    assert!(got.expect("a range")[..] == plain[range.start as usize..end as usize], "{range:?}");
                }
                Ok(())
            };
            TestRunner::new(proptest::test_runner::Config { cases: 60, failure_persistence: None, ..Default::default() })
                .run(&ranges, check)
                .expect("every range");
            let suffix = GetOptions { range: Some(GetRange::Suffix(100)), ..GetOptions::default() };
            let got = runtime.block_on(async { store.get_opts(&at, suffix).await?.bytes().await }).expect("a suffix");
            assert_eq!(got[..], plain[length - 100..]);
            let head = runtime.block_on(store.head(&at)).expect("a head");
            assert_eq!(head.size, length as u64);
            assert!(runtime.block_on(read(&store, &at)) == plain);
        }
    }

    #[tokio::test]
    async fn an_upload_in_parts_is_one_object_and_a_bucket_gets_no_small_part() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = Path::from("ff/object");
        for (inner, small_parts) in places(&dir).iter().zip([true, false]) {
            let store = sealed(inner, small_parts);
            for lengths in [vec![], vec![1], vec![PART_OF_WRITER; 2], vec![PART_OF_WRITER + 4321, 100, 70_000, PART_OF_WRITER, 65_536]] {
                let plain = bytes(lengths.iter().sum());
                let mut upload = store.put_multipart(&at).await.expect("begun");
                let mut begin = 0;
                for length in lengths {
                    upload.put_part(plain[begin..begin + length].to_vec().into()).await.expect("a part");
                    begin += length;
                }
                upload.complete().await.expect("complete");
                assert!(read(&store, &at).await == plain);
                assert_eq!(store.head(&at).await.expect("a head").size, plain.len() as u64);
                let raw = inner.head(&at).await.expect("a head").size;
                assert_eq!(raw, plain.len() as u64 + (plain.len() as u64 / SEGMENT + 1) * OVERHEAD);
            }
        }
    }

    const PART_OF_WRITER: usize = 5 << 20;

    /// Records how long the parts are.
    #[derive(Debug)]
    struct Parts(Arc<parking_lot::Mutex<Vec<usize>>>);

    #[async_trait::async_trait]
    impl MultipartUpload for Parts {
        fn put_part(&mut self, data: PutPayload) -> object_store::UploadPart {
            self.0.lock().push(data.content_length());
            Box::pin(futures::future::ready(Ok(())))
        }

        async fn complete(&mut self) -> Result<PutResult> {
            Ok(PutResult { e_tag: None, version: None, extensions: Default::default() })
        }

        async fn abort(&mut self) -> Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn every_part_of_a_bucket_but_the_last_has_5_mib() {
        let parts = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let key = DomainKey::new(&[7; 32]).expect("a key");
        for lengths in [vec![PART_OF_WRITER; 3], vec![PART_OF_WRITER + 1, PART_OF_WRITER + 99_999, 3], vec![PART_OF_WRITER, 65_536 * 3]] {
            parts.lock().clear();
            let sealer = Sealer::new(&key, "a").expect("a sealer");
            let mut upload = SealedUpload::new(Box::new(Parts(Arc::clone(&parts))), sealer, false);
            for length in lengths {
                upload.put_part(bytes(length).into()).await.expect("a part");
            }
            upload.complete().await.expect("complete");
            let (last, others) = {
                let mut all = parts.lock().clone();
                (all.pop(), all)
            };
            assert!(last.is_some() && others.iter().all(|part| *part >= PART_OF_WRITER), "{others:?}");
        }
    }

    #[tokio::test]
    async fn parts_arrive_in_their_order_however_they_are_waited_for() {
        let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let (store, at) = (sealed(&inner, true), Path::from("a"));
        let plain = bytes(20 * 65_536 + 5);
        let mut upload = store.put_multipart(&at).await.expect("begun");
        let mut parts: Vec<_> = plain.chunks(65_536).map(|chunk| upload.put_part(chunk.to_vec().into())).collect();
        parts.reverse();
        futures::future::try_join_all(parts).await.expect("all parts");
        upload.complete().await.expect("complete");
        assert!(read(&store, &at).await == plain);
    }

    #[tokio::test]
    async fn an_altered_object_is_an_error_that_names_it_and_never_other_bytes() {
        let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let (store, at) = (sealed(&inner, true), Path::from("ff/object"));
        let plain = bytes(3 * 65_536);
        store.put(&at, plain.clone().into()).await.expect("written");
        let good = read(&*inner, &at).await;
        let segment = SEALED as usize;
        let mut flipped = good.clone();
        flipped[segment + 500] ^= 1;
        let mut swapped = good.clone();
        swapped[..segment].copy_from_slice(&good[segment..2 * segment]);
        let cases = [
            flipped,
            swapped,
            good[..3 * segment].to_vec(),
            good[..2 * segment].to_vec(),
            good[..segment + 9].to_vec(),
            Vec::new(),
            plain.clone(),
        ];
        for (case, bytes) in cases.into_iter().enumerate() {
            inner.put(&at, bytes.into()).await.expect("altered");
            let got = async { store.get(&at).await?.bytes().await }.await;
            let error = crate::Error::packs(got.expect_err("it is not what was written"));
            assert!(matches!(&error, crate::Error::Altered { object, .. } if object == "ff/object"), "{case}: {error}");
            for begin in (0..plain.len() as u64).step_by(40_000) {
                // The bytes of a range are right, also if other bytes of the object are not.
                if let Ok(part) = store.get_range(&at, begin..begin + 30_000).await {
                    assert!(plain[begin as usize..].starts_with(&part), "{case}, {begin}");
                }
            }
        }
    }

    #[tokio::test]
    async fn lists_give_the_lengths_of_plaintext() {
        let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let store = sealed(&inner, true);
        for (at, length) in [("a", 0), ("b", 65_536), ("c/d", 70_000)] {
            store.put(&Path::from(at), bytes(length).into()).await.expect("written");
        }
        store.put(&Path::from(KEY), "in the clear".into()).await.expect("written");
        assert_eq!(read(&*inner, &Path::from(KEY)).await, b"in the clear");
        let mut sizes: Vec<u64> = store.list(None).map_ok(|object| object.size).try_collect().await.expect("a list");
        sizes.sort_unstable();
        assert_eq!(sizes, [0, 12, 65_536, 70_000]);
        let top = store.list_with_delimiter(None).await.expect("a list");
        assert_eq!(top.objects.iter().map(|object| object.size).sum::<u64>(), 65_536 + 12);
    }
}
