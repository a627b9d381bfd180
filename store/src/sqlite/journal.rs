//! The way of changes into the journal, and back.

use crate::error::{Error, Result};
use crate::metadata::{JournalRow, Unjournaled};
use pfr_schema::journal::Record;
use rusqlite::Connection;

pub(super) fn unjournaled(_tx: &Connection, _limit: usize) -> Result<Vec<Unjournaled>> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn journaled(_tx: &Connection, _row: &JournalRow) -> Result<()> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn names(_tx: &Connection) -> Result<(u64, Vec<Record>)> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn journal(_tx: &Connection) -> Result<Vec<JournalRow>> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn forget_journal(_tx: &Connection, _keys: &[String]) -> Result<()> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn is_empty(_tx: &Connection) -> Result<bool> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn restore_names(_tx: &Connection, _records: &[Record], _last: u64) -> Result<Vec<Record>> {
    Err(Error::Internal("in the making".into()))
}
