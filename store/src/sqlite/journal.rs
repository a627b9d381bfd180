//! The way of changes into the journal, and back.

use super::names::{insert_snapshot, point_tag};
use super::{DOMAIN, int, uint};
use crate::error::{Error, Result};
use crate::metadata::arguments::at_most;
use crate::metadata::replay::Names;
use crate::metadata::{JournalRow, ObjectId, TagMove, Unjournaled};
use pfr_schema::journal::Record;
use pfr_schema::{Digest, Kind, RepositoryName};
use rusqlite::{Connection, OptionalExtension as _, params};
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
    tx.prepare_cached("INSERT INTO journal (key, first_seq, last_seq, is_checkpoint) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (key) DO NOTHING")
        .and_then(|mut s| s.execute(params![row.key, int(row.first), int(row.last), row.checkpoint]))
        .map_err(sql)?;
    tx.prepare_cached("DELETE FROM changes WHERE seq BETWEEN ?1 AND ?2")
        .and_then(|mut s| s.execute(params![int(row.first), int(row.last)]))
        .map_err(sql)?;
    Ok(())
}

/// The last number handed out.
fn last_number(tx: &Connection) -> Result<u64> {
    let last: Option<i64> = tx
        .prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = 'changes'")
        .and_then(|mut s| s.query_row([], |r| r.get(0)).optional())
        .map_err(sql)?;
    Ok(last.map_or(0, uint))
}

/// A row of `manifests` on its way into a record.
type RawSnapshot = (i64, String, Vec<u8>, Option<String>, Option<Vec<u8>>, i64, i64);
/// A row of `tags` on its way into a record.
type RawTag = (String, String, Vec<u8>, i64);

pub(super) fn names(tx: &Connection) -> Result<(u64, Vec<Record>)> {
    let mut parents: HashMap<i64, Vec<Digest>> = HashMap::new();
    let rows: Vec<(i64, Vec<u8>)> = tx
        .prepare_cached("SELECT manifest, digest FROM parents ORDER BY manifest, position")
        .and_then(|mut s| s.query_map([], |r| Ok((r.get(0)?, r.get(1)?)))?.collect())
        .map_err(sql)?;
    for (manifest, key) in rows {
        parents.entry(manifest).or_default().push(Digest::from_key(&key)?);
    }
    // In order of row ids: it is the order of lists.
    let snapshots: Vec<RawSnapshot> = tx
        .prepare_cached(
            "SELECT m.id, r.name, o.digest, m.artifact_type, m.subject, m.pushed_at, m.new_bytes
             FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object ORDER BY m.id",
        )
        .and_then(|mut s| s.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?, r.get(6)?)))?.collect())
        .map_err(sql)?;
    let tags: Vec<RawTag> = tx
        .prepare_cached(
            "SELECT r.name, t.name, o.digest, t.updated_at FROM tags t JOIN repositories r ON r.id = t.repository
             JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object ORDER BY r.name, t.name",
        )
        .and_then(|mut s| s.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))?.collect())
        .map_err(sql)?;
    let mut records = Vec::with_capacity(snapshots.len() + tags.len());
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
    for (repository, tag, manifest, at) in tags {
        records.push(Record::Tag {
            repository: repository.parse()?,
            tag: tag.parse()?,
            manifest: Digest::from_key(&manifest)?,
            at: uint(at),
        });
    }
    Ok((last_number(tx)?, records))
}

pub(super) fn journal(tx: &Connection) -> Result<Vec<JournalRow>> {
    tx.prepare_cached("SELECT key, first_seq, last_seq, is_checkpoint FROM journal ORDER BY last_seq, key")
        .and_then(|mut s| {
            s.query_map([], |r| Ok(JournalRow { key: r.get(0)?, first: uint(r.get(1)?), last: uint(r.get(2)?), checkpoint: r.get(3)? }))?
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

pub(super) fn restore_names(tx: &Connection, records: &[Record], last: u64) -> Result<Vec<Record>> {
    let names = Names::replay(records);
    let mut restore = Restore { tx, repositories: HashMap::new(), manifests: HashMap::new() };
    let mut lost = Vec::new();
    for record in names.snapshots() {
        let Record::Snapshot { repository, manifest, .. } = record else { continue };
        if !restore.snapshot(repository, manifest, record)? {
            lost.push(record.clone());
        }
    }
    for (repository, tag, manifest, at) in names.tags() {
        let Some((row, object)) = restore.manifests.get(&(repository.clone(), manifest)).copied() else { continue };
        let id = restore.repository(repository)?;
        point_tag(tx, id, (row, object, manifest), &TagMove { tag: tag.clone(), expected: None }, at)?;
    }
    let last = int(last.max(last_number(tx)?));
    // The row exists only once something was inserted.
    let known = tx.execute("UPDATE sqlite_sequence SET seq = ?1 WHERE name = 'changes'", [last]).map_err(sql)?;
    if known == 0 {
        tx.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('changes', ?1)", [last]).map_err(sql)?;
    }
    Ok(lost)
}

struct Restore<'a> {
    tx: &'a Connection,
    repositories: HashMap<RepositoryName, i64>,
    /// Row id and object of what is back.
    manifests: HashMap<(RepositoryName, Digest), (i64, ObjectId)>,
}

impl Restore<'_> {
    fn repository(&mut self, name: &RepositoryName) -> Result<i64> {
        if let Some(id) = self.repositories.get(name) {
            return Ok(*id);
        }
        self.tx
            .prepare_cached("INSERT INTO repositories (domain, name) VALUES (?1, ?2) ON CONFLICT (name) DO NOTHING")
            .and_then(|mut s| s.execute(params![DOMAIN, name.as_str()]))
            .map_err(sql)?;
        let id = self
            .tx
            .prepare_cached("SELECT id FROM repositories WHERE name = ?1")
            .and_then(|mut s| s.query_row([name.as_str()], |r| r.get(0)))
            .map_err(sql)?;
        self.repositories.insert(name.clone(), id);
        Ok(id)
    }

    /// Brings a snapshot back; false if its manifest is not stored, or not as a manifest that holds what it lists.
    fn snapshot(&mut self, repository: &RepositoryName, manifest: &Digest, record: &Record) -> Result<bool> {
        let stored: Option<(ObjectId, i64, i64)> = self
            .tx
            .prepare_cached(
                "SELECT o.id, o.size, c.logical_bytes FROM objects o JOIN containers c ON c.object = o.id
                 WHERE o.domain = ?1 AND o.digest = ?2 AND o.kind = ?3",
            )
            .and_then(|mut s| {
                s.query_row(params![DOMAIN, manifest.to_key(), Kind::Manifest as i64], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?))).optional()
            })
            .map_err(sql)?;
        let Some((object, size, reach)) = stored else { return Ok(false) };
        let id = self.repository(repository)?;
        let row = insert_snapshot(self.tx, id, object, record, size + reach)?;
        self.manifests.insert((repository.clone(), *manifest), (row, object));
        Ok(true)
    }
}
