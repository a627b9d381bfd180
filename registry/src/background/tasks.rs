//! What each task does in one run.

use super::Collector;
use async_trait::async_trait;
use pfr_store::{Budget, Domains, Error, GcPart, GcTrigger, Lane, Result, RunEnd, ScrubOptions, Store, Task};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// The task that deletes the tables and bytes of deleted domains.
pub(crate) const REMOVAL: &str = "domain-removal";

/// One part of a collection: collection itself, merging, compaction, or a summary of the journal.
pub(super) struct CollectionTask {
    pub(super) name: &'static str,
    pub(super) part: GcPart,
    pub(super) interval: Duration,
    pub(super) collector: Collector,
    /// Places for collections of all domains.
    pub(super) places: Arc<Semaphore>,
}

#[async_trait]
impl Task for CollectionTask {
    fn name(&self) -> &'static str {
        self.name
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        let place = tokio::select! {
            place = self.places.acquire() => place,
            () = budget.used_up() => return Ok(RunEnd::Stopped),
        };
        let _place = place?;
        let done = self.collector.run(GcTrigger::Schedule, self.part, false, budget, |_| ()).await?;
        Ok(done.map_or(RunEnd::Stopped, |_| RunEnd::Finished))
    }
}

/// Deletes the tables and bytes of deleted domains.
pub(super) struct DomainRemovalTask {
    pub(super) domains: Domains,
    /// Time between two searches for deleted domains. This process begins its own deletions at
    /// once.
    pub(super) interval: Duration,
}

#[async_trait]
impl Task for DomainRemovalTask {
    fn name(&self) -> &'static str {
        REMOVAL
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    fn lane(&self) -> Lane {
        Lane::Domains
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        self.domains.remove_deleted(budget).await
    }
}

/// Something whose oldest rows are deleted.
#[derive(Clone, Copy)]
pub(super) enum Log {
    Audit,
    Events,
}

/// Deletes records of the audit log, or events, that are too old or too many. Together with the
/// events it forgets agents that have not reported for a day.
pub(super) struct LogRetentionTask {
    pub(super) store: Store,
    pub(super) log: Log,
    pub(super) interval: Duration,
    pub(super) kept: Duration,
    pub(super) rows: u64,
}

/// Rows deleted in one transaction.
const TRIMMED: usize = 5000;

/// Time for which the last report of an agent is kept.
const REPORTS_KEPT: Duration = Duration::from_secs(86_400);

#[async_trait]
impl Task for LogRetentionTask {
    fn name(&self) -> &'static str {
        match self.log {
            Log::Audit => "audit-retention",
            Log::Events => "event-retention",
        }
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        let metadata = self.store.metadata();
        if matches!(self.log, Log::Events) {
            metadata.forget_agents(REPORTS_KEPT).await?;
        }
        loop {
            let trimmed = match self.log {
                Log::Audit => metadata.trim_audit_log(self.kept, self.rows, TRIMMED).await?,
                Log::Events => metadata.trim_events(self.kept, self.rows, TRIMMED).await?,
            };
            if trimmed == 0 {
                return Ok(RunEnd::Finished);
            }
            if budget.is_used_up() {
                return Ok(RunEnd::Stopped);
            }
        }
    }
}

/// Reads every pack and names what is damaged.
pub(super) struct ScrubTask {
    pub(super) store: Store,
    pub(super) interval: Duration,
    pub(super) options: ScrubOptions,
    /// One scrub runs at a time, on request or by schedule.
    pub(super) place: Arc<Semaphore>,
}

#[async_trait]
impl Task for ScrubTask {
    fn name(&self) -> &'static str {
        "scrub"
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    fn lane(&self) -> Lane {
        Lane::Scrub
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        let work = async {
            let _place = self.place.acquire().await?;
            let report = self.store.scrub(&self.options, &mut |_| ()).await?;
            let (damaged, bad_packs, unread) = (report.damaged.len(), report.bad_packs.len(), report.unread.len());
            if damaged + bad_packs + unread > 0 {
                tracing::error!(damaged, bad_packs, unread, "scrub found damage: GET /v1/damaged lists the blobs");
            } else {
                tracing::info!(packs = report.packs, bytes = report.bytes, "scrub found no damage");
            }
            Ok::<_, Error>(RunEnd::Finished)
        };
        tokio::select! {
            done = work => done,
            () = budget.used_up() => Ok(RunEnd::Stopped),
        }
    }
}
