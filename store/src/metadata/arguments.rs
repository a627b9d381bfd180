//! Converts arguments of callers into values that every database accepts.

use super::Page;
use crate::error::{Error, Result};

/// A number of rows for `LIMIT`; a number that is too large for a database means no limit.
pub(crate) fn at_most(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

/// A sum of bytes as a database keeps it.
pub(crate) fn countable(bytes: u64) -> u64 {
    bytes.min(i64::MAX.unsigned_abs())
}

/// One row more than a page holds: whether there is one says whether another page follows.
pub(crate) fn one_more(limit: usize) -> i64 {
    at_most(limit).saturating_add(1)
}

/// Whether a text can be kept: PostgreSQL has no NUL in texts.
pub(crate) fn can_be_kept(text: &str) -> bool {
    !text.contains('\0')
}

/// The position at which a list by name continues; `first` at its beginning.
///
/// # Errors
/// [`Error::Invalid`] for a cursor that no list has returned.
pub(crate) fn cursor<'a>(after: Option<&'a str>, first: &'a str) -> Result<&'a str> {
    match after {
        None => Ok(first),
        Some(cursor) if can_be_kept(cursor) => Ok(cursor),
        Some(cursor) => Err(Error::Invalid(format!("{cursor:?} is no cursor of this list"))),
    }
}

/// Bytes of an artifact type: two names of 127 and a slash (RFC 6838).
const ARTIFACT_TYPE: usize = 255;

/// Checks the artifact type of a commit.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn check_artifact_type(artifact_type: Option<&str>) -> Result<()> {
    match artifact_type {
        Some(text) if text.len() > ARTIFACT_TYPE => {
            Err(Error::Invalid(format!("an artifact type of {} bytes, the limit is {ARTIFACT_TYPE}", text.len())))
        }
        Some(text) if !can_be_kept(text) => Err(Error::Invalid(format!("{text:?} is no artifact type: it holds a NUL"))),
        _ => Ok(()),
    }
}

/// Removes the one row too many, and makes a cursor of the last remaining row.
pub(crate) fn paged<T>(mut rows: Vec<T>, limit: usize, cursor: impl Fn(&T) -> String) -> Page<T> {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = if more { rows.last().map(cursor) } else { None };
    Page { rows, next }
}

/// The row id after which a list continues.
///
/// # Errors
/// [`Error::Invalid`] for a cursor that no list has returned.
pub(crate) fn numbered(after: Option<&str>, first: i64) -> Result<i64> {
    match after {
        None => Ok(first),
        Some(cursor) => cursor.parse().map_err(|_| Error::Invalid(format!("{cursor:?} is no cursor of this list"))),
    }
}
