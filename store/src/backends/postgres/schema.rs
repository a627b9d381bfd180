//! The tables of a domain: a schema of its own in the same database, over the same connections.
//!
//! A transaction selects the schema in the round trip that begins it, with `SET LOCAL`: when it
//! ends, however it ends, its connection is on the default tables again. So no statement can meet
//! the tables of the domain that had the connection before. A statement that would do without a
//! transaction gets one, except in the default domain, which is where a connection always is. Only
//! this one schema is searched: a table that is not there is an error, and never another domain's.
//! A prepared statement is planned again by the server when it runs on another schema than before.

use super::connection::{Database, LONG, Leased, PgWork, answered, migrate};
use super::tx::PgTx;
use crate::error::{Error, Result};
use crate::metadata::tx::{Answer, Fail, Isolation, Mode, Outcome};
use futures::future::BoxFuture;
use pfr_schema::DomainName;
use sqlx::{AssertSqlSafe, Connection as _, SqlSafeStr as _, SqlStr, raw_sql};
use std::sync::atomic::AtomicU64;

/// Where the statements of a transaction find their tables.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// The domain, unless it is the default one.
    domain: Option<DomainName>,
    /// Rows that were written to them.
    pub(super) rows_written: AtomicU64,
}

impl Tables {
    pub(super) fn of(domain: &DomainName) -> Self {
        Self { domain: Some(domain.clone()), rows_written: AtomicU64::new(0) }
    }

    /// The statement that begins a transaction, if there is one around the job.
    pub(super) fn begin(&self, isolation: Isolation) -> Option<SqlStr> {
        let begin = match isolation {
            Isolation::Statements if self.domain.is_none() => return None,
            Isolation::Snapshot => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            Isolation::Statements | Isolation::Locks => "BEGIN ISOLATION LEVEL READ COMMITTED",
        };
        Some(match &self.domain {
            None => begin.into_sql_str(),
            Some(domain) => AssertSqlSafe(format!("{begin}; {}", select(domain))).into_sql_str(),
        })
    }

    /// The error for the caller. If the tables do not exist, the domain was deleted.
    pub(super) fn explain(&self, fail: Fail) -> Error {
        match (fail.into_error(), &self.domain) {
            (Error::Unavailable { what: super::error::TABLES, .. }, Some(domain)) => Error::DomainUnknown(domain.clone()),
            (error, _) => error,
        }
    }
}

/// The quoted name of the schema. Names of domains have no characters that need escaping.
fn schema(domain: &DomainName) -> String {
    format!("\"pf_{domain}\"")
}

fn select(domain: &DomainName) -> String {
    format!("SET LOCAL search_path TO {}", schema(domain))
}

impl Database {
    /// Makes the tables of a domain, or brings them up to date, in one transaction. Its row in the
    /// catalogue is locked meanwhile: a deletion comes before or after.
    pub(super) async fn make_tables(&self, tables: &Tables) -> Result<()> {
        let Some(domain) = &tables.domain else { return Ok(()) };
        let work = async {
            let mut leased = Leased::new(self.pool.acquire().await?);
            let mut tx = leased.connection.begin().await?;
            let lock = "SELECT 1 FROM domains WHERE name = $1 AND deleting_since IS NULL FOR UPDATE";
            if sqlx::query(lock).bind(domain.as_str()).fetch_optional(&mut *tx).await?.is_none() {
                return Err(Error::DomainUnknown(domain.clone()).into());
            }
            let select = format!("CREATE SCHEMA IF NOT EXISTS {}; {}", schema(domain), select(domain));
            raw_sql(AssertSqlSafe(select)).execute(&mut *tx).await?;
            migrate(&mut tx, false).await?;
            tx.commit().await?;
            leased.done();
            Ok::<(), Fail>(())
        };
        answered(LONG, work).await.map_err(Fail::into_error)
    }

    /// Drops the tables of a domain that is being deleted.
    pub(super) async fn drop_tables(&self, tables: &Tables) -> Result<()> {
        let Some(domain) = &tables.domain else { return Ok(()) };
        self.run(&Tables::default(), Mode::LONG_WRITE, &DropTables(domain)).await.map(drop)
    }
}

struct DropTables<'a>(&'a DomainName);

impl PgWork for DropTables<'_> {
    fn start<'a>(&'a self, tx: &'a mut PgTx) -> BoxFuture<'a, Outcome<Answer>> {
        Box::pin(async {
            let Self(domain) = self;
            let lock = "SELECT 1 FROM domains WHERE name = $1 AND deleting_since IS NOT NULL FOR UPDATE";
            if sqlx::query(lock).bind(domain.as_str()).fetch_optional(tx.connection()).await?.is_some() {
                let drop = format!("DROP SCHEMA IF EXISTS {} CASCADE", schema(domain));
                raw_sql(AssertSqlSafe(drop)).execute(tx.connection()).await?;
            }
            Ok(Box::new(()) as Answer)
        })
    }
}
