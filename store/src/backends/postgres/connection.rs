//! Connections: a bounded pool, migrations under a lock, and transactions, which are repeated when
//! the database asks for it.
//!
//! A whole transaction is repeated after a deadlock, a serialisation failure or a lost connection.
//! If the connection was lost during COMMIT, the database is first asked for the outcome, so that a
//! transaction takes place only once.

use super::PostgresOptions;
use super::error::{code, is_worth_another_try, lost_connection};
use super::schema::Tables;
use super::tx::PgTx;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::metadata::tx::{Answer, Fail, Isolation, Mode, Outcome, Work};
use futures::future::BoxFuture;
use pfr_service::Backoff;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, SqlSafeStr};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// How long to wait for a connection.
const ACQUIRE: Duration = Duration::from_secs(10);
/// Maximum attempts of a transaction, and their maximum time.
const TRIES: u32 = 10;
const TIMEOUT: Duration = Duration::from_secs(15);
/// Pauses between attempts.
const PAUSE: Backoff = Backoff::new(Duration::from_millis(40), Duration::from_secs(2));
/// A connection that was idle for longer is pinged before use. It must answer within the same time.
const STALE: Duration = Duration::from_secs(1);
const ALIVE: Duration = Duration::from_secs(2);
/// Timeout of the statements that begin or end a transaction. The end waits for the disks of the
/// database and of its copies.
const ROUND_TRIP: Duration = Duration::from_secs(5);
const COMMIT: Duration = Duration::from_secs(30);
/// Timeout of a transaction over all tables.
pub(super) const LONG: Duration = Duration::from_secs(24 * 3600);

/// Migrations in order.
const MIGRATIONS: &[(&str, &str)] = &migrations!("postgres");

/// Rows are always found by key: plans must not depend on the planner's statistics, which are wrong
/// for tables that were not analysed yet. A client that hangs inside a transaction loses it and its
/// locks.
const SETTINGS: [(&str, &str); 6] = [
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_material", "off"),
    ("enable_seqscan", "off"),
    ("jit", "off"),
    ("idle_in_transaction_session_timeout", "60s"),
];

/// What a transaction does: one of the store, or one that only PostgreSQL has.
pub(super) trait PgWork: Send + Sync {
    /// Runs it, or runs it again.
    fn start<'a>(&'a self, tx: &'a mut PgTx) -> BoxFuture<'a, Outcome<Answer>>;
}

impl PgWork for Box<dyn Work> {
    fn start<'a>(&'a self, tx: &'a mut PgTx) -> BoxFuture<'a, Outcome<Answer>> {
        (**self).start(tx)
    }
}

#[derive(Debug)]
pub(super) struct Database {
    pub(super) pool: PgPool,
    pub(super) limit: Duration,
    clock: Option<Clock>,
}

impl Database {
    pub(super) async fn connect(url: &str, settings: PostgresOptions) -> Result<Self> {
        let PostgresOptions { max_connections, limit, clock } = settings;
        let unusable = |e: sqlx::Error| Error::Unavailable { what: "metadata", reason: format!("PostgreSQL: {e}") };
        let options: PgConnectOptions = url.parse().map_err(unusable)?;
        let options = options.application_name("pf-registry").options(SETTINGS);
        let mut connection = PgConnection::connect_with(&options).await.map_err(unusable)?;
        let migrated = migrate(&mut connection, true).await;
        drop(connection.close().await);
        migrated?;
        let pool = PgPoolOptions::new()
            .max_connections(max_connections.max(1))
            .acquire_timeout(ACQUIRE)
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if meta.idle_for <= STALE {
                        return Ok(true);
                    }
                    Ok(tokio::time::timeout(ALIVE, connection.ping()).await.is_ok_and(|answer| answer.is_ok()))
                })
            })
            .after_connect(|connection, _| {
                Box::pin(async move {
                    // Acknowledged changes are durable, whatever the server's default is.
                    sqlx::query("SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'")
                        .execute(connection)
                        .await
                        .map(drop)
                })
            })
            .connect_lazy_with(options);
        Ok(Self { pool, limit, clock })
    }

    /// Whether transactions run now.
    pub(super) fn is_busy(&self) -> bool {
        self.pool.size() as usize > self.pool.num_idle()
    }

    /// Runs a transaction on the tables of a domain.
    pub(super) async fn run(&self, tables: &Tables, mode: Mode, work: &dyn PgWork) -> Result<Answer> {
        let limit = if mode.long { LONG } else { self.limit };
        let started = Instant::now();
        let mut tries = 0;
        loop {
            let fail = match self.once(tables, mode.isolation, limit, work).await {
                Ok(value) => return Ok(value),
                Err(fail) => fail,
            };
            tries += 1;
            let pause = PAUSE.wait(tries);
            if !is_worth_another_try(&fail) || tries >= TRIES || started.elapsed() + pause > TIMEOUT {
                return Err(tables.explain(fail));
            }
            tracing::debug!(error = %fail, tries, "metadata transaction failed, retrying");
            tokio::time::sleep(pause).await;
        }
    }

    async fn once(&self, tables: &Tables, isolation: Isolation, limit: Duration, work: &dyn PgWork) -> Outcome<Answer> {
        let begin = tables.begin(isolation);
        let in_transaction = begin.is_some();
        let connection = Leased::new(self.pool.acquire().await?);
        let mut tx = PgTx::on(connection, self.clock.as_ref().map(Clock::now));
        if let Some(begin) = begin {
            tx.send(begin, self.limit.min(ROUND_TRIP)).await?;
        }
        match answered(limit, work.start(&mut tx)).await {
            Ok(value) => {
                let rows = tx.rows;
                if in_transaction {
                    self.commit(tx).await?;
                } else {
                    tx.connection.done();
                }
                tables.rows_written.fetch_add(rows, Ordering::Relaxed);
                Ok(value)
            }
            Err(fail) => {
                // Roll back now and not at the next use of the connection, since its locks make
                // others wait. If the connection is lost, the transaction is too.
                if !lost_connection(&fail) && (!in_transaction || tx.send("ROLLBACK", self.limit.min(ROUND_TRIP)).await.is_ok()) {
                    tx.connection.done();
                }
                Err(fail)
            }
        }
    }

    async fn commit(&self, mut tx: PgTx) -> Outcome<()> {
        let (id, server): (Option<String>, String) = match tx.rows {
            0 => (None, String::new()),
            _ => {
                let ask = "SELECT pg_current_xact_id_if_assigned()::text, pg_postmaster_start_time()::text";
                let id = sqlx::query_as(ask).fetch_one(tx.connection());
                answered(self.limit.min(ROUND_TRIP), async { Ok(id.await?) }).await?
            }
        };
        let Err(fail) = tx.send("COMMIT", self.limit.min(COMMIT)).await else {
            tx.connection.done();
            return Ok(());
        };
        // Return the connection before asking for the outcome: it may be the last one of the pool.
        drop(tx);
        match id {
            Some(id) if lost_connection(&fail) && self.was_committed(&id, &server).await? => Ok(()),
            _ => Err(fail),
        }
    }
}

impl Database {
    /// The outcome of a transaction whose COMMIT was not answered by the server that started at
    /// `server`.
    ///
    /// A server that crashes forgets the ids of transactions of which nothing was written, and
    /// gives them out again: then the status is that of another transaction. Recovery ends with a
    /// checkpoint, whose next id tells which ids were known.
    async fn was_committed(&self, id: &str, server: &str) -> Outcome<bool> {
        let started = Instant::now();
        for tries in 1.. {
            let status = async {
                let mut leased = Leased::new(self.pool.acquire().await?);
                let ask = "SELECT pg_xact_status($1::text::xid8), pg_postmaster_start_time()::text = $2";
                let ask = sqlx::query_as::<_, (Option<String>, bool)>(ask).bind(id).bind(server);
                let (mut status, same) = ask.fetch_one(&mut *leased.connection).await?;
                if !same && status.as_deref() == Some("committed") {
                    let ask = "SELECT next_xid FROM pg_control_checkpoint()";
                    let next: String = sqlx::query_scalar(ask).fetch_one(&mut *leased.connection).await?;
                    if given_out_again(id, &next) {
                        status = Some("aborted".into());
                    }
                }
                leased.done();
                Ok::<_, sqlx::Error>(status)
            };
            match tokio::time::timeout(self.limit.min(ACQUIRE + ROUND_TRIP), status).await {
                Ok(Ok(Some(status))) if status == "committed" => return Ok(true),
                Ok(Ok(Some(status))) if status == "aborted" => return Ok(false),
                // An id that the server did not give out since it crashed.
                Ok(Err(error)) if code(&error) == "22023" => return Ok(false),
                // The transaction is still running, or the database does not answer yet.
                Ok(Ok(_) | Err(sqlx::Error::PoolTimedOut)) | Err(_) => {}
                Ok(Err(error)) => {
                    let fail = Fail::from(error);
                    if !is_worth_another_try(&fail) {
                        return Err(fail);
                    }
                }
            }
            let pause = PAUSE.wait(tries);
            if started.elapsed() + pause > TIMEOUT {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        let reason = "the connection was lost during a commit, and the database does not say what became of it".into();
        Err(Error::Unavailable { what: "metadata", reason }.into())
    }
}

/// Whether a transaction's id is one that a checkpoint did not know yet. `next` is that of the
/// checkpoint, as epoch and id: `0:756`.
fn given_out_again(id: &str, next: &str) -> bool {
    let whole = |(epoch, low): (&str, &str)| Some((epoch.parse::<u64>().ok()? << 32) | low.parse::<u64>().ok()?);
    match (id.parse::<u64>().ok(), next.split_once(':').and_then(whole)) {
        (Some(id), Some(next)) => id >= next,
        _ => false,
    }
}

/// Brings the tables up to date. With `locking`, instances that start together wait for each other.
pub(super) async fn migrate(connection: &mut PgConnection, locking: bool) -> Result<()> {
    let unusable = |reason: String| Error::Unavailable { what: "metadata", reason };
    let migrations = (1..)
        .zip(MIGRATIONS)
        // `0002_session_leases` is described as `session leases`.
        .map(|(version, (name, sql))| (version, name.trim_start_matches(|c: char| c.is_ascii_digit()).replace('_', " "), *sql))
        .map(|(version, name, sql)| {
            Migration::new(version, name.trim().to_owned().into(), MigrationType::Simple, sql.into_sql_str(), false)
        })
        .collect();
    let result = Migrator::with_migrations(migrations).set_locking(locking).run_direct(None, connection, false).await;
    let known = MIGRATIONS.len();
    result.map_err(|error| match error {
        MigrateError::VersionMissing(version) => {
            unusable(format!("its tables have version {version}, this program knows {known}: use a newer one"))
        }
        other => unusable(format!("its tables cannot be brought up to date: {other}")),
    })
}

/// The answer, if it comes within `limit`. Otherwise the connection counts as lost.
pub(super) async fn answered<T>(limit: Duration, work: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let words = format!("no answer within {} seconds", limit.as_secs());
        Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, words)).into())
    })
}

/// A connection of the pool. Returned to the pool only when idle. Otherwise it is closed, which
/// aborts the transaction.
#[derive(Debug)]
pub(super) struct Leased {
    pub(super) connection: PoolConnection<Postgres>,
    done: bool,
}

impl Leased {
    pub(super) fn new(connection: PoolConnection<Postgres>) -> Self {
        Self { connection, done: false }
    }

    pub(super) fn done(&mut self) {
        self.done = true;
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) if self.done => {
                // The pool pings it before it gives it to others, without a timeout, so limit the
                // time here.
                let back = self.connection.return_to_pool();
                drop(pfr_service::task::spawn_on(&runtime, tokio::time::timeout(ALIVE, back)));
            }
            _ => self.connection.close_on_drop(),
        }
    }
}

impl PgTx {
    /// Begins or ends the transaction.
    async fn send(&mut self, statement: impl SqlSafeStr, limit: Duration) -> Outcome<()> {
        let sent = sqlx::raw_sql(statement).execute(self.connection());
        answered(limit, async { Ok(sent.await.map(drop)?) }).await
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_id_that_a_checkpoint_did_not_know_may_be_given_out_again() {
        assert!(!super::given_out_again("755", "0:756") && super::given_out_again("756", "0:756"));
        assert!(!super::given_out_again("4294967300", "1:5") && super::given_out_again("4294967301", "1:5"));
        assert!(!super::given_out_again("756", "what no server says"));
    }
}
