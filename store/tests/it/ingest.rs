//! Limits of an ingested stream: no input blocks the store for ever, and none makes a pack's memory
//! or transaction grow without bound.

use crate::common::{GEOMETRY, blob_frame, page, pieces, repository, store, stream};
use bytes::Bytes;
use futures::StreamExt as _;
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::run::Run;
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, Kind, Limits};
use pfr_store::{Incoming, Ingested, Store, WHOLE_MAX, document_frame, verified_frames};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Longer than anything here takes on any machine. A deadlock takes longer.
const FOR_EVER: Duration = Duration::from_secs(60);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(FOR_EVER, future).await.expect("it waits for itself")
}

/// A document that needs a permit to be in memory as a whole, and that has few bytes as it is sent.
fn large(kind: Kind, byte: u8) -> Document {
    Document::new(kind, vec![byte; usize::try_from(WHOLE_MAX).unwrap() + 1])
}

/// The same with bytes that cannot be compressed.
fn noise(kind: Kind, seed: u64) -> Document {
    Document::new(kind, (0..(WHOLE_MAX + 128) / 128).flat_map(|i| page((seed << 32) + i)).collect())
}

#[tokio::test]
async fn large_documents_in_one_stream_pass_one_after_another_whatever_lies_between() {
    let (a, b) = (document_frame(&large(Kind::Tree, 1)), document_frame(&large(Kind::Checkpoint, 2)));
    let (c, d) = (document_frame(&noise(Kind::Tree, 3)), document_frame(&noise(Kind::Tree, 4)));
    let small = || blob_frame(&page(5));
    let blob = || blob_frame(&noise(Kind::Blob, 6).bytes);
    let streams = [
        vec![a.clone(), b.clone()],
        vec![small(), a.clone(), small(), b.clone(), small()],
        vec![a.clone(), blob(), b.clone()],
        vec![c.clone(), d.clone(), a, b],
        vec![blob(), c, small(), d],
    ];
    for frames in streams {
        let expected = frames.len();
        let bytes = stream(frames);
        let semaphore = Arc::new(Semaphore::new(1));
        let source = pieces(&bytes, 100_000).map(|piece| Ok(piece.unwrap()));
        let mut frames = Box::pin(verified_frames(source, Limits::default(), Arc::clone(&semaphore)));
        let mut passed = 0;
        while let Some(item) = in_time(frames.next()).await {
            match item.unwrap() {
                Incoming::Whole(_) | Incoming::Finish { .. } => passed += 1,
                Incoming::Begin(_) | Incoming::Piece(_) => {}
            }
        }
        assert_eq!(passed, expected);
        assert_eq!(semaphore.available_permits(), 1);
    }
}

#[tokio::test]
async fn a_sender_that_pauses_after_a_large_document_keeps_no_other_waiting() {
    let frame = document_frame(&large(Kind::Tree, 1));
    let source = pieces(&frame, 1000).map(|piece| Ok(piece.unwrap())).chain(futures::stream::pending());
    let semaphore = Arc::new(Semaphore::new(1));
    let mut frames = Box::pin(verified_frames(source, Limits::default(), Arc::clone(&semaphore)));
    assert!(matches!(in_time(frames.next()).await, Some(Ok(Incoming::Whole(_)))));
    assert_eq!(semaphore.available_permits(), 1);
}

#[tokio::test]
async fn two_large_trees_are_taken_in_by_one_request() {
    let kv = [page(1), page(2)];
    let (runs, trees): (Vec<_>, Vec<_>) = ["a", "b"]
        .map(|name| {
            let pages = vec![Page { ix: 0, k: Digest::sha256(&kv[0]), v: Digest::sha256(&kv[1]) }];
            let sequence = |i| Sequence { id: format!("{name}-{i:0>80}"), page_ixs: vec![0], fill_in_last_page: 0 };
            let flat = FlatManifest::new(GEOMETRY, pages, (0..50_000).map(sequence).collect(), &Limits::default()).unwrap();
            let (tree, mut runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
            (runs.remove(0), tree.to_document())
        })
        .into_iter()
        .unzip();
    assert!(trees.iter().all(|tree| tree.bytes.len() as u64 > WHOLE_MAX));
    let store = store().await;
    let session = store.open_push(&repository()).await.unwrap();
    let frames: Vec<Bytes> = kv.iter().map(|p| blob_frame(p)).chain(runs[..1].iter().chain(&trees).map(document_frame)).collect();
    let done = in_time(store.ingest(&session.id, pieces(&stream(frames), 100_000))).await.unwrap();
    assert_eq!((done.frames, done.new), (5, 5));
    for tree in &trees {
        assert!(store.missing(&session.id, vec![(tree.digest, Kind::Tree)]).await.unwrap().is_empty());
    }
}

/// Frames and children of nodes in one pack, at most; the last frame may go over it.
const ENTRIES: usize = 32 << 10;

async fn packed(store: &Store) -> Vec<usize> {
    let mut counts = Vec::new();
    for pack in store.metadata().packs(None, 10_000).await.unwrap() {
        counts.push(store.metadata().pack_contents(pack.id).await.unwrap().len());
    }
    counts
}

async fn take_in(store: &Store, frames: impl IntoIterator<Item = Bytes>) -> Ingested {
    let session = store.open_push(&repository()).await.unwrap();
    store.ingest(&session.id, pieces(&stream(frames), 100_000)).await.unwrap()
}

/// Pages, each of which lies in a pack.
async fn pages(store: &Store, count: u64) -> Vec<Digest> {
    let raw: Vec<Vec<u8>> = (0..count).map(page).collect();
    take_in(store, raw.iter().map(|p| blob_frame(p))).await;
    raw.iter().map(|p| Digest::sha256(p)).collect()
}

fn run(digests: Vec<Digest>) -> Bytes {
    document_frame(&Document::new(Kind::Run, Run::new(2, 128, digests).unwrap().to_bytes()))
}

#[tokio::test]
async fn a_pack_of_tiny_blobs_is_closed_by_their_number() {
    let store = store().await;
    let done = take_in(&store, (0..40_000_u32).map(|i| blob_frame(&i.to_le_bytes()))).await;
    assert_eq!(done.new, 40_000);
    assert_eq!(packed(&store).await, [ENTRIES, 40_000 - ENTRIES]);
}

#[tokio::test]
async fn the_children_of_nodes_count_too() {
    let store = store().await;
    let pages = pages(&store, 2048).await;
    let runs = (0..40).map(|i| run(pages[i..].iter().chain(&pages[..i]).copied().collect()));
    assert_eq!(take_in(&store, runs).await.new, 40);
    // Each is 2,049 entries: 16 go just over it.
    assert_eq!(packed(&store).await, [2048, 16, 16, 8]);
}

#[tokio::test]
async fn a_blob_that_a_node_lists_several_times_counts_once() {
    let store = store().await;
    let pages = pages(&store, 64).await;
    assert_eq!(take_in(&store, pages.iter().map(|page| run(vec![*page; 2048]))).await.new, 64);
    assert_eq!(packed(&store).await, [64, 64]);
}

#[tokio::test]
async fn the_same_frame_again_takes_up_nothing() {
    let store = store().await;
    let pages = pages(&store, 2048).await;
    let frame = run(pages);
    let (again, len) = (100, frame.len() as u64);
    let before = store.metadata().disk_bytes().await.unwrap();
    let done = take_in(&store, std::iter::repeat_n(frame, again)).await;
    assert_eq!((done.frames, done.new), (again as u64, 1), "all were received");
    assert_eq!(packed(&store).await, [2048, 1]);
    assert!(store.metadata().disk_bytes().await.unwrap() - before < 2 * len);
}
