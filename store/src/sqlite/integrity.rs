//! Quarantine, and the audit of the tables.

use crate::error::{Error, Result};
use crate::metadata::{Audit, Damage, DamagedRow, Page};
use pfr_schema::Digest;
use rusqlite::Connection;

pub(super) fn quarantine(_tx: &Connection, _damage: &[Damage], _now: u64) -> Result<Vec<Digest>> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn damaged(_tx: &Connection, _after: Option<&str>, _limit: usize) -> Result<Page<DamagedRow>> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn reassess(_tx: &Connection) -> Result<u64> {
    Err(Error::Internal("in the making".into()))
}

pub(super) fn audit(_tx: &Connection, _repair: bool) -> Result<Audit> {
    Err(Error::Internal("in the making".into()))
}
