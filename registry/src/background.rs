//! Collection of garbage inside the registry: on a schedule, and when asked.

use crate::telemetry::metrics as names;
use pfr_schema::api::{GcReport, Usage};
use pfr_store::{GcOptions, GcRun, GcTrigger, Store};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Entries and packs counted for the metrics: what is more is a backlog all the same.
const COUNTED: usize = 10_000;

/// Runs collections. Cheap to clone; all clones stop together.
#[derive(Clone, Debug)]
pub(crate) struct Collector {
    store: Store,
    horizon: Duration,
    stopping: Arc<watch::Sender<bool>>,
    /// Collections that run.
    running: Arc<watch::Sender<usize>>,
}

/// One of the collections that run, until it is dropped.
struct Running(Arc<watch::Sender<usize>>);

impl Running {
    fn begin(count: &Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|n| *n += 1);
        Self(Arc::clone(count))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

impl Collector {
    pub(crate) fn new(store: Store, horizon: Duration) -> Self {
        Self { store, horizon, stopping: Arc::new(watch::channel(false).0), running: Arc::new(watch::channel(0).0) }
    }

    /// Ends what runs, where it stands, and the schedule.
    pub(crate) fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Waits until none runs: what was stopped has told so.
    pub(crate) async fn ended(&self) {
        // An error means that every sender is gone, and one is ours.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// Collects about every `interval` until it is stopped; never, if that is no time.
    pub(crate) async fn on_schedule(self, interval: Duration) {
        let mut stopping = self.stopping.subscribe();
        while !interval.is_zero() && !*stopping.borrow_and_update() {
            tokio::select! {
                // An error means that every sender is gone, and one is ours.
                _ = stopping.changed() => return,
                () = tokio::time::sleep(jittered(interval)) => {}
            }
            // What went wrong is in the log, in the metrics and in the list of runs.
            drop(self.run(GcTrigger::Schedule, false, |_| ()).await);
        }
    }

    /// Collects once; `None` if it was stopped.
    pub(crate) async fn run(
        &self,
        trigger: GcTrigger,
        dry_run: bool,
        mut progress: impl FnMut(&GcReport) + Send,
    ) -> Option<pfr_store::Result<GcReport>> {
        let _running = Running::begin(&self.running);
        let options = GcOptions { trigger, dry_run, horizon: self.horizon, ..GcOptions::default() };
        let (start, mut stopping, mut last) = (Instant::now(), self.stopping.subscribe(), GcReport::default());
        let mut on_progress = |report: &GcReport| {
            if !dry_run {
                count(&last, report);
            }
            progress(report);
            last.clone_from(report);
        };
        let result = tokio::select! {
            result = self.store.gc(&options, &mut on_progress) => Some(result),
            _ = stopping.wait_for(|stop| *stop) => None,
        };
        let Some(result) = result else {
            self.stopped(trigger, last).await;
            return None;
        };
        if !dry_run {
            ended(&result, &last, trigger, start.elapsed());
        }
        Some(result)
    }

    /// Tells whoever waits for a collection that it ended early: its row says that it still runs.
    async fn stopped(&self, trigger: GcTrigger, mut report: GcReport) {
        // One without a row has nobody who waits for it.
        let Ok(Some(row)) = recorded(&self.store, &report.id).await else { return };
        if row.finished_at.is_some() {
            return;
        }
        let now = self.store.options().clock.now();
        report.finished_at = Some(now);
        report.error.get_or_insert_with(|| "the registry stopped while it ran; the next one goes on".into());
        let Ok(text) = serde_json::to_string(&report) else { return };
        let run = GcRun { id: report.id, trigger, started_at: row.started_at, finished_at: Some(now), report: text };
        if let Err(error) = self.store.metadata().record_gc_run(run).await {
            tracing::warn!(%error, "a collection was stopped, and its row does not say so");
        }
    }

    /// What takes up room, and until when.
    pub(crate) async fn usage(&self) -> pfr_store::Result<Usage> {
        self.store.usage(self.horizon).await
    }

    /// Sets the gauges of what there is to do.
    pub(crate) async fn backlog(&self) -> pfr_store::Result<()> {
        let metadata = self.store.metadata();
        metrics::gauge!(names::GC_DUE).set(metadata.suspects(COUNTED).await?.len() as f64);
        let draining: u64 = metadata.drained_packs(Duration::ZERO, COUNTED).await?.iter().map(|pack| pack.bytes).sum();
        metrics::gauge!(names::GC_DRAINING).set(draining as f64);
        Ok(())
    }
}

/// The row of a collection, if it has one.
pub(crate) async fn recorded(store: &Store, id: &str) -> pfr_store::Result<Option<GcRun>> {
    // Ids have one length: only the id itself lies right before its continuation.
    let page = store.metadata().gc_runs(Some(format!("{id}0")), 1).await?;
    Ok(page.rows.into_iter().next().filter(|run| run.id == id))
}

/// As in reports.
fn word(trigger: GcTrigger) -> &'static str {
    match trigger {
        GcTrigger::Schedule => "schedule",
        GcTrigger::Command => "command",
        GcTrigger::Request => "request",
    }
}

/// Counts what came since the last report.
fn count(before: &GcReport, now: &GcReport) {
    let objects = |r: &GcReport| r.released + r.unclaimed;
    metrics::counter!(names::GC_OBJECTS).increment(objects(now) - objects(before));
    metrics::counter!(names::GC_FREED).increment(now.freed_bytes - before.freed_bytes);
    metrics::counter!(names::GC_MOVED).increment(now.moved_bytes - before.moved_bytes);
    metrics::counter!(names::GC_DELETED).increment(now.deleted_bytes - before.deleted_bytes);
}

fn ended(result: &pfr_store::Result<GcReport>, last: &GcReport, trigger: GcTrigger, took: Duration) {
    let outcome = if result.is_ok() { "done" } else { "failed" };
    metrics::counter!(names::GC_RUNS, "trigger" => word(trigger), "outcome" => outcome).increment(1);
    metrics::histogram!(names::GC_DURATION).record(took.as_secs_f64());
    match result {
        Err(error) => tracing::warn!(%error, run = last.id, "a collection failed"),
        Ok(r) if r.released + r.unclaimed + r.packs_deleted + r.packs_compacted + r.packs_abandoned > 0 => tracing::info!(
            run = r.id,
            trigger = r.trigger,
            released = r.released,
            unclaimed = r.unclaimed,
            freed_bytes = r.freed_bytes,
            packs_compacted = r.packs_compacted,
            moved_bytes = r.moved_bytes,
            packs_deleted = r.packs_deleted,
            deleted_bytes = r.deleted_bytes,
            draining_bytes = r.draining_bytes,
            parked = r.parked,
            took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            "garbage collected"
        ),
        Ok(_) => {}
    }
}

/// Between three quarters and five quarters: replicas that started together drift apart.
fn jittered(interval: Duration) -> Duration {
    let random = uuid::Uuid::now_v7().as_u128() as u32;
    interval.mul_f64(0.75 + 0.5 * f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_varies_by_a_quarter() {
        let waits: Vec<Duration> = (0..100).map(|_| jittered(Duration::from_secs(100))).collect();
        assert!(waits.iter().all(|w| (75..=125).contains(&w.as_secs())), "{waits:?}");
        assert!(waits.iter().any(|w| *w != waits[0]));
    }

    #[test]
    fn one_that_fails_before_it_reports_is_counted_with_its_trigger() {
        let metrics = names::recorder().unwrap();
        let failed = Err(pfr_store::Error::Unavailable { what: "metadata", reason: "locked".into() });
        ended(&failed, &GcReport::default(), GcTrigger::Schedule, Duration::ZERO);
        let text = metrics.render();
        assert!(text.contains("pf_gc_runs_total{trigger=\"schedule\",outcome=\"failed\"} 1"), "{text}");
    }
}
