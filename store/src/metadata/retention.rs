//! The retention policies of a domain: one document, read by the transactions that they bind.

use super::arguments::at_most;
use super::sql::values;
use super::tx::{Fail, Outcome, Tx};
use super::{AuditEntry, ObjectId, Retention, audit_log, children};
use crate::error::Error;
use pfr_schema::api::RetentionPolicies;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use std::collections::{BTreeMap, HashSet};

/// Tags looked at in one statement.
const TAGS: usize = 1000;

pub(super) async fn retention(tx: &mut dyn Tx) -> Outcome<Retention> {
    let now = tx.now().await?;
    let (version, policies) = policies(tx).await?;
    Ok(Retention { version, policies, now })
}

async fn policies(tx: &mut dyn Tx) -> Outcome<(u64, RetentionPolicies)> {
    let row: Option<(u64, String)> = tx.first("SELECT version, document FROM retention WHERE id = 1", &[]).await?;
    let Some((version, document)) = row else { return Ok((0, RetentionPolicies::default())) };
    let policies = serde_json::from_str(&document).map_err(|e| Fail::internal(format!("the retention policies cannot be read: {e}")))?;
    Ok((version, policies))
}

pub(super) async fn set(tx: &mut dyn Tx, policies: &RetentionPolicies, audit: Option<&AuditEntry>) -> Outcome<()> {
    let document = serde_json::to_string(policies).map_err(|e| Fail::internal(e.to_string()))?;
    let set = "INSERT INTO retention (id, version, document) VALUES (1, 1, $1)
               ON CONFLICT (id) DO UPDATE SET version = retention.version + 1, document = excluded.document";
    tx.execute(set, values![document]).await?;
    audit_log::note(tx, audit, true, |_| ()).await
}

/// Whether the policies are those of this version, and stay so until the transaction ends: setting
/// others waits for it. To be asked first, since it locks.
pub(super) async fn is_current(tx: &mut dyn Tx, version: u64) -> Outcome<bool> {
    let found: Option<u64> = tx.first("SELECT version FROM retention WHERE id = 1 FOR UPDATE", &[]).await?;
    Ok(found.unwrap_or(0) == version)
}

/// Refuses to move or delete tags of which one is immutable.
pub(super) async fn must_be_mutable(tx: &mut dyn Tx, repository: &RepositoryName, tags: &[&Tag]) -> Outcome<()> {
    if tags.is_empty() {
        return Ok(());
    }
    let (_, policies) = policies(tx).await?;
    match tags.iter().find(|tag| policies.is_immutable(repository, tag)) {
        Some(tag) => Err(Error::TagImmutable { repository: repository.clone(), tag: (*tag).clone() }.into()),
        None => Ok(()),
    }
}

/// Refuses to take `object` out of a repository while an immutable tag needs it there: the image at
/// that tag lists it, or an index does and a manifest in between. `by_snapshots`: what snapshots
/// list counts too.
pub(super) async fn must_not_be_needed(
    tx: &mut dyn Tx,
    (id, repository): (i64, &RepositoryName),
    (object, digest): (ObjectId, &Digest),
    by_snapshots: bool,
) -> Outcome<()> {
    let (_, policies) = policies(tx).await?;
    if policies.of(repository).all(|policy| policy.immutable_tags.is_empty()) {
        return Ok(());
    }
    let mut after = String::new();
    loop {
        let find = "SELECT t.name, m.object, m.is_image FROM tags t JOIN manifests m ON m.id = t.manifest
                    WHERE t.repository = $1 AND t.name > $2 ORDER BY t.name LIMIT $3";
        let rows: Vec<(Tag, ObjectId, bool)> = tx.query(find, values![id, after.as_str(), at_most(TAGS)]).await?;
        let is_last = rows.len() < TAGS;
        if let Some((tag, ..)) = rows.last() {
            tag.as_str().clone_into(&mut after);
        }
        let binds = |tag: &Tag, is_image: bool| (is_image || by_snapshots) && policies.is_immutable(repository, tag);
        let tags: BTreeMap<ObjectId, Tag> =
            rows.into_iter().filter(|(tag, _, is_image)| binds(tag, *is_image)).map(|(tag, object, _)| (object, tag)).collect();
        if let Some(tag) = needed_by(tx, object, tags).await? {
            return Err(Error::NeededByTag { repository: repository.clone(), tag, digest: *digest }.into());
        }
        if is_last {
            return Ok(());
        }
    }
}

/// The tag of a manifest that lists `object`, by itself or by manifests that it lists.
async fn needed_by(tx: &mut dyn Tx, object: ObjectId, mut tags: BTreeMap<ObjectId, Tag>) -> Outcome<Option<Tag>> {
    let find = "SELECT o.id, c.children FROM objects o JOIN containers c ON c.object = o.id
                WHERE o.id = ANY($1) AND (o.kind = $2 OR o.kind = $3) ORDER BY o.id";
    let mut seen: HashSet<ObjectId> = HashSet::new();
    while !tags.is_empty() {
        let ids: Vec<ObjectId> = tags.keys().copied().collect();
        seen.extend(&ids);
        let rows: Vec<(ObjectId, Vec<u8>)> = tx.query(find, values![ids, Kind::Manifest, Kind::Image]).await?;
        let mut below: BTreeMap<ObjectId, Tag> = BTreeMap::new();
        for (id, packed) in rows {
            let Some(tag) = tags.get(&id) else { continue };
            for child in children::unpack(&packed)? {
                if child == object {
                    return Ok(Some(tag.clone()));
                }
                if !seen.contains(&child) {
                    below.entry(child).or_insert_with(|| tag.clone());
                }
            }
        }
        tags = below;
    }
    Ok(None)
}
