//! Packs on an object store that fails: before and after the effect, in parts, on completion, on reads. Whatever fails, nothing
//! unfinished becomes visible and a retry succeeds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod common;

use async_trait::async_trait;
use common::{pieces, push, repository, snapshot, tag};
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result, UploadPart,
};
use pfr_schema::{Digest, ErrorCode, Kind};
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Where the next failure strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Open,
    Part,
    CompleteBefore,
    /// The effect happened, the answer was lost.
    CompleteAfter,
    Get,
}

/// Fails the operation `fault` once its counter reaches zero.
#[derive(Debug)]
struct Failing {
    inner: InMemory,
    fault: Fault,
    countdown: Arc<AtomicI64>,
}

fn error() -> object_store::Error {
    object_store::Error::Generic { store: "failing", source: "connection reset (injected)".into() }
}

fn strike(countdown: &AtomicI64) -> Result<()> {
    if countdown.fetch_sub(1, Ordering::SeqCst) == 0 { Err(error()) } else { Ok(()) }
}

impl std::fmt::Display for Failing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failing store")
    }
}

#[derive(Debug)]
struct FailingUpload {
    inner: Box<dyn MultipartUpload>,
    fault: Fault,
    countdown: Arc<AtomicI64>,
}

#[async_trait]
impl MultipartUpload for FailingUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        if self.fault == Fault::Part
            && let Err(error) = strike(&self.countdown)
        {
            return Box::pin(async move { Err(error) });
        }
        self.inner.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        if self.fault == Fault::CompleteBefore {
            strike(&self.countdown)?;
        }
        let done = self.inner.complete().await?;
        if self.fault == Fault::CompleteAfter {
            strike(&self.countdown)?;
        }
        Ok(done)
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

#[async_trait]
impl ObjectStore for Failing {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        if self.fault == Fault::Open {
            strike(&self.countdown)?;
        }
        let inner = self.inner.put_multipart_opts(location, opts).await?;
        Ok(Box::new(FailingUpload { inner, fault: self.fault, countdown: Arc::clone(&self.countdown) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if self.fault == Fault::Get {
            strike(&self.countdown)?;
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

async fn failing(fault: Fault) -> (Store, Arc<AtomicI64>) {
    let countdown = Arc::new(AtomicI64::new(i64::MAX));
    let packs = Failing { inner: InMemory::new(), fault, countdown: Arc::clone(&countdown) };
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    // Small packs: several in one stream, so that failures strike between them.
    let options = Options { pack_bytes: 8 << 10, ..Options::default() };
    (Store::new(Arc::new(packs), Arc::new(metadata), options), countdown)
}

#[tokio::test]
async fn whichever_write_fails_a_retry_completes_and_nothing_unfinished_is_visible() {
    for fault in [Fault::Open, Fault::Part, Fault::CompleteBefore, Fault::CompleteAfter] {
        for after in 0..4 {
            let (store, countdown) = failing(fault).await;
            let snapshot = snapshot(&(0..100).collect::<Vec<_>>(), vec![]);
            countdown.store(after, Ordering::SeqCst);
            let session = store.open_push(&repository()).await.unwrap();
            let error = store.ingest(&session.id, pieces(&snapshot.stream(), 1000)).await.unwrap_err();
            assert_eq!(error.code(), ErrorCode::Unavailable, "{fault:?} after {after}: {error}");
            let error = store.commit(&session.id, snapshot.manifest.digest, Some(tag("t")), None).await.unwrap_err();
            assert_eq!(error.code(), ErrorCode::BlobUnknown, "{fault:?} after {after}: {error}");
            assert!(store.repositories(None, 10).await.unwrap().rows.is_empty());
            // What the store says it has, it has.
            for raw in &snapshot.pages {
                let digest = Digest::sha256(raw);
                if store.missing(&session.id, vec![(digest, Kind::Blob)]).await.unwrap().is_empty() {
                    assert_eq!(store.read(&digest).await.unwrap(), raw[..]);
                }
            }
            push(&store, &snapshot, "t").await.unwrap();
            store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_pack_that_cannot_be_read_once_is_unread_and_not_bad() {
    let (store, countdown) = failing(Fault::Get).await;
    let snapshot = snapshot(&(0..100).collect::<Vec<_>>(), vec![]);
    push(&store, &snapshot, "t").await.unwrap();
    let packs = store.scrub(&Default::default(), &mut |_| ()).await.unwrap().packs;
    assert!(packs > 2, "several packs, so that one is not the storage");
    for after in 0..4 {
        countdown.store(after, Ordering::SeqCst);
        let report = store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
        assert!(report.bad_packs.is_empty() && report.damaged.is_empty(), "{report:?}");
        assert_eq!((report.unread.len(), report.packs), (1, packs - 1), "{report:?}");
        assert!(report.unread[0].contains("injected"), "{report:?}");
    }
    let report = store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
    assert!(report.unread.is_empty() && report.packs == packs, "{report:?}");
}

#[tokio::test]
async fn a_failing_read_is_unavailable_not_missing_and_not_damage() {
    let (store, countdown) = failing(Fault::Get).await;
    let snapshot = snapshot(&[1, 2, 3], vec![]);
    push(&store, &snapshot, "t").await.unwrap();
    countdown.store(0, Ordering::SeqCst);
    let error = store.read(&snapshot.tree.digest).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    assert!(error.code().retryable());
    store.read(&snapshot.tree.digest).await.unwrap();
    for after in 0..3 {
        countdown.store(after, Ordering::SeqCst);
        if let Err(error) = store.verify(&snapshot.manifest.digest, &mut |_| ()).await {
            assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
        }
    }
}
