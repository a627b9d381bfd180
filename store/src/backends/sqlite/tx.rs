//! A transaction on SQLite: a connection that runs statements. Every operation is done when it
//! returns.

use super::dialect::translate;
use crate::error::Error;
use crate::metadata::ObjectId;
use crate::metadata::sql::{Cells, Column, Sql, Value};
use crate::metadata::tx::{EachRow, Fail, Outcome, Tx};
use async_trait::async_trait;
use rusqlite::types::{self, ToSqlOutput, ValueRef};
use rusqlite::vtab::array::Array;
use rusqlite::{CachedStatement, Connection, Row, ToSql};
use std::collections::HashMap;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A connection, and what a transaction on it knows.
#[derive(Debug)]
pub(crate) struct SqliteTx {
    connection: Connection,
    /// Whether its commits wait for the disk.
    syncs: bool,
    now: u64,
    /// Transactions that wait for the writer.
    pub(super) waiting: Arc<AtomicUsize>,
    /// Statements as SQLite reads them, by where the original lies.
    translated: HashMap<(usize, usize), String>,
}

impl Deref for SqliteTx {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl SqliteTx {
    pub(super) fn on(connection: Connection) -> Self {
        Self { connection, syncs: true, now: 0, waiting: Arc::default(), translated: HashMap::new() }
    }

    /// Whether commits from now on wait for the disk. Not to be called within a transaction.
    pub(super) fn set_syncs(&mut self, syncs: bool) -> rusqlite::Result<()> {
        if self.syncs != syncs {
            let level = if syncs { "FULL" } else { "NORMAL" };
            self.connection.execute_batch(&format!("PRAGMA synchronous = {level}"))?;
            self.syncs = syncs;
        }
        Ok(())
    }

    /// A transaction at this time.
    pub(super) fn begin(&mut self, now: u64) {
        self.now = now;
    }

    /// Runs a statement for each row and each key, or once for all rows, and calls `step` with it
    /// each time.
    fn run(
        &mut self,
        sql: Sql,
        columns: Vec<Column>,
        values: &[Value<'_>],
        step: &mut dyn FnMut(&mut CachedStatement<'_>) -> Outcome<()>,
    ) -> Outcome<()> {
        let original = sql.sqlite.unwrap_or(sql.postgres);
        let rows = columns.first().map_or(1, Column::len);
        if original.is_empty() || rows == 0 {
            return Ok(());
        }
        let keys = values.iter().position(|value| matches!(value, Value::Digests(_))).map(|at| columns.len() + at + 1);
        let text = self.translated.entry((original.as_ptr() as usize, original.len())).or_insert_with(|| translate(original, keys));
        let mut statement = self.connection.prepare_cached(text).map_err(failed)?;
        let wanted = statement.parameter_count();
        for (at, value) in values.iter().enumerate() {
            let parameter = columns.len() + at + 1;
            if parameter <= wanted && Some(parameter) != keys {
                statement.raw_bind_parameter(parameter, value).map_err(failed)?;
            }
        }
        if sql.is_at_once {
            for (at, column) in columns.into_iter().enumerate() {
                statement.raw_bind_parameter(at + 1, array(column)).map_err(failed)?;
            }
            return step(&mut statement);
        }
        let number_of_row = columns.len() + values.len() + 1;
        for row in 0..rows {
            for (at, column) in columns.iter().enumerate() {
                statement.raw_bind_parameter(at + 1, Cell(column, row)).map_err(failed)?;
            }
            if !columns.is_empty() && wanted == number_of_row {
                statement.raw_bind_parameter(number_of_row, row as i64 + 1).map_err(failed)?;
            }
            match keys.map(|parameter| (parameter, &values[parameter - columns.len() - 1])) {
                Some((parameter, Value::Digests(digests))) => {
                    for digest in *digests {
                        statement.raw_bind_parameter(parameter, digest.to_key()).map_err(failed)?;
                        step(&mut statement)?;
                    }
                }
                _ => step(&mut statement)?,
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Tx for SqliteTx {
    fn is_concurrent(&self) -> bool {
        false
    }

    /// Inside a savepoint SQLite goes through the whole statement journal at the end of every
    /// statement that may touch more than one row: a statement for each object is quadratic.
    fn round(&self) -> usize {
        1024
    }

    fn may_go_on(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0
    }

    async fn now(&mut self) -> Outcome<u64> {
        Ok(self.now)
    }

    async fn new_objects(&mut self, count: usize) -> Outcome<Vec<ObjectId>> {
        let tx: &mut dyn Tx = self;
        let last: Option<ObjectId> = tx.first("SELECT seq FROM sqlite_sequence WHERE name = 'objects'", &[]).await?;
        Ok((last.unwrap_or(0) + 1..).take(count).collect())
    }

    async fn each_row(
        &mut self,
        sql: Sql,
        columns: Vec<Column>,
        values: &[Value<'_>],
        _writes: bool,
        each: &mut EachRow<'_>,
    ) -> Outcome<()> {
        self.run(sql, columns, values, &mut |statement| {
            let mut rows = statement.raw_query();
            while let Some(row) = rows.next().map_err(failed)? {
                each(row)?;
            }
            Ok(())
        })
    }

    async fn write(&mut self, sql: Sql, columns: Vec<Column>, values: &[Value<'_>]) -> Outcome<u64> {
        let mut written = 0;
        self.run(sql, columns, values, &mut |statement| {
            written += statement.raw_execute().map_err(failed)? as u64;
            Ok(())
        })?;
        Ok(written)
    }
}

fn failed(error: rusqlite::Error) -> Fail {
    Fail::Database { error: Error::metadata(&error), connection_lost: false, passing: false }
}

impl ToSql for Value<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let json = |list: Result<String, serde_json::Error>| {
            list.map(ToSqlOutput::from).map_err(|e| rusqlite::Error::ToSqlConversionFailure(e.into()))
        };
        Ok(match self {
            Self::Int(value) => number(*value),
            Self::Bool(value) => i64::from(*value).into(),
            Self::Text(None) | Self::Bytes(None) => ToSqlOutput::Borrowed(ValueRef::Null),
            Self::Text(Some(text)) => ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes())),
            Self::Bytes(Some(bytes)) => ToSqlOutput::Borrowed(ValueRef::Blob(bytes)),
            Self::Ids(ids) => return json(serde_json::to_string(ids)),
            Self::Texts(texts) => return json(serde_json::to_string(texts)),
            // Bound one by one.
            Self::Digests(_) => ToSqlOutput::Borrowed(ValueRef::Null),
        })
    }
}

/// One cell of a column.
struct Cell<'a>(&'a Column, usize);

impl ToSql for Cell<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let Self(column, row) = *self;
        Ok(match column {
            Column::Ints(values) => values[row].into(),
            Column::MaybeInts(values) => number(values[row]),
            Column::Bools(values) => i64::from(values[row]).into(),
            Column::Texts(values) => ToSqlOutput::Borrowed(ValueRef::Text(values[row].as_bytes())),
            Column::Bytes(values) => ToSqlOutput::Borrowed(ValueRef::Blob(&values[row])),
        })
    }
}

/// A column as `rarray` takes it. The statement gives it up when it goes back to the cache.
fn array(column: Column) -> Array {
    Rc::new(match column {
        Column::Ints(values) => values.into_iter().map(types::Value::Integer).collect(),
        Column::MaybeInts(values) => values.into_iter().map(|value| value.map_or(types::Value::Null, types::Value::Integer)).collect(),
        Column::Bools(values) => values.into_iter().map(|value| types::Value::Integer(value.into())).collect(),
        Column::Texts(values) => values.into_iter().map(types::Value::Text).collect(),
        Column::Bytes(values) => values.into_iter().map(types::Value::Blob).collect(),
    })
}

fn number(value: Option<i64>) -> ToSqlOutput<'static> {
    value.map_or(ToSqlOutput::Borrowed(ValueRef::Null), Into::into)
}

impl Cells for Row<'_> {
    fn is_null(&self, at: usize) -> Outcome<bool> {
        Ok(self.get_ref(at).map_err(failed)? == ValueRef::Null)
    }

    fn int(&self, at: usize) -> Outcome<i64> {
        self.get(at).map_err(failed)
    }

    fn text(&self, at: usize) -> Outcome<&str> {
        self.get_ref(at).map_err(failed)?.as_str().map_err(|e| Fail::internal(e.to_string()))
    }

    fn bytes(&self, at: usize) -> Outcome<&[u8]> {
        self.get_ref(at).map_err(failed)?.as_blob().map_err(|e| Fail::internal(e.to_string()))
    }
}
