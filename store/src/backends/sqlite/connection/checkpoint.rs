//! Checkpoints beside the writer: a thread of its own carries committed pages from the log into the
//! database file.
//!
//! SQLite does it within the commit that makes the log too long. With random keys that is a third
//! of a second, and every transaction that waits for the writer waits as long
//! (docs/decisions/0015). Checkpoints beside a writer need SQLite 3.51.3: in earlier ones a race of
//! the two can damage the database (sqlite.org/wal.html, "the WAL-reset bug"). It comes with the
//! program.

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

/// Pages that are worth a checkpoint: 16 MiB, less on a small disk. A few in tests, so that they
/// see many.
const WORTH: c_int = if cfg!(test) { 8 } else { 8 << 10 };
/// A log so many times as long as is worth a checkpoint is carried by the writer itself: the log
/// begins anew only when nothing in it is left to be carried, and a writer without a pause is
/// always ahead of the other thread.
const TOO_LONG: c_int = 8;

thread_local!(static PAGES_IN_LOG: Cell<c_int> = const { Cell::new(0) });
thread_local!(static WORTH_HERE: Cell<c_int> = const { Cell::new(WORTH) });

/// Pages that are worth a checkpoint where so many bytes are kept for one: what waits in the log
/// must fit into the reserve.
pub(super) fn worth(reserve: u64) -> c_int {
    c_int::try_from(reserve / super::files::PAGE).unwrap_or(WORTH).clamp(8, WORTH)
}

/// To be called for a writer's connection in the writer's thread.
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

/// Carries the whole log into the database and cuts it, so that its bytes are free. Waits for no
/// reader: then the log stays as long as it is.
pub(super) fn cut(writer: &Connection) -> rusqlite::Result<()> {
    writer.busy_timeout(Duration::ZERO)?;
    let busy: rusqlite::Result<i64> = writer.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0));
    writer.busy_timeout(super::files::PATIENCE)?;
    if busy? == 0 {
        PAGES_IN_LOG.set(0);
    }
    Ok(())
}

/// How often a checkpoint that fails is worth a line.
const LINE: Duration = Duration::from_secs(60);

/// After a failed fsync of the database the kernel takes pages for written that are not, and SQLite
/// does not carry again what it has carried: the next checkpoint would succeed and let the log go.
/// A new process reads the whole log, so this one ends. PostgreSQL does the same.
pub(super) fn failed(error: &rusqlite::Error) {
    thread_local!(static SAID: Cell<Option<Instant>> = const { Cell::new(None) });
    match error.sqlite_error() {
        Some(code) if code.extended_code == rusqlite::ffi::SQLITE_IOERR_FSYNC => {
            tracing::error!(%error, "fsync of the metadata failed: aborting, so that the next start reads the changes from the log");
            std::process::abort()
        }
        // The other one is at it.
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
    /// Pages of the log that the last checkpoint found or left carried.
    carried: Arc<AtomicI32>,
}

impl Checkpointer {
    /// Ends when it is dropped, after the checkpoint it is at.
    pub(super) fn start(files: &Files) -> std::io::Result<Self> {
        let path = files.path.clone();
        // One may wait while one is done.
        let (wake, woken) = sync_channel(1);
        let carried = Arc::new(AtomicI32::new(0));
        let result = Arc::clone(&carried);
        std::thread::Builder::new().name("metadata-checkpoint".into()).spawn(move || {
            while let Ok(()) = woken.recv() {
                // The database may be closed by the time that a wake arrives.
                if Arc::strong_count(&result) == 1 {
                    break;
                }
                match carry(&path) {
                    Ok(pages) => result.store(pages, Ordering::Relaxed),
                    Err(error) => failed(&error),
                }
            }
        })?;
        Ok(Self { wake, carried })
    }

    /// To be called after each commit in the writer's thread.
    pub(super) fn committed(&self) {
        let (pages, carried) = (PAGES_IN_LOG.get(), self.carried.load(Ordering::Relaxed));
        // A log shorter than that has begun anew.
        let left = if pages < carried { pages } else { pages - carried };
        // Beyond that it is the writer's turn, which the other thread would take from it.
        let worth = WORTH_HERE.get();
        if left >= worth && pages < TOO_LONG * worth {
            // An error is that one waits already.
            let _ = self.wake.try_send(());
        }
    }
}

/// Carries what no reader stands in the way of; how many pages of the log are carried then. Waits
/// for nobody, and nobody waits for it. The connection is closed again: after an outage of the disk
/// none may be left that was opened while it was read-only.
fn carry(path: &Path) -> rusqlite::Result<c_int> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.execute_batch("PRAGMA synchronous = FULL")?;
    connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(2))
}
