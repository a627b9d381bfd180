//! Push sessions, commits, tags, snapshots.
//!
//! Locks are taken in this order: the session that a change of names makes for itself, objects by
//! id, the row of the manifest, tags by name, the push session, the table of changes. Whoever holds
//! the object of a manifest decides about everything that names it.

use super::connection::Tx;
use super::error::{Fail, Outcome};
use super::objects::{add_refs, lock};
use super::{DOMAIN, int, leases, uint};
use crate::error::Error;
use crate::metadata::arguments::{can_be_kept, check_artifact_type};
use crate::metadata::{Commit, Committed, Ended, Evictable, NameChange, ObjectId, Once, Pin, PushId, Session, TagMove};
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use std::collections::BTreeMap;

// ---- push sessions

/// The row of a repository, made if it is new.
pub(super) async fn make_repository(tx: &mut Tx, repository: &RepositoryName) -> Outcome<i64> {
    if let Some(id) = repository_id(tx, repository).await? {
        return Ok(id);
    }
    tx.execute(
        sqlx::query("INSERT INTO repositories (domain, name) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING")
            .bind(DOMAIN)
            .bind(repository.as_str().to_owned()),
    )
    .await?;
    repository_id(tx, repository).await?.ok_or(Fail::Again)
}

pub(super) async fn open_push(tx: &mut Tx, push: &PushId, repository: &RepositoryName, lease: i64) -> Outcome<()> {
    let expires = tx.now().await?.saturating_add(lease);
    let id = make_repository(tx, repository).await?;
    // Sessions become visible in the order of their numbers: a session that asks about leases sees
    // every older one.
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(OPENING).execute(tx.on()).await?;
    let insert = sqlx::query("INSERT INTO pushes (id, repository, expires) VALUES ($1, $2, $3)");
    tx.execute(insert.bind(push.0.clone()).bind(id).bind(expires)).await?;
    Ok(())
}

/// Names the lock under which sessions are opened.
const OPENING: i64 = 0x7066_6f70_656e;

/// A live session.
pub(super) struct Push {
    pub number: i64,
    repository: i64,
    pub name: RepositoryName,
    expires: i64,
}

pub(super) async fn live_push(tx: &mut Tx, push: &PushId) -> Outcome<Push> {
    let now = tx.now().await?;
    if !can_be_kept(&push.0) {
        return Err(Error::PushUnknown(push.0.clone()).into());
    }
    let row: Option<(i64, i64, String, i64)> = sqlx::query_as(
        "SELECT p.number, r.id, r.name, p.expires FROM pushes p JOIN repositories r ON r.id = p.repository
         WHERE p.id = $1 AND p.expires >= $2 AND p.committed IS NULL",
    )
    .bind(&push.0)
    .bind(now)
    .fetch_optional(tx.on())
    .await?;
    let (number, repository, name, expires) = row.ok_or_else(|| Error::PushUnknown(push.0.clone()))?;
    Ok(Push { number, repository, name: name.parse()?, expires })
}

/// Renews the lease of a session, past half of it only: peers died of touching rows on every look.
pub(super) async fn renew_push(tx: &mut Tx, push: &PushId, lease: i64) -> Outcome<Push> {
    let now = tx.now().await?;
    let live = live_push(tx, push).await?;
    if live.expires < now.saturating_add(lease / 2) {
        extend_push(tx, push, lease).await?;
    }
    Ok(live)
}

pub(super) async fn extend_push(tx: &mut Tx, push: &PushId, lease: i64) -> Outcome<()> {
    let now = tx.now().await?;
    let update = "UPDATE pushes SET expires = GREATEST(expires, $1) WHERE id = $2 AND expires >= $3 AND committed IS NULL";
    let updated = tx.execute(sqlx::query(update).bind(now.saturating_add(lease)).bind(push.0.clone()).bind(now)).await?;
    if updated == 0 { Err(Error::PushUnknown(push.0.clone()).into()) } else { Ok(()) }
}

pub(super) async fn close_push(tx: &mut Tx, push: &PushId) -> Outcome<()> {
    if !can_be_kept(&push.0) {
        return Ok(());
    }
    let delete = "DELETE FROM pushes WHERE id = $1 RETURNING number";
    let number: Option<i64> = sqlx::query_scalar(delete).bind(&push.0).fetch_optional(tx.on()).await?;
    tx.wrote(number.as_slice().len());
    leases::ended(tx, number.as_slice()).await
}

/// A session whose lease has not run out, open or ended.
async fn find_session(tx: &mut Tx, session: &PushId) -> Outcome<Option<Session>> {
    let now = tx.now().await?;
    if !can_be_kept(&session.0) {
        return Ok(None);
    }
    let find = "SELECT r.name, p.committed FROM pushes p JOIN repositories r ON r.id = p.repository WHERE p.id = $1 AND p.expires >= $2";
    let row: Option<(String, Option<Vec<u8>>)> = sqlx::query_as(find).bind(&session.0).bind(now).fetch_optional(tx.on()).await?;
    let session = |(name, ended): (String, Option<Vec<u8>>)| -> Result<Session, Error> {
        Ok(Session { repository: name.parse()?, ended: ended.as_deref().and_then(Ended::from_column) })
    };
    Ok(row.map(session).transpose()?)
}

pub(super) async fn session(tx: &mut Tx, session: &PushId) -> Outcome<Session> {
    Ok(find_session(tx, session).await?.ok_or_else(|| Error::PushUnknown(session.0.clone()))?)
}

/// A change that is made once. Its session comes first: a repetition waits there, holding nothing,
/// until the first has ended.
pub(super) async fn change_names(tx: &mut Tx, repository: &RepositoryName, change: &NameChange, once: &Once, lease: i64) -> Outcome<()> {
    if let Some(session) = find_session(tx, &once.session).await? {
        return Ok(session.was_ended_by(repository, once).map(drop)?);
    }
    let now = tx.now().await?;
    let id = visible(tx, repository).await?;
    let open = "INSERT INTO pushes (id, repository, expires, committed) VALUES ($1, $2, $3, $4) ON CONFLICT (id) DO UPDATE
                SET repository = excluded.repository, expires = excluded.expires, committed = excluded.committed WHERE pushes.expires < $5";
    let open = sqlx::query(open).bind(once.session.0.clone()).bind(id).bind(now.saturating_add(lease));
    if tx.execute(open.bind(Ended::by_change(change, once).to_column()?).bind(now)).await? == 0 {
        return Err(Fail::Again);
    }
    match change {
        NameChange::PutTags { snapshot, moves } => put_tags(tx, repository, snapshot, moves).await,
        NameChange::DeleteTag { tag, expected } => delete_tag(tx, repository, tag, *expected).await,
        NameChange::DeleteSnapshot(snapshot) => delete_snapshot(tx, repository, snapshot).await,
    }
}

// ---- commit

/// The answer of a commit that this session made before.
async fn committed_before(tx: &mut Tx, push: &PushId, commit: &Commit) -> Outcome<Option<Committed>> {
    let ended = find_session(tx, push).await?.and_then(|session| session.ended);
    Ok(ended.and_then(|ended| ended.answer_to_commit(&commit.manifest, commit.tag.as_ref().map(|t| &t.tag))))
}

pub(super) async fn commit(tx: &mut Tx, push: &PushId, commit: &Commit) -> Outcome<Committed> {
    if let Some(before) = committed_before(tx, push, commit).await? {
        return Ok(before);
    }
    match commit_now(tx, push, commit).await {
        // The same commit may have ended while this one waited for it, and be what stands in its
        // way: look again.
        Err(Fail::Store(refused)) => match committed_before(tx, push, commit).await? {
            Some(_) => Err(Fail::Again),
            None => Err(refused.into()),
        },
        done => done,
    }
}

async fn commit_now(tx: &mut Tx, push: &PushId, commit: &Commit) -> Outcome<Committed> {
    let now = tx.now().await?;
    let Push { number, repository, name, .. } = live_push(tx, push).await?;
    check_artifact_type(commit.artifact_type.as_deref())?;
    let moves = commit.tag.as_slice();
    let digest = commit.manifest;
    let unknown = || Error::BlobUnknown { digest, kind: Kind::Manifest };
    let find = "SELECT id FROM objects WHERE domain = $1 AND digest = $2";
    let object: Option<ObjectId> = sqlx::query_scalar(find).bind(DOMAIN).bind(digest.to_key()).fetch_optional(tx.on()).await?;
    let object = object.ok_or_else(unknown)?;
    let before = lock_with_targets(tx, repository, object, moves).await?;
    // Only now: whoever collected, quarantined or committed it meanwhile is done.
    let row: Option<(i64, i64, i64, i64)> = sqlx::query_as(
        "SELECT o.size, o.refs, c.logical_bytes, c.new_bytes FROM objects o JOIN containers c ON c.object = o.id
         WHERE o.id = $1 AND o.kind = $2 AND o.health = 0",
    )
    .bind(object)
    .bind(Kind::Manifest as i16)
    .fetch_optional(tx.on())
    .await?;
    let (size, refs, reach, new) = row.ok_or_else(unknown)?;
    let existing: Option<(i64, i64, i64)> =
        sqlx::query_as("SELECT id, logical_bytes, new_bytes FROM manifests WHERE repository = $1 AND object = $2")
            .bind(repository)
            .bind(object)
            .fetch_optional(tx.on())
            .await?;
    let mut records = Vec::new();
    let (manifest, logical_bytes, new_bytes) = match existing {
        Some(row) => {
            used(tx, row.0).await?;
            row
        }
        None => {
            let logical = i64::saturating_add(size, reach);
            // Only the first holder of a manifest brought what it brought.
            let new = if refs == 0 { i64::saturating_add(size, new) } else { 0 };
            let record = Record::Snapshot {
                repository: name.clone(),
                manifest: digest,
                parents: commit.parents.clone(),
                artifact_type: commit.artifact_type.clone(),
                subject: commit.subject,
                at: uint(now),
                new_bytes: uint(new),
            };
            let id = insert_snapshot(tx, repository, object, &record, logical).await?;
            records.push(record);
            (id, logical, new)
        }
    };
    records.extend(put_tags_at(tx, (repository, &name), (manifest, object, digest), moves, before).await?);
    if let Some(pin) = commit.pin {
        pin_row(tx, manifest, pin, true).await?;
    }
    let done = Committed { created: existing.is_none(), logical_bytes: uint(logical_bytes), new_bytes: uint(new_bytes) };
    let update = sqlx::query("UPDATE pushes SET committed = $1 WHERE id = $2 AND committed IS NULL");
    if tx.execute(update.bind(Ended::by_commit(commit, &done).to_column()?).bind(push.0.clone())).await? == 0 {
        // The same session committed or was closed at the same time: look again.
        return Err(Fail::Again);
    }
    leases::ended(tx, &[number]).await?;
    note(tx, &records).await?;
    Ok(done)
}

/// Writes the rows of a snapshot; `record` is its [`Record::Snapshot`].
pub(super) async fn insert_snapshot(tx: &mut Tx, repository: i64, object: ObjectId, record: &Record, logical: i64) -> Outcome<i64> {
    let Record::Snapshot { parents, artifact_type, subject, at, new_bytes, .. } = record else {
        return Err(Fail::internal("a snapshot's record is none"));
    };
    let id: i64 = sqlx::query_scalar(
        "INSERT INTO manifests (repository, object, artifact_type, subject, pushed_at, used_at, logical_bytes, new_bytes)
         VALUES ($1, $2, $3, $4, $5, $5, $6, $7) RETURNING id",
    )
    .bind(repository)
    .bind(object)
    .bind(artifact_type.clone())
    .bind(subject.map(|d| d.to_key()))
    .bind(int(*at))
    .bind(logical)
    .bind(int(*new_bytes))
    .fetch_one(tx.on())
    .await?;
    tx.wrote(1);
    tx.execute_any(parents, || {
        sqlx::query("INSERT INTO parents (manifest, position, digest) SELECT $1, u.n - 1, u.digest FROM unnest($2::bytea[]) WITH ORDINALITY AS u(digest, n)")
            .bind(id)
            .bind(super::keys(parents))
    })
    .await?;
    add_refs(tx, object, 1).await?;
    Ok(id)
}

/// Notes changes for the journal, in the same transaction and as its last statement: who reads them
/// waits for all who have noted one, and others wait behind him. Nobody who has noted a change may
/// wait for those.
async fn note(tx: &mut Tx, records: &[Record]) -> Outcome<()> {
    let texts = records.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>();
    let texts = texts.map_err(|e| Error::Internal(e.to_string()))?;
    let insert = "INSERT INTO changes (record) SELECT u.record FROM unnest($1::text[]) WITH ORDINALITY AS u(record, n) ORDER BY u.n";
    tx.execute_any(records, || sqlx::query(insert).bind(texts)).await?;
    Ok(())
}

/// Takes references away and leaves the rest to collection: nothing cascades inside a request.
pub(super) async fn release(tx: &mut Tx, object: ObjectId, by: i64) -> Outcome<()> {
    let now = tx.now().await?;
    add_refs(tx, object, -by).await?;
    tx.execute(sqlx::query("INSERT INTO suspects (due, object, released) VALUES ($1, $2, true)").bind(now).bind(object)).await?;
    Ok(())
}

// ---- tags

pub(super) async fn repository_id(tx: &mut Tx, repository: &RepositoryName) -> Outcome<Option<i64>> {
    Ok(sqlx::query_scalar("SELECT id FROM repositories WHERE name = $1").bind(repository.as_str()).fetch_optional(tx.on()).await?)
}

/// The id of a repository that holds something; a push session alone does not make one visible.
pub(super) async fn visible(tx: &mut Tx, repository: &RepositoryName) -> Outcome<i64> {
    let id: Option<i64> = sqlx::query_scalar(
        "SELECT id FROM repositories r WHERE name = $1 AND EXISTS (SELECT 1 FROM manifests m WHERE m.repository = r.id)",
    )
    .bind(repository.as_str())
    .fetch_optional(tx.on())
    .await?;
    Ok(id.ok_or_else(|| Error::RepositoryUnknown(repository.clone()))?)
}

/// Where a tag points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub manifest: i64,
    pub object: ObjectId,
    pub digest: Digest,
}

/// Where tags point, of those that exist.
pub(super) async fn targets(tx: &mut Tx, repository: i64, tags: &[&Tag]) -> Outcome<BTreeMap<String, Target>> {
    let names: Vec<String> = tags.iter().map(|tag| tag.as_str().to_owned()).collect();
    let rows: Vec<(String, i64, ObjectId, Vec<u8>)> = sqlx::query_as(
        "SELECT t.name, m.id, m.object, o.digest FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
         WHERE t.repository = $1 AND t.name = ANY($2)",
    )
    .bind(repository)
    .bind(names)
    .fetch_all(tx.on())
    .await?;
    rows.into_iter().map(|(name, manifest, object, key)| Ok((name, Target { manifest, object, digest: Digest::from_key(&key)? }))).collect()
}

/// Locks `object`, what the tags to be moved point at, and the tags; returns where they point.
async fn lock_with_targets(tx: &mut Tx, repository: i64, object: ObjectId, moves: &[TagMove]) -> Outcome<BTreeMap<String, Target>> {
    let tags: Vec<&Tag> = moves.iter().map(|m| &m.tag).collect();
    let seen = targets(tx, repository, &tags).await?;
    let objects: Vec<ObjectId> = seen.values().map(|t| t.object).chain([object]).collect();
    lock(tx, &objects).await?;
    let names: Vec<String> = tags.iter().map(|tag| tag.as_str().to_owned()).collect();
    let locked: Vec<String> = sqlx::query_scalar("SELECT name FROM tags WHERE repository = $1 AND name = ANY($2) ORDER BY name FOR UPDATE")
        .bind(repository)
        .bind(names)
        .fetch_all(tx.on())
        .await?;
    let now = targets(tx, repository, &tags).await?;
    if now.len() != locked.len() || now.values().any(|target| !objects.contains(&target.object)) {
        return Err(Fail::Again);
    }
    Ok(now)
}

pub(super) fn check_expected(tag: &Tag, expected: Option<TagState>, found: Option<Digest>) -> Result<(), Error> {
    let found = found.map_or(TagState::Absent, TagState::At);
    match expected {
        Some(expected) if expected != found => Err(Error::TagMoved { tag: tag.clone(), expected, found }),
        _ => Ok(()),
    }
}

/// Points tags at (manifest row, its object, its digest); `before` is where the locked tags are.
/// Returns what is to be noted.
async fn put_tags_at(
    tx: &mut Tx,
    (repository, name): (i64, &RepositoryName),
    (manifest, object, digest): (i64, ObjectId, Digest),
    moves: &[TagMove],
    mut before: BTreeMap<String, Target>,
) -> Outcome<Vec<Record>> {
    let now = tx.now().await?;
    let mut writes: Vec<(&Tag, Option<Target>)> = Vec::with_capacity(moves.len());
    for TagMove { tag, expected } in moves {
        let found = before.insert(tag.as_str().to_owned(), Target { manifest, object, digest });
        check_expected(tag, *expected, found.map(|target| target.digest))?;
        if found.is_none_or(|target| target.manifest != manifest) {
            writes.push((tag, found));
        }
    }
    let record = |tag: &Tag| Record::Tag { repository: name.clone(), tag: tag.clone(), manifest: digest, at: uint(now) };
    let records = writes.iter().map(|(tag, _)| record(tag)).collect();
    // A new tag is as good as locked by whoever inserts it first: tags are written in the order in
    // which they are locked.
    writes.sort_by_key(|(tag, _)| tag.as_str());
    for (tag, found) in writes {
        point_tag(tx, repository, tag, manifest, found.is_some(), now).await?;
        add_refs(tx, object, 1).await?;
        if let Some(old) = found {
            release(tx, old.object, 1).await?;
        }
    }
    Ok(records)
}

/// Writes a tag's row: a new one, or the one that is locked.
pub(super) async fn point_tag(tx: &mut Tx, repository: i64, tag: &Tag, manifest: i64, exists: bool, at: i64) -> Outcome<()> {
    let statement = if exists {
        "UPDATE tags SET manifest = $3, updated_at = $4, followed = false WHERE repository = $1 AND name = $2"
    } else {
        "INSERT INTO tags (repository, name, manifest, updated_at) VALUES ($1, $2, $3, $4) ON CONFLICT (repository, name) DO NOTHING"
    };
    let written = tx.execute(sqlx::query(statement).bind(repository).bind(tag.as_str().to_owned()).bind(manifest).bind(at)).await?;
    // Somebody else made the tag meanwhile: look again.
    if written == 1 { Ok(()) } else { Err(Fail::Again) }
}

pub(super) async fn put_tags(tx: &mut Tx, repository: &RepositoryName, snapshot: &Digest, moves: &[TagMove]) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let (_, object) = manifest_row(tx, id, repository, snapshot).await?;
    let before = lock_with_targets(tx, id, object, moves).await?;
    // Again, now that nobody can delete it.
    let (manifest, object) = manifest_row(tx, id, repository, snapshot).await?;
    let records = put_tags_at(tx, (id, repository), (manifest, object, *snapshot), moves, before).await?;
    note(tx, &records).await
}

pub(super) async fn mark_followed(tx: &mut Tx, repository: &RepositoryName, tag: &Tag, at: &Digest) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let mark = "UPDATE tags SET followed = true WHERE repository = $1 AND name = $2
                AND manifest = (SELECT m.id FROM manifests m JOIN objects o ON o.id = m.object WHERE m.repository = $1 AND o.domain = $3 AND o.digest = $4)";
    tx.execute(sqlx::query(mark).bind(id).bind(tag.as_str().to_owned()).bind(DOMAIN).bind(at.to_key())).await?;
    Ok(())
}

pub(super) async fn delete_tag(tx: &mut Tx, repository: &RepositoryName, tag: &Tag, expected: Option<TagState>) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let seen = targets(tx, id, &[tag]).await?;
    let objects: Vec<ObjectId> = seen.values().map(|target| target.object).collect();
    lock(tx, &objects).await?;
    let found = targets(tx, id, &[tag]).await?.remove(tag.as_str());
    check_expected(tag, expected, found.map(|target| target.digest))?;
    let target = found.ok_or_else(|| Error::TagUnknown { repository: repository.clone(), tag: tag.clone() })?;
    let delete = sqlx::query("DELETE FROM tags WHERE repository = $1 AND name = $2 AND manifest = $3");
    let deleted = tx.execute(delete.bind(id).bind(tag.as_str().to_owned()).bind(target.manifest)).await?;
    if deleted == 0 || !objects.contains(&target.object) {
        return Err(Fail::Again);
    }
    release(tx, target.object, 1).await?;
    note(tx, &[Record::Untag { repository: repository.clone(), tag: tag.clone() }]).await
}

// ---- snapshots

/// Row id and object of a repository's manifest.
pub(super) async fn manifest_row(tx: &mut Tx, id: i64, repository: &RepositoryName, digest: &Digest) -> Outcome<(i64, ObjectId)> {
    let row: Option<(i64, ObjectId)> = sqlx::query_as(
        "SELECT m.id, m.object FROM manifests m JOIN objects o ON o.id = m.object WHERE o.domain = $1 AND o.digest = $2 AND m.repository = $3",
    )
    .bind(DOMAIN)
    .bind(digest.to_key())
    .bind(id)
    .fetch_optional(tx.on())
    .await?;
    Ok(row.ok_or_else(|| Error::SnapshotUnknown { repository: repository.clone(), snapshot: digest.to_string() })?)
}

pub(super) async fn delete_snapshot(tx: &mut Tx, repository: &RepositoryName, digest: &Digest) -> Outcome<()> {
    delete_if(tx, repository, digest, None).await.map(|_| ())
}

pub(super) async fn evict_snapshot(tx: &mut Tx, snapshot: &Evictable) -> Outcome<bool> {
    match delete_if(tx, &snapshot.repository, &snapshot.digest, Some(snapshot.used_at)).await {
        Err(Fail::Store(Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_))) => Ok(false),
        other => other,
    }
}

/// Deletes a snapshot; with `used_at` only if it was last used then and nothing pins it.
async fn delete_if(tx: &mut Tx, repository: &RepositoryName, digest: &Digest, used_at: Option<u64>) -> Outcome<bool> {
    let id = visible(tx, repository).await?;
    let (_, object) = manifest_row(tx, id, repository, digest).await?;
    lock(tx, &[object]).await?;
    // Again, now that nobody can delete it or point a tag at it.
    let (manifest, object) = manifest_row(tx, id, repository, digest).await?;
    // Whoever pins it waits for this row.
    let wanted = "SELECT id FROM manifests WHERE id = $1 AND ($2::bigint IS NULL OR (pinned = 0 AND used_at = $2)) FOR UPDATE";
    let row: Option<i64> = sqlx::query_scalar(wanted).bind(manifest).bind(used_at.map(int)).fetch_optional(tx.on()).await?;
    if row.is_none() {
        return Ok(false);
    }
    remove_snapshot(tx, manifest, object).await?;
    note(tx, &[Record::Delete { repository: repository.clone(), manifest: *digest }]).await?;
    Ok(true)
}

/// Removes a snapshot's row and its tags.
pub(super) async fn remove_snapshot(tx: &mut Tx, manifest: i64, object: ObjectId) -> Outcome<()> {
    let tags = tx.execute(sqlx::query("DELETE FROM tags WHERE manifest = $1").bind(manifest)).await?;
    tx.execute(sqlx::query("DELETE FROM manifests WHERE id = $1").bind(manifest)).await?;
    release(tx, object, int(tags) + 1).await
}

pub(super) async fn touch_snapshot(tx: &mut Tx, repository: &RepositoryName, digest: &Digest) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, digest).await?;
    used(tx, manifest).await
}

async fn used(tx: &mut Tx, manifest: i64) -> Outcome<()> {
    let now = tx.now().await?;
    tx.execute(sqlx::query("UPDATE manifests SET used_at = $1 WHERE id = $2 AND used_at < $1").bind(now).bind(manifest)).await?;
    Ok(())
}

pub(super) async fn pin_snapshot(tx: &mut Tx, repository: &RepositoryName, digest: &Digest, reason: Pin, pinned: bool) -> Outcome<bool> {
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, digest).await?;
    let left = pin_row(tx, manifest, reason, pinned).await?;
    // It may have been deleted since the look.
    Ok(left.ok_or_else(|| Error::SnapshotUnknown { repository: repository.clone(), snapshot: digest.to_string() })?)
}

/// Whether anything pins it then; none if it is not there.
async fn pin_row(tx: &mut Tx, manifest: i64, reason: Pin, pinned: bool) -> Outcome<Option<bool>> {
    let update = match pinned {
        true => "UPDATE manifests SET pinned = pinned | $1 WHERE id = $2 RETURNING pinned <> 0",
        false => "UPDATE manifests SET pinned = pinned & ~$1 WHERE id = $2 RETURNING pinned <> 0",
    };
    let left: Option<bool> = sqlx::query_scalar(update).bind(reason as i16).bind(manifest).fetch_optional(tx.on()).await?;
    tx.wrote(1);
    Ok(left)
}
