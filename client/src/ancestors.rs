//! Ancestors of a snapshot: those that are here, then those that a registry knows. Nothing is
//! pulled.

use crate::error::Result;
use crate::remote::Remote;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector};
use pfr_store::Store;
use std::collections::{HashMap, HashSet};

/// Snapshots of a lineage that the registry is asked for at once: the most that it gives.
const LINEAGE: usize = 10_000;
/// First parents that are walked at most. `tag~N` with a larger N is not found.
const STEPS: u32 = 100_000;

/// The `back`-th first parent of the snapshot `from`; none if it has fewer ancestors, as far as the
/// store and the registry know. The registry's answers are not verified.
///
/// # Errors
/// Those of the store and of the registry, except that a snapshot is unknown.
pub async fn nth_ancestor(store: &Store, remote: &Remote, repository: &RepositoryName, from: Digest, back: u32) -> Result<Option<Digest>> {
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
            Err(error) if !is_unknown(error.code()) => return Err(error.into()),
            Err(_) => {
                if !above.contains_key(&at) {
                    let most = LINEAGE.min(left as usize + 2);
                    above.extend(lineage(remote, repository, [below, at], most).await?);
                }
                above.get(&at).copied().flatten()
            }
        };
        // The registry's answers may lead in a circle.
        match parent.filter(|parent| met.insert(*parent)) {
            Some(parent) => (below, at, left) = (at, parent, left - 1),
            None => return Ok(None),
        }
    }
    Ok(Some(at))
}

/// First parents of a snapshot and of its ancestors. Asks about the snapshot below first. A
/// registry that passes requests on to another one surely has that: to answer about `at` it might
/// have to pull more than a name. But the one below may be a snapshot of this host that is not
/// pushed yet.
async fn lineage(
    remote: &Remote,
    repository: &RepositoryName,
    [below, at]: [Digest; 2],
    most: usize,
) -> Result<Vec<(Digest, Option<Digest>)>> {
    for digest in [below, at] {
        match remote.lineage(repository, &Selector::Digest(digest), most).await {
            Ok(lineage) => return Ok(lineage.snapshots.iter().map(|s| (s.digest, s.parents.first().copied())).collect()),
            Err(error) if is_unknown(error.code()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Vec::new())
}

fn is_unknown(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown)
}
