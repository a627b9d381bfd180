//! Metadata in PostgreSQL: any number of registries over one database. Time is the database's.

mod connection;
mod error;
mod schema;
mod tx;

use crate::clock::Clock;
use crate::error::Result;
use crate::metadata::Metadata;
use crate::metadata::tx::{Backend, Job, Mode};
use crate::room::{Freeing, MadeRoom};
use crate::trace::Stage;
use connection::Database;
use pfr_schema::DomainName;
use schema::Tables;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tx::PgTx;

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
    pub async fn connect(url: &str, options: PostgresOptions) -> Result<Arc<dyn Metadata>> {
        Ok(Arc::new(Self::open(url, options).await?).metadata())
    }

    /// The same, for a registry with further domains in the database.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn open(url: &str, options: PostgresOptions) -> Result<Self> {
        Ok(Self { database: Arc::new(Database::connect(url, options).await?), tables: Tables::default() })
    }

    /// The metadata of this domain.
    ///
    /// Not an async function: the transactions are compiled where this is, which must be here and
    /// not in each program that opens a store.
    #[inline(never)]
    #[must_use]
    pub fn metadata(self: Arc<Self>) -> Arc<dyn Metadata> {
        self
    }

    /// The metadata of another domain: tables of its own in a schema of its own, over the same
    /// connections. They are made, or brought up to date, if this domain's catalogue has the name.
    ///
    /// # Errors
    /// [`crate::Error::DomainUnknown`] if it has not, or the domain is being deleted.
    /// [`crate::Error::Unavailable`].
    pub async fn of_domain(&self, name: &DomainName) -> Result<Arc<dyn Metadata>> {
        let tables = Tables::of(name);
        self.database.make_tables(&tables).await?;
        Ok(Arc::new(Self { database: Arc::clone(&self.database), tables }).metadata())
    }

    /// Drops the tables of a domain that is being deleted. Twice is no error.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`].
    pub async fn drop_domain(&self, name: &DomainName) -> Result<()> {
        self.database.drop_tables(&Tables::of(name)).await
    }
}

impl Backend for PostgresMetadata {
    type Tx = PgTx;
    /// One statement looks for all of them.
    const LOOKS: usize = 1;

    async fn run<A: Send + Sync + 'static, R: Send + 'static>(&self, mode: Mode, arguments: A, job: Job<PgTx, A, R>) -> Result<R> {
        let stage = Stage::transaction("postgresql", mode.name);
        stage.end(self.database.run(&self.tables, mode, &arguments, job).await)
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
