//! Statements, their parameters and their rows, without a database.

use super::Health;
use super::fail::{Fail, Outcome};
use pfr_schema::codec::Codec;
use pfr_schema::{AccessScope, AccessTokenId, AgentName, Digest, DomainName, Kind, RepositoryName, Tag};
use std::borrow::Cow;

/// A statement.
///
/// It is written once, in PostgreSQL's dialect; `backends/sqlite/dialect.rs` says how SQLite reads
/// it. A comment `/* … */` inside a statement is read by SQLite only. An empty statement is not
/// run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sql {
    pub postgres: &'static str,
    /// If SQLite needs another one.
    pub sqlite: Option<&'static str>,
    /// Whether SQLite gets each column as an array too, and runs the statement once for all rows.
    pub is_at_once: bool,
}

impl Sql {
    /// Two statements that do the same.
    pub(crate) const fn of_each(postgres: &'static str, sqlite: &'static str) -> Self {
        Self { postgres, sqlite: Some(sqlite), is_at_once: false }
    }

    /// Two statements that do the same, for many rows at once: in that of SQLite the rows of column
    /// `n` are those of `rarray($n)`, with `value`, and `rowid` from 1 on.
    pub(crate) const fn at_once(postgres: &'static str, sqlite: &'static str) -> Self {
        Self { is_at_once: true, ..Self::of_each(postgres, sqlite) }
    }

    /// A lock, or something else that a database with one writer does not need.
    pub(crate) const fn only_postgres(postgres: &'static str) -> Self {
        Self::of_each(postgres, "")
    }
}

impl From<&'static str> for Sql {
    fn from(postgres: &'static str) -> Self {
        Self { postgres, sqlite: None, is_at_once: false }
    }
}

/// A parameter of a statement.
#[derive(Debug)]
pub(crate) enum Value<'a> {
    Int(Option<i64>),
    Bool(bool),
    Text(Option<Cow<'a, str>>),
    Bytes(Option<Cow<'a, [u8]>>),
    /// For `= ANY($n)` and `<> ALL($n)`.
    Ids(Cow<'a, [i64]>),
    /// For `= ANY($n)`.
    Texts(Vec<&'a str>),
    /// For `= ANY($n)`, at most one in a statement.
    Digests(&'a [Digest]),
}

/// A column of rows that a statement is run for.
#[derive(Debug)]
pub(crate) enum Column {
    Ints(Vec<i64>),
    MaybeInts(Vec<Option<i64>>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
    Bytes(Vec<Vec<u8>>),
}

impl Column {
    /// Rows in it.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Ints(values) => values.len(),
            Self::MaybeInts(values) => values.len(),
            Self::Bools(values) => values.len(),
            Self::Texts(values) => values.len(),
            Self::Bytes(values) => values.len(),
        }
    }
}

/// The parameters of a statement.
macro_rules! values {
    ($($value:expr),* $(,)?) => { &[$($crate::metadata::sql::Value::from($value)),*] };
}
pub(crate) use values;

/// The tables' integers are signed; nothing here comes near 2⁶³.
pub(crate) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Rows as JSON, for a statement of SQLite that changes all of them at once.
///
/// That is for statements that change a foreign key. Run for each row, they take time quadratic in
/// the number of rows: SQLite journals each of them so that it can be undone alone, and at its end
/// goes through all that its transaction has journaled.
pub(crate) fn json_rows<R: serde::Serialize>(rows: &[R]) -> Outcome<String> {
    serde_json::to_string(rows).map_err(|e| Fail::internal(e.to_string()))
}

/// Types that are parameters, and how.
macro_rules! parameters {
    ($($type:ty, $value:ident => $parameter:expr;)*) => {
        $(impl<'a> From<$type> for Value<'a> {
            fn from($value: $type) -> Self {
                $parameter
            }
        })*
    };
}

parameters! {
    i64, value => Value::Int(Some(value));
    &i64, value => Value::Int(Some(*value));
    u64, value => Value::Int(Some(int(value)));
    Option<i64>, value => Value::Int(value);
    Option<u64>, value => Value::Int(value.map(int));
    Kind, value => Value::Int(Some(value as i64));
    Health, value => Value::Int(Some(value as i64));
    bool, value => Value::Bool(value);
    &'a str, value => Value::Text(Some(value.into()));
    &'a String, value => Value::Text(Some(value.as_str().into()));
    String, value => Value::Text(Some(value.into()));
    Option<&'a str>, value => Value::Text(value.map(Into::into));
    &'a AccessTokenId, value => Value::Text(Some(value.as_str().into()));
    Option<&'a DomainName>, value => Value::Text(value.map(|name| name.as_str().into()));
    &'a DomainName, value => Value::Text(Some(value.as_str().into()));
    &'a AgentName, value => Value::Text(Some(value.as_str().into()));
    &'a RepositoryName, value => Value::Text(Some(value.as_str().into()));
    &'a Tag, value => Value::Text(Some(value.as_str().into()));
    &Digest, value => Value::Bytes(Some(value.to_key().into()));
    Option<Digest>, value => Value::Bytes(value.map(|digest| digest.to_key().into()));
    Vec<u8>, value => Value::Bytes(Some(value.into()));
    &'a [i64], value => Value::Ids(value.into());
    &'a Vec<i64>, value => Value::Ids(value.as_slice().into());
    Vec<i64>, value => Value::Ids(value.into());
    Vec<&'a str>, value => Value::Texts(value);
    &'a [Digest], value => Value::Digests(value);
}

/// Iterators that are columns.
macro_rules! columns {
    ($($item:ty => $column:ident($value:ident => $cell:expr);)*) => {
        $(impl FromIterator<$item> for Column {
            fn from_iter<I: IntoIterator<Item = $item>>(values: I) -> Self {
                Self::$column(values.into_iter().map(|$value| $cell).collect())
            }
        })*
    };
}

columns! {
    i64 => Ints(value => value);
    u64 => Ints(value => int(value));
    Kind => Ints(value => value as i64);
    Health => Ints(value => value as i64);
    Option<i64> => MaybeInts(value => value);
    bool => Bools(value => value);
    String => Texts(value => value);
    Digest => Bytes(value => value.to_key());
    Vec<u8> => Bytes(value => value);
}

/// A row as a database gives it.
pub(crate) trait Cells {
    fn is_null(&self, at: usize) -> Outcome<bool>;
    fn int(&self, at: usize) -> Outcome<i64>;
    fn text(&self, at: usize) -> Outcome<&str>;
    fn bytes(&self, at: usize) -> Outcome<&[u8]>;
}

/// What is in one cell.
pub(crate) trait FromCell: Sized {
    fn read(row: &dyn Cells, at: usize) -> Outcome<Self>;
}

/// What is in one row.
pub(crate) trait FromRow: Sized + Send {
    fn read(row: &dyn Cells) -> Outcome<Self>;
}

impl<T: FromCell + Send> FromRow for T {
    fn read(row: &dyn Cells) -> Outcome<Self> {
        T::read(row, 0)
    }
}

macro_rules! tuples {
    ($(($($type:ident $at:tt),*);)*) => {
        $(impl<$($type: FromCell + Send),*> FromRow for ($($type,)*) {
            fn read(row: &dyn Cells) -> Outcome<Self> {
                Ok(($($type::read(row, $at)?,)*))
            }
        })*
    };
}

tuples! {
    (A 0, B 1);
    (A 0, B 1, C 2);
    (A 0, B 1, C 2, D 3);
    (A 0, B 1, C 2, D 3, E 4);
    (A 0, B 1, C 2, D 3, E 4, F 5);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8);
}

impl<T: FromCell> FromCell for Option<T> {
    fn read(row: &dyn Cells, at: usize) -> Outcome<Self> {
        if row.is_null(at)? { Ok(None) } else { T::read(row, at).map(Some) }
    }
}

/// Types that are read from cells, and how.
macro_rules! cells {
    ($($type:ty: $row:ident, $at:ident => $cell:expr;)*) => {
        $(impl FromCell for $type {
            fn read($row: &dyn Cells, $at: usize) -> Outcome<Self> {
                $cell
            }
        })*
    };
}

cells! {
    i64: row, at => row.int(at);
    u64: row, at => Ok(u64::try_from(row.int(at)?).unwrap_or(0));
    bool: row, at => Ok(row.int(at)? != 0);
    String: row, at => Ok(row.text(at)?.to_owned());
    AccessTokenId: row, at => Ok(row.text(at)?.parse()?);
    Vec<AccessScope>: row, at => Ok(row.text(at)?.split(' ').map(str::parse).collect::<Result<_, _>>()?);
    DomainName: row, at => Ok(row.text(at)?.parse()?);
    AgentName: row, at => Ok(row.text(at)?.parse()?);
    RepositoryName: row, at => Ok(row.text(at)?.parse()?);
    Tag: row, at => Ok(row.text(at)?.parse()?);
    Vec<u8>: row, at => Ok(row.bytes(at)?.to_vec());
    Digest: row, at => Ok(Digest::from_key(row.bytes(at)?)?);
    Codec: row, at => codec_of(row.int(at)?);
    Kind: row, at => kind_of(row.int(at)?);
    Health: row, at => Ok(health_of(row.int(at)?));
}

/// The kind with this number.
pub(crate) fn kind_of(number: i64) -> Outcome<Kind> {
    let kind = u8::try_from(number).ok().and_then(Kind::from_number);
    kind.ok_or_else(|| Fail::internal(format!("object of unknown kind {number}")))
}

/// The codec with this number.
fn codec_of(number: i64) -> Outcome<Codec> {
    let codec = u8::try_from(number).ok().and_then(Codec::from_number);
    codec.ok_or_else(|| Fail::internal(format!("object in unknown codec {number}: a newer version stored it")))
}

fn health_of(number: i64) -> Health {
    match number {
        0 => Health::Complete,
        1 => Health::Incomplete,
        _ => Health::Damaged,
    }
}
