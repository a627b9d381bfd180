//! Metadata in PostgreSQL: any number of registries over one database. Time is the database's.

mod connection;
mod error;
mod schema;
mod tx;

use crate::boxed;
use crate::clock::Clock;
use crate::error::Result;
use crate::metadata::Metadata;
use crate::metadata::tx::{Answer, AnyBackend, Backend, Mode, Work};
use crate::room::{Freeing, MadeRoom};
use crate::trace::Stage;
use async_trait::async_trait;
use connection::Database;
use pfr_schema::DomainName;
use schema::Tables;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tx::SWEEP;

/// Connections of one process.
const MAX_CONNECTIONS: u32 = 16;

/// Limit for one answer of the database. A host that loses power closes no connection, so a caller
/// without a limit would wait for ever.
const LIMIT: Duration = Duration::from_secs(5 * 60);

/// The longest pause of collection between two of its transactions.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How to use a database.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    /// Maximum number of connections. A transaction waits until one is free.
    pub max_connections: u32,
    /// Timeout of a transaction, after which its connection counts as lost. An audit may take
    /// longer.
    pub limit: Duration,
    /// Time instead of the database's own: for tests.
    pub clock: Option<Clock>,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self { max_connections: MAX_CONNECTIONS, limit: LIMIT, clock: None }
    }
}

/// Metadata in one PostgreSQL database (15 or newer). Any number of processes may use it at the
/// same time.
#[derive(Debug)]
pub struct PostgresMetadata {
    database: Arc<Database>,
    tables: Tables,
}

impl PostgresMetadata {
    /// Connects to `postgres://user:password@host:port/database` and brings its tables up to date.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if it cannot be reached, or its tables were written by a newer
    /// version.
    #[boxed]
    pub async fn connect(url: &str, options: PostgresOptions) -> Result<Arc<dyn Metadata>> {
        Ok(AnyBackend::metadata(Self::open(url, options).await?))
    }

    /// The same, for a registry with further domains in the database.
    ///
    /// # Errors
    /// As [`Self::connect`].
    #[boxed]
    pub async fn open(url: &str, options: PostgresOptions) -> Result<Self> {
        Ok(Self { database: Arc::new(Database::connect(url, options).await?), tables: Tables::default() })
    }

    /// The metadata of this domain.
    #[must_use]
    pub fn metadata(self: Arc<Self>) -> Arc<dyn Metadata> {
        Arc::new(AnyBackend(self))
    }

    /// The metadata of another domain: tables of its own in a schema of its own, over the same
    /// connections. They are made, or brought up to date, if this domain's catalogue has the name.
    ///
    /// # Errors
    /// [`crate::Error::DomainUnknown`] if it has not, or the domain is being deleted.
    /// [`crate::Error::Unavailable`].
    #[boxed]
    pub async fn of_domain(&self, name: &DomainName) -> Result<Arc<dyn Metadata>> {
        let tables = Tables::of(name);
        self.database.make_tables(&tables).await?;
        Ok(AnyBackend::metadata(Self { database: Arc::clone(&self.database), tables }))
    }

    /// Drops the tables of a domain that is being deleted. Twice is no error.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`].
    #[boxed]
    pub async fn drop_domain(&self, name: &DomainName) -> Result<()> {
        self.database.drop_tables(&Tables::of(name)).await
    }
}

#[async_trait]
impl Backend for PostgresMetadata {
    /// One statement looks for all of them.
    fn looks(&self) -> usize {
        1
    }

    fn sweep(&self) -> usize {
        SWEEP
    }

    async fn run_untyped(&self, mode: Mode, work: Box<dyn Work>) -> Result<Answer> {
        let stage = Stage::transaction("postgresql", mode.name);
        stage.end(self.database.run(&self.tables, mode, &work).await)
    }

    /// While other transactions of this process run, collection takes at most half of the time.
    async fn give_way(&self, took: Duration) {
        if self.database.is_busy() {
            tokio::time::sleep(took.min(LONGEST_PAUSE)).await;
        }
    }

    async fn make_room(&self, _work: Freeing) -> Result<MadeRoom> {
        Ok(MadeRoom::default())
    }

    fn rows_written(&self) -> u64 {
        self.tables.rows_written.load(Ordering::Relaxed)
    }
}
