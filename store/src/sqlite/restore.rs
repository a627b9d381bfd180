//! Names from the journal.

use super::journal::last_number;
use super::names::{insert_snapshot, point_tag, remove_snapshot, remove_tag, tag_target};
use super::{DOMAIN, int};
use crate::error::{Error, Result};
use crate::metadata::{ObjectId, TagMove};
use pfr_schema::journal::Record;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use rusqlite::{Connection, OptionalExtension as _, params};
use std::collections::HashMap;

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

pub(super) fn restore_names(tx: &Connection, records: &[Record], last: u64, now: u64) -> Result<Vec<Record>> {
    let mut restore = Restore { tx, now, repositories: HashMap::new() };
    let mut lost: HashMap<(&RepositoryName, Digest), &Record> = HashMap::new();
    for record in records {
        match record {
            Record::Snapshot { repository, manifest, .. } => {
                if !restore.snapshot(repository, manifest, record)? {
                    lost.insert((repository, *manifest), record);
                }
            }
            Record::Tag { repository, tag, manifest, at } => restore.tag(repository, tag, manifest, *at)?,
            Record::Untag { repository, tag } => restore.untag(repository, tag)?,
            Record::Delete { repository, manifest } => {
                lost.remove(&(repository, *manifest));
                restore.delete(repository, manifest)?;
            }
        }
    }
    let last = int(last.max(last_number(tx)?));
    // The row exists only once something was inserted.
    let known = tx.execute("UPDATE sqlite_sequence SET seq = ?1 WHERE name = 'changes'", [last]).map_err(sql)?;
    if known == 0 {
        tx.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('changes', ?1)", [last]).map_err(sql)?;
    }
    Ok(lost.into_values().cloned().collect())
}

struct Restore<'a> {
    tx: &'a Connection,
    now: u64,
    repositories: HashMap<RepositoryName, i64>,
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

    /// Row id and object of a snapshot that exists.
    fn row(&self, repository: &RepositoryName, manifest: &Digest) -> Result<Option<(i64, ObjectId)>> {
        self.tx
            .prepare_cached(
                "SELECT m.id, m.object FROM objects o JOIN repositories r ON r.name = ?3 JOIN manifests m ON m.object = o.id AND m.repository = r.id
                 WHERE o.domain = ?1 AND o.digest = ?2",
            )
            .and_then(|mut s| {
                s.query_row(params![DOMAIN, manifest.to_key(), repository.as_str()], |r| Ok((r.get(0)?, r.get(1)?))).optional()
            })
            .map_err(sql)
    }

    /// Brings a snapshot back; false if its manifest is not stored, or not as a manifest that holds what it lists.
    fn snapshot(&mut self, repository: &RepositoryName, manifest: &Digest, record: &Record) -> Result<bool> {
        if self.row(repository, manifest)?.is_some() {
            return Ok(true);
        }
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
        insert_snapshot(self.tx, id, object, record, i64::saturating_add(size, reach))?;
        Ok(true)
    }

    /// Points a tag; if its snapshot is not there, it points nowhere.
    fn tag(&mut self, repository: &RepositoryName, tag: &Tag, manifest: &Digest, at: u64) -> Result<()> {
        let Some((row, object)) = self.row(repository, manifest)? else { return self.untag(repository, tag) };
        let id = self.repository(repository)?;
        if point_tag(self.tx, id, (row, object, *manifest), &TagMove { tag: tag.clone(), expected: None }, at)? {
            return Ok(());
        }
        // It went elsewhere and came back since.
        self.tx
            .prepare_cached("UPDATE tags SET updated_at = ?3 WHERE repository = ?1 AND name = ?2")
            .and_then(|mut s| s.execute(params![id, tag.as_str(), int(at)]))
            .map(drop)
            .map_err(sql)
    }

    fn untag(&mut self, repository: &RepositoryName, tag: &Tag) -> Result<()> {
        let id = self.repository(repository)?;
        match tag_target(self.tx, id, tag)? {
            Some((_, object, _)) => remove_tag(self.tx, id, tag, object, self.now),
            None => Ok(()),
        }
    }

    fn delete(&mut self, repository: &RepositoryName, manifest: &Digest) -> Result<()> {
        match self.row(repository, manifest)? {
            Some((row, object)) => remove_snapshot(self.tx, row, object, self.now),
            None => Ok(()),
        }
    }
}
