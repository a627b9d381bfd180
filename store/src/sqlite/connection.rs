//! Connections: one writer thread that puts all waiting transactions into one commit (one fsync), and a few readers.
//!
//! Each job runs in a savepoint of its own, so one that fails does not take its neighbours along; it is answered only after
//! the commit is durable.

mod checkpoint;

use crate::error::{Error, Result};
use checkpoint::Checkpointer;
use parking_lot::Mutex;
use rusqlite::{Connection, OpenFlags};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, oneshot};

/// Readers at a time.
const READERS: usize = 4;
/// Jobs in one commit.
const BATCH: usize = 64;
/// Migrations in order; a database's `user_version` is how many it has had.
const MIGRATIONS: &[&str] = &[include_str!("../../../migrations/sqlite/0001_init.sql")];

/// Answers a job, given why the commit failed if it did.
type Reply = Box<dyn FnOnce(Option<&str>) + Send>;
/// A transaction waiting for the writer; without a connection it is only answered.
type Job = Box<dyn FnOnce(Option<&Connection>) -> Reply + Send>;

#[derive(Debug)]
pub(super) struct Database {
    jobs: mpsc::Sender<Job>,
    /// `None` for a database in memory: its only connection is the writer's.
    readers: Option<Arc<Readers>>,
    rows_written: Arc<AtomicU64>,
    /// Transactions that were sent and not taken up.
    waiting: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Readers {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
    permits: Arc<Semaphore>,
}

impl Database {
    pub(super) async fn open(path: Option<PathBuf>) -> Result<Self> {
        let rows_written = Arc::new(AtomicU64::new(0));
        let (jobs, queue) = mpsc::channel::<Job>();
        let (ready, opened) = oneshot::channel();
        let (counter, writer_path) = (Arc::clone(&rows_written), path.clone());
        std::thread::Builder::new()
            .name("metadata-writer".into())
            .spawn(move || match open_writer(writer_path.as_deref()) {
                Err(failed) => drop(ready.send(Err(failed.into()))),
                Ok(connection) => {
                    let checkpointer = writer_path.clone().map(Checkpointer::start).transpose();
                    match checkpointer {
                        Err(error) => drop(ready.send(Err(no_thread(&error)))),
                        Ok(checkpointer) => {
                            drop(ready.send(Ok(())));
                            run_writer(connection, writer_path.as_deref(), &queue, checkpointer.as_ref(), &counter);
                        }
                    }
                }
            })
            .map_err(|e| no_thread(&e))?;
        opened.await.map_err(|_| Error::Internal("the metadata writer ended while opening".into()))??;
        let readers = path.map(|path| Arc::new(Readers { path, idle: Mutex::default(), permits: Arc::new(Semaphore::new(READERS)) }));
        Ok(Self { jobs, readers, rows_written, waiting: Arc::default() })
    }

    pub(super) fn rows_written(&self) -> u64 {
        self.rows_written.load(Ordering::Relaxed)
    }

    /// Runs `job` in a transaction; returns when it is durable.
    pub(super) async fn write<T: Send + 'static>(&self, job: impl FnOnce(&Connection) -> Result<T> + Send + 'static) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        let waiting = Arc::clone(&self.waiting);
        let job: Job = Box::new(move |connection| {
            waiting.fetch_sub(1, Ordering::Relaxed);
            let result = connection.map(|c| in_savepoint(c, job));
            Box::new(move |failure| {
                let result = match (result, failure) {
                    // The job's own error is the better one: it would have failed anyway.
                    (Some(Err(error)), _) => Err(error),
                    (_, Some(reason)) => Err(commit_error(reason)),
                    (Some(Ok(value)), None) => Ok(value),
                    (None, None) => Err(Error::Internal("a metadata transaction did not run".into())),
                };
                drop(answer.send(result));
            })
        });
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.jobs.send(job).map_err(|_| Error::Internal("the metadata writer has ended".into()))?;
        answered.await.map_err(|_| Error::Internal("the metadata writer dropped a transaction".into()))?
    }

    /// Runs `job` as [`Database::write`] does. It can do less than it was asked for and asks its second argument between steps whether
    /// others wait for the writer.
    pub(super) async fn write_politely<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection, &dyn Fn() -> bool) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let waiting = Arc::clone(&self.waiting);
        self.write(move |connection| job(connection, &|| waiting.load(Ordering::Relaxed) > 0)).await
    }

    /// Runs `job` in a read transaction: it sees one state.
    pub(super) async fn read<T: Send + 'static>(&self, job: impl FnOnce(&Connection) -> Result<T> + Send + 'static) -> Result<T> {
        let Some(readers) = &self.readers else { return self.write(job).await };
        let permit = Arc::clone(&readers.permits).acquire_owned().await.map_err(|e| Error::Internal(e.to_string()))?;
        let pool = Arc::clone(readers);
        tokio::task::spawn_blocking(move || {
            // Not the caller's: who is no longer waited for still reads, until its connection lies idle again.
            let _permit = permit;
            let idle = pool.idle.lock().pop();
            let connection = match idle {
                Some(connection) => connection,
                None => open_reader(&pool.path).map_err(|e| Error::metadata(&e))?,
            };
            let result = (|| {
                let transaction = connection.unchecked_transaction().map_err(|e| Error::metadata(&e))?;
                job(&transaction)
            })();
            if !is_read_only(&connection) {
                pool.idle.lock().push(connection);
            }
            result
        })
        .await
        .map_err(|e| Error::Internal(format!("a metadata reader failed: {e}")))?
    }
}

fn no_thread(error: &std::io::Error) -> Error {
    Error::Unavailable { what: "metadata", reason: error.to_string() }
}

fn commit_error(reason: &str) -> Error {
    if reason.contains("disk is full") {
        Error::Full(reason.to_owned())
    } else {
        Error::Unavailable { what: "metadata", reason: reason.to_owned() }
    }
}

fn in_savepoint<T>(connection: &Connection, job: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
    let sql = |statement| connection.execute_batch(statement).map_err(|e| Error::metadata(&e));
    sql("SAVEPOINT job")?;
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(connection)))
        .unwrap_or_else(|_| Err(Error::Internal("a metadata transaction panicked".into())));
    match result {
        Ok(value) => {
            sql("RELEASE job")?;
            Ok(value)
        }
        Err(error) => {
            // A full disk may have rolled everything back already; the savepoint is then gone.
            drop(sql("ROLLBACK TO job; RELEASE job"));
            Err(error)
        }
    }
}

/// Whether it was opened while the disk was read-only: SQLite then falls back to reading, and stays with it whatever becomes of the disk.
fn is_read_only(connection: &Connection) -> bool {
    connection.is_readonly(rusqlite::MAIN_DB).unwrap_or(false)
}

fn run_writer(
    connection: Connection,
    path: Option<&Path>,
    queue: &mpsc::Receiver<Job>,
    checkpointer: Option<&Checkpointer>,
    rows_written: &AtomicU64,
) {
    let (mut current, mut written_before) = (Some(connection), 0);
    while let Ok(first) = queue.recv() {
        if current.as_ref().is_none_or(is_read_only) {
            // The old one goes first: a process's connections share what SQLite knows of the log, and that stays read-only as long as one is open.
            written_before += current.take().map_or(0, |old| old.total_changes());
        }
        let connection = match current.take().map_or_else(|| connect(path), Ok) {
            Ok(connection) => &*current.insert(connection),
            Err(failed) => {
                first(None)(Some(&Error::from(failed).to_string()));
                continue;
            }
        };
        let mut replies = Vec::new();
        let begun = connection.execute_batch("BEGIN IMMEDIATE");
        let failure = match begun {
            Err(error) => {
                replies.push(first(None));
                Some(error)
            }
            Ok(()) => {
                replies.push(first(Some(connection)));
                // Once SQLite has rolled the transaction back on its own, another job would commit alone, and be told that nothing happened.
                while replies.len() < BATCH
                    && !connection.is_autocommit()
                    && let Ok(next) = queue.try_recv()
                {
                    replies.push(next(Some(connection)));
                }
                // If SQLite rolled the transaction back on its own, nothing in it happened.
                let committed = if connection.is_autocommit() {
                    Err(rusqlite::Error::SqliteFailure(
                        rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL),
                        Some("the transaction was rolled back: database or disk is full".into()),
                    ))
                } else {
                    connection.execute_batch("COMMIT")
                };
                committed.err()
            }
        };
        if failure.is_some() && !connection.is_autocommit() {
            drop(connection.execute_batch("ROLLBACK"));
        }
        rows_written.store(written_before + connection.total_changes(), Ordering::Relaxed);
        let reason = failure.map(|e| e.to_string());
        for reply in replies {
            reply(reason.as_deref());
        }
        if let Some(checkpointer) = checkpointer {
            checkpointer.committed();
        }
    }
}

/// Bytes kept aside beside the database: SQLite needs a few pages of space before it reads the first one, and a registry that was killed
/// while its disk was full must start again and serve what it has.
const RESERVE: usize = 512 << 10;

fn open_writer(path: Option<&Path>) -> std::result::Result<Connection, Failed> {
    let Some(path) = path else { return connect(None) };
    let mut reserve = path.as_os_str().to_owned();
    reserve.push("-reserve");
    let connection = match connect(Some(path)) {
        Err(Failed::Sql(error)) if !is_busy(&error) && std::fs::remove_file(&reserve).is_ok() => connect(Some(path))?,
        other => other?,
    };
    if !Path::new(&reserve).exists()
        && let Err(error) = std::fs::write(&reserve, vec![0xff; RESERVE])
    {
        drop(std::fs::remove_file(&reserve));
        tracing::warn!(%error, "no space is kept aside for starting on a full disk; the next start tries again");
    }
    Ok(connection)
}

/// How long to wait for another process that is at the database.
const PATIENCE: Duration = Duration::from_secs(30);

/// The writer's connection. SQLite does not wait for who sets up the log of a new database, or cleans away that of one nobody uses any more:
/// so this does.
fn connect(path: Option<&Path>) -> std::result::Result<Connection, Failed> {
    let start = Instant::now();
    loop {
        match connect_once(path, PATIENCE.saturating_sub(start.elapsed())) {
            Err(Failed::Sql(error)) if is_busy(&error) && start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(5)),
            other => return other,
        }
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy)
}

/// Why a database was not opened.
enum Failed {
    Sql(rusqlite::Error),
    Other(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Sql(error) => Self::metadata(&error),
            Failed::Other(error) => error,
        }
    }
}

impl From<rusqlite::Error> for Failed {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

fn connect_once(path: Option<&Path>, patience: Duration) -> std::result::Result<Connection, Failed> {
    let connection = match path {
        Some(path) => Connection::open(path),
        None => Connection::open_in_memory(),
    }?;
    connection.busy_timeout(patience)?;
    // Keys are digests: a transaction touches about as many pages as objects, and writes each twice. Half of the usual page is half of that.
    connection.execute_batch("PRAGMA page_size = 2048")?;
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;
         PRAGMA cache_size = -64000; PRAGMA journal_size_limit = 67108864; PRAGMA temp_store = MEMORY;",
    )?;
    connection.set_prepared_statement_cache_capacity(64);
    checkpoint::watch(&connection);
    migrate(&connection)?;
    connection.busy_timeout(PATIENCE)?;
    Ok(connection)
}

fn open_reader(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.busy_timeout(PATIENCE)?;
    connection.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -8000; PRAGMA mmap_size = 0;")?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

fn migrate(connection: &Connection) -> std::result::Result<(), Failed> {
    connection.execute_batch("BEGIN IMMEDIATE")?;
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    let done = usize::try_from(version).unwrap_or(usize::MAX);
    if done > MIGRATIONS.len() {
        drop(connection.execute_batch("ROLLBACK"));
        return Err(Failed::Other(Error::Unavailable {
            what: "metadata",
            reason: format!("it has version {version}, this program knows {}: use a newer one", MIGRATIONS.len()),
        }));
    }
    if done == MIGRATIONS.len() {
        // Nothing is written: a full disk does not matter.
        return Ok(connection.execute_batch("ROLLBACK")?);
    }
    for migration in &MIGRATIONS[done..] {
        connection.execute_batch(migration)?;
    }
    Ok(connection.execute_batch(&format!("PRAGMA user_version = {}; COMMIT", MIGRATIONS.len()))?)
}

#[cfg(test)]
mod tests;
