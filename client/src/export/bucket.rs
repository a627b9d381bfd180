//! A layout in a bucket: its files as objects below a prefix.

use super::folder::check_version;
use super::layout::{Layout, failed, malformed};
use super::spool::{Body, Spool, Written, pieces};
use crate::error::{Error, Result};
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt as _};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, UpdateVersion, WriteMultipart};
use pfr_schema::export::{Entry, INDEX_BYTES, INDEX_FILE, Index, LAYOUT_FILE};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode};
use pfr_store::storage::{self, StorageOptions};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes of one part of an upload, and of one read. A bucket takes 10,000 parts, so this is enough
/// for any blob.
const PART: usize = 8 << 20;
/// Parts of an upload in flight.
const PARTS: usize = 4;
/// Objects up to this size are uploaded in one request.
const SMALL: u64 = 8 << 20;
/// How often the index is read again because another export has replaced it meanwhile.
const TRIES: u32 = 10;
/// The name of a file without a name, in errors.
const NO_FILE: &str = "a temporary file";

/// A prefix of a bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    name: String,
    store: Arc<dyn ObjectStore>,
}

/// The bytes of an object, and its version.
type Found = Option<(Bytes, UpdateVersion)>;

impl Bucket {
    /// The prefix at `url`, with the credentials of the environment, if there are some. Nothing is
    /// asked of it yet.
    pub async fn at(url: &str) -> Result<Self> {
        // No error repeats the URL, which may have a secret in the wrong place.
        let refused = |error: pfr_store::Error| failed("the bucket", ErrorCode::InvalidRequest, error.to_string());
        let (store, opened) = storage::open(url, &StorageOptions::from_env()).map_err(refused)?;
        opened.check_credentials().await.map_err(refused)?;
        Ok(Self::over(url, store))
    }

    /// Objects in `store`.
    pub fn over(name: &str, store: Arc<dyn ObjectStore>) -> Self {
        Self { name: name.to_owned(), store }
    }

    /// To read from.
    pub async fn opened(self) -> Result<Self> {
        let (version, _) = self.get(LAYOUT_FILE.0, 4096).await?.ok_or_else(|| {
            failed(
                &self.name,
                ErrorCode::NotFound,
                format!("there is no OCI layout: expected the objects {} and {INDEX_FILE}", LAYOUT_FILE.0),
            )
        })?;
        check_version(&self.name, &version)?;
        Ok(self)
    }

    /// To write into.
    pub async fn created(self) -> Result<Self> {
        match self.get(LAYOUT_FILE.0, 4096).await? {
            Some((version, _)) => check_version(&self.name, &version)?,
            None => {
                let put = self.store.put(&Path::from(LAYOUT_FILE.0), Bytes::from_static(LAYOUT_FILE.1).into()).await;
                put.map_err(|error| self.failure(&error))?;
            }
        }
        Ok(self)
    }

    /// The object of this name, if there is one.
    async fn get(&self, name: &str, most: u64) -> Result<Found> {
        let found = match self.store.get_opts(&Path::from(name), GetOptions::default()).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            found => found.map_err(|error| self.failure(&error))?,
        };
        if found.meta.size > most {
            return Err(failed(&self.name, ErrorCode::TooLarge, format!("{name} has {} bytes, the limit is {most}", found.meta.size)));
        }
        let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        let bytes = found.bytes().await.map_err(|error| self.failure(&error))?;
        Ok(Some((bytes, version)))
    }

    fn failure(&self, error: &object_store::Error) -> Error {
        failure(&self.name, error)
    }

    /// Adds an entry to the index. If another export replaces the index meanwhile, its entry stays.
    async fn add(&self, entry: &Entry) -> Result<()> {
        for _ in 0..TRIES {
            let found = self.get(INDEX_FILE, INDEX_BYTES).await?;
            let mut index = match &found {
                Some((bytes, _)) => Index::parse(bytes).map_err(malformed(&self.name, INDEX_FILE))?,
                None => Index::default(),
            };
            index.add(entry.clone());
            let bytes: Bytes = index.to_bytes().map_err(malformed(&self.name, INDEX_FILE))?.into();
            let mode = found.map_or(PutMode::Create, |(_, version)| PutMode::Update(version));
            match self.replace(bytes, mode).await {
                Err(object_store::Error::Precondition { .. } | object_store::Error::AlreadyExists { .. }) => {}
                put => return put.map_err(|error| self.failure(&error)),
            }
        }
        Err(failed(&self.name, ErrorCode::Unavailable, "other exports replace the index again and again; run the same command again"))
    }

    async fn replace(&self, bytes: Bytes, mode: PutMode) -> object_store::Result<()> {
        let path = Path::from(INDEX_FILE);
        let put = self.store.put_opts(&path, bytes.clone().into(), PutOptions::from(mode)).await;
        match put {
            // Storage that cannot compare versions: the last of two exports at once wins.
            Err(object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. }) => {
                self.store.put(&path, bytes.into()).await.map(drop)
            }
            put => put.map(drop),
        }
    }

    async fn upload(&self, path: &Path, blob: Written) -> Result<()> {
        let Body::Hidden(file) = blob.body else { return Err(Error::Internal("a blob of a bucket is elsewhere".into())) };
        let mut bytes = pieces(file, PathBuf::from(NO_FILE), 0..blob.size);
        if blob.size <= SMALL {
            let whole: Vec<Bytes> = bytes.try_collect().await?;
            let put = self.store.put(path, whole.into_iter().collect()).await;
            return put.map(drop).map_err(|error| self.failure(&error));
        }
        let upload = self.store.put_multipart(path).await.map_err(|error| self.failure(&error))?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, PART);
        while let Some(piece) = bytes.next().await {
            let ready = match piece {
                Ok(piece) => upload.wait_for_capacity(PARTS).await.map(|()| piece).map_err(|error| self.failure(&error)),
                Err(error) => Err(error),
            };
            match ready {
                Ok(piece) => upload.put(piece),
                Err(error) => {
                    // Its parts cost space until they are deleted.
                    drop(upload.abort().await);
                    return Err(error);
                }
            }
        }
        upload.finish().await.map(drop).map_err(|error| self.failure(&error))
    }
}

/// An error of the object store.
fn failure(name: &str, error: &object_store::Error) -> Error {
    let code = match error {
        object_store::Error::NotFound { .. } => ErrorCode::NotFound,
        object_store::Error::PermissionDenied { .. } => ErrorCode::Denied,
        object_store::Error::Unauthenticated { .. } => ErrorCode::Unauthorized,
        _ => ErrorCode::Unavailable,
    };
    failed(name, code, error.to_string())
}

fn blob(digest: &Digest) -> Path {
    Path::from_iter(["blobs", digest.algorithm().name(), &digest.hex()])
}

impl Layout for Bucket {
    fn name(&self) -> &str {
        &self.name
    }

    fn entries(&self) -> BoxFuture<'_, Result<Vec<Entry>>> {
        async move {
            let Some((bytes, _)) = self.get(INDEX_FILE, INDEX_BYTES).await? else { return Ok(Vec::new()) };
            Ok(Index::parse(&bytes).map_err(malformed(&self.name, INDEX_FILE))?.manifests)
        }
        .boxed()
    }

    fn manifest<'a>(&'a self, entry: &'a Entry, most: u64) -> BoxFuture<'a, Result<Bytes>> {
        async move {
            let found = self.get(blob(&entry.digest).as_ref(), most).await?;
            let missing = || failed(&self.name, ErrorCode::MissingBlobs, format!("it lists {}, which is not there", entry.digest));
            Ok(found.ok_or_else(missing)?.0)
        }
        .boxed()
    }

    fn read(&self, digest: Digest, range: Range<u64>) -> BoxStream<'static, Result<Bytes>> {
        let (store, name, Range { start, end }) = (Arc::clone(&self.store), self.name.clone(), range);
        // A request must end within a time, its body included. So it ends before its bytes go on,
        // however slow the reader of the stream is.
        let parts = (start..end).step_by(PART).map(move |at| at..end.min(at + PART as u64));
        let parts = stream::iter(parts).then(move |part| {
            let (store, name) = (Arc::clone(&store), name.clone());
            async move {
                let options = GetOptions { range: Some(part.clone().into()), ..GetOptions::default() };
                let found = match store.get_opts(&blob(&digest), options).await {
                    Err(object_store::Error::NotFound { .. }) => {
                        return Err(failed(&name, ErrorCode::MissingBlobs, format!("its blob {digest} is not there")));
                    }
                    found => found.map_err(|error| failure(&name, &error))?,
                };
                if found.range != part {
                    let reason = format!("its blob {digest} is shorter than its manifest says");
                    return Err(failed(&name, ErrorCode::Truncated, reason));
                }
                found.bytes().await.map_err(|error| failure(&name, &error))
            }
        });
        parts.boxed()
    }

    fn spool(&self) -> Result<Spool> {
        Spool::hidden()
    }

    fn put(&self, written: Written) -> BoxFuture<'_, Result<bool>> {
        async move {
            let path = blob(&written.digest);
            match self.store.head(&path).await {
                Ok(found) if found.size == written.size => return Ok(false),
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failure(&error)),
            }
            self.upload(&path, written).await?;
            Ok(true)
        }
        .boxed()
    }

    fn publish<'a>(&'a self, manifest: &'a Document, entry: Entry) -> BoxFuture<'a, Result<()>> {
        async move {
            self.put(self.spool()?.all(manifest.bytes.clone()).await?).await?;
            self.add(&entry).await
        }
        .boxed()
    }

    fn finish(&self) -> BoxFuture<'_, Result<()>> {
        async { Ok(()) }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::layout::bytes_of;
    use object_store::memory::InMemory;
    use pfr_schema::export::Export;
    use pfr_schema::export::Layer;
    use pfr_schema::{Kind, Limits};

    async fn bucket(store: &Arc<InMemory>) -> Bucket {
        Bucket::over("s3://b/p", Arc::clone(store) as Arc<dyn ObjectStore>).created().await.unwrap()
    }

    fn export(number: u8) -> (Document, Entry) {
        let snapshot = Digest::sha256(&[number]);
        let layers = vec![Layer { digest: snapshot, size: 1, contents: None }];
        let manifest = Export { snapshot, layers }.to_document(&Limits::default()).unwrap();
        let entry = Entry::of(&manifest, &snapshot, &"team/agent".parse().unwrap(), Some(&format!("t{number}").parse().unwrap()));
        (manifest, entry)
    }

    #[tokio::test]
    async fn large_blobs_are_stored_in_parts_and_read_by_ranges() {
        let store = Arc::new(InMemory::new());
        let layout: Arc<dyn Layout> = Arc::new(bucket(&store).await);
        let whole: Vec<u8> = (0..20_000_000_u32).map(|n| (n / 7) as u8).collect();
        let digest = Digest::sha256(&whole);
        for is_new in [true, false] {
            let written = layout.spool().unwrap().all(whole.clone()).await.unwrap();
            assert_eq!(layout.put(written).await.unwrap(), is_new);
        }
        for range in [0..10, 8_000_000..17_000_000, 19_999_999..20_000_000, 5..5] {
            let read = bytes_of(&layout, digest, range.clone()).await.unwrap();
            assert!(read == whole[range.start as usize..range.end as usize], "{range:?}");
        }
        let pieces: Vec<Bytes> = layout.read(digest, 0..20_000_000).try_collect().await.unwrap();
        assert!(pieces.iter().all(|piece| piece.len() <= PART), "a slow reader would keep one request open for all of it");
        let error = bytes_of(&layout, digest, 0..20_000_001).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Truncated, "{error}");
        let error = bytes_of(&layout, Digest::sha256(b"absent"), 0..1).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::MissingBlobs, "{error}");
    }

    #[tokio::test]
    async fn exports_at_once_list_all_of_their_snapshots() {
        let store = Arc::new(InMemory::new());
        let work = (0..6).map(|number| {
            let store = Arc::clone(&store);
            async move {
                let (manifest, entry) = export(number);
                assert_eq!(manifest.kind, Kind::Image);
                bucket(&store).await.publish(&manifest, entry).await.unwrap();
            }
        });
        futures::future::join_all(work).await;
        let layout = Bucket::over("s3://b/p", store).opened().await.unwrap();
        let mut tags: Vec<String> = layout.entries().await.unwrap().iter().map(|entry| entry.tag().unwrap().to_string()).collect();
        tags.sort();
        assert_eq!(tags, ["t0", "t1", "t2", "t3", "t4", "t5"]);
    }

    #[tokio::test]
    async fn a_bucket_without_a_layout_is_none() {
        let error = Bucket::over("s3://b/p", Arc::new(InMemory::new())).opened().await.unwrap_err();
        assert_eq!((error.code(), error.to_string().contains("s3://b/p")), (ErrorCode::NotFound, true), "{error}");
    }
}
