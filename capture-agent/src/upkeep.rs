//! The background task of the local store: eviction if its size is limited, else the merging of
//! small packs, which eviction includes.

use async_trait::async_trait;
use pfr_schema::api::GcReport;
use pfr_store::{Budget, GcOptions, GcPart, GcTrigger, Result, RunEnd, Schedule, Store, Task};
use std::sync::Arc;
use std::time::Duration;

/// The agent's background tasks. They run when a snapshot was captured or pulled ([`wake`]).
pub(crate) fn schedule(store: &Store, max_bytes: Option<u64>) -> Schedule {
    Schedule::new(store.clone(), vec![Arc::new(Upkeep { store: store.clone(), max_bytes })])
}

/// Runs them soon.
pub(crate) fn wake(schedule: &Schedule) {
    schedule.tasks().iter().for_each(|task| _ = schedule.wake(&task.name));
}

struct Upkeep {
    store: Store,
    max_bytes: Option<u64>,
}

#[async_trait]
impl Task for Upkeep {
    fn name(&self) -> &'static str {
        if self.max_bytes.is_some() { "eviction" } else { "merging" }
    }

    fn interval(&self) -> Duration {
        Duration::ZERO
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        // Readers of a local store look again when a pack is gone, so packs need no grace period.
        // One merge a run: captures write to the same disk.
        let options = GcOptions { trigger: GcTrigger::Schedule, grace: Duration::ZERO, merges: 1, ..GcOptions::default() };
        let mut no_progress = |_: &GcReport| ();
        let Some(max_bytes) = self.max_bytes else {
            let options = GcOptions { part: GcPart::Merging, ..options };
            let done = self.store.gc_within(&options, budget, &mut no_progress).await?;
            return Ok(done.map_or(RunEnd::Stopped, |_| RunEnd::Finished));
        };
        let report = tokio::select! {
            report = self.store.evict(max_bytes, &options, &mut no_progress) => report?,
            () = budget.used_up() => return Ok(RunEnd::Stopped),
        };
        if let Some(reason) = report.error {
            tracing::warn!(reason, "store eviction incomplete: the store stays larger than max-store-size");
        }
        if report.evicted > 0 {
            tracing::info!(evicted = report.evicted, freed_bytes = report.freed_bytes, "store eviction done");
        }
        Ok(RunEnd::Finished)
    }
}
