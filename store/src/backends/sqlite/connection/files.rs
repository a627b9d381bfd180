//! The files of a database: how they are opened, also on a disk without space.
//!
//! SQLite needs space before it reads the first page: the wal-index (`-shm`) is a file that every
//! start makes anew. The reserve has room for it. If even that is spent, the database is opened
//! with the wal-index in memory. Then no other process can open it, so it is opened in the usual
//! way again as soon as there is space.

use super::checkpoint;
use crate::error::Error;
use crate::room::Room;
use rusqlite::vtab::array::load_module;
use rusqlite::{Connection, ErrorCode, OpenFlags};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a page.
pub(super) const PAGE: u64 = 2048;
/// How long to wait for another process that has locked the database.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of the reserve that are released at a time: for a wal-index, and for pages of the log that
/// make the database larger.
const INDEX: u64 = 64 << 10;
const PAGES: u64 = 512 << 10;
/// Free bytes with which a wal-index is made in a file again.
const SHARED: u64 = 1 << 20;
/// Size at which the log stays allocated when it starts again, in multiples of the checkpoint size.
const LOG_KEPT: i64 = 4;
/// SQLite's way to keep the wal-index in memory, shared by the connections of one process.
const ALONE: &str = "unix-excl";
/// Statements that a connection keeps prepared: there are about 130.
const STATEMENTS: usize = 160;
/// Migrations in order; a database's `user_version` is how many it has had.
const MIGRATIONS: &[(&str, &str)] = &migrations!("sqlite");

/// Why a database was not opened.
pub(super) enum Failed {
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

/// A database file, and the disk that it is on.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) path: PathBuf,
    pub(super) room: Arc<Room>,
    /// Whether the wal-index is in memory, which locks out every other process.
    alone: AtomicBool,
    /// KiB of pages that the writer caches.
    cache: u32,
}

impl Files {
    pub(super) fn at(path: PathBuf, floor: Option<u64>, cache: u32) -> Self {
        let room = Arc::new(Room::beside(&path, floor));
        Self { path, room, alone: AtomicBool::new(false), cache }
    }

    pub(super) fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed)
    }

    /// Whether there is space for a wal-index that other processes see.
    pub(super) fn can_share(&self) -> bool {
        self.room.has(SHARED) || self.room.kept() >= SHARED
    }

    /// The writer's connection, when no other one is open in this process. It needs no free space.
    pub(super) fn open(&self) -> Result<Connection, Failed> {
        self.alone.store(false, Ordering::Relaxed);
        // A wal-index without allocated blocks would end the process (SIGBUS), so this is not
        // tried.
        if self.room.is_low()
            && !self.room.has(INDEX)
            && !self.room.give(INDEX)
            && let Ok(connection) = self.open_alone(Duration::ZERO)
        {
            return Ok(connection);
        }
        loop {
            match self.connect(BUSY_TIMEOUT) {
                Err(Failed::Sql(error)) if lacks_space(&error) && self.room.is_low() => {
                    if !self.room.give(INDEX) {
                        // The first error says more.
                        return self.open_alone(BUSY_TIMEOUT).map_err(|_| Failed::Sql(error));
                    }
                }
                other => {
                    let connection = other?;
                    self.room.refill();
                    return Ok(connection);
                }
            }
        }
    }

    fn open_alone(&self, timeout: Duration) -> Result<Connection, Failed> {
        self.alone.store(true, Ordering::Relaxed);
        let connected = self.connect(timeout);
        match connected {
            Ok(_) => tracing::warn!(
                "no space for the index of the metadata's log: it is kept in memory, and no other process can open the metadata until there is space"
            ),
            Err(_) => self.alone.store(false, Ordering::Relaxed),
        }
        connected
    }

    /// A connection for the writer. SQLite's busy timeout does not cover another connection that
    /// creates or removes the log, so this function waits for that.
    pub(super) fn connect(&self, timeout: Duration) -> Result<Connection, Failed> {
        let start = Instant::now();
        loop {
            let connected = self.connection(OpenFlags::default()).map_err(Failed::from).and_then(|connection| {
                set_up(connection, timeout.saturating_sub(start.elapsed()), checkpoint::worth(self.room.largest()), self.cache)
            });
            match connected {
                Err(Failed::Sql(error)) if is_busy(&error) && start.elapsed() < timeout => std::thread::sleep(Duration::from_millis(5)),
                other => return other.map_err(|failed| self.with_reason(failed)),
            }
        }
    }

    /// SQLite does not say why a file cannot be opened. If it is a matter of permissions, the file
    /// system says so.
    fn with_reason(&self, failed: Failed) -> Failed {
        let Failed::Sql(error) = &failed else { return failed };
        if error.sqlite_error_code() != Some(ErrorCode::CannotOpen) {
            return failed;
        }
        match std::fs::File::options().read(true).write(true).open(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Failed::Other(Error::io("metadata", &self.path, &error)),
            _ => failed,
        }
    }

    pub(super) fn open_reader(&self) -> rusqlite::Result<Connection> {
        let connection = self.connection(OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -8000; PRAGMA mmap_size = 0;")?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        load_module(&connection)?;
        Ok(connection)
    }

    fn connection(&self, flags: OpenFlags) -> rusqlite::Result<Connection> {
        if self.is_alone() {
            Connection::open_with_flags_and_vfs(&self.path, flags, ALONE)
        } else {
            Connection::open_with_flags(&self.path, flags)
        }
    }

    /// On a nearly full disk: truncates the log and completes the reserve. Called between
    /// transactions.
    pub(super) fn save_space(&self, writer: &Connection) {
        if !self.room.is_low() {
            return;
        }
        while self.log_bytes() > 0 {
            match checkpoint::cut(writer) {
                Ok(_) => break,
                // The database must grow by what is in the log, and the log then gives back more.
                Err(error) if error.sqlite_error_code() == Some(ErrorCode::DiskFull) && self.room.give(PAGES) => {}
                Err(error) => {
                    checkpoint::failed(&error);
                    break;
                }
            }
        }
        // Until the database is shared, free space is kept for the wal-index.
        if !self.is_alone() {
            self.room.refill();
        }
    }

    fn log_bytes(&self) -> u64 {
        let mut log = self.path.clone().into_os_string();
        log.push("-wal");
        std::fs::metadata(log).map_or(0, |metadata| metadata.len())
    }
}

pub(super) fn in_memory() -> Result<Connection, Failed> {
    set_up(Connection::open_in_memory()?, BUSY_TIMEOUT, checkpoint::worth(u64::MAX), super::super::CACHE)
}

fn set_up(connection: Connection, timeout: Duration, worth: i32, cache: u32) -> Result<Connection, Failed> {
    connection.busy_timeout(timeout)?;
    // Keys are digests: a transaction touches about as many pages as objects, and writes each
    // twice. Pages of half the usual size halve that.
    connection.execute_batch(&format!("PRAGMA page_size = {PAGE}"))?;
    let kept = LOG_KEPT * i64::from(worth) * PAGE as i64;
    connection.execute_batch(&format!(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;
         PRAGMA cache_size = -{cache}; PRAGMA journal_size_limit = {kept}; PRAGMA temp_store = MEMORY;"
    ))?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    load_module(&connection)?;
    checkpoint::watch(&connection, worth);
    migrate(&connection)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

fn migrate(connection: &Connection) -> Result<(), Failed> {
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
    for (_, migration) in &MIGRATIONS[done..] {
        connection.execute_batch(migration)?;
    }
    Ok(connection.execute_batch(&format!("PRAGMA user_version = {}; COMMIT", MIGRATIONS.len()))?)
}

/// Whether it was opened while the disk was read-only: SQLite then only reads, even when the disk
/// is writable again.
pub(super) fn is_read_only(connection: &Connection) -> bool {
    connection.is_readonly(rusqlite::MAIN_DB).unwrap_or(false)
}

fn is_busy(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
}

/// Whether a full disk can be the cause: SQLite says "disk I/O error" for a wal-index that does not
/// fit.
fn lacks_space(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DiskFull | ErrorCode::SystemIoFailure | ErrorCode::CannotOpen))
}
