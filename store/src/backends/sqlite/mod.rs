//! Metadata in SQLite: WAL, `synchronous=FULL`, one writer thread that batches commits, a few
//! readers.

mod connection;
mod dialect;
mod tx;

use crate::boxed;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::metadata::Metadata;
use crate::metadata::tx::{Answer, AnyBackend, Backend, Fail, Mode, Work};
use crate::room::{Freeing, MadeRoom};
use crate::trace::Stage;
use async_trait::async_trait;
use connection::{Database, READERS};
use futures::future::BoxFuture;
use pfr_schema::DomainName;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tx::SqliteTx;

/// KiB of pages that the writer keeps in memory at most; for a domain of many.
const CACHE: u32 = 64_000;
const SMALL_CACHE: u32 = 8_000;

/// Metadata in one SQLite file. Several processes may open the same file.
#[derive(Debug)]
pub struct SqliteMetadata {
    database: Database,
    clock: Clock,
    /// The domain, unless it is the default one, and its file: without that the domain was deleted.
    domain: Option<(DomainName, PathBuf)>,
}

impl SqliteMetadata {
    /// Opens (or creates) the file and brings its tables up to date.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if it cannot be opened, is no database, or was written by a
    /// newer version.
    #[boxed]
    pub async fn open(path: &Path, clock: Clock) -> Result<Arc<dyn Metadata>> {
        Self::open_above(path, clock, None).await
    }

    /// Like [`Self::open`], but refuses transactions that store something new while fewer than
    /// `floor` bytes are free on the file's disk. By default that is 64 MiB, or a twentieth of a
    /// smaller file system.
    ///
    /// # Errors
    /// As [`Self::open`].
    #[boxed]
    pub async fn open_above(path: &Path, clock: Clock, floor: Option<u64>) -> Result<Arc<dyn Metadata>> {
        Ok(AnyBackend::metadata(Self { database: Database::open(Some(path.to_owned()), floor, CACHE).await?, clock, domain: None }))
    }

    /// The metadata of another domain than the default one, with a smaller cache: there may be
    /// many.
    pub(crate) async fn of_domain(name: &DomainName, path: &Path, clock: Clock, floor: Option<u64>) -> Result<Arc<dyn Metadata>> {
        let database = Database::open(Some(path.to_owned()), floor, SMALL_CACHE).await?;
        Ok(AnyBackend::metadata(Self { database, clock, domain: Some((name.clone(), path.to_owned())) }))
    }

    /// A database in memory, for tests.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if SQLite cannot be set up.
    #[boxed]
    pub async fn open_in_memory(clock: Clock) -> Result<Arc<dyn Metadata>> {
        Ok(AnyBackend::metadata(Self::in_memory(clock).await?))
    }

    pub(crate) async fn in_memory(clock: Clock) -> Result<Self> {
        Ok(Self { database: Database::open(None, None, CACHE).await?, clock, domain: None })
    }
}

#[async_trait]
impl Backend for SqliteMetadata {
    /// Two readers are left for others.
    fn looks(&self) -> usize {
        READERS - 2
    }

    fn sweep(&self) -> usize {
        8000
    }

    async fn run_untyped(&self, mode: Mode, work: Box<dyn Work>) -> Result<Answer> {
        if let Some((name, file)) = &self.domain
            && matches!(file.try_exists(), Ok(false))
        {
            // The connections would continue to use the deleted file.
            return Err(Error::DomainUnknown(name.clone()));
        }
        let stage = Stage::transaction("sqlite", mode.name);
        let clock = self.clock.clone();
        let work = Box::new(move |tx: &mut SqliteTx| {
            tx.begin(clock.now());
            at_once(work.start(tx))?.map_err(Fail::into_error)
        });
        let done = match (mode.writes, mode.grows) {
            (false, _) => self.database.read(work),
            (true, false) if mode.may_be_undone => self.database.write_undoable(work),
            (true, false) => self.database.write(work),
            (true, true) if mode.may_be_undone => self.database.grow_undoable(work),
            (true, true) => self.database.grow(work),
        };
        stage.end(done.await)
    }

    /// Not here: a transaction of collection ends when another one waits ([`Tx::may_go_on`]).
    ///
    /// [`Tx::may_go_on`]: crate::metadata::tx::Tx::may_go_on
    async fn give_way(&self, _took: Duration) {}

    async fn make_room(&self, work: Freeing) -> Result<MadeRoom> {
        self.database.make_room(work).await
    }

    fn rows_written(&self) -> u64 {
        self.database.rows_written()
    }
}

/// The result of work that never waits: the operations of [`SqliteTx`] are done when they return.
///
/// # Errors
/// [`Error::Internal`] if it waits after all: a transaction waited for something other than its
/// database.
fn at_once<T>(mut work: BoxFuture<'_, T>) -> Result<T> {
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Ok(result),
        Poll::Pending => Err(Error::Internal("a transaction on SQLite waits for something else than SQLite".into())),
    }
}

#[cfg(test)]
mod tests;
