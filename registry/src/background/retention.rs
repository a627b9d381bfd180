//! Runs of the retention policies of a domain, on request and by schedule.

use crate::audit::of_task;
use crate::metrics as names;
use async_trait::async_trait;
use pfr_schema::DomainName;
use pfr_schema::api::RetentionReport;
use pfr_store::{AuditEntry, Budget, Result, RunEnd, Store, Task};
use std::time::Duration;

/// The name of the task, and of its deletions in the audit log.
const NAME: &str = "retention";

/// Follows the retention policies of a domain. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Retention {
    store: Store,
    domain: DomainName,
}

impl Retention {
    pub(crate) fn new(store: Store, domain: DomainName) -> Self {
        Self { store, domain }
    }

    /// Runs once. `entry` is what the audit log will say of each deletion.
    pub(crate) async fn run(&self, dry_run: bool, entry: AuditEntry, budget: &Budget) -> Result<RetentionReport> {
        let mut report = RetentionReport::default();
        let done = self.store.audited(entry).retain(dry_run, budget, &mut report).await;
        if !dry_run && report.snapshots > 0 {
            metrics::counter!(names::RETENTION_DELETED, names::of_domain(&self.domain)).increment(report.snapshots);
            let (snapshots, complete) = (report.snapshots, report.complete);
            tracing::info!(domain = %self.domain, snapshots, complete, "retention policies deleted snapshots");
        }
        done.map(|()| report)
    }
}

/// The background task.
pub(super) struct RetentionTask {
    pub(super) retention: Retention,
    pub(super) interval: Duration,
}

#[async_trait]
impl Task for RetentionTask {
    fn name(&self) -> &'static str {
        NAME
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        self.retention.run(false, of_task(NAME, &self.retention.domain), budget).await?;
        Ok(if budget.is_used_up() { RunEnd::Stopped } else { RunEnd::Finished })
    }
}
