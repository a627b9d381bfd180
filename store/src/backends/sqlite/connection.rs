//! Connections: one writer thread that puts all waiting transactions into one commit (one fsync),
//! and a few readers.
//!
//! Each job runs in a savepoint of its own, so that a failure affects no other job. A job is
//! answered only after the commit is durable, unless it may be undone: such a job comes into a
//! commit of its own that does not wait for the disk. The next commit that waits makes both
//! durable: its fsync is of the whole log.

mod checkpoint;
mod files;

use super::tx::SqliteTx;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::tx::Answer;
use crate::room::{Freeing, MadeRoom, Room};
use checkpoint::Checkpointer;
use files::{Files, is_read_only};
use parking_lot::Mutex;
use rusqlite::Connection;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};

/// Readers at a time.
pub(super) const READERS: usize = 4;
/// Jobs in one commit.
const BATCH: usize = 64;
/// Pause between attempts to share a database that is open for this process alone.
const SHARE_AFTER: Duration = Duration::from_secs(1);

/// Other messages of SQLite on a full disk.
const AS_IF_FULL: [&str; 2] = ["disk I/O error", "unable to open database file"];

/// What a transaction does.
type Work = Box<dyn FnOnce(&mut SqliteTx) -> Result<Answer> + Send>;

/// Answers a job, given why the commit failed if it did.
type Reply = Box<dyn FnOnce(Option<&str>) + Send>;
/// Runs a job. Without a connection it is only answered.
type Run = Box<dyn FnOnce(Option<&mut SqliteTx>) -> Reply + Send>;
/// A transaction waiting for the writer.
struct Job {
    run: Run,
    may_be_undone: bool,
}

#[derive(Debug)]
pub(super) struct Database {
    jobs: mpsc::Sender<Job>,
    /// `None` for a database in memory: its only connection is the writer's.
    readers: Option<Arc<Readers>>,
    rows_written: Arc<AtomicU64>,
    /// Transactions that wait for the writer.
    waiting: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Readers {
    files: Files,
    idle: Mutex<Vec<SqliteTx>>,
    permits: Arc<Semaphore>,
}

impl Database {
    /// Opens the file, or a database in memory. Without a `floor` the free space at which growth
    /// stops depends on the disk. The writer caches `cache` KiB of pages.
    pub(super) async fn open(path: Option<PathBuf>, floor: Option<u64>, cache: u32) -> Result<Self> {
        let rows_written = Arc::new(AtomicU64::new(0));
        let (jobs, queue) = mpsc::channel::<Job>();
        let (ready, opened) = oneshot::channel();
        let readers = path.map(|path| {
            Arc::new(Readers { files: Files::at(path, floor, cache), idle: Mutex::default(), permits: Arc::new(Semaphore::new(READERS)) })
        });
        let (counter, of_writer) = (Arc::clone(&rows_written), readers.clone());
        std::thread::Builder::new()
            .name("metadata-writer".into())
            .spawn(move || {
                let readers = of_writer.as_deref();
                let connection = match readers {
                    Some(readers) => readers.files.open(),
                    None => files::in_memory(),
                };
                match connection {
                    Err(failed) => drop(ready.send(Err(failed.into()))),
                    Ok(connection) => match readers.map(|readers| Checkpointer::start(&readers.files)).transpose() {
                        Err(error) => drop(ready.send(Err(no_thread(&error)))),
                        Ok(checkpointer) => {
                            drop(ready.send(Ok(())));
                            Writer {
                                current: Some(SqliteTx::on(connection)),
                                readers,
                                checkpointer,
                                begins_anew: false,
                                empties_log: false,
                                written_before: 0,
                                rows_written: &counter,
                            }
                            .run(&queue);
                        }
                    },
                }
            })
            .map_err(|e| no_thread(&e))?;
        let opened = opened.await.map_err(|_| Error::Internal("the metadata writer ended while opening".into()))?;
        let database = Self { jobs, readers, rows_written, waiting: Arc::default() };
        match opened {
            Ok(()) => Ok(database),
            Err(error) => Err(database.name(error)),
        }
    }

    fn room(&self) -> Option<&Arc<Room>> {
        self.readers.as_ref().map(|readers| &readers.files.room)
    }

    /// An error by its cause.
    fn name(&self, error: Error) -> Error {
        match error {
            Error::Unavailable { what: "metadata", reason }
                if AS_IF_FULL.iter().any(|words| reason.contains(words)) && self.room().is_some_and(|room| room.is_spent()) =>
            {
                Error::Full(reason)
            }
            other => other,
        }
    }

    /// Makes room for work that frees space.
    pub(super) async fn make_room(&self, work: Freeing) -> Result<MadeRoom> {
        let Some(room) = self.room().filter(|room| room.is_low()).cloned() else { return Ok(MadeRoom::default()) };
        pfr_service::task::spawn_blocking(move || room.make(work)).await?
    }

    /// Runs `job` as [`Database::write`] does, unless the disk is nearly full.
    ///
    /// # Errors
    /// [`Error::Full`]: nothing has changed.
    #[boxed]
    pub(super) async fn grow(&self, job: Work) -> Result<Answer> {
        if let Some(room) = self.room()
            && room.admit().is_err()
        {
            // The log may hold the missing space: an empty transaction makes the writer truncate
            // it.
            drop(self.write(Box::new(|_| Ok(Box::new(())))).await);
            room.admit()?;
        }
        self.write(job).await
    }

    /// Runs `job` as [`Database::write_undoable`] does, unless the disk is nearly full. Then it
    /// writes nothing at all, and takes nothing from the reserve: such jobs come again and again.
    ///
    /// # Errors
    /// [`Error::Full`]: nothing has changed.
    #[boxed]
    pub(super) async fn grow_undoable(&self, job: Work) -> Result<Answer> {
        if let Some(room) = self.room() {
            room.admit()?;
        }
        self.write_undoable(job).await
    }

    pub(super) fn rows_written(&self) -> u64 {
        self.rows_written.load(Ordering::Relaxed)
    }

    /// Runs `job` in a transaction; returns when it is durable.
    #[boxed]
    pub(super) async fn write(&self, job: Work) -> Result<Answer> {
        self.enqueue(job, false).await
    }

    /// Runs `job` in a transaction that is undone if the host goes down before a later one is
    /// durable; does not wait for the disk.
    #[boxed]
    pub(super) async fn write_undoable(&self, job: Work) -> Result<Answer> {
        self.enqueue(job, true).await
    }

    async fn enqueue(&self, job: Work, may_be_undone: bool) -> Result<Answer> {
        let (answer, answered) = oneshot::channel();
        let waiting = Arc::clone(&self.waiting);
        let run = move |connection: Option<&mut SqliteTx>| -> Reply {
            waiting.fetch_sub(1, Ordering::Relaxed);
            let result = connection.map(|tx| {
                tx.waiting = waiting;
                in_savepoint(tx, job)
            });
            Box::new(move |failure| {
                let result = match (result, failure) {
                    // Report the job's own error: it would have failed anyway.
                    (Some(Err(error)), _) => Err(error),
                    (_, Some(reason)) => Err(commit_error(reason)),
                    (Some(Ok(value)), None) => Ok(value),
                    (None, None) => Err(Error::Internal("a metadata transaction did not run".into())),
                };
                drop(answer.send(result));
            })
        };
        let job = Job { run: Box::new(run), may_be_undone };
        // Small writes of reads and sessions go on as well. Without space they would fail, or end
        // the process: SQLite maps the wal-index from a file, and a page of it without its blocks
        // is fatal (SIGBUS).
        let _room = self.make_room(Freeing::Deletion).await;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.jobs.send(job).map_err(|_| Error::Internal("the metadata writer has ended".into()))?;
        let answer = answered.await.map_err(|_| Error::Internal("the metadata writer dropped a transaction".into()))?;
        answer.map_err(|error| self.name(error))
    }

    /// Runs `job` in a read transaction: it sees one state.
    #[boxed]
    pub(super) async fn read(&self, job: Work) -> Result<Answer> {
        let Some(readers) = &self.readers else { return self.write(job).await };
        let permit = match Arc::clone(&readers.permits).try_acquire_owned() {
            Ok(permit) => permit,
            // In a task, which is always polled: a caller that is not polled could get a permit and
            // keep it while the writer waits for it.
            Err(_) => {
                let waits = pfr_service::task::spawn(Arc::clone(&readers.permits).acquire_owned());
                waits.await??
            }
        };
        let pool = Arc::clone(readers);
        let read = pfr_service::task::spawn_blocking(move || {
            // The permit belongs to the blocking task: a cancelled read still occupies its
            // connection.
            let _permit = permit;
            let idle = pool.idle.lock().pop();
            let mut tx = match idle {
                Some(tx) => tx,
                None => SqliteTx::on(pool.files.open_reader().map_err(|e| Error::metadata(&e))?),
            };
            tx.execute_batch("BEGIN").map_err(|e| Error::metadata(&e))?;
            let result = job(&mut tx);
            if tx.execute_batch("ROLLBACK").is_ok() && !is_read_only(&tx) {
                pool.idle.lock().push(tx);
            }
            result
        })
        .await
        .map_err(|e| Error::Internal(format!("a metadata reader failed: {e}")))?;
        read.map_err(|error| self.name(error))
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

fn in_savepoint(tx: &mut SqliteTx, job: Work) -> Result<Answer> {
    let sql = |tx: &SqliteTx, statement| tx.execute_batch(statement).map_err(|e| Error::metadata(&e));
    sql(tx, "SAVEPOINT job")?;
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(tx)))
        .unwrap_or_else(|_| Err(Error::Internal("a metadata transaction panicked".into())));
    match result {
        Ok(value) => {
            sql(tx, "RELEASE job")?;
            Ok(value)
        }
        Err(error) => {
            // A full disk may have rolled everything back already; the savepoint is then gone.
            drop(sql(tx, "ROLLBACK TO job; RELEASE job"));
            Err(error)
        }
    }
}

/// Whether this failure of a transaction stays until all connections were closed: the database was
/// read-only, or the log is to be emptied.
fn needs_new_connections(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::ReadOnly) || needs_new_log(error)
}

/// Whether an fsync of the log has failed. The kernel counts pages as written then that are not on
/// disk, and among them are those of commits that did not wait. Later commits would be durable only
/// as far as these pages are.
///
/// The last connection that is closed copies the log into the database file and removes it. Another
/// process, or a WAL checkpoint in this one, may have the database open: so it is not enough that
/// this process closes its connections.
fn needs_new_log(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|e| e.extended_code == rusqlite::ffi::SQLITE_IOERR_FSYNC)
}

/// A connection for the writer.
fn connect(files: Option<&Files>) -> std::result::Result<Connection, files::Failed> {
    files.map_or_else(files::in_memory, |files| files.connect(files::BUSY_TIMEOUT))
}

/// The writer's thread.
struct Writer<'a> {
    current: Option<SqliteTx>,
    readers: Option<&'a Readers>,
    checkpointer: Option<Checkpointer>,
    /// Whether all connections are to be closed before the next transaction.
    begins_anew: bool,
    /// Whether the log is to be emptied before the next transaction.
    empties_log: bool,
    /// Rows that earlier connections wrote.
    written_before: u64,
    rows_written: &'a AtomicU64,
}

impl<'a> Writer<'a> {
    fn run(mut self, queue: &mpsc::Receiver<Job>) {
        while let Ok(first) = self.next(queue) {
            let is_closed = self.current.as_ref().is_none_or(|tx| self.begins_anew || is_read_only(tx));
            let no_reads = if is_closed { self.close_all().filter(|_| self.empties_log) } else { None };
            let files = self.readers.map(|readers| &readers.files);
            let connection = match self.current.take().map_or_else(|| connect(files).map(SqliteTx::on), Ok) {
                Ok(connection) => self.current.insert(connection),
                Err(failed) => {
                    (first.run)(None)(Some(&Error::from(failed).to_string()));
                    continue;
                }
            };
            if self.empties_log {
                match checkpoint::cut(connection) {
                    Ok(true) => self.empties_log = false,
                    failed => {
                        let reason = failed.err().map_or_else(|| "it is in use".to_owned(), |error| error.to_string());
                        (first.run)(None)(Some(&format!("an fsync of the log failed, and it cannot be emptied yet: {reason}")));
                        continue;
                    }
                }
            }
            drop(no_reads);
            let (replies, failure) = transact(connection, first, queue);
            self.rows_written.store(self.written_before + connection.total_changes(), Ordering::Relaxed);
            if let Some(files) = files {
                files.save_space(connection);
            }
            self.begins_anew = failure.as_ref().is_some_and(needs_new_connections);
            self.empties_log = failure.as_ref().is_some_and(needs_new_log);
            let reason = failure.map(|e| e.to_string());
            for reply in replies {
                reply(reason.as_deref());
            }
            if let (Some(checkpointer), Some(files)) = (&self.checkpointer, files)
                && !files.is_alone()
            {
                checkpointer.committed();
            }
        }
        // The writer's connection is closed last, so that it removes the log.
        if let Some(readers) = self.readers {
            readers.idle.lock().clear();
        }
    }

    /// The next job. Meanwhile, a database that is open for this process alone is shared again as
    /// soon as possible.
    fn next(&mut self, queue: &mpsc::Receiver<Job>) -> std::result::Result<Job, mpsc::RecvError> {
        loop {
            let Some(readers) = self.readers.filter(|readers| readers.files.is_alone()) else { return queue.recv() };
            match queue.recv_timeout(SHARE_AFTER) {
                Ok(job) => return Ok(job),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(mpsc::RecvError),
                Err(mpsc::RecvTimeoutError::Timeout) => self.share(readers),
            }
        }
    }

    /// Opens the database shared with other processes, if there is space for that and no read is
    /// under way.
    fn share(&mut self, readers: &Readers) {
        if !readers.files.can_share() {
            return;
        }
        // Connections of both kinds at once would not see each other.
        let Ok(_all) = readers.permits.try_acquire_many(READERS as u32) else { return };
        readers.idle.lock().clear();
        self.close();
        match readers.files.open() {
            Ok(connection) => self.current = Some(SqliteTx::on(connection)),
            Err(failed) => {
                tracing::warn!(error = %Error::from(failed), "reopening the metadata failed, the next transaction tries again")
            }
        }
    }

    /// Closes the connections of readers as well. A process's connections share what SQLite knows
    /// of the log. If one of them was opened while the disk was read-only, that stays read-only
    /// until the last of them is closed. No read begins before the permit is dropped.
    fn close_all(&mut self) -> Option<SemaphorePermit<'a>> {
        // Later reads wait behind this, so it takes only as long as the current reads.
        let all = self.readers.and_then(|readers| {
            let all = futures::executor::block_on(readers.permits.acquire_many(READERS as u32));
            readers.idle.lock().clear();
            all.ok()
        });
        self.close();
        all
    }

    fn close(&mut self) {
        self.written_before += self.current.take().map_or(0, |old| old.total_changes());
    }
}

/// Runs a job and those that wait behind it in one transaction; returns how to answer them, and why
/// the transaction failed if it did. Those behind one that may be undone do not join it: their
/// commit waits for the disk.
fn transact(connection: &mut SqliteTx, first: Job, queue: &mpsc::Receiver<Job>) -> (Vec<Reply>, Option<rusqlite::Error>) {
    let mut replies = Vec::new();
    let syncs = !first.may_be_undone;
    let begun = connection.set_syncs(syncs).and_then(|()| connection.execute_batch("BEGIN IMMEDIATE"));
    let failure = match begun {
        Err(error) => {
            replies.push((first.run)(None));
            Some(error)
        }
        Ok(()) => {
            replies.push((first.run)(Some(&mut *connection)));
            // If SQLite has rolled the transaction back on its own, a further job would commit by
            // itself, but be answered that nothing happened.
            while syncs
                && replies.len() < BATCH
                && !connection.is_autocommit()
                && let Ok(next) = queue.try_recv()
            {
                replies.push((next.run)(Some(&mut *connection)));
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
    (replies, failure)
}

#[cfg(test)]
mod tests;
