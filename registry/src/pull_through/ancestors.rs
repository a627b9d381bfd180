//! Lineages: of snapshots that are here, or the upstream's. Nothing is pulled.

use pfr_client::Remote;
use pfr_schema::api::Lineage;
use pfr_schema::{Digest, RepositoryName, Selector};
use pfr_store::Store;
use std::collections::HashSet;

/// The upstream's lineage of a snapshot, if it knows more ancestors than are here.
pub(super) async fn lineage(
    store: &Store,
    remote: &Remote,
    repository: &RepositoryName,
    selector: &Selector,
    limit: usize,
) -> Option<Lineage> {
    let digest = store.resolve(repository, selector).await.ok()?;
    let here = store.lineage(repository, &digest, limit).await.ok()?;
    let named: HashSet<Digest> = here.snapshots.iter().map(|snapshot| snapshot.digest).collect();
    if here.truncated || here.snapshots.iter().flat_map(|snapshot| &snapshot.parents).all(|parent| named.contains(parent)) {
        return None;
    }
    let there = match remote.lineage(repository, &Selector::Digest(digest), limit).await {
        Ok(there) => there,
        Err(error) => {
            tracing::debug!(%error, %repository, %digest, "pull-through: lineage request failed, the local lineage is served");
            return None;
        }
    };
    (there.snapshots.len() > here.snapshots.len()).then_some(there)
}
