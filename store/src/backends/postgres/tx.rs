//! A transaction on PostgreSQL: a connection of the pool that runs statements.

use super::connection::Leased;
use crate::metadata::ObjectId;
use crate::metadata::sql::{Cells, Column, Sql, Value};
use crate::metadata::tx::{EachRow, Fail, Outcome, Tx};
use async_trait::async_trait;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgRow, PgValueRef};
use sqlx::{Arguments as _, Decode, PgConnection, Postgres, Row as _, TypeInfo as _, ValueRef as _};

/// Objects that collection deletes in one transaction: a push that shares an object with it waits
/// for its end.
pub(super) const SWEEP: usize = 250;

/// A transaction's connection and time.
#[derive(Debug)]
pub(crate) struct PgTx {
    pub(super) connection: Leased,
    now: Option<u64>,
    /// Rows written.
    pub(super) rows: u64,
}

impl PgTx {
    /// A transaction at `now`, or at the database's time.
    pub(super) fn on(connection: Leased, now: Option<u64>) -> Self {
        Self { connection, now, rows: 0 }
    }

    /// To run statements on.
    pub(super) fn connection(&mut self) -> &mut PgConnection {
        &mut self.connection.connection
    }
}

#[async_trait]
impl Tx for PgTx {
    fn is_concurrent(&self) -> bool {
        true
    }

    fn round(&self) -> usize {
        SWEEP
    }

    fn may_go_on(&self) -> bool {
        false
    }

    /// The database's time when it is first asked for.
    async fn now(&mut self) -> Outcome<u64> {
        if let Some(now) = self.now {
            return Ok(now);
        }
        let tx: &mut dyn Tx = self;
        let now: u64 = tx.one("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint", &[]).await?;
        self.now = Some(now);
        Ok(now)
    }

    async fn new_objects(&mut self, count: usize) -> Outcome<Vec<ObjectId>> {
        let next = "SELECT nextval(pg_get_serial_sequence('objects', 'id')) FROM generate_series(1, $1)";
        let count = [Value::from(count as u64)];
        let tx: &mut dyn Tx = self;
        let mut ids: Vec<ObjectId> = tx.query(next, &count).await?;
        ids.sort_unstable();
        Ok(ids)
    }

    async fn each_row(
        &mut self,
        sql: Sql,
        columns: Vec<Column>,
        values: &[Value<'_>],
        writes: bool,
        each: &mut EachRow<'_>,
    ) -> Outcome<()> {
        let Some(arguments) = arguments(sql, columns, values)? else { return Ok(()) };
        let rows = sqlx::query_with(sql.postgres, arguments).fetch_all(self.connection()).await?;
        if writes {
            self.rows += rows.len() as u64;
        }
        rows.iter().try_for_each(|row| each(row))
    }

    async fn write(&mut self, sql: Sql, columns: Vec<Column>, values: &[Value<'_>]) -> Outcome<u64> {
        let Some(arguments) = arguments(sql, columns, values)? else { return Ok(0) };
        let rows = sqlx::query_with(sql.postgres, arguments).execute(self.connection()).await?.rows_affected();
        self.rows += rows;
        Ok(rows)
    }
}

/// The parameters of a statement; none if it is not to be run.
fn arguments(sql: Sql, columns: Vec<Column>, values: &[Value<'_>]) -> Outcome<Option<PgArguments>> {
    if sql.postgres.is_empty() || columns.first().is_some_and(|column| column.len() == 0) {
        return Ok(None);
    }
    let mut all = PgArguments::default();
    let added = columns.into_iter().try_for_each(|column| add_column(&mut all, column));
    added.and_then(|()| values.iter().try_for_each(|value| add(&mut all, value))).map_err(sqlx::Error::Encode)?;
    Ok(Some(all))
}

fn add_column(all: &mut PgArguments, column: Column) -> Result<(), BoxDynError> {
    match column {
        Column::Ints(values) => all.add(values),
        Column::MaybeInts(values) => all.add(values),
        Column::Bools(values) => all.add(values),
        Column::Texts(values) => all.add(values),
        Column::Bytes(values) => all.add(values),
    }
}

fn add(all: &mut PgArguments, value: &Value<'_>) -> Result<(), BoxDynError> {
    match value {
        Value::Int(value) => all.add(*value),
        Value::Bool(value) => all.add(*value),
        Value::Text(value) => all.add(value.as_deref()),
        Value::Bytes(value) => all.add(value.as_deref()),
        Value::Ids(ids) => all.add(&**ids),
        Value::Texts(texts) => all.add(texts.as_slice()),
        Value::Digests(digests) => all.add(digests.iter().map(|digest| digest.to_key()).collect::<Vec<_>>()),
    }
}

fn decoded<'r, T: Decode<'r, Postgres>>(value: PgValueRef<'r>) -> Outcome<T> {
    T::decode(value).map_err(|error| Fail::from(sqlx::Error::Decode(error)))
}

impl Cells for PgRow {
    fn is_null(&self, at: usize) -> Outcome<bool> {
        Ok(self.try_get_raw(at)?.is_null())
    }

    fn int(&self, at: usize) -> Outcome<i64> {
        let value = self.try_get_raw(at)?;
        let bytes = match value.type_info().name() {
            "BOOL" => 1,
            "INT2" => 2,
            "INT4" => 4,
            _ => 8,
        };
        match bytes {
            1 => Ok(decoded::<bool>(value)?.into()),
            2 => Ok(decoded::<i16>(value)?.into()),
            4 => Ok(decoded::<i32>(value)?.into()),
            _ => decoded(value),
        }
    }

    fn text(&self, at: usize) -> Outcome<&str> {
        decoded(self.try_get_raw(at)?)
    }

    fn bytes(&self, at: usize) -> Outcome<&[u8]> {
        decoded(self.try_get_raw(at)?)
    }
}
