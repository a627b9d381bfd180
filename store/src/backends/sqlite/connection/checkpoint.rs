//! WAL checkpoints beside the writer: a thread of its own copies committed pages from the log into
//! the database file.
//!
//! By default SQLite runs a WAL checkpoint within the commit that makes the log too long. With
//! random keys this takes a third of a second, and delays every transaction that waits for the
//! writer (docs/decisions/0015). Checkpoints beside a writer need SQLite 3.51.3: in earlier
//! versions a race between the two can damage the database (sqlite.org/wal.html, "the WAL-reset
//! bug"). The program contains its own SQLite, which is new enough.

use super::files::Files;
use rusqlite::hooks::Wal;
use rusqlite::{Connection, OpenFlags};
use std::cell::Cell;
use std::ffi::c_int;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Pages in the log after which a checkpoint runs: 16 MiB, less on a small disk. In tests only a
/// few, so that there are many checkpoints.
const WORTH: c_int = if cfg!(test) { 8 } else { 8 << 10 };
/// If the log is this many times as long, the writer itself runs the checkpoint. The log starts
/// again at its beginning only when all of it is checkpointed, and a writer without pauses is
/// always ahead of the other thread.
const TOO_LONG: c_int = 8;

thread_local!(static PAGES_IN_LOG: Cell<c_int> = const { Cell::new(0) });
thread_local!(static WORTH_HERE: Cell<c_int> = const { Cell::new(WORTH) });

/// Pages after which a checkpoint runs, given the bytes of the reserve: the log must fit into it.
pub(super) fn worth(reserve: u64) -> c_int {
    c_int::try_from(reserve / super::files::PAGE).unwrap_or(WORTH).clamp(8, WORTH)
}

/// Counts the pages of the log after each commit. Must be called in the writer's thread.
pub(super) fn watch(writer: &Connection, worth: c_int) {
    WORTH_HERE.set(worth);
    writer.wal_hook(Some(|wal: &Wal, pages: c_int| {
        PAGES_IN_LOG.set(pages);
        if pages >= TOO_LONG * WORTH_HERE.get()
            && let Err(error) = wal.checkpoint()
        {
            // The transaction is committed all the same, and the next one tries again.
            failed(&error);
        }
        Ok(())
    }));
}

/// Runs a WAL checkpoint of the complete log and truncates the log, so that its bytes are free.
/// Does not wait for readers: while a reader needs the log, the log keeps its length. Returns
/// whether the log is empty.
pub(super) fn cut(writer: &Connection) -> rusqlite::Result<bool> {
    writer.busy_timeout(Duration::ZERO)?;
    let busy: rusqlite::Result<i64> = writer.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0));
    writer.busy_timeout(super::files::BUSY_TIMEOUT)?;
    let is_empty = busy? == 0;
    if is_empty {
        PAGES_IN_LOG.set(0);
    }
    Ok(is_empty)
}

/// Shortest time between two log lines about WAL checkpoints that fail.
const LINE: Duration = Duration::from_secs(60);

/// Logs a failed WAL checkpoint, and aborts the process after a failed fsync of the database. After
/// such an fsync the kernel marks pages as written that are not on disk, and SQLite does not write
/// them again: the next WAL checkpoint would succeed, and the log with these pages would be
/// discarded. A new process reads the complete log. PostgreSQL does the same.
pub(super) fn failed(error: &rusqlite::Error) {
    thread_local!(static SAID: Cell<Option<Instant>> = const { Cell::new(None) });
    match error.sqlite_error() {
        Some(code) if code.extended_code == rusqlite::ffi::SQLITE_IOERR_FSYNC => {
            tracing::error!(%error, "fsync of the metadata failed: aborting, so that the next start reads the changes from the log");
            std::process::abort()
        }
        // Another checkpoint is running.
        Some(code) if code.code == rusqlite::ErrorCode::DatabaseBusy => {}
        _ if SAID.get().is_some_and(|said| said.elapsed() < LINE) => {}
        _ => {
            SAID.set(Some(Instant::now()));
            tracing::warn!(%error, "WAL checkpoint of the metadata failed, the log grows");
        }
    }
}

#[derive(Debug)]
pub(super) struct Checkpointer {
    wake: SyncSender<()>,
    /// Pages of the log that were checkpointed when the last checkpoint ended.
    checkpointed: Arc<AtomicI32>,
}

impl Checkpointer {
    /// Starts the thread. It ends when this is dropped, after the current checkpoint.
    pub(super) fn start(files: &Files) -> std::io::Result<Self> {
        let path = files.path.clone();
        // One request may wait while a checkpoint runs.
        let (wake, woken) = sync_channel(1);
        let checkpointed = Arc::new(AtomicI32::new(0));
        let result = Arc::clone(&checkpointed);
        std::thread::Builder::new().name("metadata-checkpoint".into()).spawn(move || {
            while let Ok(()) = woken.recv() {
                // The database may be closed by the time that a wake arrives.
                if Arc::strong_count(&result) == 1 {
                    break;
                }
                match checkpoint(&path) {
                    Ok(pages) => result.store(pages, Ordering::Relaxed),
                    Err(error) => failed(&error),
                }
            }
        })?;
        Ok(Self { wake, checkpointed })
    }

    /// Called after each commit, in the writer's thread.
    pub(super) fn committed(&self) {
        let (pages, checkpointed) = (PAGES_IN_LOG.get(), self.checkpointed.load(Ordering::Relaxed));
        // If the log is shorter than that, the writer has started it again at its beginning.
        let left = if pages < checkpointed { pages } else { pages - checkpointed };
        // If the log is longer, the writer itself runs the checkpoint, and the thread would only
        // delay it.
        let worth = WORTH_HERE.get();
        if left >= worth && pages < TOO_LONG * worth {
            // An error means that a request is waiting already.
            let _ = self.wake.try_send(());
        }
    }
}

/// Runs a passive WAL checkpoint. Returns the number of pages of the log that are checkpointed.
/// Never blocks. Closes its connection again: after an outage of the disk, no connection may remain
/// that was opened while the disk was read-only.
fn checkpoint(path: &Path) -> rusqlite::Result<c_int> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.execute_batch("PRAGMA synchronous = FULL")?;
    connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(2))
}
