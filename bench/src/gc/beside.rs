//! Small pushes and reads, alone and during a collection, in alternation.

use super::Args;
use super::rows::{Ahead, LEASE};
use super::sweep::{collect_all, fill, push_garbage};
use crate::Result;
use crate::generated::{Generated, component};
use bytes::Bytes;
use futures::StreamExt as _;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Digest, frame};
use pfr_store::{GcOptions, GcTrigger, Options, Store};
use serde::Serialize;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pages with components of 4 KiB.
const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 2, n_heads: 1, head_dim: 64, dtype: Dtype::Bf16 };
/// Pages of a small push.
const PAGES: u64 = 16;
/// How long each phase without a collection lasts.
const QUIET: Duration = Duration::from_secs(3);

/// Latencies of one kind of operation.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// Number of operations.
    pub count: usize,
    /// Milliseconds.
    pub p50: f64,
    /// Milliseconds.
    pub p90: f64,
    /// Milliseconds.
    pub p99: f64,
    /// Milliseconds.
    pub max: f64,
}

impl Latency {
    fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| {
            seconds.get(((seconds.len() as f64 * share) as usize).min(seconds.len().saturating_sub(1))).map_or(0.0, |s| s * 1e3)
        };
        Self { count: seconds.len(), p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

/// All phases of one kind together.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// Objects in one transaction of the collection; `None` without a collection.
    pub batch: Option<usize>,
    /// Objects that the collection deleted in a second.
    pub swept_per_second: f64,
    /// Open, upload and commit of a snapshot of 16 pages, one after the other.
    pub push: Latency,
    /// The frames of such a snapshot's pages, read to the end.
    pub read: Latency,
}

#[derive(Default)]
struct Gathered {
    push: Vec<f64>,
    read: Vec<f64>,
    swept: u64,
    seconds: f64,
}

pub async fn run(disk: &Path, args: &Args) -> Result<Vec<Phase>> {
    let (dir, ahead) = (tempfile::Builder::new().prefix("pf-bench-gc-").tempdir_in(disk)?, Ahead::default());
    let (metadata, _, shared) = fill(dir.path(), args.beside_live, args.straight_above, &ahead).await?;
    // The rows were made without a store, so the marker and the packs are missing. Tables without
    // an id would refuse a storage that has none of their packs.
    metadata.enter_storage_id(uuid::Uuid::now_v7().to_string()).await?;
    drop(metadata);
    std::fs::create_dir_all(dir.path().join("packs"))?;
    std::fs::write(dir.path().join("packs/pf-store"), "")?;
    let store = Store::open(dir.path(), Options { clock: ahead.clock(), ..Options::default() }).await?;
    let numbers = Arc::new(AtomicU64::new(0));
    let kinds: Vec<Option<usize>> = std::iter::once(None).chain(args.beside_batches.iter().copied().map(Some)).collect();
    let mut gathered: Vec<Gathered> = kinds.iter().map(|_| Gathered::default()).collect();
    let name = "bench/garbage".parse()?;
    for round in 0..args.rounds as u64 {
        for (position, kind) in kinds.iter().enumerate() {
            let first = (2 << 40) + (round * kinds.len() as u64 + position as u64) * 2 * args.garbage;
            if kind.is_some() {
                let manifests = push_garbage(store.metadata(), &name, first, args.garbage, shared).await?;
                ahead.advance(2 * LEASE);
                collect_all(store.metadata(), args.batch).await?;
                for manifest in manifests {
                    store.delete_snapshot(&name, &manifest).await?;
                }
            }
            let done = phase(&store, *kind, &numbers).await?;
            let all = &mut gathered[position];
            all.push.extend(done.push);
            all.read.extend(done.read);
            all.swept += done.swept;
            all.seconds += done.seconds;
        }
    }
    let phase = |(batch, all): (Option<usize>, Gathered)| {
        let swept_per_second = if all.seconds > 0.0 { all.swept as f64 / all.seconds } else { 0.0 };
        Phase { batch, swept_per_second, push: Latency::of(all.push), read: Latency::of(all.read) }
    };
    Ok(kinds.into_iter().zip(gathered).map(phase).collect())
}

/// Pushes and reads until the collection ends, or for [`QUIET`].
async fn phase(store: &Store, batch: Option<usize>, numbers: &Arc<AtomicU64>) -> Result<Gathered> {
    let ended = Arc::new(AtomicBool::new(false));
    let pushing = {
        let (store, ended, numbers) = (store.clone(), Arc::clone(&ended), Arc::clone(numbers));
        tokio::spawn(async move {
            let mut seconds = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                seconds.push(push(&store, numbers.fetch_add(PAGES, Ordering::Relaxed)).await?);
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(seconds)
        })
    };
    // The first push must have ended before its pages are read.
    push(store, u64::from(u32::MAX)).await?;
    let reading = {
        let (store, ended) = (store.clone(), Arc::clone(&ended));
        tokio::spawn(async move {
            let mut seconds = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                let start = Instant::now();
                let digests = (0..2 * PAGES).map(|i| Digest::sha256(&component(GEOMETRY, 2 * u64::from(u32::MAX) + i))).collect();
                let mut frames = store.frames(digests).await?;
                while let Some(piece) = frames.next().await {
                    drop(piece?);
                }
                seconds.push(start.elapsed().as_secs_f64());
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(seconds)
        })
    };
    let (swept, seconds) = match batch {
        Some(batch) => {
            let start = Instant::now();
            // The rows of the store were made without bytes: there is nothing to compact.
            let options = GcOptions { trigger: GcTrigger::Command, batch, compact: false, ..GcOptions::default() };
            let report = store.gc(&options, &mut |_| {}).await?;
            (report.released, start.elapsed().as_secs_f64())
        }
        None => {
            tokio::time::sleep(QUIET).await;
            (0, QUIET.as_secs_f64())
        }
    };
    ended.store(true, Ordering::Relaxed);
    Ok(Gathered { push: pushing.await??, read: reading.await??, swept, seconds })
}

/// Pushes a snapshot of pages from `first` on. Returns the seconds from opening the session to the
/// acknowledged commit.
async fn push(store: &Store, first: u64) -> Result<f64> {
    let pages: Vec<u64> = (first..first + PAGES).collect();
    let snapshot = Generated::new(GEOMETRY, &pages);
    let mut frames: Vec<Bytes> = snapshot.blobs.into_iter().map(|blob| blob.frame).collect();
    frames.push(frame::end_mark(frames.len() as u64).into());
    let stream = futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>));
    let start = Instant::now();
    let session = store.open_push(&"bench/small".parse()?).await?.id;
    store.ingest(&session, stream).await?;
    store.commit(&session, snapshot.manifest, Some("latest".parse()?), None).await?;
    Ok(start.elapsed().as_secs_f64())
}

/// Prints the table.
pub fn print(phases: &[Phase]) {
    if phases.is_empty() {
        return;
    }
    println!("| beside | swept, objects/s | what | count | p50 | p90 | p99 | max |\n|---|---|---|---|---|---|---|---|");
    for phase in phases {
        let beside = phase.batch.map_or_else(|| "nothing".into(), |batch| format!("collection, {batch} objects a transaction"));
        for (what, l) in [("push of 16 pages", phase.push), ("read of 16 pages", phase.read)] {
            println!(
                "| {beside} | {:.0} | {what} | {} | {:.1} ms | {:.1} ms | {:.1} ms | {:.1} ms |",
                phase.swept_per_second, l.count, l.p50, l.p90, l.p99, l.max
            );
        }
    }
}
