//! The cost of committing a fork with a few new pages: of a snapshot and of one ten times as large,
//! and the 12th fork of an agent with a long context beside that of a small one.

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
/// Forks of an agent before the 12th.
const BEFORE: u64 = 11;
/// Forks in a round, the 12th and those after it: one commit takes a few milliseconds, and many
/// are steadier.
const TIMED: u64 = 4;
/// Pages of the small agent.
const SMALL: u64 = 1000;
/// Tokens of a page of an agent.
const PAGE_TOKENS: u64 = 16;

pub async fn run(disk: &Path, pages: usize, rounds: usize) -> Result<()> {
    for pages in [pages, 10 * pages] {
        let dir = tempfile::tempdir_in(disk)?;
        let store = Store::open(dir.path(), Options::default()).await?;
        let base: Vec<u64> = (0..pages as u64).collect();
        push(&store, &base, 0).await?;
        let (mut upload, mut commit, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds as u64 {
            let before = store.metadata().rows_written();
            let (uploading, committing) = push(&store, &forked(&base, round), pages).await?;
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

/// An agent in a store of its own.
struct Agent {
    store: Store,
    pages: Vec<u64>,
    commits: Vec<f64>,
    _dir: tempfile::TempDir,
}

/// Commits forks of an agent of so many tokens and of a small one in turn, from the 12th on.
/// Returns the median of the time for the former over the time for the latter.
pub async fn twelfth(disk: &Path, tokens: u64, rounds: usize) -> Result<f64> {
    let last = tokens.div_ceil(PAGE_TOKENS).max(SMALL);
    let mut agents = Vec::new();
    // The small agent has the last pages of the other one. So both end with the same page chunk,
    // which each fork rewrites: how full it is decides most of what a commit writes.
    for first in [0, last - SMALL] {
        let dir = tempfile::tempdir_in(disk)?;
        let store = Store::open(dir.path(), Options::default()).await?;
        let pages: Vec<u64> = (first..last).collect();
        push(&store, &pages, 0).await?;
        agents.push(Agent { store, pages, commits: Vec::new(), _dir: dir });
    }
    for fork in 0..BEFORE + TIMED * rounds as u64 {
        for agent in &mut agents {
            let (_, commit) = push(&agent.store, &forked(&agent.pages, fork), agent.pages.len()).await?;
            if fork >= BEFORE {
                agent.commits.push(commit * 1e3);
            }
        }
    }
    for Agent { pages, commits, .. } in &agents {
        line(&format!("12th fork of {} pages, and those after it: commit", pages.len()), commits, "ms");
    }
    let [large, small] = &agents[..] else { return Err("there are not two agents".into()) };
    let ratios: Vec<f64> = large.commits.iter().zip(&small.commits).map(|(large, small)| large / small).collect();
    Ok(line("12th fork, and those after it: commit of the large agent over that of the small one", &ratios, "×"))
}

/// The pages of an agent, and those that only its fork number `fork` has.
fn forked(pages: &[u64], fork: u64) -> Vec<u64> {
    pages.iter().copied().chain((0..NEW).map(|i| 1_000_000_000 + fork * NEW + i)).collect()
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
