//! Background work of a registry: its tasks, and the collector that they share with requests.
//!
//! All tasks are made here, and [`pfr_store::Schedule`] runs them. A new one is a struct with a name,
//! an interval and a `run`, and one line in [`schedule`].

mod collector;
mod tasks;

pub(crate) use collector::Collector;

use crate::config::Config;
use pfr_store::{GcPart, Schedule, ScrubOptions, Store, Task};
use std::sync::Arc;
use std::time::Duration;
use tasks::{CollectionTask, ScrubTask};
use tokio::sync::Semaphore;

/// The background tasks of a registry. Those of one lane run in this order: collection empties the
/// packs that compaction then need not copy.
pub(crate) fn schedule(store: &Store, collector: &Collector, scrubs: &Arc<Semaphore>, config: &Config) -> Schedule {
    let interval = Duration::from_secs(config.gc_interval_seconds);
    let collection = |name, part| -> Arc<dyn Task> { Arc::new(CollectionTask { name, part, interval, collector: collector.clone() }) };
    let scrub: Arc<dyn Task> = Arc::new(ScrubTask {
        store: store.clone(),
        interval: Duration::from_secs(config.scrub_interval_seconds),
        options: ScrubOptions { full: false, bytes_per_second: Some(config.scrub_bytes_per_second).filter(|rate| *rate > 0) },
        place: Arc::clone(scrubs),
    });
    let tasks = vec![
        collection("collection", GcPart::Collection),
        collection("journal-summary", GcPart::JournalSummary),
        collection("compaction", GcPart::Compaction),
        scrub,
    ];
    Schedule::new(store.clone(), tasks)
}
