//! The interface between the logic of transactions and the databases: [`Backend`] runs a
//! transaction, and [`Tx`] runs its statements. A back end decides nothing about the tables.

pub(crate) use super::fail::{Fail, Outcome};
use super::sql::{Cells, Column, FromRow, Sql, Value};
use super::{Metadata, ObjectId};
use crate::error::{Error, Result};
use crate::room::{Freeing, MadeRoom};
use async_trait::async_trait;
use futures::future::BoxFuture;
use std::any::Any;
use std::sync::Arc;
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
pub(crate) type Job<A, R> = for<'a> fn(&'a mut dyn Tx, &'a A) -> BoxFuture<'a, Outcome<R>>;

/// What a transaction returns, without its type.
pub(crate) type Answer = Box<dyn Any + Send>;

/// A transaction and its arguments, without their types: there are some 140 transactions, and what
/// is around them is compiled once.
pub(crate) trait Work: Send + Sync {
    /// Runs it, or runs it again.
    fn start<'a>(&'a self, tx: &'a mut dyn Tx) -> BoxFuture<'a, Outcome<Answer>>;
}

struct Typed<A, R> {
    job: Job<A, R>,
    arguments: A,
}

impl<A: Send + Sync, R: Send + 'static> Work for Typed<A, R> {
    fn start<'a>(&'a self, tx: &'a mut dyn Tx) -> BoxFuture<'a, Outcome<Answer>> {
        untyped((self.job)(tx, &self.arguments))
    }
}

fn untyped<R: Send + 'static>(work: BoxFuture<'_, Outcome<R>>) -> BoxFuture<'_, Outcome<Answer>> {
    Box::pin(async { Ok(Box::new(work.await?) as Answer) })
}

async fn typed<R: 'static>(answer: BoxFuture<'_, Result<Answer>>) -> Result<R> {
    let answer = answer.await?.downcast();
    answer.map(|answer| *answer).map_err(|_| Error::Internal("a transaction gave a value of another type".into()))
}

/// A database that keeps the tables.
#[async_trait]
pub(crate) trait Backend: Send + Sync + std::fmt::Debug + 'static {
    /// Connections that one request for missing blobs uses at a time, at most.
    fn looks(&self) -> usize;

    /// Objects that collection deletes in one transaction, about.
    fn sweep(&self) -> usize;

    /// Runs a transaction, again if the database asks for it; returns when it is durable, or at
    /// once if it may be undone.
    async fn run_untyped(&self, mode: Mode, work: Box<dyn Work>) -> Result<Answer>;

    /// Collection has worked for `took`: waits so that others get their share, if there are any.
    async fn give_way(&self, took: Duration);

    /// See [`super::Metadata::make_room`].
    async fn make_room(&self, work: Freeing) -> Result<MadeRoom>;

    /// See [`super::Metadata::rows_written`].
    fn rows_written(&self) -> u64;
}

impl dyn Backend {
    /// Runs a transaction as [`Backend::run_untyped`] does.
    pub(crate) fn run<A: Send + Sync + 'static, R: Send + 'static>(
        &self,
        mode: Mode,
        arguments: A,
        job: Job<A, R>,
    ) -> impl Future<Output = Result<R>> + Send {
        typed(self.run_untyped(mode, Box::new(Typed { job, arguments })))
    }
}

/// The transactions of the store on a database.
#[derive(Debug)]
pub(crate) struct AnyBackend(pub Arc<dyn Backend>);

impl AnyBackend {
    pub(crate) fn metadata(backend: impl Backend) -> Arc<dyn Metadata> {
        Arc::new(Self(Arc::new(backend)))
    }
}

/// Sees a row.
pub(crate) type EachRow<'a> = dyn FnMut(&dyn Cells) -> Outcome<()> + Send + 'a;

/// A transaction: statements with parameters.
///
/// `$1…` of a statement are first the columns, if it is given any, then the values. With columns a
/// statement works on many rows: PostgreSQL gets each column as an array and runs it once, SQLite
/// runs the prepared statement for each row, or once as well if it is [`Sql::at_once`]. No row, no
/// statement.
///
/// Transactions take `&mut dyn Tx`: they are compiled once, and not once for each database.
#[async_trait]
pub(crate) trait Tx: Send {
    /// Whether other transactions write at the same time. If not, locks and their order do not
    /// matter.
    fn is_concurrent(&self) -> bool;

    /// Objects that collection deletes with one set of statements, about.
    fn round(&self) -> usize;

    /// Whether collection may delete a further set in this transaction. It must not where a second
    /// set of locks breaks the order of locks, nor while others wait for the only writer.
    fn may_go_on(&self) -> bool;

    /// Milliseconds since 1970: one moment for the whole transaction.
    async fn now(&mut self) -> Outcome<u64>;

    /// `count` unused row ids of objects, ascending.
    async fn new_objects(&mut self, count: usize) -> Outcome<Vec<ObjectId>>;

    /// Runs a statement that returns rows, and shows them one after the other. `writes` says
    /// whether these are rows that it wrote.
    async fn each_row(&mut self, sql: Sql, columns: Vec<Column>, values: &[Value<'_>], writes: bool, each: &mut EachRow<'_>)
    -> Outcome<()>;

    /// Runs a statement that writes; returns how many rows.
    async fn write(&mut self, sql: Sql, columns: Vec<Column>, values: &[Value<'_>]) -> Outcome<u64>;
}

impl dyn Tx + '_ {
    /// The rows that a statement returns. `writes` says whether these are rows that it wrote.
    pub(crate) async fn rows<R: FromRow>(&mut self, sql: Sql, columns: Vec<Column>, values: &[Value<'_>], writes: bool) -> Outcome<Vec<R>> {
        let mut rows = Vec::new();
        let read = &mut |row: &dyn Cells| {
            rows.push(R::read(row)?);
            Ok(())
        };
        self.each_row(sql, columns, values, writes, read).await?;
        Ok(rows)
    }

    /// All rows of a statement that reads.
    pub(crate) async fn query<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> Outcome<Vec<R>> {
        self.rows(sql.into(), Vec::new(), values, false).await
    }

    /// The first row of a statement that reads.
    pub(crate) async fn first<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> Outcome<Option<R>> {
        Ok(self.query::<R>(sql, values).await?.into_iter().next())
    }

    /// The only row of a statement that reads.
    pub(crate) async fn one<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> Outcome<R> {
        self.first(sql, values).await?.ok_or_else(|| Fail::internal("a statement that always has a row had none"))
    }

    /// The rows that a statement wrote and returns.
    pub(crate) async fn returning<R: FromRow>(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> Outcome<Vec<R>> {
        self.rows(sql.into(), Vec::new(), values, true).await
    }

    /// Runs a statement that writes; returns how many rows.
    pub(crate) async fn execute(&mut self, sql: impl Into<Sql>, values: &[Value<'_>]) -> Outcome<u64> {
        self.write(sql.into(), Vec::new(), values).await
    }

    /// Runs a statement that writes for each row of `columns`; returns how many rows.
    pub(crate) async fn execute_each(&mut self, sql: impl Into<Sql>, columns: Vec<Column>, values: &[Value<'_>]) -> Outcome<u64> {
        self.write(sql.into(), columns, values).await
    }
}
