//! Lists of tags, snapshots and repositories, each read from one state of the tables. They leave
//! images out, and the tags of images; but a repository counts the tags of both.

use super::arguments::{at_most, cursor, numbered, one_more, paged};
use super::names::visible;
use super::snapshots::{manifest_row, unknown};
use super::sql::values;
use super::tx::{Outcome, Tx};
use super::{ObjectId, Page, RepositoryInfo, SnapshotRow, TagRow};
use crate::error::Error;
use pfr_schema::{Digest, DigestPrefix, RepositoryName, Tag};
use std::collections::HashMap;

pub(super) async fn tag(tx: &mut dyn Tx, repository: &RepositoryName, tag: &Tag) -> Outcome<TagRow> {
    let id = visible(tx, repository).await?;
    let find =
        "SELECT o.digest, t.updated_at, t.followed FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
                WHERE t.repository = $1 AND t.name = $2 AND NOT m.is_image";
    let row: Option<(Digest, u64, bool)> = tx.first(find, values![id, tag]).await?;
    let unknown = || Error::TagUnknown { repository: repository.clone(), tag: tag.clone() };
    let (digest, updated_at, followed) = row.ok_or_else(unknown)?;
    Ok(TagRow { name: tag.clone(), digest, updated_at, followed })
}

pub(super) async fn tags(tx: &mut dyn Tx, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Outcome<Page<TagRow>> {
    let id = visible(tx, repository).await?;
    let find =
        "SELECT t.name, o.digest, t.updated_at, t.followed FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
         WHERE t.repository = $1 AND t.name > $2 AND NOT m.is_image ORDER BY t.name LIMIT $3";
    let rows: Vec<(Tag, Digest, u64, bool)> = tx.query(find, values![id, cursor(after, "")?, one_more(limit)]).await?;
    let row = |(name, digest, updated_at, followed)| TagRow { name, digest, updated_at, followed };
    Ok(paged(rows.into_iter().map(row).collect(), limit, |row| row.name.to_string()))
}

/// Snapshots by the row ids of their manifests, in that order.
pub(super) async fn snapshot_rows(tx: &mut dyn Tx, manifests: &[i64]) -> Outcome<Vec<SnapshotRow>> {
    let mut tags: HashMap<i64, Vec<Tag>> = HashMap::new();
    let find = "SELECT manifest, name FROM tags WHERE manifest = ANY($1) ORDER BY name";
    for (manifest, name) in tx.query::<(i64, Tag)>(find, values![manifests]).await? {
        tags.entry(manifest).or_default().push(name);
    }
    let mut parents: HashMap<i64, Vec<Digest>> = HashMap::new();
    let find = "SELECT manifest, digest FROM parents WHERE manifest = ANY($1) ORDER BY manifest, position";
    for (manifest, digest) in tx.query::<(i64, Digest)>(find, values![manifests]).await? {
        parents.entry(manifest).or_default().push(digest);
    }
    let find = "SELECT m.id, m.object, o.digest, m.pushed_at, m.logical_bytes, m.new_bytes
                FROM manifests m JOIN objects o ON o.id = m.object WHERE m.id = ANY($1)";
    type Row = (i64, ObjectId, Digest, u64, u64, u64);
    let rows: Vec<Row> = tx.query(find, values![manifests]).await?;
    let mut row = |(id, object, digest, pushed_at, logical_bytes, new_bytes): Row| {
        let (tags, parents) = (tags.remove(&id).unwrap_or_default(), parents.remove(&id).unwrap_or_default());
        (id, SnapshotRow { object, digest, tags, parents, pushed_at, logical_bytes, new_bytes })
    };
    let mut rows: HashMap<i64, SnapshotRow> = rows.into_iter().map(&mut row).collect();
    Ok(manifests.iter().filter_map(|id| rows.remove(id)).collect())
}

pub(super) async fn snapshot(tx: &mut dyn Tx, repository: &RepositoryName, digest: &Digest) -> Outcome<SnapshotRow> {
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, digest).await?;
    if tx.one("SELECT is_image FROM manifests WHERE id = $1", values![manifest]).await? {
        return Err(unknown(repository, digest));
    }
    snapshot_rows(tx, &[manifest]).await?.pop().ok_or_else(|| unknown(repository, digest))
}

pub(super) async fn snapshots_like(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    prefix: &DigestPrefix,
    limit: usize,
) -> Outcome<Vec<Digest>> {
    let id = visible(tx, repository).await?;
    let mut found = Vec::new();
    for (first, last) in prefix.key_ranges() {
        // From the index of digests to manifests: a repository may have very many snapshots.
        let find = "SELECT o.digest FROM objects o /* CROSS */ JOIN manifests m ON m.repository = $1 AND m.object = o.id AND NOT m.is_image
                    WHERE o.digest BETWEEN $2 AND $3 ORDER BY o.digest LIMIT $4";
        let values = values![id, first, last, at_most(limit - found.len())];
        found.extend(tx.query::<Digest>(find, values).await?);
    }
    Ok(found)
}

pub(super) async fn snapshots(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    after: Option<&str>,
    limit: usize,
) -> Outcome<Page<SnapshotRow>> {
    let id = visible(tx, repository).await?;
    let find = "SELECT id FROM manifests WHERE repository = $1 AND id < $2 AND NOT is_image ORDER BY id DESC LIMIT $3";
    let ids: Vec<i64> = tx.query(find, values![id, numbered(after, i64::MAX)?, one_more(limit)]).await?;
    let page = paged(ids, limit, ToString::to_string);
    Ok(Page { rows: snapshot_rows(tx, &page.rows).await?, next: page.next })
}

pub(super) async fn repositories(tx: &mut dyn Tx, after: Option<&str>, limit: usize) -> Outcome<Page<RepositoryInfo>> {
    let find = "SELECT r.name, SUM(CASE WHEN m.is_image THEN 0 ELSE 1 END), (SELECT COUNT(*) FROM tags t WHERE t.repository = r.id), MAX(m.pushed_at)
                FROM repositories r JOIN manifests m ON m.repository = r.id WHERE r.name > $1 GROUP BY r.id, r.name ORDER BY r.name LIMIT $2";
    let rows: Vec<(RepositoryName, u64, u64, u64)> = tx.query(find, values![cursor(after, "")?, one_more(limit)]).await?;
    let row = |(name, snapshots, tags, updated_at)| RepositoryInfo { name, snapshots, tags, updated_at };
    Ok(paged(rows.into_iter().map(row).collect(), limit, |row| row.name.to_string()))
}
