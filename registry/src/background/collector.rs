//! Collections of garbage: their options, their budget, their metrics.

use crate::metrics as names;
use metrics::Label;
use pfr_schema::DomainName;
use pfr_schema::api::{GcReport, Usage};
use pfr_store::{Budget, GcOptions, GcPart, GcTrigger, Store};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Entries and packs counted for the metrics: more than that is a backlog in any case.
const COUNTED: usize = 10_000;

/// Full packs that small ones are merged into in one run on schedule: 4 GiB. Other tasks wait for
/// it.
const MERGES: usize = 64;

/// Runs collections, on request and as tasks. Cheap to clone; clones share the count of running
/// collections.
#[derive(Clone, Debug)]
pub(crate) struct Collector {
    store: Store,
    domain: DomainName,
    grace: Duration,
    /// The budget of collections on request: until the process stops.
    pub(crate) requests: Budget,
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
    /// `grace` is how long a pack that nothing points to stays on storage.
    pub(crate) fn new(store: Store, domain: DomainName, grace: Duration) -> Self {
        Self { store, domain, grace, requests: Budget::default(), running: Arc::new(watch::channel(0).0) }
    }

    /// Ends the collections on request that are under way.
    pub(crate) fn stop(&self) {
        self.requests.end();
    }

    /// Waits until no collection runs: a stopped one has noted that it stopped.
    pub(crate) async fn ended(&self) {
        // An error means that every sender is gone, and one is ours.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// Collects once; `None` if the budget was used up first.
    pub(crate) async fn run(
        &self,
        trigger: GcTrigger,
        part: GcPart,
        dry_run: bool,
        budget: &Budget,
        mut progress: impl FnMut(&GcReport) + Send,
    ) -> pfr_store::Result<Option<GcReport>> {
        let _running = Running::begin(&self.running);
        let merges = if trigger == GcTrigger::Schedule { MERGES } else { usize::MAX };
        let options = GcOptions { trigger, part, dry_run, merges, grace: self.grace, ..GcOptions::default() };
        let (start, mut last) = (Instant::now(), GcReport::default());
        let mut on_progress = |report: &GcReport| {
            if !dry_run {
                count(&self.domain, &last, report);
            }
            progress(report);
            last.clone_from(report);
        };
        let result = self.store.gc_within(&options, budget, &mut on_progress).await;
        let done = match &result {
            Ok(report) => report.as_ref().map(Ok),
            Err(error) => Some(Err(error)),
        };
        if let Some(done) = done.filter(|_| !dry_run) {
            ended(&self.domain, done, &last, (trigger, part), start.elapsed());
        }
        result
    }

    /// What takes up room, and until when.
    pub(crate) async fn usage(&self) -> pfr_store::Result<Usage> {
        self.store.usage(self.grace).await
    }

    /// Sets the gauges of the work that is left.
    pub(crate) async fn backlog(&self) -> pfr_store::Result<()> {
        let metadata = self.store.metadata();
        let labels = || names::of_domain(&self.domain);
        metrics::gauge!(names::GC_DUE, labels()).set(metadata.candidates(COUNTED).await?.len() as f64);
        let emptied: u64 = metadata.emptied_packs(Duration::ZERO, COUNTED).await?.iter().map(|pack| pack.bytes).sum();
        metrics::gauge!(names::GC_DRAINING, labels()).set(emptied as f64);
        Ok(())
    }
}

/// The trigger as reports name it.
fn trigger_name(trigger: GcTrigger) -> &'static str {
    match trigger {
        GcTrigger::Schedule => "schedule",
        GcTrigger::Command => "command",
        GcTrigger::Request => "request",
    }
}

/// Counts the work of a domain since the last report.
fn count(domain: &DomainName, before: &GcReport, now: &GcReport) {
    let objects = |r: &GcReport| r.released + r.unclaimed;
    for (name, more) in [
        (names::GC_OBJECTS, objects(now) - objects(before)),
        (names::GC_FREED, now.freed_bytes - before.freed_bytes),
        (names::GC_MOVED, now.moved_bytes - before.moved_bytes),
        (names::GC_MERGED, now.packs_merged - before.packs_merged),
        (names::GC_DELETED, now.deleted_bytes - before.deleted_bytes),
    ] {
        metrics::counter!(name, names::of_domain(domain)).increment(more);
    }
}

fn ended(
    domain: &DomainName,
    result: Result<&GcReport, &pfr_store::Error>,
    last: &GcReport,
    (trigger, part): (GcTrigger, GcPart),
    took: Duration,
) {
    // Runs of the other parts are counted as runs of their tasks.
    if matches!(part, GcPart::All | GcPart::Collection) {
        let outcome = if result.is_ok() { "done" } else { "failed" };
        let run = vec![Label::new("trigger", trigger_name(trigger)), Label::new("outcome", outcome)];
        metrics::counter!(names::GC_RUNS, [run, names::of_domain(domain)].concat()).increment(1);
        metrics::histogram!(names::GC_DURATION, names::of_domain(domain)).record(took.as_secs_f64());
    }
    match result {
        Err(error) => tracing::warn!(%error, %domain, run = last.id, ?part, "garbage collection failed"),
        Ok(r)
            if r.released + r.unclaimed + r.packs_deleted + r.packs_compacted + r.packs_merged + r.packs_abandoned + r.journal_deleted
                > 0 =>
        {
            tracing::info!(
                %domain,
                run = r.id,
                trigger = r.trigger,
                ?part,
                released = r.released,
                unclaimed = r.unclaimed,
                freed_bytes = r.freed_bytes,
                packs_compacted = r.packs_compacted,
                packs_merged = r.packs_merged,
                moved_bytes = r.moved_bytes,
                packs_deleted = r.packs_deleted,
                deleted_bytes = r.deleted_bytes,
                draining_bytes = r.draining_bytes,
                journal_deleted = r.journal_deleted,
                deferred = r.deferred,
                took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
                "garbage collected"
            );
        }
        Ok(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_fails_before_it_reports_is_counted_with_its_trigger() {
        let metrics = names::recorder().unwrap();
        let failed = pfr_store::Error::Unavailable { what: "metadata", reason: "locked".into() };
        for domain in [DomainName::default(), "acme".parse().unwrap()] {
            ended(&domain, Err(&failed), &GcReport::default(), (GcTrigger::Schedule, GcPart::Collection), Duration::ZERO);
        }
        let text = metrics.render();
        for labels in ["", ",domain=\"acme\""] {
            let line = format!("pf_gc_runs_total{{trigger=\"schedule\",outcome=\"failed\"{labels}}} 1");
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
