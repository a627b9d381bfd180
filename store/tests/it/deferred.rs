//! Collection of nodes whose children are not known: they are kept, and the rest is collected.

use crate::common::{pieces, push, repository, snapshot};
use object_store::memory::InMemory;
use pfr_schema::Digest;
use pfr_schema::api::GcReport;
use pfr_store::{Clock, GcOptions, Metadata, Options, PostgresMetadata, PostgresOptions, SqliteMetadata, Store};
use pfr_testkit::postgres;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Runs a statement behind the store's back.
type Sql = Box<dyn Fn(&str)>;

struct Rig {
    now: Arc<AtomicU64>,
    store: Store,
    sql: Sql,
    /// How the database writes the bytes ff.
    unreadable: &'static str,
    /// Where the database lies, if it is a file.
    _dir: Option<TempDir>,
}

impl Rig {
    fn new(metadata: Arc<dyn Metadata>, now: Arc<AtomicU64>, sql: Sql, unreadable: &'static str, dir: Option<TempDir>) -> Self {
        let options = Options { clock: clock(&now), ..Options::default() };
        Self { now, store: Store::new(Arc::new(InMemory::new()), metadata, options), sql, unreadable, _dir: dir }
    }

    fn hours(&self, hours: u64) {
        self.now.fetch_add(hours * 3_600_000, Ordering::SeqCst);
    }

    async fn gc(&self, batch: usize) -> GcReport {
        let options = GcOptions { grace: Duration::ZERO, batch, ..GcOptions::default() };
        let collected = tokio::time::timeout(Duration::from_secs(60), self.store.gc(&options, &mut |_| ())).await;
        collected.expect("a collection ends").unwrap()
    }

    async fn objects(&self) -> u64 {
        self.store.metadata().audit(false).await.unwrap().objects
    }

    async fn id(&self, digest: &Digest) -> i64 {
        self.store.metadata().find(vec![*digest]).await.unwrap()[0].as_ref().unwrap().id
    }
}

fn clock(now: &Arc<AtomicU64>) -> Clock {
    let now = Arc::clone(now);
    Clock::new(move || now.load(Ordering::SeqCst))
}

/// Changes to the row of a page chunk, with the number of objects that are left then: the chunk and
/// its pages.
fn spoils(rig: &Rig, run: i64, page: i64) -> [(String, u64); 3] {
    [
        (format!("UPDATE containers SET children = {} WHERE object = {run}", rig.unreadable), 5),
        (format!("DELETE FROM containers WHERE object = {run}"), 5),
        (format!("DELETE FROM objects WHERE id = {page}"), 4),
    ]
}

/// Sizes of batches.
const BATCHES: [usize; 3] = [1, 3, 2000];

/// Each change with so many sizes of batches.
async fn defers(rig: impl AsyncFn() -> Rig, batches: usize) {
    for spoil in 0..3 {
        for batch in BATCHES.into_iter().cycle().skip(spoil).take(batches) {
            let rig = rig().await;
            let (hurt, well) = (snapshot(&[1, 2], vec![]), snapshot(&[8], vec![]));
            push(&rig.store, &hurt, "hurt").await.unwrap();
            push(&rig.store, &well, "well").await.unwrap();
            let (run, page) = (rig.id(&hurt.runs[0].digest).await, rig.id(&Digest::sha256(&hurt.pages[0])).await);
            for snapshot in [&hurt, &well] {
                rig.store.delete_snapshot(&repository(), &snapshot.manifest.digest).await.unwrap();
            }
            let (statement, left) = spoils(&rig, run, page)[spoil].clone();
            (rig.sql)(&statement);
            rig.hours(3);
            rig.store.gc(&GcOptions { dry_run: true, batch, ..GcOptions::default() }, &mut |_| ()).await.unwrap();
            let report = rig.gc(batch).await;
            assert_eq!((report.deferred, rig.objects().await), (1, left), "{statement}, batch {batch}: {report:?}");
            assert_eq!(rig.gc(batch).await.deferred, 0, "it is not tried again at once");
            rig.hours(25);
            let report = rig.gc(batch).await;
            assert_eq!((report.deferred, rig.objects().await), (1, left), "{statement}, batch {batch}: {report:?}");
        }
    }
}

/// The same for what was uploaded and never held; it goes when it can be read again.
async fn defers_unclaimed(rig: impl AsyncFn() -> Rig) {
    for batch in BATCHES {
        let rig = rig().await;
        let (hurt, well) = (snapshot(&[1, 2], vec![]), snapshot(&[8], vec![]));
        for snapshot in [&hurt, &well] {
            let session = rig.store.open_push(&repository()).await.unwrap();
            rig.store.ingest(&session.id, pieces(&snapshot.stream(), 777)).await.unwrap();
        }
        let all = rig.objects().await;
        let manifest = rig.id(&hurt.manifest.digest).await;
        (rig.sql)("CREATE TABLE kept AS SELECT object, children FROM containers");
        (rig.sql)(&format!("UPDATE containers SET children = {} WHERE object = {manifest}", rig.unreadable));
        rig.hours(3);
        let report = rig.gc(batch).await;
        assert_eq!((report.deferred, report.unclaimed + report.released), (1, all - 8), "batch {batch}: {report:?}");
        (rig.sql)("UPDATE containers SET children = (SELECT k.children FROM kept k WHERE k.object = containers.object)");
        rig.hours(25);
        let report = rig.gc(batch).await;
        assert_eq!((report.deferred, rig.objects().await), (0, 0), "batch {batch}: {report:?}");
    }
}

async fn sqlite() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metadata.sqlite");
    let now = Arc::new(AtomicU64::new(1_000_000_000));
    let metadata = SqliteMetadata::open(&path, clock(&now)).await.unwrap();
    let tables = rusqlite::Connection::open(&path).unwrap();
    Rig::new(metadata, now, Box::new(move |statement| tables.execute_batch(statement).unwrap()), "x'ff'", Some(dir))
}

#[tokio::test]
async fn a_node_whose_children_are_unknown_does_not_block_collection() {
    defers(sqlite, BATCHES.len()).await;
    defers_unclaimed(sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_in_postgresql() {
    defers_in_postgresql(1).await;
}

mod long {
    use super::{BATCHES, defers_in_postgresql};

    #[tokio::test(flavor = "multi_thread")]
    async fn nor_in_postgresql() {
        defers_in_postgresql(BATCHES.len()).await;
    }
}

async fn defers_in_postgresql(batches: usize) {
    let rig = async || {
        let (url, now) = (postgres::database(), Arc::new(AtomicU64::new(1_000_000_000)));
        let options = PostgresOptions { max_connections: 2, clock: Some(clock(&now)), ..PostgresOptions::default() };
        let metadata = PostgresMetadata::connect(&url, options).await.unwrap();
        Rig::new(metadata, now, Box::new(move |statement| drop(postgres::sql(&url, statement))), "'\\xff'::bytea", None)
    };
    defers(&rig, batches).await;
    defers_unclaimed(&rig).await;
}
