//! The interface between the logic of transactions and the databases: [`Backend`] runs a
//! transaction, and [`Tx`] runs its statements. A back end decides nothing about the tables.

use super::ObjectId;
pub(crate) use super::fail::{Fail, Outcome};
use super::sql::{Column, FromRow, Sql, Value};
use crate::error::Result;
use crate::room::{Freeing, MadeRoom};
use futures::future::BoxFuture;
use std::time::Duration;

/// What the statements of a transaction see of each other and of other transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isolation {
    /// Each statement stands alone: nothing ties it to the one before.
    Statements,
    /// All statements see one state of the tables.
    Snapshot,
    /// Statements see what is committed, lock what they change, and are committed together.
    Locks,
}

/// How a transaction is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode {
    pub isolation: Isolation,
    pub writes: bool,
    /// It stores something new: refused while the database's disk is nearly full.
    pub grows: bool,
    /// It reads whole tables, so the usual timeout does not apply.
    pub long: bool,
    /// If the host goes down soon after, it may never have been: its caller then does it again. It
    /// need not wait for the disk, and every later transaction that does makes it durable too.
    pub may_be_undone: bool,
    /// What traces call it.
    pub name: &'static str,
}

impl Mode {
    const NOTHING: Self =
        Self { isolation: Isolation::Statements, writes: false, grows: false, long: false, may_be_undone: false, name: "transaction" };
    pub const READ: Self = Self::NOTHING;
    pub const SNAPSHOT: Self = Self { isolation: Isolation::Snapshot, ..Self::NOTHING };
    pub const LONG_SNAPSHOT: Self = Self { long: true, ..Self::SNAPSHOT };
    pub const WRITE: Self = Self { isolation: Isolation::Locks, writes: true, ..Self::NOTHING };
    pub const LONG_WRITE: Self = Self { long: true, ..Self::WRITE };
    pub const UNDOABLE: Self = Self { may_be_undone: true, ..Self::WRITE };
    pub const GROW: Self = Self { grows: true, ..Self::WRITE };
    /// Its caller does without it on a nearly full disk, and nothing makes room for it.
    pub const UNDOABLE_GROW: Self = Self { grows: true, ..Self::UNDOABLE };
    /// A single statement that writes: it needs no transaction around it.
    pub const STATEMENT: Self = Self { isolation: Isolation::Statements, ..Self::WRITE };
    pub const GROWING_STATEMENT: Self = Self { grows: true, ..Self::STATEMENT };

    /// The same under this name.
    pub const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }
}

/// A transaction over borrowed arguments, so that it can be run again.
pub(crate) type Job<X, A, R> = for<'a> fn(&'a mut X, &'a A) -> BoxFuture<'a, Outcome<R>>;

/// A database that keeps the tables.
pub(crate) trait Backend: Send + Sync + std::fmt::Debug + 'static {
    /// Its transactions.
    type Tx: Tx;
    /// Connections that one request for missing blobs uses at a time, at most.
    const LOOKS: usize;

    /// Runs a transaction, again if the database asks for it; returns when it is durable, or at
    /// once if it may be undone.
    fn run<A: Send + Sync + 'static, R: Send + 'static>(
        &self,
        mode: Mode,
        arguments: A,
        job: Job<Self::Tx, A, R>,
    ) -> impl Future<Output = Result<R>> + Send;

    /// Collection has worked for `took`: waits so that others get their share, if there are any.
    fn give_way(&self, took: Duration) -> impl Future<Output = ()> + Send;

    /// See [`super::Metadata::make_room`].
    fn make_room(&self, work: Freeing) -> impl Future<Output = Result<MadeRoom>> + Send;

    /// See [`super::Metadata::rows_written`].
    fn rows_written(&self) -> u64;
}

/// A transaction: statements with parameters.
///
/// `$1…` of a statement are first the columns, if it is given any, then the values. With columns a
/// statement works on many rows: PostgreSQL gets each column as an array and runs it once, SQLite
/// runs the prepared statement for each row, or once as well if it is [`Sql::at_once`]. No row, no
/// statement.
pub(crate) trait Tx: Send {
    /// Whether other transactions write at the same time. If not, locks and their order do not
    /// matter.
    const CONCURRENT: bool;
    /// Objects that collection deletes in one transaction, about.
    const SWEEP: usize;
    /// Objects that collection deletes with one set of statements, about.
    const ROUND: usize;

    /// Whether collection may delete a further set in this transaction. It must not where a second
    /// set of locks breaks the order of locks, nor while others wait for the only writer.
    fn may_go_on(&self) -> bool;

    /// Milliseconds since 1970: one moment for the whole transaction.
    fn now(&mut self) -> impl Future<Output = Outcome<u64>> + Send;

    /// `count` unused row ids of objects, ascending.
    fn new_objects(&mut self, count: usize) -> impl Future<Output = Outcome<Vec<ObjectId>>> + Send;

    /// Runs a statement that returns rows. `writes` says whether these are rows that it wrote.
    fn rows<R: FromRow>(
        &mut self,
        sql: Sql,
        columns: Vec<Column>,
        values: &[Value<'_>],
        writes: bool,
    ) -> impl Future<Output = Outcome<Vec<R>>> + Send;

    /// Runs a statement that writes; returns how many rows.
    fn write(&mut self, sql: Sql, columns: Vec<Column>, values: &[Value<'_>]) -> impl Future<Output = Outcome<u64>> + Send;

    /// All rows of a statement that reads.
    fn query<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> impl Future<Output = Outcome<Vec<R>>> + Send {
        self.rows(sql.into(), Vec::new(), values, false)
    }

    /// The first row of a statement that reads.
    fn first<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> impl Future<Output = Outcome<Option<R>>> + Send {
        let rows = self.rows::<R>(sql.into(), Vec::new(), values, false);
        async move { Ok(rows.await?.into_iter().next()) }
    }

    /// The only row of a statement that reads.
    fn one<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> impl Future<Output = Outcome<R>> + Send {
        let row = self.first::<R>(sql, values);
        async move { row.await?.ok_or_else(|| Fail::internal("a statement that always has a row had none")) }
    }

    /// The rows that a statement wrote and returns.
    fn returning<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> impl Future<Output = Outcome<Vec<R>>> + Send {
        self.rows(sql.into(), Vec::new(), values, true)
    }

    /// Runs a statement that writes; returns how many rows.
    fn execute(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> impl Future<Output = Outcome<u64>> + Send {
        self.write(sql.into(), Vec::new(), values)
    }

    /// Runs a statement that writes for each row of `columns`; returns how many rows.
    fn execute_each(
        &mut self,
        sql: impl Into<Sql>,
        columns: Vec<Column>,
        values: &[Value<'_>],
    ) -> impl Future<Output = Outcome<u64>> + Send {
        self.write(sql.into(), columns, values)
    }
}
