//! Ancestors: one recursive query, however far they go.

use super::arguments::at_most;
use super::lists::snapshot_rows;
use super::names::visible;
use super::snapshots::{manifest_row, unknown};
use super::sql::values;
use super::tx::{Outcome, Tx};
use super::{Ancestor, SnapshotRow};
use crate::error::Error;
use pfr_schema::{Digest, RepositoryName, Tag};
use std::collections::{HashMap, VecDeque};

/// The manifests that `up.manifest` names as parents: those of the repository `$2`. `COALESCE`
/// keeps the databases from going the other way round, by the index on the digests of parents: from
/// all manifests down to those that name them, in each step.
macro_rules! parents {
    ($position:literal) => {
        concat!(
            "up JOIN parents p ON p.manifest = up.manifest",
            $position,
            " JOIN objects o ON o.digest = COALESCE(p.digest, p.digest)
             JOIN manifests m ON m.repository = $2 AND m.object = o.id"
        )
    };
}

pub(super) async fn ancestor(tx: &mut dyn Tx, repository: &RepositoryName, from: &Digest, back: u64) -> Outcome<Ancestor> {
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, from).await?;
    walk(tx, id, manifest, back).await
}

pub(super) async fn ancestor_of_tag(tx: &mut dyn Tx, repository: &RepositoryName, tag: &Tag, back: u64) -> Outcome<Ancestor> {
    let id = visible(tx, repository).await?;
    let manifest: Option<i64> = tx.first("SELECT manifest FROM tags WHERE repository = $1 AND name = $2", values![id, tag]).await?;
    let manifest = manifest.ok_or_else(|| Error::TagUnknown { repository: repository.clone(), tag: tag.clone() })?;
    walk(tx, id, manifest, back).await
}

/// Goes up first parents. The number of steps ends it in any case.
async fn walk(tx: &mut dyn Tx, repository: i64, manifest: i64, back: u64) -> Outcome<Ancestor> {
    let find = concat!(
        "WITH RECURSIVE up(manifest, steps) AS (
           SELECT $1::bigint, 0::bigint UNION ALL SELECT m.id, up.steps + 1 FROM ",
        parents!(" AND p.position = 0"),
        " WHERE up.steps < $3)
         SELECT o.digest, up.steps, p.digest FROM (SELECT manifest, steps FROM up ORDER BY steps DESC LIMIT 1) up
         JOIN manifests m ON m.id = up.manifest JOIN objects o ON o.id = m.object
         LEFT JOIN parents p ON p.manifest = m.id AND p.position = 0"
    );
    let (digest, steps, parent) = tx.one(find, values![manifest, repository, back]).await?;
    Ok(Ancestor { digest, steps, parent })
}

pub(super) async fn lineage(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    digest: &Digest,
    limit: usize,
) -> Outcome<(Vec<SnapshotRow>, bool)> {
    // Both databases find rows breadth first, and no more of them than are asked for.
    let find = concat!(
        "WITH RECURSIVE up(manifest) AS (SELECT $1::bigint UNION SELECT m.id FROM ",
        parents!(""),
        ") SELECT manifest FROM up LIMIT $3"
    );
    let id = visible(tx, repository).await?;
    let (manifest, _) = manifest_row(tx, id, repository, digest).await?;
    let limit = limit.max(1);
    let found: Vec<i64> = tx.query(find, values![manifest, id, limit as u64 + 1]).await?;
    let truncated = found.len() > limit;
    let mut rows: HashMap<Digest, SnapshotRow> = snapshot_rows(tx, &found).await?.into_iter().map(|row| (row.digest, row)).collect();
    let (mut ordered, mut queue) = (Vec::with_capacity(rows.len()), VecDeque::from([*digest]));
    while ordered.len() < limit
        && let Some(next) = queue.pop_front()
    {
        if let Some(row) = rows.remove(&next) {
            queue.extend(&row.parents);
            ordered.push(row);
        }
    }
    if ordered.is_empty() { Err(unknown(repository, digest)) } else { Ok((ordered, truncated)) }
}

/// Snapshots that name `parent` as a parent, which need not be in the repository.
pub(super) async fn continuations(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    parent: &Digest,
    limit: usize,
) -> Outcome<Vec<SnapshotRow>> {
    let id = visible(tx, repository).await?;
    let find = "SELECT DISTINCT m.id FROM parents p JOIN manifests m ON m.id = p.manifest
                WHERE p.digest = $2 AND m.repository = $1 ORDER BY m.id LIMIT $3";
    let found: Vec<i64> = tx.query(find, values![id, parent, at_most(limit)]).await?;
    snapshot_rows(tx, &found).await
}
