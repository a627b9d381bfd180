//! Retention: deletes the snapshots that the policies of a domain say.
//!
//! ```text
//! policies ─▶ for each repository: all snapshots ─▶ Criteria::choose ─▶ a transaction for each: same policies, same tags, no pin, not listed?
//!                                                                           ├▶ deleted, with its record in the audit log
//!                                                                           └▶ kept: the next run looks again
//! ```
//!
//! Nothing is written but these deletions, in an order that can be cut anywhere: where the order
//! matters ([`Criteria::is_ordered`]), a chosen snapshot goes only when those chosen before it are
//! gone. So a kill leaves a shorter list to the next run, and processes that run at the same time
//! find each other's snapshots gone.

mod choose;

pub(crate) use choose::with_descendants;
pub use choose::{Criteria, KeepLast};

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{Expiring, Expiry, Retention};
use crate::room::Freeing;
use crate::tasks::Budget;
use pfr_schema::api::{
    DeletedSnapshot, Freed, KeepLastOf, RetentionPolicies, RetentionPolicy, RetentionReport, SnapshotSummary, snapshot_etag,
};
use pfr_schema::{Digest, RepositoryName, Selector};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

/// Snapshots read at a time.
const PAGE: usize = 1000;
/// Deleted snapshots that the report lists.
const LISTED: usize = 10_000;
/// Deletions whose records are written into the journal together. None is acknowledged before.
const JOURNALED: u64 = 100;
/// Snapshots of a dry run of which is counted what they would free: as many as one `POST /v1/freed`
/// may name.
const COUNTED: u64 = 100_000;

/// What stays the same during a run.
struct Plan<'a> {
    policies: &'a RetentionPolicies,
    version: u64,
    now: u64,
    /// Pinned snapshots of each repository.
    pinned: HashMap<RepositoryName, HashSet<Digest>>,
    budget: &'a Budget,
}

impl Store {
    /// Deletes the snapshots that the retention policies say, until `budget` is used up. A dry run
    /// deletes nothing, and reports what a run would delete now; what that would free is counted
    /// within `budget` too, and of 100,000 snapshots at most. `report` says what was done in any
    /// case.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`]: what was deleted until then stays deleted.
    #[boxed]
    pub async fn retain(&self, dry_run: bool, budget: &Budget, report: &mut RetentionReport) -> Result<()> {
        *report = RetentionReport { dry_run, freed: dry_run.then(Freed::default), ..RetentionReport::default() };
        let Retention { version, policies, now } = self.metadata.retention().await?;
        report.complete = true;
        if !policies.policies.iter().any(RetentionPolicy::deletes) {
            return Ok(());
        }
        let mut pinned: HashMap<_, HashSet<_>> = HashMap::new();
        for row in self.pinned().await? {
            pinned.entry(row.repository).or_default().insert(row.snapshot.digest);
        }
        let plan = Plan { policies: &policies, version, now, pinned, budget };
        let mut chosen: BTreeMap<RepositoryName, BTreeSet<Digest>> = BTreeMap::new();
        for repository in self.all_repositories().await? {
            if budget.is_used_up() {
                report.complete = false;
                break;
            }
            if plan.policies.of(&repository).next().is_some() {
                let done = self.retain_in(&repository, &plan, report).await;
                if !dry_run {
                    self.flush_journal().await?;
                }
                let gone = done?;
                if dry_run && report.snapshots <= COUNTED {
                    chosen.insert(repository, gone.into_iter().collect());
                }
            }
        }
        if dry_run {
            report.freed = None;
            if report.complete && report.snapshots <= COUNTED {
                report.freed = self.freed_by(&chosen, budget).await?;
                report.complete = report.freed.is_some();
            }
        }
        Ok(())
    }

    /// Follows the policies in a repository. Returns the snapshots that are gone, or would be.
    async fn retain_in(&self, repository: &RepositoryName, plan: &Plan<'_>, report: &mut RetentionReport) -> Result<HashSet<Digest>> {
        let snapshots = self.every_snapshot(repository).await?;
        let pinned = plan.pinned.get(repository);
        let listed: HashSet<Digest> = self.metadata.listed_snapshots(repository.clone()).await?.into_iter().collect();
        let stays = |snapshot: &SnapshotSummary| {
            pinned.is_some_and(|pinned| pinned.contains(&snapshot.digest))
                || listed.contains(&snapshot.digest)
                || snapshot.tags.iter().any(|tag| plan.policies.keeps(repository, tag))
        };
        let mut gone: HashSet<Digest> = HashSet::new();
        let policies: Vec<&RetentionPolicy> = plan.policies.of(repository).filter(|policy| policy.deletes()).collect();
        for policy in policies {
            let Some(criteria) = self.criteria(policy, repository).await? else { continue };
            for snapshot in criteria.choose(&snapshots, plan.now, stays) {
                if plan.budget.is_used_up() {
                    report.complete = false;
                    break;
                }
                if gone.contains(&snapshot.digest) {
                    continue;
                }
                let expiry = if report.dry_run { Expiry::Deleted } else { self.expire(repository, snapshot, policy, plan.version).await? };
                match expiry {
                    Expiry::Deleted => {
                        report.snapshots += 1;
                        if report.deleted.len() < LISTED {
                            report.deleted.push(deleted(repository, snapshot, policy));
                        }
                        if !report.dry_run && report.snapshots.is_multiple_of(JOURNALED) {
                            self.flush_journal().await?;
                        }
                    }
                    Expiry::Gone => {}
                    Expiry::Kept => {
                        report.complete = false;
                        // With `below`, those that come next may be its ancestors: without them
                        // it would not be below the root any more. By lineage they may be its
                        // descendants: without them it would be an end, and be kept as one.
                        if criteria.is_ordered() {
                            break;
                        }
                        continue;
                    }
                }
                gone.insert(snapshot.digest);
            }
        }
        report.kept += (snapshots.len() - gone.len()) as u64;
        Ok(gone)
    }

    async fn expire(
        &self,
        repository: &RepositoryName,
        snapshot: &SnapshotSummary,
        policy: &RetentionPolicy,
        version: u64,
    ) -> Result<Expiry> {
        let _room = self.metadata.make_room(Freeing::Deletion).await?;
        let etag = snapshot_etag(&snapshot.digest, &snapshot.tags);
        let expiring = Expiring { repository: repository.clone(), digest: snapshot.digest, etag, pushed_at: snapshot.pushed_at, version };
        let audit = self.audit_entry().map(|mut entry| {
            entry.record.subject = Some(policy.name.clone());
            entry
        });
        self.metadata.expire_snapshot(expiring, audit).await
    }

    /// What a policy says of a repository; `None` if it says nothing.
    async fn criteria(&self, policy: &RetentionPolicy, repository: &RepositoryName) -> Result<Option<Criteria>> {
        let below = match &policy.below {
            None => None,
            // Its descendants name it, also when it is gone.
            Some(Selector::Digest(digest)) => Some(*digest),
            Some(selector) => match self.resolve(repository, selector).await {
                Ok(digest) => Some(digest),
                Err(
                    Error::TagUnknown { .. }
                    | Error::SnapshotUnknown { .. }
                    | Error::SnapshotAmbiguous { .. }
                    | Error::RepositoryUnknown(_),
                ) => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        let keep_last = policy.keep_last.map(|last| usize::try_from(last).unwrap_or(usize::MAX));
        Ok(Some(Criteria {
            tags: policy.tags.clone(),
            untagged: policy.untagged,
            below,
            keep_last: keep_last.map(|last| match policy.keep_last_of {
                KeepLastOf::Repository => KeepLast::OfRepository(last),
                KeepLastOf::Lineage => KeepLast::OfLineage(last),
            }),
            older_than: policy.max_age_seconds.map(Duration::from_secs),
        }))
    }

    /// All snapshots of a repository, newest first; none if there is no such repository any more.
    pub(crate) async fn every_snapshot(&self, repository: &RepositoryName) -> Result<Vec<SnapshotSummary>> {
        let (mut snapshots, mut after) = (Vec::new(), None);
        loop {
            let page = match self.snapshots(repository, after, PAGE).await {
                Err(Error::RepositoryUnknown(_)) => return Ok(Vec::new()),
                page => page?,
            };
            snapshots.extend(page.rows.into_iter().map(SnapshotSummary::from));
            after = page.next;
            if after.is_none() {
                return Ok(snapshots);
            }
        }
    }
}

fn deleted(repository: &RepositoryName, snapshot: &SnapshotSummary, policy: &RetentionPolicy) -> DeletedSnapshot {
    DeletedSnapshot {
        repository: repository.clone(),
        digest: snapshot.digest,
        tags: snapshot.tags.clone(),
        pushed_at: snapshot.pushed_at,
        logical_bytes: snapshot.logical_bytes,
        policy: Some(policy.name.clone()),
    }
}
