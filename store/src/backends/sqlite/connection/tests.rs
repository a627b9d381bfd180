//! Tests of the connections when callers are dropped and when the disk is full.

use super::*;
use futures::FutureExt as _;
use std::sync::mpsc::channel;

async fn on_disk(dir: &tempfile::TempDir) -> Database {
    Database::open(Some(dir.path().join("metadata.sqlite")), None, 8_000).await.expect("a new file")
}

fn fail(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_reads_still_occupy_their_connections() {
    let dir = tempfile::tempdir().expect("a directory");
    let database = on_disk(&dir).await;
    let readers = Arc::clone(database.readers.as_ref().expect("a file has readers"));
    let (begun, begins) = channel();
    let mut gates = Vec::new();
    for _ in 0..READERS {
        let (open, gate) = channel::<()>();
        gates.push(open);
        let begun = begun.clone();
        let mut read = Box::pin(database.reads(move |_| {
            begun.send(()).unwrap_or_default();
            gate.recv().unwrap_or_default();
            Ok(())
        }));
        assert!((&mut read).now_or_never().is_none());
        tokio::task::block_in_place(|| begins.recv()).expect("it begins");
        // Drop the caller.
        drop(read);
    }
    assert_eq!(readers.permits.available_permits(), 0, "they all still read");
    let mut late = Box::pin(database.reads(move |_| {
        begun.send(()).unwrap_or_default();
        Ok(())
    }));
    assert!((&mut late).now_or_never().is_none());
    drop(gates);
    late.await.expect("there is room again");
    drop(readers.permits.acquire_many(READERS as u32).await.expect("all are idle again"));
    assert!(readers.idle.lock().len() <= READERS);
}

#[tokio::test]
async fn a_transaction_that_sqlite_rolled_back_does_not_affect_later_ones() {
    let dir = tempfile::tempdir().expect("a directory");
    let database = on_disk(&dir).await;
    database
        .writes(|tx| {
            tx.execute_batch("CREATE TABLE filled (what TEXT, bytes BLOB)").map_err(fail)?;
            let pages: i64 = tx.query_row("PRAGMA page_count", [], |row| row.get(0)).map_err(fail)?;
            let limit: i64 = tx.query_row(&format!("PRAGMA max_page_count = {}", pages + 4), [], |row| row.get(0)).map_err(fail)?;
            assert!(limit <= pages + 4);
            Ok(())
        })
        .await
        .expect("the table is made");
    let (open, gate) = channel::<()>();
    let insert = |what: &'static str, bytes: usize, gate: Option<std::sync::mpsc::Receiver<()>>| {
        database.writes(move |tx| {
            if let Some(gate) = gate {
                gate.recv().unwrap_or_default();
            }
            tx.execute("INSERT INTO filled VALUES (?1, zeroblob(?2))", rusqlite::params![what, bytes as i64]).map_err(fail)
        })
    };
    // The first one waits until all are in the queue: they come into one transaction.
    let mut jobs = [insert("first", 1, Some(gate)), insert("large", 1 << 20, None), insert("last", 1, None)].map(Box::pin);
    for job in &mut jobs {
        assert!(job.now_or_never().is_none());
    }
    drop(open);
    let [first, large, last] = jobs;
    let (first, large, last) = (first.await, large.await, last.await);
    assert!(matches!(large, Err(Error::Full(_))), "{large:?}");
    let found: Vec<String> = database
        .reads(|tx| {
            let mut select = tx.prepare("SELECT what FROM filled ORDER BY what").map_err(fail)?;
            select.query_map([], |row| row.get(0)).and_then(Iterator::collect).map_err(fail)
        })
        .await
        .expect("it can be read");
    let promised: Vec<&str> =
        [("first", first.is_ok()), ("last", last.is_ok())].iter().filter(|(_, ok)| *ok).map(|(what, _)| *what).collect();
    assert_eq!(found, promised, "the rows that are there, and those that were acknowledged");
    assert_eq!(promised, ["last"], "the job after the failed one is not affected");
}

#[tokio::test]
async fn only_what_may_be_undone_does_not_wait_for_the_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let database = on_disk(&dir).await;
    let level = |tx: &mut SqliteTx| tx.query_row("PRAGMA synchronous", [], |row| row.get::<_, i64>(0)).map_err(fail);
    // 2 is FULL, 1 is NORMAL.
    for _ in 0..2 {
        assert_eq!(database.writes(level).await.expect("it is read"), 2);
        let undoable = database.write_undoable(untyped(level)).await.expect("it is read");
        assert_eq!(typed::<i64>(undoable).expect("a number"), 1);
        let grown = database.grow_undoable(untyped(level)).await.expect("it is read");
        assert_eq!(typed::<i64>(grown).expect("a number"), 1);
    }
    let (open, gate) = channel::<()>();
    let mut waits = Box::pin(database.writes(move |_| {
        gate.recv().unwrap_or_default();
        Ok(())
    }));
    assert!((&mut waits).now_or_never().is_none());
    let mut joins = Box::pin(database.write_undoable(untyped(level)));
    assert!((&mut joins).now_or_never().is_none());
    drop(open);
    waits.await.expect("it is written");
    assert_eq!(typed::<i64>(joins.await.expect("it is read")).expect("a number"), 2, "it comes into a commit that waits anyway");
}

#[tokio::test]
async fn undoable_growth_on_a_nearly_full_disk_is_refused_without_a_transaction() {
    let dir = tempfile::tempdir().expect("a directory");
    // The floor is so high that the disk is always below it.
    let path = dir.path().join("metadata.sqlite");
    let database = Database::open(Some(path), Some(u64::MAX), 8_000).await.expect("a new file");
    let refused = database.grow_undoable(untyped(|_| Ok(()))).now_or_never();
    assert!(matches!(refused, Some(Err(Error::Full(_)))), "it waits for nothing: {refused:?}");
    assert!(database.grow(untyped(|_| Ok(()))).now_or_never().is_none(), "other growth makes room first");
}

#[test]
fn no_commit_follows_in_a_log_whose_fsync_failed() {
    let failure = |code| rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None);
    assert!(needs_new_connections(&failure(rusqlite::ffi::SQLITE_IOERR_FSYNC)), "it may have lost commits that did not wait");
    assert!(needs_new_connections(&failure(rusqlite::ffi::SQLITE_READONLY)));
    assert!(!needs_new_log(&failure(rusqlite::ffi::SQLITE_READONLY)), "the log is as it was");
    for code in [rusqlite::ffi::SQLITE_FULL, rusqlite::ffi::SQLITE_IOERR_WRITE, rusqlite::ffi::SQLITE_BUSY] {
        assert!(!needs_new_connections(&failure(code)), "{code}");
    }
}

#[test]
fn a_log_whose_fsync_failed_is_emptied_before_the_next_commit_although_others_have_it_open() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("metadata.sqlite");
    let readers =
        Readers { files: Files::at(path.clone(), None, 8_000), idle: Mutex::default(), permits: Arc::new(Semaphore::new(READERS)) };
    drop(readers.files.open().map_err(Error::from).expect("a new file"));
    // As in another process: a read that needs the log.
    let other = Connection::open(&path).expect("it opens");
    other.execute_batch("CREATE TABLE kept (what TEXT); BEGIN").expect("a table");
    let count = |connection: &Connection| connection.query_row("SELECT count(*) FROM kept", [], |row| row.get::<_, i64>(0));
    assert_eq!(count(&other).expect("it reads"), 0);
    let log = || std::fs::metadata(dir.path().join("metadata.sqlite-wal")).expect("it is there").len();
    let (answers, answered) = channel::<(bool, Option<String>)>();
    let job = || {
        let answers = answers.clone();
        let run = move |connection: Option<&mut SqliteTx>| -> Reply {
            let ran = connection.is_some();
            Box::new(move |failure: Option<&str>| drop(answers.send((ran, failure.map(str::to_owned)))))
        };
        Job { run: Box::new(run), may_be_undone: false }
    };
    let rows_written = AtomicU64::new(0);
    let (readers, rows_written) = (&readers, &rows_written);
    std::thread::scope(|scope| {
        let (jobs, queue) = channel::<Job>();
        scope.spawn(move || {
            let failed = Writer {
                current: None,
                readers: Some(readers),
                checkpointer: None,
                begins_anew: true,
                empties_log: true,
                written_before: 0,
                rows_written,
            };
            failed.run(&queue);
        });
        jobs.send(job()).expect("it runs");
        let (ran, failure) = answered.recv().expect("an answer");
        assert!(!ran && failure.as_ref().is_some_and(|reason| reason.contains("fsync")), "{ran} {failure:?}");
        assert!(log() > 0);
        other.execute_batch("COMMIT").expect("it ends");
        jobs.send(job()).expect("it runs");
        assert_eq!(answered.recv().expect("an answer"), (true, None));
        assert_eq!(log(), 0, "nothing follows what may not be on disk");
    });
    assert_eq!(count(&other).expect("nothing is lost"), 0);
}

fn untyped<T: Send + 'static>(job: impl FnOnce(&mut SqliteTx) -> Result<T> + Send + 'static) -> Work {
    Box::new(move |tx| Ok(Box::new(job(tx)?)))
}

fn typed<T: 'static>(answer: Answer) -> Option<T> {
    answer.downcast().map(|answer| *answer).ok()
}

impl Database {
    async fn writes<T: Send + 'static>(&self, job: impl FnOnce(&mut SqliteTx) -> Result<T> + Send + 'static) -> Result<T> {
        Ok(typed(self.write(untyped(job)).await?).expect("the type of the job"))
    }

    async fn reads<T: Send + 'static>(&self, job: impl FnOnce(&mut SqliteTx) -> Result<T> + Send + 'static) -> Result<T> {
        Ok(typed(self.read(untyped(job)).await?).expect("the type of the job"))
    }
}

/// Inserts rows under scattered keys without a pause, and sends each number when it is durable.
async fn scatter(database: &Database, numbers: std::ops::Range<i64>, mut done: impl FnMut(i64)) {
    for number in numbers {
        let insert = move |tx: &mut SqliteTx| {
            for part in 0..20 {
                let key = (number * 20 + part).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64.cast_signed());
                tx.execute("INSERT INTO scattered VALUES (?1, ?2, zeroblob(100))", [key, number]).map_err(fail)?;
            }
            Ok(())
        };
        database.writes(insert).await.expect("it is written");
        done(number);
    }
}

async fn scattered(database: &Database) {
    let table = "CREATE TABLE IF NOT EXISTS scattered (key INTEGER PRIMARY KEY, number INTEGER, bytes BLOB)";
    database.writes(|tx| tx.execute_batch(table).map_err(fail)).await.expect("the table is made");
}

/// Rows of each number that has any.
async fn rows(database: &Database) -> std::collections::BTreeMap<i64, i64> {
    let rows = |tx: &mut SqliteTx| {
        let mut select = tx.prepare("SELECT number, count(*) FROM scattered GROUP BY number").map_err(fail)?;
        select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).and_then(Iterator::collect).map_err(fail)
    };
    database.reads(rows).await.expect("it can be read")
}

async fn is_sound(database: &Database) {
    let check = |tx: &mut SqliteTx| tx.query_row("PRAGMA integrity_check", [], |row| row.get::<_, String>(0)).map_err(fail);
    assert_eq!(database.reads(check).await.expect("it can be checked"), "ok");
}

#[test]
fn sqlite_has_no_race_of_checkpoints() {
    assert!(rusqlite::version_number() >= 3_051_003, "SQLite {} may lose pages of a log that begins anew", rusqlite::version());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_stays_short_although_the_writer_never_pauses() {
    let dir = tempfile::tempdir().expect("a directory");
    let database = Arc::new(on_disk(&dir).await);
    scattered(&database).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let reading = {
        let database = Arc::clone(&database);
        tokio::spawn(async move {
            while !*stopped.borrow() {
                assert!(rows(&database).await.values().all(|rows| *rows == 20), "a reader sees whole transactions");
                // The log cannot be overwritten while a reader needs it: with a reader at every
                // moment it would grow for ever.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
    };
    scatter(&database, 0..800, |_| ()).await;
    stop.send(true).expect("it listens");
    reading.await.expect("no reader saw half a transaction");
    assert_eq!(rows(&database).await, (0..800).map(|number| (number, 20)).collect());
    is_sound(&database).await;
    let log = std::fs::metadata(dir.path().join("metadata.sqlite-wal")).expect("it is there").len();
    // Scattered keys: about a page for each row.
    let written = 800 * 20 * 2048;
    assert!(log < written / 2, "a log of {log} bytes after writing {written}");
}

const KILLED: &str = "PF_TEST_SCATTER_IN";

/// Not a test of its own: the child process that the next test starts and kills.
#[tokio::test]
async fn child_that_writes_until_it_is_killed() {
    let Some(path) = std::env::var_os(KILLED) else { return };
    let database = Database::open(Some(path.into()), None, 8_000).await.expect("it opens");
    let first = rows(&database).await.last_key_value().map_or(0, |(number, _)| number + 1);
    scatter(&database, first..i64::MAX, |number| println!("durable {number}")).await;
}

#[tokio::test]
async fn a_kill_between_commits_and_checkpoints_loses_nothing_that_was_acknowledged() {
    use std::io::BufRead as _;
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("metadata.sqlite");
    scattered(&on_disk(&dir).await).await;
    for round in 0..12 {
        let mut child = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "backends::sqlite::connection::tests::child_that_writes_until_it_is_killed", "--nocapture"])
            .env(KILLED, &path)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("it starts");
        let lines = std::io::BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(std::result::Result::ok);
        let mut durable = lines.filter_map(|line| line.rsplit_once("durable ").and_then(|(_, number)| number.parse::<i64>().ok()));
        let seen = durable.nth(20 + 7 * round).expect("it writes");
        child.kill().expect("it can be killed");
        // Numbers that were sent before the kill and are not read yet.
        let promised = durable.last().unwrap_or(seen);
        child.wait().expect("it ends");
        let database = on_disk(&dir).await;
        let found = rows(&database).await;
        assert!(found.keys().copied().eq(0..found.len() as i64), "numbers without gaps");
        assert!(found.len() as i64 > promised, "{promised} was acknowledged, {} are there", found.len());
        assert!(found.values().all(|rows| *rows == 20), "whole transactions");
        is_sound(&database).await;
    }
}

#[test]
fn many_open_and_close_a_new_database_at_once() {
    for _ in 0..30 {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("metadata.sqlite");
        let open = || (0..10).try_for_each(|_| Files::at(path.clone(), None, 8_000).open().map(drop).map_err(Error::from));
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..6).map(|_| scope.spawn(open)).collect();
            for one in all {
                one.join().expect("no panic").expect("it opens");
            }
        });
    }
}
