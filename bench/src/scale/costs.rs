//! Measures the cost of operations on this machine, on SQLite and on tmpfs.

use crate::Result;
use crate::gc::rows::{Ahead, LEASE, Rows};
use bytes::Bytes;
use futures::StreamExt as _;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{self, Header};
use pfr_schema::{Digest, Kind, RepositoryName};
use pfr_store::{Metadata, Options, PushId, SqliteMetadata, Store};
use rusqlite::Connection;
use serde::Serialize;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Concurrent pushers where transactions share commits.
const PUSHERS: usize = 32;
/// Snapshots that are pushed for the measurement, and pages of each.
const SNAPSHOTS: usize = 60;
const PAGES: usize = 1600;
/// Pages of a page chunk in the measurement.
const RUN: usize = 314;

/// Measured costs: operations in one second of one thread, and bytes of rows.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Costs {
    /// Objects indexed.
    pub inserted: f64,
    /// Reference counts raised.
    pub raised: f64,
    /// Objects collected.
    pub swept: f64,
    /// Digests in requests for missing blobs.
    pub asked: f64,
    /// Pushes of hardly any rows (session, pack, commit), 32 at a time.
    pub commits: f64,
    /// Bytes taken in and verified, one stream, on tmpfs.
    pub bytes_in: f64,
    /// Bytes given out, one stream, from tmpfs.
    pub bytes_out: f64,
    /// Bytes of an object with its indexes.
    pub object_bytes: f64,
    /// Of these, the index over digests.
    pub digest_index_bytes: f64,
    /// Bytes of a node's entry.
    pub child_bytes: f64,
    /// Bytes of a snapshot's rows.
    pub snapshot_bytes: f64,
}

/// Measures costs of rows on `disk` and of bytes on `tmpfs`.
pub async fn measure(disk: &Path, tmpfs: &Path) -> Result<Costs> {
    let (dir, ahead) = (tempfile::Builder::new().prefix("pf-bench-scale-").tempdir_in(disk)?, Ahead::default());
    let path = dir.path().join("metadata.sqlite");
    let metadata = SqliteMetadata::open(&path, ahead.clock()).await?;
    let name: RepositoryName = "bench/costs".parse()?;
    let mut rows = Rows::new(&*metadata, 1);
    let start = Instant::now();
    let (mut manifests, mut all) = (Vec::new(), Vec::new());
    for _ in 0..SNAPSHOTS {
        let components = rows.pages(PAGES);
        let runs: Vec<_> = components.chunks(2 * RUN).map(|part| rows.run(part)).collect();
        manifests.push(rows.commit(&name, &runs, None, None).await?);
        all.push(components);
    }
    let objects = (SNAPSHOTS * (2 * PAGES + PAGES.div_ceil(RUN) + 3)) as f64;
    let inserted = objects / start.elapsed().as_secs_f64();
    let sizes = Sizes::read(&path)?;
    let (object_bytes, digest_index_bytes, child_bytes) = (
        sizes.of(&["objects", "objects_digest", "objects_pack"]) / objects,
        sizes.of(&["objects_digest"]) / objects,
        sizes.of(&["containers"]) / (SNAPSHOTS * (2 * PAGES + PAGES.div_ceil(RUN) + 2)) as f64,
    );
    // The same pages in other page chunks: few objects are new, and reference counts are raised.
    let start = Instant::now();
    for components in &all {
        let runs: Vec<_> = components.chunks(2 * (RUN - 1)).map(|part| rows.run(part)).collect();
        manifests.push(rows.commit(&name, &runs, None, None).await?);
    }
    let raised = (SNAPSHOTS * 2 * PAGES) as f64 / start.elapsed().as_secs_f64();
    let wanted: Vec<(Digest, Kind)> = all.iter().flatten().take(50_000).map(|digest| (*digest, Kind::Blob)).collect();
    let (count, push) = (wanted.len() as f64, PushId("costs".into()));
    metadata.open_push(push.clone(), name.clone(), LEASE).await?;
    let start = Instant::now();
    metadata.missing(push, wanted, LEASE).await?;
    let asked = count / start.elapsed().as_secs_f64();
    let (commits, snapshot_bytes) = small(&metadata, &path, child_bytes).await?;
    ahead.advance(2 * LEASE);
    crate::gc::collect_all(&*metadata, 2000).await?;
    for manifest in manifests {
        metadata.delete_snapshot(name.clone(), manifest).await?;
    }
    let (seconds, swept) = crate::gc::collect_all(&*metadata, 2000).await?;
    let (bytes_in, bytes_out) = bytes(tmpfs).await?;
    let swept = swept as f64 / seconds;
    Ok(Costs {
        inserted,
        raised,
        swept,
        asked,
        commits,
        bytes_in,
        bytes_out,
        object_bytes,
        digest_index_bytes,
        child_bytes,
        snapshot_bytes,
    })
}

/// Concurrent small pushes. Returns how many there are in a second, and the bytes of rows that are
/// not objects.
async fn small(metadata: &Arc<dyn Metadata>, path: &Path, child_bytes: f64) -> Result<(f64, f64)> {
    const EACH: u64 = 40;
    let tables = [
        "manifests",
        "sqlite_autoindex_manifests_1",
        "manifests_list",
        "manifests_object",
        "manifests_used",
        "parents",
        "tags",
        "tags_manifest",
        "changes",
    ];
    let before = (Sizes::read(path)?, Instant::now());
    let running = (0..PUSHERS as u64).map(|pusher| {
        let metadata = Arc::clone(metadata);
        tokio::spawn(async move {
            let mut rows = Rows::new(&*metadata, (pusher + 1) << 32);
            let (name, mut parent) = (format!("bench/small-{pusher}").parse()?, None);
            for turn in 0..EACH {
                let components = rows.pages(1);
                let run = rows.run(&components);
                parent = Some(rows.commit(&name, &[run], parent, Some(&format!("turn-{turn}"))).await?);
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        })
    });
    for done in futures::future::join_all(running).await {
        done??;
    }
    let pushes = (PUSHERS as u64 * EACH) as f64;
    let commits = pushes / before.1.elapsed().as_secs_f64();
    let grown = Sizes::read(path)?.of(&tables) - before.0.of(&tables);
    // Page trees and manifests are nodes too: each is a row with few entries.
    Ok((commits, grown / pushes + 3.0 * (40.0 - child_bytes)))
}

/// Bytes of each table and index.
struct Sizes(Vec<(String, f64)>);

impl Sizes {
    fn read(path: &Path) -> Result<Self> {
        let connection = Connection::open(path)?;
        let mut select = connection.prepare("SELECT name, SUM(pgsize) FROM dbstat GROUP BY name")?;
        let rows = select.query_map([], |r| Ok((r.get(0)?, r.get::<_, i64>(1)? as f64)))?.collect::<rusqlite::Result<_>>()?;
        Ok(Self(rows))
    }

    fn of(&self, names: &[&str]) -> f64 {
        self.0.iter().filter(|(name, _)| names.contains(&name.as_str())).map(|(_, bytes)| bytes).sum()
    }
}

/// Bytes through a store in memory, one stream: taken in, given out.
async fn bytes(tmpfs: &Path) -> Result<(f64, f64)> {
    const BLOB: usize = 180_224;
    const BLOBS: u64 = 2048;
    let dir = tempfile::Builder::new().prefix("pf-bench-scale-").tempdir_in(tmpfs)?;
    let store = Store::open(dir.path(), Options::default()).await?;
    let (mut frames, mut digests) = (Vec::<Bytes>::new(), Vec::new());
    for number in 0..BLOBS {
        let raw: Vec<u8> = (0..BLOB as u64 / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number).to_le_bytes()).collect();
        let header =
            Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(&raw), raw_len: BLOB as u64, stored_len: BLOB as u64 };
        digests.push(header.digest);
        frames.push(frame::encode(&header, &raw).into());
    }
    frames.push(frame::end_mark(BLOBS).into());
    let total = BLOBS as f64 * BLOB as f64;
    let push = store.open_push(&"bench/bytes".parse()?).await?.id;
    let start = Instant::now();
    store.ingest(&push, futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>))).await?;
    let bytes_in = total / start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mut out = store.frames(digests).await?;
    while let Some(piece) = out.next().await {
        drop(piece?);
    }
    Ok((bytes_in, total / start.elapsed().as_secs_f64()))
}
