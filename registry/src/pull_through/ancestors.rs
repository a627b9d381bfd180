//! Ancestors by name: those that are here, then the upstream's. Nothing is pulled.

use super::upstream::{failure, is_unknown};
use crate::problem::ApiError;
use pfr_client::Remote;
use pfr_schema::api::Lineage;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector};
use pfr_store::Store;
use std::collections::{HashMap, HashSet};

/// Snapshots of a lineage that the upstream is asked for at once: the most that a registry gives.
const LINEAGE: usize = 10_000;
/// First parents that are walked at most. `tag~N` with a larger N is not found.
const STEPS: u32 = 100_000;

/// The `back`-th first parent of a snapshot; none if it has fewer ancestors.
pub(super) async fn nth(
    store: &Store,
    remote: &Remote,
    repository: &RepositoryName,
    from: Digest,
    back: u32,
) -> Result<Option<Digest>, ApiError> {
    let mut above: HashMap<Digest, Option<Digest>> = HashMap::new();
    let (mut at, mut below, mut left, mut met) = (from, from, u64::from(back), HashSet::from([from]));
    if back > STEPS {
        return Ok(None);
    }
    while left > 0 {
        let parent = match store.ancestor(repository, &at, left).await {
            Ok(here) if here.steps == left => return Ok(Some(here.digest)),
            Ok(here) => {
                (at, left) = (here.digest, left - here.steps);
                here.parent
            }
            Err(error) if !matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => {
                return Err(error.into());
            }
            Err(_) => {
                if !above.contains_key(&at) {
                    // Asks about the snapshot below, which the upstream surely has. To answer about
                    // another one it might have to pull more than a name first.
                    let most = LINEAGE.min(left as usize + 2);
                    match remote.lineage(repository, &Selector::Digest(below), most).await {
                        Ok(lineage) => above.extend(lineage.snapshots.iter().map(|s| (s.digest, s.parents.first().copied()))),
                        Err(error) if is_unknown(&error) => return Ok(None),
                        Err(error) => return Err(failure(&error)),
                    }
                }
                above.get(&at).copied().flatten()
            }
        };
        // The upstream's answers are not verified: they may lead in a circle.
        match parent.filter(|parent| met.insert(*parent)) {
            Some(parent) => (below, at, left) = (at, parent, left - 1),
            None => return Ok(None),
        }
    }
    Ok(Some(at))
}

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
