//! Retention policies, and the snapshots that the model says they delete.

use crate::names::Repository;
use pfr_schema::api::{RetentionPolicies, RetentionReport};
use pfr_schema::{Digest, RepositoryName};
use pfr_store::{Budget, Error, Pin, Result, Store};
use rand::RngExt as _;
use rand::rngs::StdRng;
use std::collections::BTreeSet;

/// The tag that keeps its snapshot.
const KEPT: &str = "keep";
/// Snapshots that a run deletes, at most: the model tries their orders.
const MOST: usize = 3;

/// The policies of one run.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The repository.
    pub repository: RepositoryName,
    /// How many of the newest snapshots stay.
    keep_last: usize,
    /// One that is pinned meanwhile.
    pinned: Option<Digest>,
    /// What goes.
    pub doomed: BTreeSet<Digest>,
}

impl Rule {
    /// Draws policies for a repository with these snapshots, newest first; none if all would stay.
    pub fn draw(random: &mut StdRng, repository: RepositoryName, found: &Repository, newest_first: &[Digest]) -> Option<Self> {
        let least = newest_first.len().saturating_sub(MOST).max(1);
        let keep_last = random.random_range(least..=least + 1);
        let old = newest_first.get(keep_last..).filter(|old| !old.is_empty())?;
        let pinned = random.random_bool(0.5).then(|| old[random.random_range(0..old.len())]);
        let is_kept = |digest: &Digest| found.tags.iter().any(|(tag, at)| tag.as_str() == KEPT && at == digest);
        let doomed = old.iter().copied().filter(|digest| Some(*digest) != pinned && !is_kept(digest)).collect();
        Some(Self { repository, keep_last, pinned, doomed })
    }

    fn policies(&self) -> RetentionPolicies {
        let policies = serde_json::json!({"policies": [
            {"name": "last", "repositories": self.repository, "keep_last": self.keep_last},
            {"name": "kept", "repositories": "*", "keep_tags": [KEPT]},
        ]});
        serde_json::from_value(policies).unwrap_or_else(|error| unreachable!("{error}"))
    }

    /// Sets the policies, and asks a dry run; returns what it would delete.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn begin(&self, store: &Store) -> Result<BTreeSet<Digest>> {
        store.metadata().set_retention(self.policies(), None).await?;
        if let Some(pinned) = &self.pinned {
            store.pin(&self.repository, pinned, Pin::ByHand, true).await?;
        }
        let mut report = RetentionReport::default();
        store.retain(true, &Budget::default(), &mut report).await?;
        Ok(report.deleted.into_iter().map(|deleted| deleted.digest).collect())
    }

    /// Runs the policies to their end, and returns the snapshots that the report names.
    ///
    /// # Errors
    /// Those of the store. [`Error::Internal`] if the run leaves something, though nothing else
    /// runs.
    pub async fn run(store: Store) -> Result<BTreeSet<Digest>> {
        let mut report = RetentionReport::default();
        store.retain(false, &Budget::default(), &mut report).await?;
        if !report.complete {
            return Err(Error::Internal(format!("nothing else runs, and this run leaves something: {report:?}")));
        }
        Ok(report.deleted.into_iter().map(|deleted| deleted.digest).collect())
    }

    /// Takes policies and pin away.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn end(&self, store: &Store) -> Result<()> {
        store.metadata().set_retention(RetentionPolicies::default(), None).await?;
        match &self.pinned {
            Some(pinned) => store.pin(&self.repository, pinned, Pin::ByHand, false).await.map(drop),
            None => Ok(()),
        }
    }
}
