//! The background task that keeps the local store within its size.

use async_trait::async_trait;
use pfr_schema::api::GcReport;
use pfr_store::{Budget, GcOptions, GcTrigger, Result, RunEnd, Schedule, Store, Task};
use std::sync::Arc;
use std::time::Duration;

/// Its name.
pub(crate) const NAME: &str = "eviction";

/// The agent's background tasks: eviction, if the size of the store is limited. It runs when a
/// snapshot was captured or pulled ([`Schedule::wake`]).
pub(crate) fn schedule(store: &Store, max_bytes: Option<u64>) -> Schedule {
    let eviction = max_bytes.map(|max_bytes| -> Arc<dyn Task> { Arc::new(Eviction { store: store.clone(), max_bytes }) });
    Schedule::new(store.clone(), eviction.into_iter().collect())
}

struct Eviction {
    store: Store,
    max_bytes: u64,
}

#[async_trait]
impl Task for Eviction {
    fn name(&self) -> &'static str {
        NAME
    }

    fn interval(&self) -> Duration {
        Duration::ZERO
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        // Readers of a local store look again when a pack is gone, so packs need no grace period.
        let options = GcOptions { trigger: GcTrigger::Schedule, horizon: Duration::ZERO, ..GcOptions::default() };
        let mut no_progress = |_: &GcReport| ();
        let report = tokio::select! {
            report = self.store.evict(self.max_bytes, &options, &mut no_progress) => report?,
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
