//! The cost of committing a fork with a few new pages: of a snapshot, and of one ten times as
//! large.

use super::{line, timed};
use crate::Result;
use bytes::Bytes;
use pfr_schema::frame;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Digest, Kind};
use pfr_store::{LivePush, Options, Store};
use pfr_testkit::frames;
use pfr_testkit::snapshot::Shape;
use std::convert::Infallible;
use std::path::Path;

/// Pages of 32 bytes: a commit does not read pages, so their size does not matter.
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
        line(&format!("fork of {pages} pages with {NEW} new: upload of pages and nodes"), &upload, "ms");
        line(&format!("fork of {pages} pages with {NEW} new: commit"), &commit, "ms");
        line(&format!("fork of {pages} pages with {NEW} new: rows written"), &rows, "rows");
    }
    Ok(())
}

/// Uploads the pages from number `known` on, and commits. Returns the seconds of each.
async fn push(store: &Store, pages: &[u64], known: usize) -> Result<(f64, f64)> {
    let made = Shape::of(GEOMETRY).snapshot(pages).build();
    let (tree, runs) = (&made.trees[0], &made.trees[0].runs);
    let session: LivePush = store.open_push(&"bench/w".parse()?).await?.id;
    let wanted: Vec<(Digest, Kind)> = runs.iter().map(|run| (run.digest, run.kind)).collect();
    let missing = store.missing(&session, wanted).await?;
    let nodes = missing.into_iter().map(|i| &runs[i]).chain([&tree.document, &made.config, &made.manifest]);
    let mut frames: Vec<Bytes> = tree.pages[2 * known..].iter().chain(nodes).map(frames::of).collect();
    frames.push(frame::end_mark(frames.len() as u64).into());
    let stream = futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>));
    let (upload, _) = timed(store.ingest(&session, stream)).await?;
    let (commit, _) = timed(store.commit(&session, made.digest(), Some("fork".parse()?), None)).await?;
    Ok((upload, commit))
}
