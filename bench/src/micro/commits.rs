//! What it costs to commit a fork with a few new pages, for a snapshot and for one ten times as large.

use super::{line, timed};
use crate::Result;
use bytes::Bytes;
use pfr_schema::codec::Codec;
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::frame::{self, Header};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, Kind, Limits, media_type};
use pfr_store::{Options, PushId, Store, document_frame};
use std::convert::Infallible;
use std::path::Path;

/// Pages of 32 bytes: a commit never looks into them.
const GEOMETRY: Geometry = Geometry { page_size_tokens: 4, n_layers: 1, n_heads: 1, head_dim: 4, dtype: Dtype::Bf16 };
/// New pages of a fork.
const NEW: u64 = 16;

pub async fn run(disk: &Path, pages: usize, rounds: usize) -> Result<()> {
    for pages in [pages, 10 * pages] {
        let dir = tempfile::tempdir_in(disk)?;
        let store = Store::open(dir.path(), Options::default()).await?;
        let base: Vec<u64> = (0..pages as u64).collect();
        push(&store, &base, 0).await?;
        let (mut upload, mut commit, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds as u64 {
            let new = (0..NEW).map(|i| 1_000_000_000 + round * NEW + i);
            let fork: Vec<u64> = base.iter().copied().chain(new).collect();
            let before = store.metadata().rows_written();
            let (uploading, committing) = push(&store, &fork, pages).await?;
            upload.push(uploading * 1e3);
            commit.push(committing * 1e3);
            rows.push((store.metadata().rows_written() - before) as f64);
        }
        line(&format!("fork of {pages} pages with {NEW} new: upload of pages and containers"), &upload, "ms");
        line(&format!("fork of {pages} pages with {NEW} new: commit"), &commit, "ms");
        line(&format!("fork of {pages} pages with {NEW} new: rows written"), &rows, "rows");
    }
    Ok(())
}

fn blob(number: u64) -> Vec<u8> {
    (0..4_u64).flat_map(|i| (number ^ (i << 56)).to_le_bytes()).collect()
}

/// Sends what is new from page `known` on, and commits; seconds of both.
async fn push(store: &Store, pages: &[u64], known: usize) -> Result<(f64, f64)> {
    let limits = Limits::default();
    let entry = |(ix, n): (usize, &u64)| Page { ix: ix as u32, k: Digest::sha256(&blob(2 * n)), v: Digest::sha256(&blob(2 * n + 1)) };
    let sequence = Sequence { id: "seq".into(), page_ixs: (0..pages.len() as u32).collect(), fill_in_last_page: 0 };
    let flat = FlatManifest::new(GEOMETRY, pages.iter().enumerate().map(entry).collect(), vec![sequence], &limits)?;
    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1)?;
    let tree = tree.to_document();
    let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
    let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree)], Default::default()).to_document();
    let session: PushId = store.open_push(&"bench/w".parse()?).await?.id;
    let wanted: Vec<(Digest, Kind)> = runs.iter().map(|run| (run.digest, run.kind)).collect();
    let missing = store.missing(&session, wanted).await?;
    let mut frames: Vec<Bytes> = Vec::new();
    for number in pages[known..].iter().flat_map(|n| [2 * n, 2 * n + 1]) {
        let raw = blob(number);
        let len = raw.len() as u64;
        let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(&raw), raw_len: len, stored_len: len };
        frames.push(frame::encode(&header, &raw).into());
    }
    frames.extend(missing.into_iter().map(|i| &runs[i]).chain([&tree, &config, &manifest]).map(document_frame));
    frames.push(frame::end_mark(frames.len() as u64).into());
    let stream = futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>));
    let (upload, _) = timed(store.ingest(&session, stream)).await?;
    let (commit, _) = timed(store.commit(&session, manifest.digest, Some("fork".parse()?), None)).await?;
    Ok((upload, commit))
}
