//! Connections: a bounded pool, migrations under a lock, and transactions that are run again when the database asks for it.
//!
//! A transaction is run again, whole, after a deadlock, a serialisation failure or a lost connection. If the connection was lost
//! during COMMIT, the database is asked what became of the transaction before anything else is done: it happens once.

use super::PostgresOptions;
use super::error::{Fail, Outcome};
use crate::clock::Clock;
use crate::error::{Error, Result};
use futures::future::BoxFuture;
use pfr_service::Backoff;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgPoolOptions};
use sqlx::query::Query;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, SqlSafeStr as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// How long to wait for a connection.
const ACQUIRE: Duration = Duration::from_secs(10);
/// How often a transaction is tried, and for how long.
const TRIES: u32 = 10;
const PATIENCE: Duration = Duration::from_secs(15);
/// Pauses between tries.
const PAUSE: Backoff = Backoff::new(Duration::from_millis(40), Duration::from_secs(2));
/// A connection that was idle for longer is asked whether it is alive, and has so long to answer.
const STALE: Duration = Duration::from_secs(1);
const ALIVE: Duration = Duration::from_secs(2);
/// How long a word about a transaction may take, and its end, which is as slow as the disks of the database and of its copies.
const WORD: Duration = Duration::from_secs(5);
const COMMIT: Duration = Duration::from_secs(30);
/// How long a job over all tables may take.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// Migrations in order.
const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "init", include_str!("../../../migrations/postgres/0001_init.sql")),
    (2, "session leases", include_str!("../../../migrations/postgres/0002_session_leases.sql")),
];

/// Rows are always found by key: plans must not change with what the planner believes about tables that it has not looked at yet.
/// A client that hangs inside a transaction loses it and its locks.
const SETTINGS: [(&str, &str); 6] = [
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_material", "off"),
    ("enable_seqscan", "off"),
    ("jit", "off"),
    ("idle_in_transaction_session_timeout", "60s"),
];

#[derive(Debug)]
pub(super) struct Database {
    pool: PgPool,
    limit: Duration,
    clock: Option<Clock>,
    rows_written: AtomicU64,
}

/// How a job sees the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Each statement on its own.
    Statements,
    /// One state, nothing is written.
    Snapshot,
    /// A transaction that locks what it changes.
    Write,
}

impl Mode {
    fn begin(self) -> Option<&'static str> {
        match self {
            Self::Statements => None,
            Self::Snapshot => Some("BEGIN ISOLATION LEVEL REPEATABLE READ"),
            Self::Write => Some("BEGIN ISOLATION LEVEL READ COMMITTED"),
        }
    }
}

/// A job over borrowed arguments, so that it can be run again.
pub(super) type Job<A, T> = for<'a> fn(&'a mut Tx, &'a A) -> BoxFuture<'a, Outcome<T>>;

impl Database {
    pub(super) async fn connect(url: &str, settings: PostgresOptions) -> Result<Self> {
        let PostgresOptions { max_connections, limit, clock } = settings;
        let unusable = |e: sqlx::Error| Error::Unavailable { what: "metadata", reason: format!("PostgreSQL: {e}") };
        let options: PgConnectOptions = url.parse().map_err(unusable)?;
        let options = options.application_name("pf-registry").options(SETTINGS);
        migrate(&options).await?;
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
                    // What is acknowledged is durable, whatever the server's default is.
                    sqlx::query("SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'")
                        .execute(connection)
                        .await
                        .map(drop)
                })
            })
            .connect_lazy_with(options);
        Ok(Self { pool, limit, clock, rows_written: AtomicU64::new(0) })
    }

    pub(super) fn rows_written(&self) -> u64 {
        self.rows_written.load(Ordering::Relaxed)
    }

    /// Runs a job whose statements need not see the same state.
    pub(super) async fn statements<A: Sync, T: Send>(&self, arguments: A, job: Job<A, T>) -> Result<T> {
        self.run(Mode::Statements, self.limit, &arguments, job).await
    }

    /// Runs a job that sees one state of the tables and writes nothing.
    pub(super) async fn snapshot<A: Sync, T: Send>(&self, arguments: A, job: Job<A, T>) -> Result<T> {
        self.run(Mode::Snapshot, self.limit, &arguments, job).await
    }

    /// Runs a job in a transaction; returns when it is durable.
    pub(super) async fn write<A: Sync, T: Send>(&self, arguments: A, job: Job<A, T>) -> Result<T> {
        self.run(Mode::Write, self.limit, &arguments, job).await
    }

    /// The same for a job that goes through all containers.
    pub(super) async fn write_long<A: Sync, T: Send>(&self, arguments: A, job: Job<A, T>) -> Result<T> {
        self.run(Mode::Write, LONG, &arguments, job).await
    }

    /// Runs a job over all tables that sees one state; `writes` says whether it corrects them.
    pub(super) async fn audit<T: Send>(&self, writes: bool, job: Job<bool, T>) -> Result<T> {
        self.run(if writes { Mode::Write } else { Mode::Snapshot }, LONG, &writes, job).await
    }

    async fn run<A: Sync, T: Send>(&self, mode: Mode, limit: Duration, arguments: &A, job: Job<A, T>) -> Result<T> {
        let started = Instant::now();
        let mut tries = 0;
        loop {
            let fail = match self.once(mode, limit, arguments, job).await {
                Ok(value) => return Ok(value),
                Err(fail) => fail,
            };
            tries += 1;
            let pause = PAUSE.wait(tries);
            if !fail.is_worth_another_try() || tries >= TRIES || started.elapsed() + pause > PATIENCE {
                return Err(fail.into_error());
            }
            tracing::debug!(error = %fail, tries, "a metadata transaction is tried again");
            tokio::time::sleep(pause).await;
        }
    }

    async fn once<A: Sync, T: Send>(&self, mode: Mode, limit: Duration, arguments: &A, job: Job<A, T>) -> Outcome<T> {
        let mut tx = Tx { connection: Leased::new(self.pool.acquire().await?), now: None, rows: 0 };
        tx.now = self.clock.as_ref().map(|clock| super::int(clock.now()));
        if let Some(begin) = mode.begin() {
            tx.say(begin, self.limit.min(WORD)).await?;
        }
        match answered(limit, job(&mut tx, arguments)).await {
            Ok(value) => {
                let rows = tx.rows;
                if mode.begin().is_some() {
                    self.commit(tx).await?;
                } else {
                    tx.connection.done();
                }
                self.rows_written.fetch_add(rows, Ordering::Relaxed);
                Ok(value)
            }
            Err(fail) => {
                // Rolled back now and not when the connection is used next: its locks keep others waiting. If the connection
                // is lost, so is the transaction.
                if !fail.lost_connection() && (mode.begin().is_none() || tx.say("ROLLBACK", self.limit.min(WORD)).await.is_ok()) {
                    tx.connection.done();
                }
                Err(fail)
            }
        }
    }

    async fn commit(&self, mut tx: Tx) -> Outcome<()> {
        let (id, server): (Option<String>, String) = match tx.rows {
            0 => (None, String::new()),
            _ => {
                let ask = "SELECT pg_current_xact_id_if_assigned()::text, pg_postmaster_start_time()::text";
                let id = sqlx::query_as(ask).fetch_one(tx.on());
                answered(self.limit.min(WORD), async { Ok(id.await?) }).await?
            }
        };
        let Err(fail) = tx.say("COMMIT", self.limit.min(COMMIT)).await else {
            tx.connection.done();
            return Ok(());
        };
        // Before anybody is asked what became of it: its place in the pool may be the last one.
        drop(tx);
        match id {
            Some(id) if fail.lost_connection() && self.was_committed(&id, &server).await? => Ok(()),
            _ => Err(fail),
        }
    }
}

impl Database {
    /// What became of a transaction whose COMMIT was not answered by the server that started at `server`.
    ///
    /// A server that crashes forgets the ids of transactions of which nothing was written, and gives
    /// them out again: then the status is that of another transaction. Recovery ends with a
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
                Ok(status)
            };
            match answered(self.limit.min(ACQUIRE + WORD), status).await {
                Ok(Some(status)) if status == "committed" => return Ok(true),
                Ok(Some(status)) if status == "aborted" => return Ok(false),
                // An id that the server did not give out since it crashed.
                Err(Fail::Sql(sqlx::Error::Database(error))) if error.code().as_deref() == Some("22023") => return Ok(false),
                // Still on its way, or the database is.
                Err(Fail::Sql(sqlx::Error::PoolTimedOut)) => {}
                Err(fail) if !fail.is_worth_another_try() => return Err(fail.into_error().into()),
                Ok(_) | Err(_) => {}
            }
            let pause = PAUSE.wait(tries);
            if started.elapsed() + pause > PATIENCE {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        let reason = "the connection was lost during a commit, and the database does not say what became of it".into();
        Err(Error::Unavailable { what: "metadata", reason }.into())
    }
}

/// Whether a transaction's id is one that a checkpoint did not know yet. `next` is that of the checkpoint, as epoch and id: `0:756`.
fn given_out_again(id: &str, next: &str) -> bool {
    let whole = |(epoch, low): (&str, &str)| Some((epoch.parse::<u64>().ok()? << 32) | low.parse::<u64>().ok()?);
    match (id.parse::<u64>().ok(), next.split_once(':').and_then(whole)) {
        (Some(id), Some(next)) => id >= next,
        _ => false,
    }
}

/// Brings the tables up to date; instances that start together wait for each other.
async fn migrate(options: &PgConnectOptions) -> Result<()> {
    let unusable = |reason: String| Error::Unavailable { what: "metadata", reason };
    let mut connection = PgConnection::connect_with(options).await.map_err(|e| unusable(format!("PostgreSQL: {e}")))?;
    let migrations = MIGRATIONS
        .iter()
        .map(|(version, name, sql)| Migration::new(*version, (*name).into(), MigrationType::Simple, (*sql).into_sql_str(), false))
        .collect();
    let result = Migrator::with_migrations(migrations).run_direct(None, &mut connection, false).await;
    let known = MIGRATIONS.len();
    let result = result.map_err(|error| match error {
        MigrateError::VersionMissing(version) => {
            unusable(format!("its tables have version {version}, this program knows {known}: use a newer one"))
        }
        other => unusable(format!("its tables cannot be brought up to date: {other}")),
    });
    drop(connection.close().await);
    result
}

/// What comes within `limit`; else the connection is taken for lost.
async fn answered<T>(limit: Duration, work: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let words = format!("no answer within {} seconds", limit.as_secs());
        Err(Fail::Sql(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, words))))
    })
}

/// A connection of the pool. It goes back only if nothing of a job is under way on it: else it is closed, and with it the transaction ends.
struct Leased {
    connection: PoolConnection<Postgres>,
    done: bool,
}

impl Leased {
    fn new(connection: PoolConnection<Postgres>) -> Self {
        Self { connection, done: false }
    }

    fn done(&mut self) {
        self.done = true;
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) if self.done => {
                // It is asked whether it is alive before others get it, and would have all the time in the world for an answer.
                let back = self.connection.return_to_pool();
                drop(runtime.spawn(tokio::time::timeout(ALIVE, back)));
            }
            _ => self.connection.close_on_drop(),
        }
    }
}

/// What a job works with.
pub(super) struct Tx {
    connection: Leased,
    now: Option<i64>,
    rows: u64,
}

impl Tx {
    /// The database's time when it is first asked for: one moment for the whole transaction.
    pub(super) async fn now(&mut self) -> Outcome<i64> {
        if let Some(now) = self.now {
            return Ok(now);
        }
        let now: i64 = sqlx::query_scalar("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint").fetch_one(self.on()).await?;
        self.now = Some(now);
        Ok(now)
    }

    /// To run statements on that return rows.
    pub(super) fn on(&mut self) -> &mut PgConnection {
        &mut self.connection.connection
    }

    /// A word to the database about the transaction.
    async fn say(&mut self, word: &'static str, limit: Duration) -> Outcome<()> {
        let said = sqlx::raw_sql(word).execute(self.on());
        answered(limit, async { Ok(said.await.map(drop)?) }).await
    }

    /// Runs a statement that writes; returns how many rows.
    pub(super) async fn execute(&mut self, query: Query<'_, Postgres, PgArguments>) -> Outcome<u64> {
        let rows = query.execute(self.on()).await?.rows_affected();
        self.rows += rows;
        Ok(rows)
    }

    /// Counts rows that a statement wrote which also returned some.
    pub(super) fn wrote(&mut self, rows: usize) {
        self.rows += rows as u64;
    }

    /// Like [`Self::execute`], unless there is nothing to write.
    pub(super) async fn execute_any<T>(
        &mut self,
        items: &[T],
        query: impl FnOnce() -> Query<'static, Postgres, PgArguments> + Send,
    ) -> Outcome<u64> {
        if items.is_empty() { Ok(0) } else { self.execute(query()).await }
    }
}

impl std::fmt::Debug for Tx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tx").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl Fail {
    fn code(&self) -> Option<String> {
        match self {
            Self::Sql(error) => error.as_database_error().and_then(|e| e.code()).map(|code| code.into_owned()),
            _ => None,
        }
    }

    /// Whether nothing can be said about what the database did last.
    fn lost_connection(&self) -> bool {
        // Among the codes: shutdown, crash, a session that was ended.
        let ended = |code: &str| code.starts_with("08") || matches!(code, "57P01" | "57P02" | "57P05" | "25P03");
        match self {
            Self::Sql(sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed | sqlx::Error::BeginFailed | sqlx::Error::Protocol(_)) => true,
            _ => self.code().is_some_and(|code| ended(&code)),
        }
    }

    /// Whether the whole transaction may succeed when it is run again.
    fn is_worth_another_try(&self) -> bool {
        // Serialisation, deadlock, start-up, too many connections.
        let passing = |code: &str| matches!(code, "40001" | "40P01" | "57P03" | "53300");
        matches!(self, Self::Again) || self.lost_connection() || self.code().is_some_and(|code| passing(&code))
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
