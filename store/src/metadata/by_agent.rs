//! The agents of snapshots, as their configurations name them.

use super::arguments::at_most;
use super::names::visible;
use super::snapshots::lock_rows;
use super::sql::values;
use super::tx::{Outcome, Tx};
use pfr_schema::{Digest, RepositoryName};

/// Snapshots of a repository whose agent is not known, by the row ids of their manifests.
pub(super) async fn unread(tx: &mut dyn Tx, repository: &RepositoryName, after: i64, limit: usize) -> Outcome<Vec<(i64, Digest)>> {
    let id = visible(tx, repository).await?;
    let find = "SELECT m.id, o.digest FROM manifests m JOIN objects o ON o.id = m.object
                WHERE m.repository = $1 AND m.id > $2 AND m.agent IS NULL AND NOT m.is_image ORDER BY m.id LIMIT $3";
    tx.query(find, values![id, after, at_most(limit)]).await
}

/// Writes agents that were not known; a snapshot that was deleted meanwhile is left out.
pub(super) async fn note(tx: &mut dyn Tx, agents: &[(i64, String)]) -> Outcome<()> {
    let ids: Vec<i64> = agents.iter().map(|(manifest, _)| *manifest).collect();
    lock_rows(tx, &ids).await?;
    for (manifest, agent) in agents {
        tx.execute("UPDATE manifests SET agent = $2 WHERE id = $1 AND agent IS NULL", values![*manifest, agent]).await?;
    }
    Ok(())
}

/// The snapshots of an agent, the oldest first.
pub(super) async fn snapshots(tx: &mut dyn Tx, repository: &RepositoryName, agent: &str) -> Outcome<Vec<Digest>> {
    let id = visible(tx, repository).await?;
    let find = "SELECT o.digest FROM manifests m JOIN objects o ON o.id = m.object
                WHERE m.repository = $1 AND m.agent = $2 AND NOT m.is_image ORDER BY m.id";
    tx.query(find, values![id, agent]).await
}
