//! Snapshots to test with.

#![allow(
    dead_code,
    missing_docs,
    unused_macros,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "each test file uses a part; a test that cannot go on should stop"
)]

pub mod leaks;
#[macro_use]
pub mod rig;
pub mod watched;

use bytes::Bytes;
use pfr_schema::flat::FlatManifest;
use pfr_schema::geometry::Geometry;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, RepositoryName, Tag};
use pfr_store::{Damage, Ingested, Options, Result, Store};
use pfr_testkit::frames;
pub use pfr_testkit::frames::{blob as blob_frame, stream};
use pfr_testkit::snapshot::Shape;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};

pub const GEOMETRY: Geometry = Shape::TINY.geometry;

/// A snapshot of one tree, as its pages and documents.
pub struct Snapshot {
    pub pages: Vec<Vec<u8>>,
    pub runs: Vec<Document>,
    pub tree: Document,
    pub config: Document,
    pub manifest: Document,
    pub flat: FlatManifest,
}

/// One page's bytes, different for each number.
pub fn page(number: u64) -> Vec<u8> {
    Shape::TINY.page(number)
}

/// A snapshot whose page `i` has K bytes `page(2n)` and V bytes `page(2n+1)` for n = `numbers[i]`.
pub fn snapshot(numbers: &[u64], parents: Vec<Digest>) -> Snapshot {
    snapshot_of(Shape::TINY, numbers, parents)
}

/// The same with pages of this shape.
pub fn snapshot_of(shape: Shape, numbers: &[u64], parents: Vec<Digest>) -> Snapshot {
    let mut made = Shape { fill: 0, ..shape }.snapshot(numbers).parents(parents).build();
    let tree = made.trees.remove(0);
    let pages = tree.pages.into_iter().map(|page| page.bytes).collect();
    Snapshot { pages, runs: tree.runs, tree: tree.document, config: made.config, manifest: made.manifest, flat: tree.flat }
}

impl Snapshot {
    /// Nodes and configuration, children first.
    pub fn documents(&self) -> Vec<&Document> {
        self.runs.iter().chain([&self.tree, &self.config, &self.manifest]).collect()
    }

    /// A stream with every page and document.
    pub fn stream(&self) -> Vec<u8> {
        stream(self.pages.iter().map(|p| blob_frame(p)).chain(self.documents().into_iter().map(frames::of)))
    }
}

/// A stream of `bytes` in pieces.
pub fn pieces(bytes: &[u8], size: usize) -> impl futures::Stream<Item = std::result::Result<Bytes, std::io::Error>> + Send + Unpin + use<> {
    let pieces: Vec<_> = bytes.chunks(size).map(|c| Ok(Bytes::copy_from_slice(c))).collect();
    futures::stream::iter(pieces)
}

pub fn repository() -> RepositoryName {
    "team/agent".parse().unwrap()
}

pub fn tag(name: &str) -> Tag {
    name.parse().unwrap()
}

/// Tries cases of `strategy` inside an asynchronous test.
pub async fn property<S, F>(cases: u32, strategy: S, check: impl Fn(S::Value) -> F + Send + 'static)
where
    S: Strategy + Send + 'static,
    F: Future<Output = ()>,
{
    let runtime = tokio::runtime::Handle::current();
    let tried = tokio::task::spawn_blocking(move || {
        let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
        let check = |value| {
            runtime.block_on(check(value));
            Ok(())
        };
        runner.run(&strategy, check).unwrap_or_else(|failure| panic!("{failure}"));
    });
    tried.await.unwrap();
}

pub async fn store() -> Store {
    Store::open_in_memory(Options::default()).await.unwrap()
}

/// Uploads and commits. Asserts that the blobs that were not stored before count as new.
pub async fn push(store: &Store, snapshot: &Snapshot, name: &str) -> Result<(Ingested, pfr_schema::api::Committed)> {
    let session = store.open_push(&repository()).await?;
    let ingested = store.ingest(&session.id, pieces(&snapshot.stream(), 777)).await?;
    let committed = store.commit(&session.id, snapshot.manifest.digest, Some(tag(name)), None).await?;
    Ok((ingested, committed))
}

/// Puts blobs into quarantine where they lie, though nothing is wrong with them: as after a read
/// that failed.
pub async fn accuse(store: &Store, digests: &[Digest]) {
    let locations = store.metadata().locate(digests.to_vec()).await.unwrap();
    let damage = digests.iter().zip(locations).map(|(digest, location)| Damage {
        digest: *digest,
        pack: location.unwrap().pack,
        reason: "it was misread".into(),
    });
    let quarantined = store.metadata().quarantine(damage.collect()).await.unwrap();
    assert_eq!(quarantined, digests);
}
