//! Metadata in PostgreSQL: any number of registries over one database. Time is the database's.

mod connection;
mod error;
mod tx;

use crate::clock::Clock;
use crate::error::Result;
use crate::metadata::Metadata;
use crate::metadata::tx::{Backend, Job, Mode};
use crate::room::{Freeing, MadeRoom};
use connection::Database;
use std::sync::Arc;
use std::time::Duration;
use tx::PgTx;

/// Connections of one process.
const MAX_CONNECTIONS: u32 = 16;

/// Limit for one answer of the database. A host that loses power closes no connection, so a caller
/// without a limit would wait for ever.
const LIMIT: Duration = Duration::from_secs(5 * 60);

/// How to use a database.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    /// Connections at a time, at most; who needs one more waits for it.
    pub max_connections: u32,
    /// How long a transaction may take before its connection is taken for lost. An audit may take longer.
    pub limit: Duration,
    /// Time instead of the database's own: for tests.
    pub clock: Option<Clock>,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self { max_connections: MAX_CONNECTIONS, limit: LIMIT, clock: None }
    }
}

/// Metadata in one PostgreSQL database (15 or newer). Any number of processes may use it at the same time.
#[derive(Debug)]
pub struct PostgresMetadata {
    database: Database,
}

impl PostgresMetadata {
    /// Connects to `postgres://user:password@host:port/database` and brings its tables up to date.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if it cannot be reached, or its tables were written by a newer version.
    pub async fn connect(url: &str, options: PostgresOptions) -> Result<Arc<dyn Metadata>> {
        Ok(erased(Self { database: Database::connect(url, options).await? }))
    }
}

/// Not in an async function: the transactions are compiled where this is, which must be here and not
/// in each program that opens a store.
#[inline(never)]
fn erased(database: PostgresMetadata) -> Arc<dyn Metadata> {
    Arc::new(database)
}

impl Backend for PostgresMetadata {
    type Tx = PgTx;

    async fn run<A: Send + Sync + 'static, R: Send + 'static>(&self, mode: Mode, arguments: A, job: Job<PgTx, A, R>) -> Result<R> {
        self.database.run(mode, &arguments, job).await
    }

    async fn make_room(&self, _work: Freeing) -> Result<MadeRoom> {
        Ok(MadeRoom::default())
    }

    fn rows_written(&self) -> u64 {
        self.database.rows_written()
    }
}
