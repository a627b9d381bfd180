//! How many packs remain after many small pushes, and how many bytes merging copies.

use super::{line, timed};
use crate::Result;
use pfr_schema::frame;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_store::{GcOptions, GcPart, Options, Store};
use pfr_testkit::frames;
use pfr_testkit::snapshot::Shape;
use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

/// Pages of 4 KiB.
const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 1, n_heads: 2, head_dim: 64, dtype: Dtype::Bf16 };
/// New pages of a push, each with K and V. A push has about 22 kB, its documents included.
const PAGES: u64 = 2;
/// Pushes between two runs of merging.
const PUSHES_BETWEEN: u64 = 30;

pub async fn run(disk: &Path, pushes: u64) -> Result<()> {
    let dir = tempfile::tempdir_in(disk)?;
    let store = Store::open(dir.path(), Options::default()).await?;
    let options = GcOptions { part: GcPart::Merging, grace: Duration::ZERO, ..GcOptions::default() };
    let (mut moved, mut seconds) = (0, 0.0);
    for number in 0..pushes {
        push(&store, number).await?;
        if (number + 1) % PUSHES_BETWEEN == 0 {
            let (took, report) = timed(store.gc(&options, &mut |_| ())).await?;
            moved += report.moved_bytes;
            seconds += took;
        }
    }
    let packs = store.metadata().packs(None, usize::MAX).await?;
    let live: u64 = packs.iter().map(|pack| pack.live_bytes).sum();
    line(&format!("{pushes} small pushes, merged every {PUSHES_BETWEEN}: packs"), &[packs.len() as f64], "packs");
    line("full packs that would hold them", &[live.div_ceil(store.full_pack().bytes) as f64], "packs");
    line("bytes copied for each byte pushed", &[moved as f64 / live.max(1) as f64], "bytes");
    line("merging", &[moved as f64 / 1e6 / f64::max(seconds, 1e-9)], "MB/s");
    Ok(())
}

/// Pushes a snapshot whose pages are in no other snapshot.
async fn push(store: &Store, number: u64) -> Result<()> {
    let pages: Vec<u64> = (number * PAGES..(number + 1) * PAGES).collect();
    let made = Shape::of(GEOMETRY).snapshot(&pages).build();
    let tree = &made.trees[0];
    let session = store.open_push(&"bench/small".parse()?).await?.id;
    let documents = tree.runs.iter().chain([&tree.document, &made.config, &made.manifest]);
    let mut frames: Vec<bytes::Bytes> = tree.pages.iter().chain(documents).map(frames::of).collect();
    frames.push(frame::end_mark(frames.len() as u64).into());
    store.ingest(&session, futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>))).await?;
    store.commit(&session, made.digest(), None, None).await?;
    Ok(())
}
