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

use bytes::Bytes;
use pfr_schema::codec::Codec;
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::frame::{self, Header};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, Kind, Limits, RepositoryName, Tag, media_type};
use pfr_store::{Ingested, Options, Result, Store, document_frame};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};

/// 2 layers × 4 tokens × 2 heads × 4 elements of bf16: 128 bytes a page.
pub const GEOMETRY: Geometry = Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 };

/// A snapshot as its documents and pages.
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
    (0..16_u64).flat_map(|i| (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i.wrapping_mul(0x1234_5678_9abc_def1)).to_le_bytes()).collect()
}

/// A snapshot whose page `i` has K bytes `page(2n)` and V bytes `page(2n+1)` for n = `numbers[i]`.
pub fn snapshot(numbers: &[u64], parents: Vec<Digest>) -> Snapshot {
    let limits = Limits::default();
    let blobs: Vec<Vec<u8>> = numbers.iter().flat_map(|n| [page(2 * n), page(2 * n + 1)]).collect();
    let entries =
        blobs.chunks(2).enumerate().map(|(ix, kv)| Page { ix: ix as u32, k: Digest::sha256(&kv[0]), v: Digest::sha256(&kv[1]) }).collect();
    let sequence = Sequence { id: "seq".into(), page_ixs: (0..numbers.len() as u32).collect(), fill_in_last_page: 0 };
    let flat = FlatManifest::new(GEOMETRY, entries, vec![sequence], &limits).unwrap();
    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
    let tree = tree.to_document();
    let config = Document::new(Kind::Blob, SnapshotConfig { parents, ..SnapshotConfig::default() }.to_bytes());
    let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree)], Default::default()).to_document();
    Snapshot { pages: blobs, runs, tree, config, manifest, flat }
}

impl Snapshot {
    /// Containers and configuration, children first.
    pub fn documents(&self) -> Vec<&Document> {
        self.runs.iter().chain([&self.tree, &self.config, &self.manifest]).collect()
    }

    /// A stream with every page and document.
    pub fn stream(&self) -> Vec<u8> {
        stream(self.pages.iter().map(|p| blob_frame(p)).chain(self.documents().into_iter().map(document_frame)))
    }
}

/// A plain blob as a raw frame.
pub fn blob_frame(raw: &[u8]) -> Bytes {
    let len = raw.len() as u64;
    frame::encode(&Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(raw), raw_len: len, stored_len: len }, raw).into()
}

/// Frames and an end mark.
pub fn stream(frames: impl IntoIterator<Item = Bytes>) -> Vec<u8> {
    let (mut out, mut count) = (Vec::new(), 0);
    for frame in frames {
        out.extend_from_slice(&frame);
        count += 1;
    }
    out.extend_from_slice(&frame::end_mark(count));
    out
}

/// A stream of `bytes` in pieces.
pub fn pieces(bytes: &[u8], size: usize) -> impl futures::Stream<Item = std::result::Result<Bytes, std::io::Error>> + Send + Unpin {
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

/// Uploads and commits; what was not there before is what counts as new.
pub async fn push(store: &Store, snapshot: &Snapshot, name: &str) -> Result<(Ingested, pfr_schema::api::Committed)> {
    let session = store.open_push(&repository()).await?;
    let ingested = store.ingest(&session.id, pieces(&snapshot.stream(), 777)).await?;
    let committed = store.commit(&session.id, snapshot.manifest.digest, Some(tag(name)), None).await?;
    Ok((ingested, committed))
}
