//! Lists of tags, snapshots and repositories, each read from one state of the tables.

use super::connection::Tx;
use super::error::Outcome;
use super::names::{manifest_row, visible};
use super::{DOMAIN, uint};
use crate::error::Error;
use crate::metadata::arguments::{at_most, cursor, one_more};
use crate::metadata::{Evictable, Page, RepositoryRow, SnapshotRow, TagRow};
use pfr_schema::{Digest, DigestPrefix, RepositoryName, Tag};
use std::collections::HashMap;

/// Cuts one row too many off and makes a cursor of the last that stays.
pub(super) fn paged<T>(mut rows: Vec<T>, limit: usize, cursor: impl Fn(&T) -> String) -> Page<T> {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = if more { rows.last().map(cursor) } else { None };
    Page { rows, next }
}

pub(super) async fn tag(tx: &mut Tx, repository: &RepositoryName, tag: &Tag) -> Outcome<TagRow> {
    let id = visible(tx, repository).await?;
    let row: Option<(Vec<u8>, i64, bool)> = sqlx::query_as(
        "SELECT o.digest, t.updated_at, t.followed FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
         WHERE t.repository = $1 AND t.name = $2",
    )
    .bind(id)
    .bind(tag.as_str())
    .fetch_optional(tx.on())
    .await?;
    let (key, updated_at, followed) = row.ok_or_else(|| Error::TagUnknown { repository: repository.clone(), tag: tag.clone() })?;
    Ok(TagRow { name: tag.clone(), digest: Digest::from_key(&key)?, updated_at: uint(updated_at), followed })
}

pub(super) async fn tags(tx: &mut Tx, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Outcome<Page<TagRow>> {
    let id = visible(tx, repository).await?;
    let rows: Vec<(String, Vec<u8>, i64, bool)> = sqlx::query_as(
        "SELECT t.name, o.digest, t.updated_at, t.followed FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
         WHERE t.repository = $1 AND t.name > $2 ORDER BY t.name LIMIT $3",
    )
    .bind(id)
    .bind(cursor(after, "")?)
    .bind(one_more(limit))
    .fetch_all(tx.on())
    .await?;
    let rows = rows
        .into_iter()
        .map(|(name, key, updated_at, followed)| {
            Ok(TagRow { name: name.parse()?, digest: Digest::from_key(&key)?, updated_at: uint(updated_at), followed })
        })
        .collect::<Outcome<Vec<_>>>()?;
    Ok(paged(rows, limit, |row| row.name.to_string()))
}

/// Snapshots by the row ids of their manifests, in that order.
async fn snapshot_rows(tx: &mut Tx, manifests: &[i64]) -> Outcome<Vec<SnapshotRow>> {
    let mut tags: HashMap<i64, Vec<Tag>> = HashMap::new();
    let rows: Vec<(i64, String)> = sqlx::query_as("SELECT manifest, name FROM tags WHERE manifest = ANY($1) ORDER BY name")
        .bind(manifests.to_vec())
        .fetch_all(tx.on())
        .await?;
    for (manifest, name) in rows {
        tags.entry(manifest).or_default().push(name.parse()?);
    }
    let mut parents: HashMap<i64, Vec<Digest>> = HashMap::new();
    let rows: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT manifest, digest FROM parents WHERE manifest = ANY($1) ORDER BY manifest, position")
            .bind(manifests.to_vec())
            .fetch_all(tx.on())
            .await?;
    for (manifest, key) in rows {
        parents.entry(manifest).or_default().push(Digest::from_key(&key)?);
    }
    let rows: Vec<(i64, i64, Vec<u8>, i64, i64, i64)> = sqlx::query_as(
        "SELECT m.id, m.object, o.digest, m.pushed_at, m.logical_bytes, m.new_bytes
         FROM unnest($1::bigint[]) WITH ORDINALITY AS u(id, n) JOIN manifests m ON m.id = u.id JOIN objects o ON o.id = m.object ORDER BY u.n",
    )
    .bind(manifests.to_vec())
    .fetch_all(tx.on())
    .await?;
    rows.into_iter()
        .map(|(id, object, key, pushed_at, logical, new)| {
            Ok(SnapshotRow {
                object,
                digest: Digest::from_key(&key)?,
                tags: tags.remove(&id).unwrap_or_default(),
                parents: parents.remove(&id).unwrap_or_default(),
                pushed_at: uint(pushed_at),
                logical_bytes: uint(logical),
                new_bytes: uint(new),
            })
        })
        .collect()
}

pub(super) async fn snapshot(tx: &mut Tx, repository: &RepositoryName, digest: &Digest) -> Outcome<SnapshotRow> {
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, digest).await?;
    let unknown = || Error::SnapshotUnknown { repository: repository.clone(), snapshot: digest.to_string() };
    Ok(snapshot_rows(tx, &[manifest]).await?.pop().ok_or_else(unknown)?)
}

pub(super) async fn snapshots_like(tx: &mut Tx, repository: &RepositoryName, prefix: &DigestPrefix, limit: usize) -> Outcome<Vec<Digest>> {
    let id = visible(tx, repository).await?;
    let mut found = Vec::new();
    for (first, last) in prefix.key_ranges() {
        let keys: Vec<Vec<u8>> = sqlx::query_scalar(
            "SELECT o.digest FROM objects o JOIN manifests m ON m.repository = $1 AND m.object = o.id
             WHERE o.domain = $2 AND o.digest BETWEEN $3 AND $4 ORDER BY o.digest LIMIT $5",
        )
        .bind(id)
        .bind(DOMAIN)
        .bind(first)
        .bind(last)
        .bind(at_most(limit - found.len()))
        .fetch_all(tx.on())
        .await?;
        for key in keys {
            found.push(Digest::from_key(&key)?);
        }
    }
    Ok(found)
}

pub(super) async fn snapshots(tx: &mut Tx, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Outcome<Page<SnapshotRow>> {
    let id = visible(tx, repository).await?;
    let before = match after {
        None => i64::MAX,
        Some(cursor) => cursor.parse().map_err(|_| Error::Invalid(format!("{cursor:?} is no cursor of this list")))?,
    };
    let ids: Vec<i64> = sqlx::query_scalar("SELECT id FROM manifests WHERE repository = $1 AND id < $2 ORDER BY id DESC LIMIT $3")
        .bind(id)
        .bind(before)
        .bind(one_more(limit))
        .fetch_all(tx.on())
        .await?;
    let page = paged(ids, limit, ToString::to_string);
    Ok(Page { rows: snapshot_rows(tx, &page.rows).await?, next: page.next })
}

pub(super) async fn evictable(tx: &mut Tx, limit: usize) -> Outcome<Vec<Evictable>> {
    let rows: Vec<(String, Vec<u8>, i64)> = sqlx::query_as(
        "SELECT r.name, o.digest, m.used_at FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
         WHERE m.pinned = 0 ORDER BY m.used_at, m.id LIMIT $1",
    )
    .bind(at_most(limit))
    .fetch_all(tx.on())
    .await?;
    let row = |(name, key, used_at): (String, Vec<u8>, i64)| {
        Ok(Evictable { repository: name.parse()?, digest: Digest::from_key(&key)?, used_at: uint(used_at) })
    };
    rows.into_iter().map(row).collect()
}

pub(super) async fn repositories(tx: &mut Tx, after: Option<&str>, limit: usize) -> Outcome<Page<RepositoryRow>> {
    let rows: Vec<(String, i64, i64, i64)> = sqlx::query_as(
        "SELECT r.name, COUNT(*), (SELECT COUNT(*) FROM tags t WHERE t.repository = r.id), MAX(m.pushed_at)
         FROM repositories r JOIN manifests m ON m.repository = r.id WHERE r.name > $1 GROUP BY r.id, r.name ORDER BY r.name LIMIT $2",
    )
    .bind(cursor(after, "")?)
    .bind(one_more(limit))
    .fetch_all(tx.on())
    .await?;
    let rows = rows
        .into_iter()
        .map(|(name, snapshots, tags, updated)| {
            Ok(RepositoryRow { name: name.parse()?, snapshots: uint(snapshots), tags: uint(tags), updated_at: uint(updated) })
        })
        .collect::<Outcome<Vec<_>>>()?;
    Ok(paged(rows, limit, |row| row.name.to_string()))
}
