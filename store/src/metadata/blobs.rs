//! Which blobs a repository has, for the OCI API.
//!
//! A row says that a repository has a blob; it holds nothing. Rows of what a manifest lists follow
//! from the manifest, so they are written only when they are asked for, and neither the journal nor
//! a rebuild knows them.

use super::arguments::at_most;
use super::leases::leased_by_a_session;
use super::objects::lock;
use super::sessions::live_push;
use super::snapshots::lock_rows;
use super::sql::{Sql, values};
use super::tx::{Outcome, Tx};
use super::{AuditEntry, Listing, ObjectId, PushId, Unlinked, audit_log, children, retention};
use crate::error::Error;
use pfr_schema::{Digest, Kind, RepositoryName};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Puts stored blobs into a repository; they are locked, and those that are gone are left out.
async fn link_all(tx: &mut dyn Tx, repository: i64, ids: &[ObjectId]) -> Outcome<usize> {
    lock(tx, ids).await?;
    // Of any kind: the bytes of a manifest may be uploaded as a blob, and a refusal would say that
    // some repository has the manifest.
    let there: Vec<ObjectId> = tx.query("SELECT id FROM objects WHERE id = ANY($1)", values![ids]).await?;
    let insert = "INSERT INTO repository_blobs (repository, object) SELECT $2, u.object FROM unnest($1::bigint[]) AS u(object)
                  ON CONFLICT (repository, object) DO NOTHING";
    let count = there.len();
    tx.execute_each(insert, vec![there.into_iter().collect()], values![repository]).await?;
    Ok(count)
}

pub(super) async fn link(tx: &mut dyn Tx, push: &PushId, digest: &Digest) -> Outcome<()> {
    let repository = live_push(tx, push).await?.repository;
    let object: Option<ObjectId> = tx.first("SELECT id FROM objects WHERE digest = $1", values![digest]).await?;
    match link_all(tx, repository, object.as_slice()).await? {
        0 => Err(Error::BlobUnknown { digest: *digest, kind: Kind::Blob }.into()),
        _ => Ok(()),
    }
}

pub(super) async fn unlinked(tx: &mut dyn Tx, repository: &RepositoryName, after: i64, limit: usize) -> Outcome<Vec<Unlinked>> {
    let find =
        "SELECT m.id, o.digest, m.is_image FROM repositories r JOIN manifests m ON m.repository = r.id JOIN objects o ON o.id = m.object
                WHERE r.name = $1 AND NOT m.linked AND m.id > $2 ORDER BY m.id LIMIT $3";
    let rows: Vec<(i64, Digest, bool)> = tx.query(find, values![repository, after, at_most(limit)]).await?;
    Ok(rows.into_iter().map(|(id, digest, is_image)| Unlinked { id, image: is_image.then_some(digest) }).collect())
}

pub(super) async fn link_manifests(tx: &mut dyn Tx, repository: &RepositoryName, manifests: &[Listing]) -> Outcome<()> {
    let ids: Vec<i64> = manifests.iter().map(|listing| listing.manifest).collect();
    let find = "SELECT m.id, m.repository, c.children FROM repositories r JOIN manifests m ON m.repository = r.id
                JOIN containers c ON c.object = m.object WHERE r.name = $1 AND NOT m.linked AND m.id = ANY($2) ORDER BY m.id";
    let rows: Vec<(i64, i64, Vec<u8>)> = tx.query(find, values![repository, &ids]).await?;
    let Some(id) = rows.first().map(|row| row.1) else { return Ok(()) };
    let named: HashMap<i64, &[Digest]> =
        manifests.iter().filter_map(|listing| Some((listing.manifest, listing.needs.as_deref()?))).collect();
    let digests: Vec<Digest> = named.values().flat_map(|needs| needs.iter().copied()).collect();
    let stored: Vec<(Digest, ObjectId)> = match digests.is_empty() {
        true => Vec::new(),
        false => tx.query("SELECT digest, id FROM objects WHERE digest = ANY($1)", values![&digests[..]]).await?,
    };
    let stored: HashMap<Digest, ObjectId> = stored.into_iter().collect();
    let mut all: BTreeSet<ObjectId> = BTreeSet::new();
    for (manifest, _, packed) in &rows {
        let held = children::unpack(packed)?;
        match named.get(manifest) {
            None => all.extend(held),
            // What the bytes do not require may be another repository's, and was never asked for.
            Some(needs) => {
                let held: HashSet<ObjectId> = held.into_iter().collect();
                all.extend(needs.iter().filter_map(|digest| stored.get(digest)).filter(|id| held.contains(*id)));
            }
        }
    }
    link_all(tx, id, &all.into_iter().collect::<Vec<_>>()).await?;
    let manifests: Vec<i64> = rows.iter().map(|row| row.0).collect();
    lock_rows(tx, &manifests).await?;
    tx.execute("UPDATE manifests SET linked = true WHERE id = ANY($1)", values![&manifests]).await?;
    Ok(())
}

pub(super) async fn unlink(tx: &mut dyn Tx, repository: &RepositoryName, digest: &Digest, audit: Option<&AuditEntry>) -> Outcome<()> {
    // An image that needs the blob is there before, or finds it gone.
    const ALONE: Sql = Sql::only_postgres("SELECT object FROM repository_blobs WHERE repository = $1 AND object = $2 FOR UPDATE");
    let find = "SELECT r.id, o.id FROM objects o JOIN repository_blobs b ON b.object = o.id JOIN repositories r ON r.id = b.repository
                WHERE o.digest = $1 AND r.name = $2";
    let unknown = || Error::BlobUnknown { digest: *digest, kind: Kind::Blob };
    let (id, object): (i64, ObjectId) = tx.first(find, values![digest, repository]).await?.ok_or_else(unknown)?;
    tx.query::<i64>(ALONE, values![id, object]).await?;
    if !audit.is_some_and(|entry| entry.overrides) {
        retention::must_not_be_needed(tx, (id, repository), (object, digest), true).await?;
    }
    if tx.execute("DELETE FROM repository_blobs WHERE repository = $1 AND object = $2", values![id, object]).await? == 0 {
        return Err(unknown().into());
    }
    audit_log::note(tx, audit, true, |record| audit_log::about_names(record, repository, Some(*digest), &[])).await
}

/// The size of a blob that a repository has. Not of garbage: who is told that it is there does not
/// upload it, and the next collection takes it.
pub(super) async fn blob(tx: &mut dyn Tx, repository: &RepositoryName, digest: &Digest) -> Outcome<Option<u64>> {
    let find = concat!(
        "SELECT o.size FROM objects o JOIN repository_blobs b ON b.object = o.id JOIN repositories r ON r.id = b.repository
         WHERE o.digest = $1 AND r.name = $2 AND (o.refs > 0 OR o.keep_until > $3 OR ",
        leased_by_a_session!("$3"),
        ")"
    );
    let now = tx.now().await?;
    tx.first(find, values![digest, repository, now]).await
}

pub(super) async fn places(tx: &mut dyn Tx, digest: &Digest, limit: usize) -> Outcome<Vec<RepositoryName>> {
    let find = "SELECT r.name FROM objects o JOIN repository_blobs b ON b.object = o.id JOIN repositories r ON r.id = b.repository
                WHERE o.digest = $1 ORDER BY r.name LIMIT $2";
    tx.query(find, values![digest, at_most(limit)]).await
}

/// Of stored objects, those that a repository has neither as blobs nor as manifests; and those of
/// `manifests` that it does not have as manifests. The others stay there until the transaction
/// ends. To be asked when the objects that the transaction changes are locked.
pub(super) async fn absent(tx: &mut dyn Tx, repository: i64, ids: &[ObjectId], manifests: &[Digest]) -> Outcome<Vec<Digest>> {
    // Only deletions wait for such a lock: pushes of the same layers do not wait for each other.
    const KEEP_BLOBS: Sql =
        Sql::only_postgres("SELECT object FROM repository_blobs WHERE repository = $1 AND object = ANY($2) ORDER BY object FOR KEY SHARE");
    const KEEP_MANIFESTS: Sql =
        Sql::only_postgres("SELECT id FROM manifests WHERE repository = $1 AND object = ANY($2) ORDER BY id FOR KEY SHARE");
    for keep in [KEEP_BLOBS, KEEP_MANIFESTS] {
        tx.query::<i64>(keep, values![repository, ids]).await?;
    }
    let find = "SELECT o.digest FROM objects o WHERE o.id = ANY($1)
                AND NOT EXISTS (SELECT 1 FROM repository_blobs b WHERE b.repository = $2 AND b.object = o.id)
                AND NOT EXISTS (SELECT 1 FROM manifests m WHERE m.repository = $2 AND m.object = o.id)";
    let mut absent: Vec<Digest> = tx.query(find, values![ids, repository]).await?;
    let find = "SELECT o.digest FROM objects o WHERE o.digest = ANY($1)
                AND NOT EXISTS (SELECT 1 FROM manifests m WHERE m.repository = $2 AND m.object = o.id)";
    let mut named: HashSet<Digest> = absent.iter().copied().collect();
    let more = tx.query::<Digest>(find, values![manifests, repository]).await?;
    // SQLite answers for each element of the list, so twice for one that is listed twice.
    absent.extend(more.into_iter().filter(|digest| named.insert(*digest)));
    Ok(absent)
}

/// Of these digests, those that a repository has neither as blobs nor as manifests, stored or not;
/// with `as_manifests` those that it does not have as manifests.
pub(super) async fn missing(tx: &mut dyn Tx, repository: &RepositoryName, digests: &[Digest], as_manifests: bool) -> Outcome<Vec<Digest>> {
    let find = "SELECT o.digest FROM objects o WHERE o.digest = ANY($1)
                AND ($3 = false AND EXISTS (SELECT 1 FROM repository_blobs b JOIN repositories r ON r.id = b.repository
                             WHERE r.name = $2 AND b.object = o.id)
                  OR EXISTS (SELECT 1 FROM manifests m JOIN repositories r ON r.id = m.repository
                             WHERE r.name = $2 AND m.object = o.id))";
    let there: HashSet<Digest> = tx.query::<Digest>(find, values![digests, repository, as_manifests]).await?.into_iter().collect();
    Ok(digests.iter().filter(|digest| !there.contains(digest)).copied().collect())
}
