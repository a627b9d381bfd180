//! Collects the same amount of garbage from stores of different sizes, to show whether the time
//! depends on the size.

use super::Args;
use super::rows::{Ahead, LEASE, Rows, StoredRun};
use super::straight;
use crate::Result;
use crate::report::Spread;
use pfr_schema::{Digest, RepositoryName};
use pfr_store::{Collected, Metadata, SqliteMetadata};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Maximum number of objects of a snapshot: 8 page chunks of 512 pages, and three documents.
pub const SNAPSHOT: u64 = 8 * (2 * 512 + 1) + 3;
/// Pages of a full page chunk.
pub const RUN: usize = 512;
/// The number of the first blob that a round pushes; the live blobs have lower numbers.
const FIRST_GARBAGE: u64 = 1 << 40;

/// A store and what was measured in it.
#[derive(Clone, Debug)]
pub struct Store {
    /// Live objects.
    pub live: u64,
    /// Whether its rows were written straight into the tables.
    pub straight: bool,
    /// Objects when the database was measured: the live ones and the garbage of one round.
    pub objects: u64,
    /// Bytes of the database at that time.
    pub database_bytes: u64,
    /// Seconds of the first collection, which looks at all packs of the live objects.
    pub base_look_seconds: f64,
    /// Measurements, by round.
    pub rounds: Vec<Round>,
}

/// Measurements of one round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    /// Objects pushed that become garbage.
    pub pushed: u64,
    /// Seconds to insert their rows: for each pack one transaction with one fsync.
    pub push_seconds: f64,
    /// Seconds of the collection after their leases have ended, which deletes nothing.
    pub look_seconds: f64,
    /// Seconds to delete their snapshots, which deletes no objects yet.
    pub delete_seconds: f64,
    /// Objects collected.
    pub swept: u64,
    /// Seconds to collect them.
    pub sweep_seconds: f64,
    /// Transactions of that collection.
    pub transactions: u64,
    /// Seconds of the longest of these transactions.
    pub longest_transaction_seconds: f64,
    /// Packs that the collection emptied.
    pub retired: u64,
    /// Seconds to mark those packs as emptied.
    pub retire_seconds: f64,
    /// Seconds of a collection when nothing is due.
    pub idle_seconds: f64,
}

/// A store in a file of results, with the spread of each measurement over the rounds.
#[derive(Serialize)]
pub struct Case {
    live: u64,
    straight: bool,
    objects: u64,
    database_bytes: u64,
    base_look_seconds: f64,
    rounds: usize,
    transactions: Option<Spread>,
    swept: Option<Spread>,
    retired: Option<Spread>,
    push_seconds: Option<Spread>,
    look_seconds: Option<Spread>,
    delete_seconds: Option<Spread>,
    sweep_seconds: Option<Spread>,
    longest_transaction_seconds: Option<Spread>,
    retire_seconds: Option<Spread>,
    idle_seconds: Option<Spread>,
}

impl Store {
    /// The spreads over the rounds.
    pub fn case(&self) -> Case {
        let of = |value: fn(&Round) -> f64| Spread::of(self.rounds.iter().map(value));
        Case {
            live: self.live,
            straight: self.straight,
            objects: self.objects,
            database_bytes: self.database_bytes,
            base_look_seconds: self.base_look_seconds,
            rounds: self.rounds.len(),
            transactions: of(|r| r.transactions as f64),
            swept: of(|r| r.swept as f64),
            retired: of(|r| r.retired as f64),
            push_seconds: of(|r| r.push_seconds),
            look_seconds: of(|r| r.look_seconds),
            delete_seconds: of(|r| r.delete_seconds),
            sweep_seconds: of(|r| r.sweep_seconds),
            longest_transaction_seconds: of(|r| r.longest_transaction_seconds),
            retire_seconds: of(|r| r.retire_seconds),
            idle_seconds: of(|r| r.idle_seconds),
        }
    }
}

struct Open {
    /// The directory of the database, deleted when this is dropped.
    dir: TempDir,
    metadata: Arc<dyn Metadata>,
    ahead: Ahead,
    shared: StoredRun,
    report: Store,
}

pub async fn run(disk: &Path, args: &Args) -> Result<Vec<Store>> {
    let mut stores = Vec::new();
    for live in &args.live {
        stores.push(open(disk, *live, args).await?);
    }
    for round in 0..args.rounds {
        for store in &mut stores {
            let done = store.round(round as u64, args).await?;
            eprintln!(
                "round {round}, {} live: {} swept in {:.2} s, {:.0} objects/s",
                store.report.live,
                done.swept,
                done.sweep_seconds,
                done.swept as f64 / done.sweep_seconds
            );
            store.report.rounds.push(done);
        }
    }
    Ok(stores.into_iter().map(|store| store.report).collect())
}

pub fn database(dir: &Path) -> PathBuf {
    dir.join("metadata.sqlite")
}

/// Fills a new database with `live` objects. Returns the database, the number of objects in it, and
/// a page chunk that snapshots of garbage also list.
pub async fn fill(dir: &Path, live: u64, straight_above: u64, ahead: &Ahead) -> Result<(Arc<dyn Metadata>, u64, StoredRun)> {
    let metadata = SqliteMetadata::open(&database(dir), ahead.clock()).await?;
    if live > straight_above {
        drop(metadata);
        let (objects, shared) = straight::fill(&database(dir), "bench/live", live, SNAPSHOT, RUN)?;
        return Ok((SqliteMetadata::open(&database(dir), ahead.clock()).await?, objects, shared));
    }
    let (mut left, mut shared, name) = (live, None, "bench/live".parse::<RepositoryName>()?);
    let mut rows = Rows::new(&*metadata, 1);
    while left >= 6 {
        let objects = SNAPSHOT.min(left);
        let (_, own) = rows.snapshot(&name, objects, RUN, None).await?;
        shared = shared.or(Some(own));
        left -= objects;
    }
    drop(rows);
    Ok((metadata, live, shared.ok_or("too few live objects")?))
}

async fn open(disk: &Path, live: u64, args: &Args) -> Result<Open> {
    let (dir, ahead) = (tempfile::Builder::new().prefix("pf-bench-gc-").tempdir_in(disk)?, Ahead::default());
    let start = Instant::now();
    let (metadata, objects, shared) = fill(dir.path(), live, args.straight_above, &ahead).await?;
    eprintln!("{objects} live objects in {:.1} s", start.elapsed().as_secs_f64());
    ahead.advance(2 * LEASE);
    let (base_look_seconds, _, _) = collect_all(&*metadata, args.batch).await?;
    let straight = live > args.straight_above;
    let report = Store { live: objects, straight, objects, database_bytes: 0, base_look_seconds, rounds: Vec::new() };
    Ok(Open { dir, metadata, ahead, shared, report })
}

/// Collects until nothing is due. Returns the seconds, the results with the number of transactions,
/// and the seconds of the longest transaction.
pub async fn collect_all(metadata: &dyn Metadata, batch: usize) -> Result<(f64, (Collected, u64), f64)> {
    let (start, mut longest, mut all, mut transactions) = (Instant::now(), Duration::ZERO, Collected::default(), 0);
    loop {
        let step = Instant::now();
        let done = metadata.collect(batch).await?;
        longest = longest.max(step.elapsed());
        transactions += 1;
        all.released += done.released;
        all.unclaimed += done.unclaimed;
        all.examined += done.examined;
        all.frame_bytes += done.frame_bytes;
        all.sessions += done.sessions;
        if !done.more {
            return Ok((start.elapsed().as_secs_f64(), (all, transactions), longest.as_secs_f64()));
        }
    }
}

/// Pushes snapshots with `objects` objects in all, which will become garbage. Returns their
/// manifests.
pub async fn push_garbage(
    metadata: &dyn Metadata,
    name: &RepositoryName,
    first: u64,
    objects: u64,
    shared: StoredRun,
) -> Result<Vec<Digest>> {
    let (mut rows, mut left, mut manifests) = (Rows::new(metadata, first), objects, Vec::new());
    while left >= 6 {
        let part = SNAPSHOT.min(left);
        manifests.push(rows.snapshot(name, part, RUN, Some(shared)).await?.0);
        left -= part;
    }
    Ok(manifests)
}

impl Open {
    async fn round(&mut self, number: u64, args: &Args) -> Result<Round> {
        let name: RepositoryName = "bench/garbage".parse()?;
        let start = Instant::now();
        let first = FIRST_GARBAGE + number * 2 * args.garbage;
        let manifests = push_garbage(&*self.metadata, &name, first, args.garbage, self.shared).await?;
        let push_seconds = start.elapsed().as_secs_f64();
        self.ahead.advance(2 * LEASE);
        let (look_seconds, (looked, _), _) = collect_all(&*self.metadata, args.batch).await?;
        if looked.released + looked.unclaimed > 0 {
            return Err(format!("{looked:?}: the collection deleted objects that snapshots hold").into());
        }
        if self.report.rounds.is_empty() {
            self.report.database_bytes = database(self.dir.path()).metadata()?.len();
            self.report.objects = self.report.live + args.garbage;
        }
        let start = Instant::now();
        for manifest in &manifests {
            self.metadata.delete_snapshot(name.clone(), *manifest).await?;
        }
        let delete_seconds = start.elapsed().as_secs_f64();
        let (sweep_seconds, (swept, transactions), longest_transaction_seconds) = collect_all(&*self.metadata, args.batch).await?;
        let short = args.garbage.abs_diff(swept.released);
        if short > 2 * manifests.len() as u64 + 6 {
            return Err(format!("{} objects were pushed and {} collected", args.garbage, swept.released).into());
        }
        let start = Instant::now();
        let retired = self.metadata.empty_packs(1_000_000).await?.empty;
        let retire_seconds = start.elapsed().as_secs_f64();
        let idle_seconds = collect_all(&*self.metadata, args.batch).await?.0;
        Ok(Round {
            pushed: args.garbage,
            push_seconds,
            look_seconds,
            delete_seconds,
            swept: swept.released,
            sweep_seconds,
            transactions,
            longest_transaction_seconds,
            retired,
            retire_seconds,
            idle_seconds,
        })
    }
}
