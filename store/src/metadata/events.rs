//! The log of events: changes that are in the journal, and collections.
//!
//! Processes that journal changes read them in the order of their numbers, when all smaller numbers
//! are visible ([`super::journal`]), and record them in that order. So rows of `events` become
//! visible in the order of their numbers, and reading them waits for no writer. And a number that
//! a reader has seen is in the journal: no rebuild gives it to another change.

use super::arguments::at_most;
use super::journal::last_number;
use super::sessions::millis;
use super::sql::{Sql, values};
use super::tx::{Fail, Outcome, Tx};
use super::{Event, EventLog, EventPage, Happening};
use pfr_schema::api::GcReport;
use std::time::Duration;

/// The changes between these numbers are in the journal: they become events, if the log has begun.
/// Reports of collections with smaller numbers come with them.
pub(super) async fn keep(tx: &mut dyn Tx, first: u64, last: u64) -> Outcome<()> {
    let now = tx.now().await?;
    // The lock makes `begin` wait for this transaction.
    let keep = "INSERT INTO events (number, noted_at, is_name, record)
                SELECT seq, $3::bigint, is_name, record FROM changes
                WHERE seq <= $2 AND (seq >= $1 OR is_name = false) AND EXISTS (SELECT 1 FROM event_log) ORDER BY seq FOR UPDATE
                ON CONFLICT (number) DO NOTHING";
    tx.execute(keep, values![first, last, now]).await?;
    let keep = "INSERT INTO events (number, noted_at, is_name, record)
                SELECT number, $2::bigint, false, record FROM collections
                WHERE number <= $1 AND EXISTS (SELECT 1 FROM event_log) ORDER BY number FOR UPDATE
                ON CONFLICT (number) DO NOTHING";
    tx.execute(keep, values![last, now]).await?;
    tx.execute("DELETE FROM collections WHERE number <= $1", values![last]).await?;
    tx.execute("DELETE FROM changes WHERE seq <= $2 AND (seq >= $1 OR is_name = false)", values![first, last]).await.map(drop)
}

/// The row of the log, and its newest number.
async fn log(tx: &mut dyn Tx) -> Outcome<Option<EventLog>> {
    let find = "SELECT epoch, forgotten, COALESCE((SELECT MAX(number) FROM events), 0) FROM event_log";
    let row: Option<(String, u64, u64)> = tx.first(find, &[]).await?;
    Ok(row.map(|(epoch, forgotten, newest)| EventLog { epoch, forgotten, last: newest.max(forgotten) }))
}

pub(super) async fn begin(tx: &mut dyn Tx, epoch: &str) -> Outcome<EventLog> {
    // Waits for transactions that have seen no log: the changes that they record are no events.
    const ALONE: Sql = Sql::only_postgres("LOCK TABLE changes IN EXCLUSIVE MODE");
    if let Some(log) = log(tx).await? {
        return Ok(log);
    }
    tx.execute(ALONE, &[]).await?;
    let insert = "INSERT INTO event_log (id, epoch, forgotten) VALUES (1, $1, 0) ON CONFLICT (id) DO NOTHING";
    tx.execute(insert, values![epoch]).await?;
    log(tx).await?.ok_or_else(|| Fail::internal("the log of events was begun and has no row"))
}

pub(super) async fn after(tx: &mut dyn Tx, after: u64, limit: usize) -> Outcome<EventPage> {
    let Some(log) = log(tx).await? else { return Ok(EventPage { log: None, events: Vec::new() }) };
    if log.last <= after {
        return Ok(EventPage { log: Some(log), events: Vec::new() });
    }
    let find = "SELECT number, noted_at, is_name, record FROM events WHERE number > $1 ORDER BY number LIMIT $2";
    let rows: Vec<(u64, u64, bool, String)> = tx.query(find, values![after, at_most(limit)]).await?;
    let event = |(number, at, is_name, text): (u64, u64, bool, String)| {
        let what = match is_name {
            true => serde_json::from_str(&text).map(Happening::Names),
            false => serde_json::from_str(&text).map(Happening::Collection),
        };
        let what = what.map_err(|e| Fail::internal(format!("event {number} cannot be read: {e}")))?;
        Ok(Event { number, at, what })
    };
    Ok(EventPage { log: Some(log), events: rows.into_iter().map(event).collect::<Outcome<_>>()? })
}

/// Notes a collection that ended, if the log has begun. The event appears later: it has a number
/// among changes of names, and must not appear before smaller ones.
///
/// The row of `changes` only takes the number, and is gone before any other transaction can see it:
/// a replica of the version before events would take the report for a change.
pub(super) async fn note_collection(tx: &mut dyn Tx, report: &GcReport) -> Outcome<()> {
    let text = serde_json::to_string(report).map_err(|e| Fail::internal(e.to_string()))?;
    let number = "INSERT INTO changes (record, is_name) SELECT '', false FROM event_log RETURNING seq";
    let Some(number) = tx.returning::<u64>(number, &[]).await?.pop() else { return Ok(()) };
    tx.execute("DELETE FROM changes WHERE seq = $1", values![number]).await?;
    tx.execute("INSERT INTO collections (number, record) VALUES ($1, $2)", values![number, text]).await.map(drop)
}

pub(super) async fn note_collections(tx: &mut dyn Tx) -> Outcome<bool> {
    // Nothing is written to `changes` meanwhile, so all that wait are seen.
    const ALONE: Sql = Sql::only_postgres("LOCK TABLE changes IN EXCLUSIVE MODE");
    const WAIT: &str = "SELECT number FROM collections UNION ALL SELECT seq FROM changes WHERE is_name = false LIMIT 1";
    if tx.first::<u64>(WAIT, &[]).await?.is_none() {
        return Ok(true);
    }
    tx.execute(ALONE, &[]).await?;
    if tx.first::<u64>("SELECT seq FROM changes WHERE is_name = true LIMIT 1", &[]).await?.is_some() {
        return Ok(false);
    }
    let last = last_number(tx).await?;
    keep(tx, last, last).await?;
    Ok(true)
}

pub(super) async fn trim(tx: &mut dyn Tx, kept: Duration, rows: u64, limit: usize) -> Outcome<u64> {
    let Some(EventLog { last, .. }) = log(tx).await? else { return Ok(0) };
    let old = tx.now().await?.saturating_sub(millis(kept));
    let too_old = "SELECT MAX(number) FROM (SELECT number FROM events WHERE noted_at < $1 ORDER BY noted_at, number LIMIT $2) AS going";
    let too_old: Option<u64> = tx.one(too_old, values![old, at_most(limit)]).await?;
    let too_many = "SELECT MAX(number) FROM (SELECT number FROM events WHERE number <= $1 ORDER BY number LIMIT $2) AS going";
    let too_many: Option<u64> = tx.one(too_many, values![last.saturating_sub(rows), at_most(limit)]).await?;
    let Some(forgotten) = too_old.max(too_many) else { return Ok(0) };
    let forget = "UPDATE event_log SET forgotten = $1 WHERE forgotten < $1";
    tx.execute(forget, values![forgotten]).await?;
    tx.execute("DELETE FROM events WHERE number <= $1", values![forgotten]).await
}

/// Ends the log: the names were made anew from the journal, and not by changes that it has. The
/// next reader begins another one.
pub(super) async fn end(tx: &mut dyn Tx) -> Outcome<()> {
    tx.execute("DELETE FROM events", &[]).await?;
    tx.execute("DELETE FROM collections", &[]).await?;
    tx.execute("DELETE FROM event_log", &[]).await.map(drop)
}
