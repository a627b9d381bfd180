//! Background work of a registry: its tasks, and the collector that they share with requests.
//!
//! All tasks are made here, and [`pfr_store::Schedule`] runs them. A new one is a struct with a
//! name, an interval and a `run`, and one line in [`schedule`].

mod collector;
mod retention;
mod tasks;

pub(crate) use collector::Collector;
pub(crate) use retention::Retention;
pub(crate) use tasks::REMOVAL;

use crate::config::Config;
use pfr_store::{Domains, GcPart, PrefixIndexTask, Schedule, ScrubOptions, Store, Task};
use retention::RetentionTask;
use std::sync::Arc;
use std::time::Duration;
use tasks::{CollectionTask, DomainRemovalTask, Log, LogRetentionTask, ScrubTask};
use tokio::sync::Semaphore;

/// Time between two searches for snapshots that are not in the prefix index yet. Each is one small
/// query.
const PREFIX_INDEX: Duration = Duration::from_secs(300);

/// Time between two looks for records of the audit log, and for events, that are too old or too
/// many.
const LOG_RETENTION: Duration = Duration::from_secs(1800);

/// Scheduled collections at once, in all domains together.
const COLLECTIONS: usize = 2;

/// Maximum time between two searches for deleted domains.
const REMOVALS: Duration = Duration::from_secs(60);

/// What the tasks of all domains share.
pub(crate) struct Limits {
    /// One scrub runs at a time, on request or by schedule.
    pub(crate) scrubs: Arc<Semaphore>,
    /// Places for collections that the schedules run.
    collections: Arc<Semaphore>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { scrubs: Arc::new(Semaphore::new(1)), collections: Arc::new(Semaphore::new(COLLECTIONS)) }
    }
}

/// The background tasks of a domain; the default one also `removes` deleted domains. Those of one
/// lane run in this order: collection empties the packs that compaction then need not copy.
pub(crate) fn schedule(
    store: &Store,
    collector: &Collector,
    retention: &Retention,
    limits: &Limits,
    config: &Config,
    removes: Option<Domains>,
) -> Schedule {
    let interval = Duration::from_secs(config.gc_interval_seconds);
    let collection = |name, part| -> Arc<dyn Task> {
        Arc::new(CollectionTask { name, part, interval, collector: collector.clone(), places: Arc::clone(&limits.collections) })
    };
    let scrub: Arc<dyn Task> = Arc::new(ScrubTask {
        store: store.clone(),
        interval: Duration::from_secs(config.scrub_interval_seconds),
        options: ScrubOptions { full: false, bytes_per_second: Some(config.scrub_bytes_per_second).filter(|rate| *rate > 0) },
        place: Arc::clone(&limits.scrubs),
    });
    let log = |log, days: u64, rows| -> Arc<dyn Task> {
        let kept = Duration::from_secs(days.saturating_mul(86_400));
        Arc::new(LogRetentionTask { store: store.clone(), log, interval: LOG_RETENTION, kept, rows })
    };
    let mut tasks = vec![
        collection("collection", GcPart::Collection),
        collection("journal-summary", GcPart::JournalSummary),
        collection("merging", GcPart::Merging),
        collection("compaction", GcPart::Compaction),
        Arc::new(RetentionTask { retention: retention.clone(), interval: Duration::from_secs(config.retention_interval_seconds) }),
        log(Log::Audit, config.audit_days, config.audit_rows),
        log(Log::Events, config.event_days, config.event_rows),
        Arc::new(PrefixIndexTask { store: store.clone(), interval: PREFIX_INDEX }),
        scrub,
    ];
    let interval = REMOVALS.min(store.options().lease);
    tasks.extend(removes.map(|domains| -> Arc<dyn Task> { Arc::new(DomainRemovalTask { domains, interval }) }));
    Schedule::new(store.clone(), tasks)
}
