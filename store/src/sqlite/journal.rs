//! The way of changes into the journal.

use super::{int, uint};
use crate::error::{Error, Result};
use crate::journal::checkpoint_of;
use crate::metadata::arguments::at_most;
use crate::metadata::{JournalRow, JournalState, NamesCursor, Unjournaled};
use pfr_schema::Digest;
use pfr_schema::journal::Record;
use rusqlite::{Connection, OptionalExtension as _, ToSql, params};
use std::collections::HashMap;

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

/// Numbers are handed out by the one writer: they become visible in their order.
pub(super) fn unjournaled(tx: &Connection, limit: usize) -> Result<Vec<Unjournaled>> {
    let rows: Vec<(i64, String)> = tx
        .prepare_cached("SELECT seq, record FROM changes ORDER BY seq LIMIT ?1")
        .and_then(|mut s| s.query_map([at_most(limit)], |r| Ok((r.get(0)?, r.get(1)?)))?.collect())
        .map_err(sql)?;
    rows.into_iter()
        .map(|(seq, record)| {
            let record = serde_json::from_str(&record).map_err(|e| Error::Internal(format!("change {seq} cannot be read: {e}")))?;
            Ok(Unjournaled { seq: uint(seq), record })
        })
        .collect()
}

pub(super) fn journaled(tx: &Connection, row: &JournalRow) -> Result<()> {
    tx.prepare_cached(
        "INSERT INTO journal (key, first_seq, last_seq, is_checkpoint, records) VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (key) DO NOTHING",
    )
    .and_then(|mut s| s.execute(params![row.key, int(row.first), int(row.last), row.checkpoint, int(row.records)]))
    .map_err(sql)?;
    if !row.checkpoint {
        tx.prepare_cached("DELETE FROM changes WHERE seq BETWEEN ?1 AND ?2")
            .and_then(|mut s| s.execute(params![int(row.first), int(row.last)]))
            .map_err(sql)?;
    }
    Ok(())
}

/// The last number handed out.
pub(super) fn last_number(tx: &Connection) -> Result<u64> {
    let last: Option<i64> = tx
        .prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = 'changes'")
        .and_then(|mut s| s.query_row([], |r| r.get(0)).optional())
        .map_err(sql)?;
    Ok(last.map_or(0, uint))
}

/// A row of `manifests` on its way into a record.
type RawSnapshot = (i64, String, Vec<u8>, Option<String>, Option<Vec<u8>>, i64, i64);
/// A row of `tags` on its way into a record.
type RawTag = (i64, String, String, Vec<u8>, i64);

pub(super) fn begin_names(tx: &Connection) -> Result<(u64, NamesCursor)> {
    let until: Option<i64> =
        tx.prepare_cached("SELECT max(id) FROM manifests").and_then(|mut s| s.query_row([], |r| r.get(0))).map_err(sql)?;
    Ok((last_number(tx)?, NamesCursor::Snapshots { after: 0, until: until.unwrap_or(0) }))
}

pub(super) fn names(tx: &Connection, cursor: &NamesCursor, limit: usize) -> Result<(Vec<Record>, Option<NamesCursor>)> {
    match cursor {
        NamesCursor::Snapshots { after, until } => snapshots(tx, *after, *until, limit),
        NamesCursor::Tags { repository, tag } => tags(tx, *repository, tag, limit),
    }
}

/// In order of row ids: it is the order of lists.
fn snapshots(tx: &Connection, after: i64, until: i64, limit: usize) -> Result<(Vec<Record>, Option<NamesCursor>)> {
    let snapshots: Vec<RawSnapshot> = tx
        .prepare_cached(
            "SELECT m.id, r.name, o.digest, m.artifact_type, m.subject, m.pushed_at, m.new_bytes
             FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
             WHERE m.id > ?1 AND m.id <= ?2 ORDER BY m.id LIMIT ?3",
        )
        .and_then(|mut s| {
            s.query_map(params![after, until, at_most(limit)], |r| {
                Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?, r.get(6)?))
            })?
            .collect()
        })
        .map_err(sql)?;
    let Some(last) = snapshots.last().map(|row| row.0) else { return Ok((Vec::new(), Some(NamesCursor::TAGS))) };
    let mut parents: HashMap<i64, Vec<Digest>> = HashMap::new();
    let rows: Vec<(i64, Vec<u8>)> = tx
        .prepare_cached("SELECT manifest, digest FROM parents WHERE manifest > ?1 AND manifest <= ?2 ORDER BY manifest, position")
        .and_then(|mut s| s.query_map([after, last], |r| Ok((r.get(0)?, r.get(1)?)))?.collect())
        .map_err(sql)?;
    for (manifest, key) in rows {
        parents.entry(manifest).or_default().push(Digest::from_key(&key)?);
    }
    let mut records = Vec::with_capacity(snapshots.len());
    for (id, repository, manifest, artifact_type, subject, at, new_bytes) in snapshots {
        records.push(Record::Snapshot {
            repository: repository.parse()?,
            manifest: Digest::from_key(&manifest)?,
            parents: parents.remove(&id).unwrap_or_default(),
            artifact_type,
            subject: subject.map(|key| Digest::from_key(&key)).transpose()?,
            at: uint(at),
            new_bytes: uint(new_bytes),
        });
    }
    Ok((records, Some(NamesCursor::Snapshots { after: last, until })))
}

fn tags(tx: &Connection, repository: i64, tag: &str, limit: usize) -> Result<(Vec<Record>, Option<NamesCursor>)> {
    let tags: Vec<RawTag> = tx
        .prepare_cached(
            "SELECT t.repository, r.name, t.name, o.digest, t.updated_at FROM tags t JOIN repositories r ON r.id = t.repository
             JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
             WHERE (t.repository, t.name) > (?1, ?2) ORDER BY t.repository, t.name LIMIT ?3",
        )
        .and_then(|mut s| {
            s.query_map(params![repository, tag, at_most(limit)], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?)))?
                .collect()
        })
        .map_err(sql)?;
    let next = tags.last().map(|(repository, _, tag, _, _)| NamesCursor::Tags { repository: *repository, tag: tag.clone() });
    let record = |(_, repository, tag, manifest, at): RawTag| {
        Ok(Record::Tag { repository: repository.parse()?, tag: tag.parse()?, manifest: Digest::from_key(&manifest)?, at: uint(at) })
    };
    Ok((tags.into_iter().map(record).collect::<Result<_>>()?, next))
}

/// Number of the newest checkpoint, and what the keys of its parts begin with.
fn newest(tx: &Connection) -> Result<Option<(i64, String)>> {
    let row: Option<(i64, String)> = tx
        .prepare_cached("SELECT last_seq, key FROM journal WHERE is_checkpoint = 1 ORDER BY last_seq DESC, key DESC LIMIT 1")
        .and_then(|mut s| s.query_row([], |r| Ok((r.get(0)?, r.get(1)?))).optional())
        .map_err(sql)?;
    row.map(|(last, key)| Ok((last, checkpoint_of(&key)?))).transpose()
}

pub(super) fn journal_state(tx: &Connection, most: usize) -> Result<JournalState> {
    let (checkpoint, prefix) = newest(tx)?.unwrap_or_default();
    let count = |statement: &str, values: &[&dyn ToSql]| -> Result<u64> {
        tx.prepare_cached(statement).and_then(|mut s| s.query_row(values, |r| r.get(0))).map(uint).map_err(sql)
    };
    let names = count(
        "SELECT coalesce(sum(records), 0) FROM journal WHERE is_checkpoint = 1 AND last_seq = ?1 AND key >= ?2",
        &[&checkpoint, &prefix],
    )?;
    let since = "SELECT count(*) FROM (SELECT 1 FROM journal WHERE is_checkpoint = 0 AND last_seq > ?1 LIMIT ?2)";
    let objects = count(since, &[&checkpoint, &(at_most(most))])?;
    Ok(JournalState { checkpoint: uint(checkpoint), names, last: last_number(tx)?, objects })
}

pub(super) fn superfluous(tx: &Connection, limit: usize) -> Result<Vec<String>> {
    let Some((last, prefix)) = newest(tx)? else { return Ok(Vec::new()) };
    tx.prepare_cached(
        "SELECT key FROM (SELECT key FROM journal WHERE is_checkpoint = 0 AND last_seq <= ?1 ORDER BY last_seq LIMIT ?3)
         UNION ALL SELECT key FROM (SELECT key FROM journal WHERE is_checkpoint = 1 AND key < ?2 ORDER BY last_seq LIMIT ?3) LIMIT ?3",
    )
    .and_then(|mut s| s.query_map(params![last, prefix, at_most(limit)], |r| r.get(0))?.collect())
    .map_err(sql)
}

pub(super) fn journal(tx: &Connection) -> Result<Vec<JournalRow>> {
    tx.prepare_cached("SELECT key, first_seq, last_seq, is_checkpoint, records FROM journal ORDER BY last_seq, key")
        .and_then(|mut s| {
            s.query_map([], |r| {
                let (first, last, records) = (uint(r.get(1)?), uint(r.get(2)?), uint(r.get(4)?));
                Ok(JournalRow { key: r.get(0)?, first, last, checkpoint: r.get(3)?, records })
            })?
            .collect()
        })
        .map_err(sql)
}

pub(super) fn forget_journal(tx: &Connection, keys: &[String]) -> Result<()> {
    let mut forget = tx.prepare_cached("DELETE FROM journal WHERE key = ?1").map_err(sql)?;
    keys.iter().try_for_each(|key| forget.execute([key]).map(|_| ()).map_err(sql))
}

pub(super) fn is_empty(tx: &Connection) -> Result<bool> {
    tx.prepare_cached("SELECT NOT EXISTS (SELECT 1 FROM packs) AND NOT EXISTS (SELECT 1 FROM repositories)")
        .and_then(|mut s| s.query_row([], |r| r.get(0)))
        .map_err(sql)
}
