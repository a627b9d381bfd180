//! Changes of tags, and changes that are made once.
//!
//! Locks are taken in this order: the session that such a change makes for itself, objects by id,
//! rows of manifests by id, tags by name, the push session, the quota, the table of changes, the
//! audit log. The transaction that holds the object of a manifest decides about everything that
//! names it. An image keeps the rows of what it lists as well, which only their deletion waits for:
//! that holds nothing which the push of an image waits for but these rows and their objects.

use super::objects::{add_refs, lock, release};
use super::sessions::{find_session, millis};
use super::snapshots::{delete_snapshot, manifest_row};
use super::sql::{Sql, values};
use super::tx::{Backend, Fail, Mode, Outcome, Tx};
use super::{AuditEntry, Ended, NameChange, ObjectId, Once, Signed, TagMove, audit_log, retention, signing};
use crate::error::{Error, Result};
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, RepositoryName, Tag};
use std::collections::BTreeMap;
use std::time::Duration;

/// Makes a change, once if it is to be made once. Deletions go on while the disk is nearly full.
pub(super) async fn change_names(
    backend: &dyn Backend,
    repository: RepositoryName,
    change: NameChange,
    once: Option<Once>,
    lease: Duration,
    audit: Option<AuditEntry>,
    signed: Option<Signed>,
) -> Result<()> {
    let mode = if matches!(change, NameChange::PutTags { .. }) { Mode::GROW } else { Mode::WRITE };
    let job = (repository, change, once, lease, audit, signed);
    backend
        .run(mode.named("change_names"), job, |tx, (repository, change, once, lease, audit, signed)| {
            Box::pin(async move {
                if let Some(once) = once
                    && !is_first(tx, repository, change, once, *lease).await?
                {
                    return Ok(());
                }
                make(tx, repository, change, Allowed::new(audit.as_ref(), signed.as_ref())).await?;
                audit_log::note(tx, audit.as_ref(), true, |record| audit_log::about_change(record, repository, change)).await
            })
        })
        .await
}

/// Whether a change is to be made now; false if it was made before. Lock the session of the change
/// first: a repetition waits there, without other locks, until the first attempt has ended.
async fn is_first(tx: &mut dyn Tx, repository: &RepositoryName, change: &NameChange, once: &Once, lease: Duration) -> Outcome<bool> {
    if let Some(session) = find_session(tx, &once.session).await? {
        return Ok(session.was_ended_by(repository, once).map(|_| false)?);
    }
    let now = tx.now().await?;
    let id = visible(tx, repository).await?;
    // An expired session with the same id may still have a row.
    let open = "INSERT INTO pushes (id, repository, expires, committed) VALUES ($1, $2, $3, $4) ON CONFLICT (id) DO UPDATE
                SET repository = excluded.repository, expires = excluded.expires, committed = excluded.committed WHERE pushes.expires < $5";
    let ended = Ended::by_change(change, once).to_column()?;
    let opened = tx.execute(open, values![&once.session.0, id, now.saturating_add(millis(lease)), ended, now]).await?;
    if opened == 0 { Err(Fail::Again) } else { Ok(true) }
}

/// What policies let a change do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Allowed<'a> {
    /// It moves and deletes immutable tags.
    overrides: bool,
    /// Signing policies that its manifest satisfies.
    signed: Option<&'a Signed>,
}

impl<'a> Allowed<'a> {
    pub(super) fn new(audit: Option<&AuditEntry>, signed: Option<&'a Signed>) -> Self {
        Self { overrides: audit.is_some_and(|entry| entry.overrides), signed }
    }
}

async fn make(tx: &mut dyn Tx, repository: &RepositoryName, change: &NameChange, allowed: Allowed<'_>) -> Outcome<()> {
    match change {
        NameChange::PutTags { snapshot, moves } => put_tags(tx, repository, snapshot, moves, allowed).await,
        NameChange::DeleteTag { tag, expected } => delete_tag(tx, repository, tag, *expected, allowed.overrides).await,
        NameChange::DeleteSnapshot { snapshot, etag } => delete_snapshot(tx, repository, snapshot, etag.as_ref(), allowed.overrides).await,
    }
}

/// Notes changes for the journal, in the same transaction. Only its record in the audit log may
/// follow: a reader of changes waits for all transactions that have noted one, and others wait
/// behind it. A transaction that has noted a change must not wait for those.
pub(super) async fn note(tx: &mut dyn Tx, records: &[Record]) -> Outcome<()> {
    let texts = records.iter().map(serde_json::to_string).collect::<std::result::Result<Vec<_>, _>>();
    let texts = texts.map_err(|e| Error::Internal(e.to_string()))?;
    let insert = "INSERT INTO changes (record) SELECT u.record FROM unnest($1::text[]) WITH ORDINALITY AS u(record, n) ORDER BY u.n";
    tx.execute_each(insert, vec![texts.into_iter().collect()], &[]).await?;
    Ok(())
}

/// The id of a repository that holds something; a push session alone does not make one visible.
pub(super) async fn visible(tx: &mut dyn Tx, repository: &RepositoryName) -> Outcome<i64> {
    let find = "SELECT id FROM repositories r WHERE name = $1 AND EXISTS (SELECT 1 FROM manifests m WHERE m.repository = r.id)";
    let id = tx.first(find, values![repository]).await?;
    id.ok_or_else(|| Error::RepositoryUnknown(repository.clone()).into())
}

/// Where a tag points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub manifest: i64,
    pub object: ObjectId,
    pub digest: Digest,
}

/// The targets of those tags that exist.
pub(super) async fn targets(tx: &mut dyn Tx, repository: i64, tags: &[&Tag]) -> Outcome<BTreeMap<String, Target>> {
    let find = "SELECT t.name, m.id, m.object, o.digest FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
                WHERE t.repository = $1 AND t.name = ANY($2)";
    let names: Vec<&str> = tags.iter().map(|tag| tag.as_str()).collect();
    let rows: Vec<(String, i64, ObjectId, Digest)> = tx.query(find, values![repository, names]).await?;
    Ok(rows.into_iter().map(|(name, manifest, object, digest)| (name, Target { manifest, object, digest })).collect())
}

/// Locks `object`, the targets of the tags to be moved, and the tags. Returns the targets.
pub(super) async fn lock_with_targets(
    tx: &mut dyn Tx,
    repository: i64,
    object: ObjectId,
    moves: &[TagMove],
) -> Outcome<BTreeMap<String, Target>> {
    const LOCK: Sql = Sql::only_postgres("SELECT name FROM tags WHERE repository = $1 AND name = ANY($2) ORDER BY name FOR UPDATE");
    let tags: Vec<&Tag> = moves.iter().map(|m| &m.tag).collect();
    let seen = targets(tx, repository, &tags).await?;
    if !tx.is_concurrent() {
        return Ok(seen);
    }
    let objects: Vec<ObjectId> = seen.values().map(|t| t.object).chain([object]).collect();
    lock(tx, &objects).await?;
    let names: Vec<&str> = tags.iter().map(|tag| tag.as_str()).collect();
    let locked: Vec<String> = tx.query(LOCK, values![repository, names]).await?;
    let now = targets(tx, repository, &tags).await?;
    if now.len() != locked.len() || now.values().any(|target| !objects.contains(&target.object)) {
        return Err(Fail::Again);
    }
    Ok(now)
}

fn check_expected(tag: &Tag, expected: Option<TagState>, found: Option<Digest>) -> Result<()> {
    let found = found.map_or(TagState::Absent, TagState::At);
    match expected {
        Some(expected) if expected != found => Err(Error::TagMoved { tag: tag.clone(), expected, found }),
        _ => Ok(()),
    }
}

/// Points tags at `target`; `before` are the targets of the locked tags. One that is immutable, or
/// that needs a signature, is put only if the change is allowed to. Returns the records for the
/// journal.
pub(super) async fn put_tags_at(
    tx: &mut dyn Tx,
    (repository, name): (i64, &RepositoryName),
    target: Target,
    moves: &[TagMove],
    mut before: BTreeMap<String, Target>,
    allowed: Allowed<'_>,
) -> Outcome<Vec<Record>> {
    let now = tx.now().await?;
    let mut writes: Vec<(&Tag, Option<Target>)> = Vec::with_capacity(moves.len());
    for TagMove { tag, expected } in moves {
        let found = before.insert(tag.as_str().to_owned(), target);
        check_expected(tag, *expected, found.map(|target| target.digest))?;
        if found.is_none_or(|found| found.manifest != target.manifest) {
            writes.push((tag, found));
        }
    }
    let put: Vec<(&Tag, Option<Digest>)> = writes.iter().map(|(tag, found)| (*tag, found.map(|found| found.digest))).collect();
    signing::must_be_signed(tx, name, &target.digest, &put, allowed.signed).await?;
    if !allowed.overrides {
        let moved: Vec<&Tag> = writes.iter().filter(|(_, found)| found.is_some()).map(|(tag, _)| *tag).collect();
        retention::must_be_mutable(tx, name, &moved).await?;
    }
    let record = |tag: &Tag| Record::Tag { repository: name.clone(), tag: tag.clone(), manifest: target.digest, at: now };
    let records = writes.iter().map(|(tag, _)| record(tag)).collect();
    // The transaction that inserts a new tag first holds it like a lock, so tags are written in the
    // order in which they are locked.
    writes.sort_by_key(|(tag, _)| tag.as_str());
    for (tag, found) in writes {
        point_tag(tx, repository, tag, target, found, now).await?;
    }
    Ok(records)
}

/// Points a tag at `target`: a new one, or the locked one that points at `found`.
pub(super) async fn point_tag(tx: &mut dyn Tx, repository: i64, tag: &Tag, target: Target, found: Option<Target>, at: u64) -> Outcome<()> {
    let statement = match found {
        Some(_) => "UPDATE tags SET manifest = $3, updated_at = $4, followed = false WHERE repository = $1 AND name = $2",
        None => {
            "INSERT INTO tags (repository, name, manifest, updated_at) VALUES ($1, $2, $3, $4) ON CONFLICT (repository, name) DO NOTHING"
        }
    };
    if tx.execute(statement, values![repository, tag, target.manifest, at]).await? != 1 {
        // Another transaction made the tag meanwhile: look again.
        return Err(Fail::Again);
    }
    add_refs(tx, target.object, 1).await?;
    match found {
        Some(old) => release(tx, old.object, 1).await,
        None => Ok(()),
    }
}

pub(super) async fn put_tags(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    snapshot: &Digest,
    moves: &[TagMove],
    allowed: Allowed<'_>,
) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let (_, object) = manifest_row(tx, id, repository, snapshot).await?;
    let before = lock_with_targets(tx, id, object, moves).await?;
    // Read once more under the lock: no other transaction can delete it now.
    let (manifest, object) = manifest_row(tx, id, repository, snapshot).await?;
    let target = Target { manifest, object, digest: *snapshot };
    let records = put_tags_at(tx, (id, repository), target, moves, before, allowed).await?;
    note(tx, &records).await
}

pub(super) async fn mark_followed(tx: &mut dyn Tx, repository: &RepositoryName, tag: &Tag, at: &Digest) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let mark = "UPDATE tags SET followed = true WHERE repository = $1 AND name = $2 AND manifest =
                  (SELECT m.id FROM manifests m JOIN objects o ON o.id = m.object WHERE m.repository = $1 AND o.digest = $3)";
    tx.execute(mark, values![id, tag, at]).await?;
    Ok(())
}

pub(super) async fn delete_tag(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    tag: &Tag,
    expected: Option<TagState>,
    overrides: bool,
) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let seen = targets(tx, id, &[tag]).await?;
    let objects: Vec<ObjectId> = seen.values().map(|target| target.object).collect();
    lock(tx, &objects).await?;
    let found = targets(tx, id, &[tag]).await?.remove(tag.as_str());
    check_expected(tag, expected, found.map(|target| target.digest))?;
    let target = found.ok_or_else(|| Error::TagUnknown { repository: repository.clone(), tag: tag.clone() })?;
    if !overrides {
        retention::must_be_mutable(tx, repository, &[tag]).await?;
    }
    let delete = "DELETE FROM tags WHERE repository = $1 AND name = $2 AND manifest = $3";
    let deleted = tx.execute(delete, values![id, tag, target.manifest]).await?;
    if deleted == 0 || !objects.contains(&target.object) {
        return Err(Fail::Again);
    }
    release(tx, target.object, 1).await?;
    note(tx, &[Record::Untag { repository: repository.clone(), tag: tag.clone() }]).await
}
