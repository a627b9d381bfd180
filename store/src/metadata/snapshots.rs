//! Snapshots after their commit: used, pinned, evicted, deleted.

use super::arguments::at_most;
use super::lists::snapshot_rows;
use super::names::{note, visible};
use super::objects::{lock, release};
use super::quota::Growth;
use super::sql::{Sql, int, values};
use super::tx::{Fail, Outcome, Tx};
use super::{AuditEntry, Evictable, Expiring, Expiry, ObjectId, Pin, PinnedSnapshot, audit_log, images, quota, retention};
use crate::error::Error;
use pfr_schema::api::snapshot_etag;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, RepositoryName, Tag};
use std::slice;

/// Manifests with signatures that go with their snapshot, in one transaction: many more than `pf`
/// makes, which keeps all signatures of a snapshot in one.
pub(super) const SIGNATURES: usize = 1000;

/// Row id and object of a repository's manifest.
pub(super) async fn manifest_row(tx: &mut dyn Tx, id: i64, repository: &RepositoryName, digest: &Digest) -> Outcome<(i64, ObjectId)> {
    find_manifest(tx, id, digest).await?.ok_or_else(|| unknown(repository, digest))
}

/// The same, if it is there.
pub(super) async fn find_manifest(tx: &mut dyn Tx, repository: i64, digest: &Digest) -> Outcome<Option<(i64, ObjectId)>> {
    let find = "SELECT m.id, m.object FROM manifests m JOIN objects o ON o.id = m.object WHERE o.digest = $1 AND m.repository = $2";
    tx.first(find, values![digest, repository]).await
}

pub(super) fn unknown(repository: &RepositoryName, digest: &Digest) -> Fail {
    Error::SnapshotUnknown { repository: repository.clone(), snapshot: digest.to_string() }.into()
}

/// Deletes a snapshot; with `etag`, only while its tags are those of this entity tag. A snapshot
/// with an immutable tag is deleted only if the change `overrides` that.
pub(super) async fn delete_snapshot(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    digest: &Digest,
    etag: Option<&Digest>,
    overrides: bool,
) -> Outcome<()> {
    delete_if(tx, repository, digest, Condition { etag, mutable: !overrides, ..Condition::default() }).await.map(|_| ())
}

pub(super) async fn expire(tx: &mut dyn Tx, expiring: &Expiring, audit: Option<&AuditEntry>) -> Outcome<Expiry> {
    let Expiring { repository, digest, etag, pushed_at, version } = expiring;
    if !retention::is_current(tx, *version).await? {
        return Ok(Expiry::Kept);
    }
    let condition = Condition { etag: Some(etag), pushed_at: Some(*pushed_at), unpinned: true, unlisted: true, ..Condition::default() };
    match delete_if(tx, repository, digest, condition).await {
        Ok(true) => {}
        Ok(false) | Err(Fail::Store(Error::TagsMoved { .. })) => return Ok(Expiry::Kept),
        Err(Fail::Store(Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_))) => return Ok(Expiry::Gone),
        Err(other) => return Err(other),
    }
    audit_log::note(tx, audit, true, |record| audit_log::about_names(record, repository, Some(*digest), &[])).await?;
    Ok(Expiry::Deleted)
}

pub(super) async fn evict(tx: &mut dyn Tx, snapshot: &Evictable) -> Outcome<bool> {
    let unused = Condition { used_at: Some(snapshot.used_at), unpinned: true, ..Condition::default() };
    match delete_if(tx, &snapshot.repository, &snapshot.digest, unused).await {
        Err(Fail::Store(Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_))) => Ok(false),
        other => other,
    }
}

/// What must hold for a snapshot to be deleted.
#[derive(Clone, Copy, Default)]
struct Condition<'a> {
    /// Its tags are those of this entity tag.
    etag: Option<&'a Digest>,
    /// It was last used then.
    used_at: Option<u64>,
    /// It was pushed then.
    pushed_at: Option<u64>,
    /// Nothing pins it.
    unpinned: bool,
    /// None of its tags is immutable.
    mutable: bool,
    /// No image of its repository lists it.
    unlisted: bool,
}

/// Deletes a snapshot. Returns false if it was used, pinned or pushed again since, or is listed.
async fn delete_if(tx: &mut dyn Tx, repository: &RepositoryName, digest: &Digest, condition: Condition<'_>) -> Outcome<bool> {
    let id = visible(tx, repository).await?;
    let (manifest, object) = manifest_row(tx, id, repository, digest).await?;
    // Its signatures go with it. Those of an image are its client's.
    let is_image: Option<bool> = tx.first("SELECT is_image FROM manifests WHERE id = $1", values![manifest]).await?;
    let most = if is_image == Some(false) { SIGNATURES } else { 0 };
    let signatures = images::signatures_of(tx, id, slice::from_ref(digest), true, most).await?;
    let objects: Vec<ObjectId> = signatures.iter().map(|row| row.object).chain([object]).collect();
    lock(tx, &objects).await?;
    // Read once more under the lock: no other transaction can delete it or move a tag to it now.
    let (manifest, object) = manifest_row(tx, id, repository, digest).await?;
    let signatures = images::signatures_of(tx, id, slice::from_ref(digest), true, most).await?;
    if [object].iter().chain(signatures.iter().map(|row| &row.object)).any(|object| !objects.contains(object)) {
        return Err(Fail::Again);
    }
    let rows: Vec<i64> = signatures.iter().map(|row| row.manifest).chain([manifest]).collect();
    lock_rows(tx, &rows).await?;
    // A transaction that pins it waits for this row.
    let wanted = "SELECT id FROM manifests WHERE id = $1 AND ($2::bigint IS NULL OR used_at = $2) AND ($3 = false OR pinned = 0)
                  AND ($4::bigint IS NULL OR pushed_at = $4) FOR UPDATE";
    let row: Option<i64> = tx.first(wanted, values![manifest, condition.used_at, condition.unpinned, condition.pushed_at]).await?;
    if row.is_none() {
        return Ok(false);
    }
    if condition.etag.is_some() || condition.mutable {
        let tags: Vec<Tag> = tx.query("SELECT name FROM tags WHERE manifest = $1 ORDER BY name", values![manifest]).await?;
        if condition.etag.is_some_and(|etag| snapshot_etag(digest, &tags) != *etag) {
            return Err(Error::TagsMoved { repository: repository.clone(), snapshot: *digest, tags }.into());
        }
        if condition.mutable {
            retention::must_be_mutable(tx, repository, &tags.iter().collect::<Vec<_>>()).await?;
            retention::must_not_be_needed(tx, (id, repository), (object, digest), false).await?;
        }
    }
    if condition.unlisted && images::is_listed(tx, id, object, digest).await? {
        return Ok(false);
    }
    let mut records = vec![Record::Delete { repository: repository.clone(), manifest: *digest }];
    remove(tx, manifest, object).await?;
    for row in signatures {
        remove(tx, row.manifest, row.object).await?;
        records.push(Record::Delete { repository: repository.clone(), manifest: row.digest });
    }
    quota::add(tx, Growth { snapshots: -int(records.len() as u64), ..Growth::default() }).await?;
    note(tx, &records).await?;
    Ok(true)
}

/// Locks rows of manifests in id order, as everywhere; ids that do not exist are left out. For a
/// transaction that changes several of them: a statement that changes them locks them in the order
/// in which it finds them.
pub(super) async fn lock_rows(tx: &mut dyn Tx, ids: &[i64]) -> Outcome<()> {
    const LOCK: Sql = Sql::only_postgres("SELECT id FROM manifests WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE");
    tx.query::<i64>(LOCK, values![ids]).await?;
    Ok(())
}

/// Removes a snapshot's row and its tags. The caller counts it for the quota.
pub(super) async fn remove(tx: &mut dyn Tx, manifest: i64, object: ObjectId) -> Outcome<()> {
    let tags = tx.execute("DELETE FROM tags WHERE manifest = $1", values![manifest]).await?;
    tx.execute("DELETE FROM manifests WHERE id = $1", values![manifest]).await?;
    release(tx, object, int(tags) + 1).await
}

pub(super) async fn touch(tx: &mut dyn Tx, repository: &RepositoryName, digest: &Digest) -> Outcome<()> {
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, digest).await?;
    used(tx, manifest).await
}

/// Marks a snapshot as used now.
pub(super) async fn used(tx: &mut dyn Tx, manifest: i64) -> Outcome<()> {
    let now = tx.now().await?;
    tx.execute("UPDATE manifests SET used_at = $1 WHERE id = $2 AND used_at < $1", values![now, manifest]).await?;
    Ok(())
}

pub(super) async fn pin(tx: &mut dyn Tx, repository: &RepositoryName, digest: &Digest, reason: Pin, pinned: bool) -> Outcome<bool> {
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, digest).await?;
    // It may have been deleted since the look.
    pin_row(tx, manifest, reason, pinned).await?.ok_or_else(|| unknown(repository, digest))
}

/// Sets or clears a reason. Returns whether any reason is left; `None` if there is no such
/// snapshot.
pub(super) async fn pin_row(tx: &mut dyn Tx, manifest: i64, reason: Pin, pinned: bool) -> Outcome<Option<bool>> {
    let update = match pinned {
        true => "UPDATE manifests SET pinned = pinned | $1 WHERE id = $2 RETURNING pinned <> 0",
        false => "UPDATE manifests SET pinned = pinned & ~$1 WHERE id = $2 RETURNING pinned <> 0",
    };
    Ok(tx.returning(update, values![reason as i64, manifest]).await?.pop())
}

/// Snapshots that eviction does not delete, by repository, the newest first in each.
pub(super) async fn pinned(tx: &mut dyn Tx, limit: usize) -> Outcome<Vec<PinnedSnapshot>> {
    let find = "SELECT m.id, r.name, m.pinned FROM manifests m JOIN repositories r ON r.id = m.repository
                WHERE m.pinned <> 0 ORDER BY r.name, m.id DESC LIMIT $1";
    let rows: Vec<(i64, RepositoryName, u64)> = tx.query(find, values![at_most(limit)]).await?;
    let ids: Vec<i64> = rows.iter().map(|(id, ..)| *id).collect();
    let snapshots = snapshot_rows(tx, &ids).await?;
    let pinned = |((_, repository, pins), snapshot)| PinnedSnapshot { repository, snapshot, pins: Pin::of(pins) };
    Ok(rows.into_iter().zip(snapshots).map(pinned).collect())
}

/// All snapshots, and those that eviction leaves.
pub(super) async fn count(tx: &mut dyn Tx) -> Outcome<(u64, u64)> {
    let count = "SELECT COUNT(*), COALESCE(SUM(CASE WHEN pinned = 0 THEN 0 ELSE 1 END), 0) FROM manifests WHERE NOT is_image";
    tx.one(count, &[]).await
}

/// Snapshots that may be evicted, least recently used first. Signatures go with their snapshot.
pub(super) async fn evictable(tx: &mut dyn Tx, limit: usize) -> Outcome<Vec<Evictable>> {
    let find =
        "SELECT r.name, o.digest, m.used_at FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
         WHERE m.pinned = 0 AND NOT m.is_image ORDER BY m.used_at, m.id LIMIT $1";
    let rows: Vec<(RepositoryName, Digest, u64)> = tx.query(find, values![at_most(limit)]).await?;
    Ok(rows.into_iter().map(|(repository, digest, used_at)| Evictable { repository, digest, used_at }).collect())
}
