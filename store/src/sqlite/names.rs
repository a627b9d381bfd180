//! Push sessions, commits, tags, snapshots, repositories.

use super::{DOMAIN, int, leases, uint};
use crate::error::{Error, Result};
use crate::metadata::arguments::{at_most, check_artifact_type, cursor, one_more};
use crate::metadata::{
    Commit, Committed, Ended, Evictable, NameChange, ObjectId, Once, Page, Pin, PushId, RepositoryRow, Session, SnapshotRow, TagMove,
    TagRow,
};
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, DigestPrefix, Kind, RepositoryName, Tag};
use rusqlite::{Connection, OptionalExtension as _, params};

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

// ---- push sessions

pub(super) fn open_push(tx: &Connection, push: &PushId, repository: &RepositoryName, expires: u64) -> Result<()> {
    tx.prepare_cached("INSERT INTO repositories (domain, name) VALUES (?1, ?2) ON CONFLICT (name) DO NOTHING")
        .and_then(|mut s| s.execute(params![DOMAIN, repository.as_str()]))
        .map_err(sql)?;
    tx.prepare_cached("INSERT INTO pushes (id, repository, expires) SELECT ?1, id, ?2 FROM repositories WHERE name = ?3")
        .and_then(|mut s| s.execute(params![push.0, int(expires), repository.as_str()]))
        .map_err(sql)?;
    Ok(())
}

/// A session that is neither committed nor expired.
pub(super) struct LivePush {
    pub number: i64,
    pub repository: RepositoryName,
    pub expires: u64,
}

pub(super) fn push(tx: &Connection, push: &PushId, now: u64) -> Result<LivePush> {
    let row = tx
        .prepare_cached(
            "SELECT p.number, r.name, p.expires FROM pushes p JOIN repositories r ON r.id = p.repository
             WHERE p.id = ?1 AND p.expires >= ?2 AND p.committed IS NULL",
        )
        .and_then(|mut s| {
            s.query_row(params![push.0, int(now)], |r| Ok((r.get(0)?, r.get::<_, String>(1)?, r.get::<_, i64>(2)?))).optional()
        })
        .map_err(sql)?;
    let (number, name, expires) = row.ok_or_else(|| Error::PushUnknown(push.0.clone()))?;
    Ok(LivePush { number, repository: name.parse()?, expires: uint(expires) })
}

/// Renews the lease of a session; returns its number.
pub(super) fn renew_push(tx: &Connection, push: &PushId, now: u64, until: u64) -> Result<i64> {
    tx.prepare_cached("UPDATE pushes SET expires = MAX(expires, ?1) WHERE id = ?2 AND expires >= ?3 AND committed IS NULL RETURNING number")
        .and_then(|mut s| s.query_row(params![int(until), push.0, int(now)], |r| r.get(0)).optional())
        .map_err(sql)?
        .ok_or_else(|| Error::PushUnknown(push.0.clone()))
}

pub(super) fn close_push(tx: &Connection, push: &PushId, now: u64) -> Result<()> {
    let number = tx
        .prepare_cached("DELETE FROM pushes WHERE id = ?1 RETURNING number")
        .and_then(|mut s| s.query_row([&push.0], |r| r.get::<_, i64>(0)).optional())
        .map_err(sql)?;
    number.map_or(Ok(()), |number| leases::ended(tx, number, now))
}

/// A session whose lease has not run out, open or ended.
fn find_session(tx: &Connection, session: &PushId, now: u64) -> Result<Option<Session>> {
    let find = "SELECT r.name, p.committed FROM pushes p JOIN repositories r ON r.id = p.repository WHERE p.id = ?1 AND p.expires >= ?2";
    tx.prepare_cached(find)
        .and_then(|mut s| s.query_row(params![session.0, int(now)], |r| Ok((r.get::<_, String>(0)?, r.get(1)?))).optional())
        .map_err(sql)?
        .map(|(name, ended): (String, Option<Vec<u8>>)| {
            Ok(Session { repository: name.parse()?, ended: ended.as_deref().and_then(Ended::from_column) })
        })
        .transpose()
}

pub(super) fn session(tx: &Connection, session: &PushId, now: u64) -> Result<Session> {
    find_session(tx, session, now)?.ok_or_else(|| Error::PushUnknown(session.0.clone()))
}

/// A change that is made once.
pub(super) fn change_names(
    tx: &Connection,
    repository: &RepositoryName,
    change: &NameChange,
    once: &Once,
    now: u64,
    until: u64,
) -> Result<()> {
    if let Some(session) = find_session(tx, &once.session, now)? {
        return session.was_ended_by(repository, once).map(drop);
    }
    let id = visible(tx, repository)?;
    // One of the same id whose lease has run out may lie there still.
    let ended = Ended::by_change(change, once).to_column()?;
    tx.prepare_cached("INSERT OR REPLACE INTO pushes (id, repository, expires, committed) VALUES (?1, ?2, ?3, ?4)")
        .and_then(|mut s| s.execute(params![once.session.0, id, int(until), ended]))
        .map_err(sql)?;
    match change {
        NameChange::PutTags { snapshot, moves } => put_tags(tx, repository, snapshot, moves, now),
        NameChange::DeleteTag { tag, expected } => delete_tag(tx, repository, tag, *expected, now),
        NameChange::DeleteSnapshot(snapshot) => delete_snapshot(tx, repository, snapshot, now),
    }
}

// ---- commit

/// The answer of a commit that this session made before.
fn committed_before(tx: &Connection, push: &PushId, commit: &Commit, now: u64) -> Result<Option<Committed>> {
    let ended = find_session(tx, push, now)?.and_then(|session| session.ended);
    Ok(ended.and_then(|ended| ended.answer_to_commit(&commit.manifest, commit.tag.as_ref().map(|t| &t.tag))))
}

pub(super) fn commit(tx: &Connection, push_id: &PushId, commit: &Commit, now: u64) -> Result<Committed> {
    if let Some(before) = committed_before(tx, push_id, commit, now)? {
        return Ok(before);
    }
    let LivePush { number, repository, .. } = push(tx, push_id, now)?;
    check_artifact_type(commit.artifact_type.as_deref())?;
    let repository_id = repository_row(tx, &repository)?.0;
    let unknown = || Error::BlobUnknown { digest: commit.manifest, kind: Kind::Manifest };
    let (object, size, refs, reach, new) = tx
        .prepare_cached(
            "SELECT o.id, o.size, o.refs, c.logical_bytes, c.new_bytes FROM objects o JOIN containers c ON c.object = o.id
             WHERE o.domain = ?1 AND o.digest = ?2 AND o.kind = ?3 AND o.health = 0",
        )
        .and_then(|mut s| {
            s.query_row(params![DOMAIN, commit.manifest.to_key(), Kind::Manifest as i64], |r| {
                Ok((r.get::<_, ObjectId>(0)?, r.get::<_, i64>(1)?, r.get::<_, i64>(2)?, r.get::<_, i64>(3)?, r.get::<_, i64>(4)?))
            })
            .optional()
        })
        .map_err(sql)?
        .ok_or_else(unknown)?;
    let existing = tx
        .prepare_cached("SELECT id, logical_bytes, new_bytes FROM manifests WHERE repository = ?1 AND object = ?2")
        .and_then(|mut s| {
            s.query_row([repository_id, object], |r| Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)?, r.get::<_, i64>(2)?))).optional()
        })
        .map_err(sql)?;
    let (manifest, logical_bytes, new_bytes) = match existing {
        Some(row) => {
            used(tx, row.0, now)?;
            row
        }
        None => {
            let logical = i64::saturating_add(size, reach);
            // Only the first holder of a manifest brought what it brought.
            let new = if refs == 0 { i64::saturating_add(size, new) } else { 0 };
            let record = Record::Snapshot {
                repository: repository.clone(),
                manifest: commit.manifest,
                parents: commit.parents.clone(),
                artifact_type: commit.artifact_type.clone(),
                subject: commit.subject,
                at: now,
                new_bytes: uint(new),
            };
            let id = insert_snapshot(tx, repository_id, object, &record, logical)?;
            note(tx, &record)?;
            (id, logical, new)
        }
    };
    if let Some(tag) = &commit.tag {
        put_tag(tx, (repository_id, &repository), (manifest, object, commit.manifest), tag, now)?;
    }
    if let Some(pin) = commit.pin {
        pin_row(tx, manifest, pin, true)?;
    }
    let done = Committed { created: existing.is_none(), logical_bytes: uint(logical_bytes), new_bytes: uint(new_bytes) };
    let ended = Ended::by_commit(commit, &done).to_column()?;
    tx.prepare_cached("UPDATE pushes SET committed = ?1 WHERE id = ?2")
        .and_then(|mut s| s.execute(params![ended, push_id.0]))
        .map_err(sql)?;
    leases::ended(tx, number, now)?;
    Ok(done)
}

/// Writes the rows of a snapshot; `record` is its [`Record::Snapshot`].
pub(super) fn insert_snapshot(tx: &Connection, repository: i64, object: ObjectId, record: &Record, logical: i64) -> Result<i64> {
    let Record::Snapshot { parents, artifact_type, subject, at, new_bytes, .. } = record else {
        return Err(Error::Internal("a snapshot's record is none".into()));
    };
    let id = tx
        .prepare_cached(
            "INSERT INTO manifests (repository, object, artifact_type, subject, pushed_at, used_at, logical_bytes, new_bytes)
             VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6, ?7)",
        )
        .and_then(|mut s| {
            s.insert(params![repository, object, artifact_type, subject.map(|d| d.to_key()), int(*at), logical, int(*new_bytes)])
        })
        .map_err(sql)?;
    for (position, parent) in parents.iter().enumerate() {
        tx.prepare_cached("INSERT INTO parents (manifest, position, digest) VALUES (?1, ?2, ?3)")
            .and_then(|mut s| s.execute(params![id, position as i64, parent.to_key()]))
            .map_err(sql)?;
    }
    add_refs(tx, object, 1)?;
    Ok(id)
}

/// Notes a change for the journal, in the same transaction.
fn note(tx: &Connection, record: &Record) -> Result<()> {
    let record = serde_json::to_string(record).map_err(|e| Error::Internal(e.to_string()))?;
    tx.prepare_cached("INSERT INTO changes (record) VALUES (?1)").and_then(|mut s| s.execute([record])).map_err(sql)?;
    Ok(())
}

fn add_refs(tx: &Connection, object: ObjectId, by: i64) -> Result<()> {
    tx.prepare_cached("UPDATE objects SET refs = refs + ?1 WHERE id = ?2").and_then(|mut s| s.execute([by, object])).map_err(sql)?;
    Ok(())
}

/// Takes references away and leaves the rest to collection: nothing cascades inside a request.
pub(super) fn release(tx: &Connection, object: ObjectId, by: i64, now: u64) -> Result<()> {
    add_refs(tx, object, -by)?;
    tx.prepare_cached("INSERT INTO suspects (due, object, released) VALUES (?1, ?2, 1)")
        .and_then(|mut s| s.execute([int(now), object]))
        .map_err(sql)?;
    Ok(())
}

// ---- tags

fn repository_row(tx: &Connection, repository: &RepositoryName) -> Result<(i64,)> {
    tx.prepare_cached("SELECT id FROM repositories WHERE name = ?1")
        .and_then(|mut s| s.query_row([repository.as_str()], |r| Ok((r.get(0)?,))).optional())
        .map_err(sql)?
        .ok_or_else(|| Error::RepositoryUnknown(repository.clone()))
}

/// The id of a repository that holds something; a push session alone does not make one visible.
fn visible(tx: &Connection, repository: &RepositoryName) -> Result<i64> {
    let (id,) = repository_row(tx, repository)?;
    let holds: bool = tx
        .prepare_cached("SELECT EXISTS (SELECT 1 FROM manifests WHERE repository = ?1)")
        .and_then(|mut s| s.query_row([id], |r| r.get(0)))
        .map_err(sql)?;
    if holds { Ok(id) } else { Err(Error::RepositoryUnknown(repository.clone())) }
}

/// Where a tag points: row id of the manifest, its object, its digest.
pub(super) fn tag_target(tx: &Connection, repository: i64, tag: &Tag) -> Result<Option<(i64, ObjectId, Digest)>> {
    tx.prepare_cached(
        "SELECT m.id, m.object, o.digest FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
         WHERE t.repository = ?1 AND t.name = ?2",
    )
    .and_then(|mut s| s.query_row(params![repository, tag.as_str()], |r| Ok((r.get(0)?, r.get(1)?, r.get::<_, Vec<u8>>(2)?))).optional())
    .map_err(sql)?
    .map(|(manifest, object, key)| Ok((manifest, object, Digest::from_key(&key)?)))
    .transpose()
}

fn check_expected(tag: &Tag, expected: Option<TagState>, found: Option<Digest>) -> Result<()> {
    let found = found.map_or(TagState::Absent, TagState::At);
    match expected {
        Some(expected) if expected != found => Err(Error::TagMoved { tag: tag.clone(), expected, found }),
        _ => Ok(()),
    }
}

/// Points a tag at (manifest row, its object, its digest) and notes it.
fn put_tag(
    tx: &Connection,
    (repository, name): (i64, &RepositoryName),
    target: (i64, ObjectId, Digest),
    tag: &TagMove,
    now: u64,
) -> Result<()> {
    if !point_tag(tx, repository, target, tag, now)? {
        return Ok(());
    }
    note(tx, &Record::Tag { repository: name.clone(), tag: tag.tag.clone(), manifest: target.2, at: now })
}

/// Points a tag at (manifest row, its object, its digest); false if it was there already.
pub(super) fn point_tag(
    tx: &Connection,
    repository: i64,
    (manifest, object, _): (i64, ObjectId, Digest),
    tag: &TagMove,
    now: u64,
) -> Result<bool> {
    let before = tag_target(tx, repository, &tag.tag)?;
    check_expected(&tag.tag, tag.expected, before.map(|(_, _, digest)| digest))?;
    if before.is_some_and(|(id, _, _)| id == manifest) {
        return Ok(false);
    }
    tx.prepare_cached(
        "INSERT INTO tags (repository, name, manifest, updated_at) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (repository, name) DO UPDATE SET manifest = excluded.manifest, updated_at = excluded.updated_at, followed = 0",
    )
    .and_then(|mut s| s.execute(params![repository, tag.tag.as_str(), manifest, int(now)]))
    .map_err(sql)?;
    add_refs(tx, object, 1)?;
    if let Some((_, old, _)) = before {
        release(tx, old, 1, now)?;
    }
    Ok(true)
}

pub(super) fn tag(tx: &Connection, repository: &RepositoryName, tag: &Tag) -> Result<TagRow> {
    let id = visible(tx, repository)?;
    let unknown = || Error::TagUnknown { repository: repository.clone(), tag: tag.clone() };
    let (_, _, digest) = tag_target(tx, id, tag)?.ok_or_else(unknown)?;
    let (updated_at, followed) = tx
        .prepare_cached("SELECT updated_at, followed FROM tags WHERE repository = ?1 AND name = ?2")
        .and_then(|mut s| s.query_row(params![id, tag.as_str()], |r| Ok((r.get(0)?, r.get(1)?))))
        .map_err(sql)?;
    Ok(TagRow { name: tag.clone(), digest, updated_at: uint(updated_at), followed })
}

pub(super) fn mark_followed(tx: &Connection, repository: &RepositoryName, tag: &Tag, at: &Digest) -> Result<()> {
    let id = visible(tx, repository)?;
    if tag_target(tx, id, tag)?.is_some_and(|(_, _, digest)| digest == *at) {
        tx.prepare_cached("UPDATE tags SET followed = 1 WHERE repository = ?1 AND name = ?2")
            .and_then(|mut s| s.execute(params![id, tag.as_str()]))
            .map_err(sql)?;
    }
    Ok(())
}

pub(super) fn tags(tx: &Connection, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Result<Page<TagRow>> {
    let id = visible(tx, repository)?;
    let mut select = tx
        .prepare_cached(
            "SELECT t.name, o.digest, t.updated_at, t.followed FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
             WHERE t.repository = ?1 AND t.name > ?2 ORDER BY t.name LIMIT ?3",
        )
        .map_err(sql)?;
    let rows = select
        .query_map(params![id, cursor(after, "")?, one_more(limit)], |r| {
            Ok((r.get::<_, String>(0)?, r.get::<_, Vec<u8>>(1)?, r.get::<_, i64>(2)?, r.get::<_, bool>(3)?))
        })
        .and_then(Iterator::collect::<rusqlite::Result<Vec<_>>>)
        .map_err(sql)?;
    let rows = rows
        .into_iter()
        .map(|(name, key, updated_at, followed)| {
            Ok(TagRow { name: name.parse()?, digest: Digest::from_key(&key)?, updated_at: uint(updated_at), followed })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(paged(rows, limit, |row| row.name.to_string()))
}

/// Cuts one row too many off and makes a cursor of the last that stays.
pub(super) fn paged<T>(mut rows: Vec<T>, limit: usize, cursor: impl Fn(&T) -> String) -> Page<T> {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = if more { rows.last().map(cursor) } else { None };
    Page { rows, next }
}

pub(super) fn put_tags(tx: &Connection, repository: &RepositoryName, snapshot: &Digest, moves: &[TagMove], now: u64) -> Result<()> {
    let id = visible(tx, repository)?;
    let (manifest, object) = manifest_row(tx, id, repository, snapshot)?;
    moves.iter().try_for_each(|tag| put_tag(tx, (id, repository), (manifest, object, *snapshot), tag, now))
}

pub(super) fn delete_tag(tx: &Connection, repository: &RepositoryName, tag: &Tag, expected: Option<TagState>, now: u64) -> Result<()> {
    let id = visible(tx, repository)?;
    let before = tag_target(tx, id, tag)?;
    check_expected(tag, expected, before.map(|(_, _, digest)| digest))?;
    let (_, object, _) = before.ok_or_else(|| Error::TagUnknown { repository: repository.clone(), tag: tag.clone() })?;
    remove_tag(tx, id, tag, object, now)?;
    note(tx, &Record::Untag { repository: repository.clone(), tag: tag.clone() })
}

/// Removes a tag that points at `object`.
pub(super) fn remove_tag(tx: &Connection, repository: i64, tag: &Tag, object: ObjectId, now: u64) -> Result<()> {
    tx.prepare_cached("DELETE FROM tags WHERE repository = ?1 AND name = ?2")
        .and_then(|mut s| s.execute(params![repository, tag.as_str()]))
        .map_err(sql)?;
    release(tx, object, 1, now)
}

// ---- snapshots

/// Row id and object of a repository's manifest.
fn manifest_row(tx: &Connection, id: i64, repository: &RepositoryName, digest: &Digest) -> Result<(i64, ObjectId)> {
    tx.prepare_cached("SELECT m.id, m.object FROM manifests m JOIN objects o ON o.id = m.object WHERE o.domain = ?1 AND o.digest = ?2 AND m.repository = ?3")
        .and_then(|mut s| s.query_row(params![DOMAIN, digest.to_key(), id], |r| Ok((r.get(0)?, r.get(1)?))).optional())
        .map_err(sql)?
        .ok_or_else(|| Error::SnapshotUnknown { repository: repository.clone(), snapshot: digest.to_string() })
}

fn snapshot_row(tx: &Connection, manifest: i64) -> Result<SnapshotRow> {
    let (object, key, pushed_at, logical, new) = tx
        .prepare_cached(
            "SELECT m.object, o.digest, m.pushed_at, m.logical_bytes, m.new_bytes FROM manifests m JOIN objects o ON o.id = m.object WHERE m.id = ?1",
        )
        .and_then(|mut s| {
            s.query_row([manifest], |r| {
                Ok((r.get(0)?, r.get::<_, Vec<u8>>(1)?, r.get::<_, i64>(2)?, r.get::<_, i64>(3)?, r.get::<_, i64>(4)?))
            })
        })
        .map_err(sql)?;
    let texts = |statement: &str| -> Result<Vec<String>> {
        tx.prepare_cached(statement).and_then(|mut s| s.query_map([manifest], |r| r.get(0))?.collect()).map_err(sql)
    };
    let tags =
        texts("SELECT name FROM tags WHERE manifest = ?1 ORDER BY name")?.into_iter().map(|t| Ok(t.parse()?)).collect::<Result<_>>()?;
    let parents: Vec<Vec<u8>> = tx
        .prepare_cached("SELECT digest FROM parents WHERE manifest = ?1 ORDER BY position")
        .and_then(|mut s| s.query_map([manifest], |r| r.get(0))?.collect())
        .map_err(sql)?;
    let parents = parents.iter().map(|key| Ok(Digest::from_key(key)?)).collect::<Result<_>>()?;
    Ok(SnapshotRow {
        object,
        digest: Digest::from_key(&key)?,
        tags,
        parents,
        pushed_at: uint(pushed_at),
        logical_bytes: uint(logical),
        new_bytes: uint(new),
    })
}

pub(super) fn snapshot(tx: &Connection, repository: &RepositoryName, digest: &Digest) -> Result<SnapshotRow> {
    let id = visible(tx, repository)?;
    snapshot_row(tx, manifest_row(tx, id, repository, digest)?.0)
}

pub(super) fn snapshots_like(tx: &Connection, repository: &RepositoryName, prefix: &DigestPrefix, limit: usize) -> Result<Vec<Digest>> {
    let id = visible(tx, repository)?;
    let mut found = Vec::new();
    for (first, last) in prefix.key_ranges() {
        // From the index of digests to manifests, not the other way around: a repository may have very many snapshots.
        let keys: Vec<Vec<u8>> = tx
            .prepare_cached(
                "SELECT o.digest FROM objects o CROSS JOIN manifests m ON m.repository = ?1 AND m.object = o.id
                 WHERE o.domain = ?2 AND o.digest BETWEEN ?3 AND ?4 ORDER BY o.digest LIMIT ?5",
            )
            .and_then(|mut s| s.query_map(params![id, DOMAIN, first, last, at_most(limit - found.len())], |r| r.get(0))?.collect())
            .map_err(sql)?;
        for key in keys {
            found.push(Digest::from_key(&key)?);
        }
    }
    Ok(found)
}

pub(super) fn snapshots(tx: &Connection, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Result<Page<SnapshotRow>> {
    let id = visible(tx, repository)?;
    let before = match after {
        None => i64::MAX,
        Some(cursor) => cursor.parse().map_err(|_| Error::Invalid(format!("{cursor:?} is no cursor of this list")))?,
    };
    let ids: Vec<i64> = tx
        .prepare_cached("SELECT id FROM manifests WHERE repository = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3")
        .and_then(|mut s| s.query_map([id, before, one_more(limit)], |r| r.get(0))?.collect())
        .map_err(sql)?;
    let page = paged(ids, limit, ToString::to_string);
    let rows = page.rows.into_iter().map(|manifest| snapshot_row(tx, manifest)).collect::<Result<_>>()?;
    Ok(Page { rows, next: page.next })
}

pub(super) fn delete_snapshot(tx: &Connection, repository: &RepositoryName, digest: &Digest, now: u64) -> Result<()> {
    let id = visible(tx, repository)?;
    let (manifest, object) = manifest_row(tx, id, repository, digest)?;
    remove_snapshot(tx, manifest, object, now)?;
    note(tx, &Record::Delete { repository: repository.clone(), manifest: *digest })
}

/// Removes a snapshot's row and its tags.
pub(super) fn remove_snapshot(tx: &Connection, manifest: i64, object: ObjectId, now: u64) -> Result<()> {
    let tags = tx.prepare_cached("DELETE FROM tags WHERE manifest = ?1").and_then(|mut s| s.execute([manifest])).map_err(sql)?;
    tx.prepare_cached("DELETE FROM manifests WHERE id = ?1").and_then(|mut s| s.execute([manifest])).map_err(sql)?;
    release(tx, object, tags as i64 + 1, now)
}

pub(super) fn touch_snapshot(tx: &Connection, repository: &RepositoryName, digest: &Digest, now: u64) -> Result<()> {
    let id = visible(tx, repository)?;
    let (manifest, _) = manifest_row(tx, id, repository, digest)?;
    used(tx, manifest, now)
}

fn used(tx: &Connection, manifest: i64, now: u64) -> Result<()> {
    tx.prepare_cached("UPDATE manifests SET used_at = ?1 WHERE id = ?2 AND used_at < ?1")
        .and_then(|mut s| s.execute(params![int(now), manifest]))
        .map_err(sql)?;
    Ok(())
}

pub(super) fn pin_snapshot(tx: &Connection, repository: &RepositoryName, digest: &Digest, reason: Pin, pinned: bool) -> Result<bool> {
    let id = visible(tx, repository)?;
    let (manifest, _) = manifest_row(tx, id, repository, digest)?;
    pin_row(tx, manifest, reason, pinned)
}

fn pin_row(tx: &Connection, manifest: i64, reason: Pin, pinned: bool) -> Result<bool> {
    let update = if pinned { "pinned | ?1" } else { "pinned & ~?1" };
    tx.prepare_cached(&format!("UPDATE manifests SET pinned = {update} WHERE id = ?2 RETURNING pinned <> 0"))
        .and_then(|mut s| s.query_row(params![reason as i64, manifest], |r| r.get(0)))
        .map_err(sql)
}

pub(super) fn evictable(tx: &Connection, limit: usize) -> Result<Vec<Evictable>> {
    let rows: Vec<(String, Vec<u8>, i64)> = tx
        .prepare_cached(
            "SELECT r.name, o.digest, m.used_at FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
             WHERE m.pinned = 0 ORDER BY m.used_at, m.id LIMIT ?1",
        )
        .and_then(|mut s| s.query_map([at_most(limit)], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))?.collect())
        .map_err(sql)?;
    let row = |(name, key, used_at): (String, Vec<u8>, i64)| {
        Ok(Evictable { repository: name.parse()?, digest: Digest::from_key(&key)?, used_at: uint(used_at) })
    };
    rows.into_iter().map(row).collect()
}

pub(super) fn evict_snapshot(tx: &Connection, snapshot: &Evictable, now: u64) -> Result<bool> {
    let Evictable { repository, digest, used_at } = snapshot;
    let as_listed: bool = tx
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
             WHERE r.name = ?1 AND o.domain = ?2 AND o.digest = ?3 AND m.pinned = 0 AND m.used_at = ?4)",
        )
        .and_then(|mut s| s.query_row(params![repository.as_str(), DOMAIN, digest.to_key(), int(*used_at)], |r| r.get(0)))
        .map_err(sql)?;
    if as_listed {
        delete_snapshot(tx, repository, digest, now)?;
    }
    Ok(as_listed)
}

pub(super) fn repositories(tx: &Connection, after: Option<&str>, limit: usize) -> Result<Page<RepositoryRow>> {
    let mut select = tx
        .prepare_cached(
            "SELECT r.name, COUNT(*), (SELECT COUNT(*) FROM tags t WHERE t.repository = r.id), MAX(m.pushed_at)
             FROM repositories r JOIN manifests m ON m.repository = r.id WHERE r.name > ?1 GROUP BY r.id ORDER BY r.name LIMIT ?2",
        )
        .map_err(sql)?;
    let rows = select
        .query_map(params![cursor(after, "")?, one_more(limit)], |r| {
            Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?, r.get::<_, i64>(2)?, r.get::<_, i64>(3)?))
        })
        .and_then(Iterator::collect::<rusqlite::Result<Vec<_>>>)
        .map_err(sql)?;
    let rows = rows
        .into_iter()
        .map(|(name, snapshots, tags, updated)| {
            Ok(RepositoryRow { name: name.parse()?, snapshots: uint(snapshots), tags: uint(tags), updated_at: uint(updated) })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(paged(rows, limit, |row| row.name.to_string()))
}
