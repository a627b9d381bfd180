//! Slow clients, in uploads and downloads: they hold little memory, and no other client waits for
//! them.

use crate::common::rig::{Backend, Rig};
use crate::common::{blob_frame, page, repository, stream};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use pfr_schema::codec::Codecs;
use pfr_schema::frame::Header;
use pfr_schema::{Algorithm, Digest, ErrorCode};
use pfr_store::{Clock, Error, Ingested, Options, Result, Served, SqliteMetadata, Store, document_frame};
use pfr_testkit::snapshot::repeated;
use pfr_testkit::storage::{Moment, watched};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

/// Longer than anything here takes on any machine. A wait in vain takes longer.
const FOR_EVER: Duration = Duration::from_secs(60);

const MINUTE: Duration = Duration::from_secs(60);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(FOR_EVER, future).await.expect("it waits for a slow client")
}

/// A blob of `kib` KiB, different for each seed.
fn blob(seed: u64, kib: u64) -> Vec<u8> {
    (0..kib << 3).flat_map(|i| page(seed << 32 | i)).collect()
}

/// An upload whose bytes come when the test sends them.
struct Upload {
    sender: mpsc::UnboundedSender<Bytes>,
    done: JoinHandle<Result<Ingested>>,
}

impl Upload {
    async fn begin(store: &Store) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel::<Bytes>();
        let bytes = futures::stream::unfold(receiver, |mut receiver| async { receiver.recv().await.map(|b| (b, receiver)) });
        let (store, session) = (store.clone(), store.open_push(&repository()).await.unwrap());
        let upload = async move { store.ingest(&session.id, bytes.map(Ok::<_, std::io::Error>).boxed()).await };
        Self { sender, done: tokio::spawn(upload) }
    }

    /// Sends bytes, unless the upload is over.
    fn send(&self, bytes: &[u8]) {
        for piece in bytes.chunks(10_000) {
            drop(self.sender.send(Bytes::copy_from_slice(piece)));
        }
    }

    async fn end(self) -> Result<Ingested> {
        drop(self.sender);
        in_time(self.done).await.unwrap()
    }
}

async fn upload_at_once(store: &Store, bytes: &[u8]) -> Result<Ingested> {
    let upload = Upload::begin(store).await;
    upload.send(bytes);
    upload.end().await
}

#[tokio::test]
async fn slow_uploads_give_their_places_to_a_fast_one_and_go_on_later() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { ingests: 2, ..Options::default() };
    for store in [Store::open(dir.path(), options.clone()).await.unwrap(), Store::open_in_memory(options).await.unwrap()] {
        // Small frames, a frame that is half there, and a blob that passes in pieces.
        let streams: Vec<Vec<u8>> = (0..9)
            .map(|i| match i % 3 {
                0 => stream((0..400).map(|j| blob_frame(&blob(i << 20 | j, 1)))),
                1 => stream((0..3).map(|j| blob_frame(&blob(i << 20 | j, 300)))),
                _ => stream([blob_frame(&blob(i << 20, 6 << 10))]),
            })
            .collect();
        let mut slow = Vec::new();
        for bytes in &streams {
            let upload = Upload::begin(&store).await;
            upload.send(&bytes[..bytes.len() / 2]);
            slow.push(upload);
        }
        // It takes its turn while they wait for their clients.
        for seed in 0..3 {
            let fast = upload_at_once(&store, &stream((0..20).map(|i| blob_frame(&blob(1 << 30 | seed << 10 | i, 100))))).await.unwrap();
            assert_eq!((fast.frames, fast.new), (20, 20));
        }
        for (upload, bytes) in slow.into_iter().zip(&streams) {
            upload.send(&bytes[bytes.len() / 2..]);
            let done = upload.end().await.unwrap();
            assert_eq!(done.frames, done.new);
        }
        let digest = Digest::sha256(&blob(2 << 20, 6 << 10));
        assert_eq!(read_back(store.frames(vec![digest]).await.unwrap()).await, blob(2 << 20, 6 << 10));
    }
}

#[tokio::test]
async fn the_session_of_a_slow_upload_lives_before_its_first_frame_is_there() {
    let rig = Rig::still(Backend::Memory, Options { lease: 60 * MINUTE, ..Options::default() }).await;
    let bytes = stream([blob_frame(&blob(1, 300))]);
    let upload = Upload::begin(&rig.store).await;
    let mut sent = 0;
    // First without a place, then in one.
    for until in [0, 10_000, 20_000, 100_000, 200_000, bytes.len() - 1] {
        upload.send(&bytes[sent..until]);
        sent = until;
        rig.wait(40 * MINUTE);
        in_time(async {
            let enough = rig.now.load(Ordering::SeqCst) + 30 * 60_000;
            while rig.metadata.unfinished(1).await.unwrap().first().expect("the session ended").until < enough {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }
    upload.send(&bytes[sent..]);
    assert_eq!(upload.end().await.unwrap().new, 1);
}

#[tokio::test]
async fn slow_uploads_that_hold_too_much_are_refused_and_fast_ones_are_not() {
    // Room for four frames that are nearly there.
    let options = Options { ingests: 1, slow_bytes: 16 << 20, queue: Duration::from_millis(300), ..Options::default() };
    let store = Store::open_in_memory(options).await.unwrap();
    let mut slow = Vec::new();
    for i in 0..10 {
        let bytes = stream([blob_frame(&blob(i, 4000))]);
        let upload = Upload::begin(&store).await;
        upload.send(&bytes[..bytes.len() - 1000]);
        slow.push((upload, bytes));
    }
    let mut refused = 0;
    while slow.iter().filter(|(upload, _)| upload.done.is_finished()).count() < 5 {
        let fast = upload_at_once(&store, &stream([blob_frame(&blob(1 << 20 | refused, 500))])).await;
        // While all of them come at once it may have to wait for longer than a queue lasts here.
        assert!(matches!(&fast, Ok(_) | Err(Error::Overloaded(_))), "{fast:?}");
        refused += 1;
    }
    let (ended, waiting): (Vec<_>, Vec<_>) = slow.into_iter().partition(|(upload, _)| upload.done.is_finished());
    for (upload, _) in ended {
        let error = upload.end().await.unwrap_err();
        assert_eq!((error.code(), error.code().retryable()), (ErrorCode::Overloaded, true), "{error}");
    }
    for (upload, bytes) in &waiting {
        upload.send(&bytes[bytes.len() - 1000..]);
    }
    let mut served = 0;
    for (upload, _) in waiting {
        // One of them may have kept its place while no other upload waited for it.
        match upload.end().await {
            Ok(_) => served += 1,
            Err(error) => assert_eq!(error.code(), ErrorCode::Overloaded, "{error}"),
        }
    }
    assert!(served > 0, "some fit");
}

#[tokio::test]
async fn an_upload_that_waits_too_long_for_its_place_is_told_to_come_back() {
    let (stuck, entered) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (until, arrived) = (Arc::clone(&stuck), Arc::clone(&entered));
    let say = move |moment| {
        let (until, arrived) = (Arc::clone(&until), Arc::clone(&arrived));
        Box::pin(async move {
            if moment == Moment::Complete {
                arrived.add_permits(1);
                drop(until.acquire().await);
            }
            Ok(())
        }) as _
    };
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    let options = Options { ingests: 1, queue: Duration::from_millis(100), ..Options::default() };
    let store = Store::new(watched(Arc::new(InMemory::new()), Arc::new(say)), metadata, options);
    let first = Upload::begin(&store).await;
    first.send(&stream([blob_frame(&blob(1, 100))]));
    let first = tokio::spawn(first.end());
    // It writes its pack, in the only place.
    drop(in_time(entered.acquire()).await);
    let second = Upload::begin(&store).await;
    second.send(&stream([blob_frame(&blob(2, 100))]));
    let refused = second.end().await.unwrap_err();
    assert!(matches!(refused, Error::Overloaded(_)), "{refused}");
    stuck.add_permits(100);
    first.await.unwrap().unwrap();
}

/// The payload of the one frame in a stream.
async fn read_back(frames: pfr_store::BoxFrames) -> Vec<u8> {
    let frames: Vec<Bytes> = in_time(frames.try_collect()).await.unwrap();
    let (all, start) = (frames.concat(), Header::len(Algorithm::Sha256));
    all[start..all.len() - pfr_schema::frame::END_LEN - pfr_schema::frame::CHECKSUM].to_vec()
}

#[tokio::test]
async fn downloads_that_are_not_taken_keep_no_other_from_being_read() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { outputs: 2, ..Options::default() };
    for store in [Store::open(dir.path(), options.clone()).await.unwrap(), Store::open_in_memory(options).await.unwrap()] {
        let whole = blob(1, 20 << 10);
        let small: Vec<Vec<u8>> = (0..300).map(|i| blob(2 << 20 | i, 1 + i % 40)).collect();
        upload_at_once(&store, &stream([&whole].into_iter().chain(&small).map(|b| blob_frame(b)))).await.unwrap();
        let digest = Digest::sha256(&whole);
        let mut slow = Vec::new();
        for _ in 0..10 {
            let mut frames = store.serve(vec![digest], Codecs::ALL).await.unwrap().pieces;
            let first = in_time(frames.try_next()).await.unwrap().unwrap();
            slow.push((frames, vec![first]));
        }
        assert!(read_back(store.serve(vec![digest], Codecs::ALL).await.unwrap().pieces).await == whole);
        let all: Vec<Digest> = small.iter().map(|b| Digest::sha256(b)).collect();
        // Long enough for a place to be free: the next download could be sent in large pieces
        // alone.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let Served { bytes, pieces } = store.serve(all.clone(), Codecs::LEAST).await.unwrap();
        let served: Vec<Bytes> = in_time(pieces.try_collect()).await.unwrap();
        assert_eq!(Some(served.iter().map(|piece| piece.len() as u64).sum::<u64>()), bytes, "the length is known before");
        // All these pieces are held now, as by clients that take no byte more.
        let held = slow.iter().flat_map(|(_, pieces)| pieces).chain(&served);
        let large: Vec<usize> = held.map(Bytes::len).filter(|len| *len > 64 << 10).collect();
        assert!(large.len() == 4 && large.iter().all(|len| *len <= 512 << 10), "{large:?}");
        let streamed: Vec<Bytes> = in_time(store.frames(all).await.unwrap().try_collect()).await.unwrap();
        assert!(served.concat() == streamed.concat());
        // Downloads that waited, and lost what was read ahead, are complete all the same.
        for (frames, mut pieces) in slow {
            pieces.extend(in_time(frames.try_collect::<Vec<_>>()).await.unwrap());
            assert!(read_back(futures::stream::iter(pieces.into_iter().map(Ok)).boxed()).await == whole);
        }
    }
}

#[tokio::test]
async fn a_few_bytes_that_stand_for_gigabytes_are_stored_but_not_computed() {
    let store = Store::open_in_memory(Options::default()).await.unwrap();
    let documents = repeated(1 << 36);
    let (bytes, manifest) = (stream(documents.iter().map(document_frame)), documents[3].digest);
    upload_at_once(&store, &bytes).await.unwrap();
    let session = store.open_push(&repository()).await.unwrap();
    store.commit(&session.id, manifest, None, None).await.unwrap();
    let error = in_time(store.verify(&manifest, &mut |_| ())).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::TooLarge, "{error}");
    assert!(error.to_string().contains("68719476736 bytes"), "{error}");
    // A little repetition is allowed: this value is computed, and found wrong.
    let documents = repeated(1 << 20);
    let (bytes, manifest) = (stream(documents.iter().map(document_frame)), documents[3].digest);
    upload_at_once(&store, &bytes).await.unwrap();
    assert_eq!(in_time(store.verify(&manifest, &mut |_| ())).await.unwrap_err().code(), ErrorCode::ValueHashMismatch);
}

/// A verification whose caller leaves ends long before it is done, and keeps its place until then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_verification_ends_and_only_then_frees_its_place() {
    let store = Store::open_in_memory(Options::default()).await.unwrap();
    let documents = repeated(64 << 20);
    let (bytes, manifest) = (stream(documents.iter().map(document_frame)), documents[3].digest);
    upload_at_once(&store, &bytes).await.unwrap();
    let session = store.open_push(&repository()).await.unwrap();
    store.commit(&session.id, manifest, None, None).await.unwrap();
    let places = Arc::new(Semaphore::new(1));
    let begin = async || {
        let place = in_time(Arc::clone(&places).acquire_owned()).await.unwrap();
        let (store, started) = (store.clone(), Instant::now());
        (started, tokio::spawn(async move { store.verify_in(&manifest, Some(place), &mut |_| ()).await.map(drop) }))
    };
    // To its end: the value is computed, and found wrong.
    let (started, whole) = begin().await;
    assert_eq!(in_time(whole).await.unwrap().unwrap_err().code(), ErrorCode::ValueHashMismatch);
    let whole = started.elapsed();
    let (started, left) = begin().await;
    tokio::time::sleep(whole / 4).await;
    assert_eq!(places.available_permits(), 0);
    left.abort();
    drop(in_time(Arc::clone(&places).acquire_owned()).await.unwrap());
    assert!(started.elapsed() < whole * 3 / 4, "{:?} of {whole:?}", started.elapsed());
}
