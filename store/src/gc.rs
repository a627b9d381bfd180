//! Collection: frees what nothing can reach or is about to reach, at a cost in proportion to the
//! garbage.
//!
//! ```text
//! collect  due GC candidates ─▶ rows of objects that nothing holds and no lease covers, and what hung on them
//! empty    packs that nothing points to, uploads past their lease ─▶ emptied: state `draining`
//! merge    packs far below the size of a full one ─▶ their live frames in few packs; the old ones are emptied
//! compact  packs less than half alive ─▶ their live frames in a new pack; the old ones are emptied
//! delete   packs that have been emptied for the grace period ─▶ bytes deleted, then rows
//! trim     objects of the journal that a summary made superfluous ─▶ bytes deleted, then rows
//! ```
//!
//! Every step is a transaction or may be repeated, so a run may be killed anywhere and any number
//! may run at once. A run does all steps, or one [`GcPart`] of them: those are four background
//! tasks.

mod collect;
mod compact;
mod copy;
mod debris;
mod deletion;
mod dry;
mod evacuate;
mod evict;
mod merge;
mod plan;
mod run;
mod usage;

use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::metadata::{GcRun, GcTrigger};
use crate::tasks::Budget;
use pfr_schema::api::GcReport;
use run::Run;
use std::time::Duration;

/// Which steps a run does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GcPart {
    /// All of them.
    #[default]
    All,
    /// Collect, empty and delete.
    Collection,
    /// Compact and delete.
    Compaction,
    /// Merge small packs and delete.
    Merging,
    /// Write a summary of the journal if that pays, and trim the journal.
    JournalSummary,
}

impl GcPart {
    fn has(self, part: Self) -> bool {
        self == Self::All || self == part
    }
}

/// How a collection runs.
#[derive(Clone, Debug)]
pub struct GcOptions {
    /// Why it runs.
    pub trigger: GcTrigger,
    /// Which steps it does. A dry run counts all of them. Default all.
    pub part: GcPart,
    /// Change nothing, only report what would be freed.
    pub dry_run: bool,
    /// How long a pack that nothing points to stays on storage: longer than any read, redirect or
    /// clock error. Default 1 hour.
    pub grace: Duration,
    /// Objects deleted in one transaction, at most: an implementation does less while others wait.
    /// Default 8,000.
    pub batch: usize,
    /// Whether live frames are copied: out of packs less than half alive, and out of small ones.
    /// Default true.
    pub compact: bool,
    /// Packs that small ones are merged into, at most. Default no limit.
    pub merges: usize,
    /// End every push session first, and give up every upload: leased blobs are garbage, and a
    /// push or pull that still runs begins anew. For a local store, whose sessions are those of
    /// interrupted pulls. Default false.
    pub end_sessions: bool,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self {
            trigger: GcTrigger::Command,
            part: GcPart::All,
            dry_run: false,
            grace: Duration::from_secs(3600),
            batch: 8000,
            compact: true,
            merges: usize::MAX,
            end_sessions: false,
        }
    }
}

impl Store {
    /// Collects garbage until none is due. Any number may run at once, in any number of processes.
    ///
    /// A failure with one pack does not keep it from the others: it does what it can and then
    /// returns the first error. `progress` has seen the last report by then, and so has the list of
    /// runs; a scheduled run is in that list only if it found something to do.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`], [`crate::Error::Full`]. A node whose references cannot be
    /// read is no error: it is kept, with all that hangs on it, and counted as deferred.
    #[boxed]
    pub async fn gc(&self, options: &GcOptions, progress: &mut (dyn FnMut(&GcReport) + Send)) -> Result<GcReport> {
        let mut run = Run::start(self, options, progress).await?;
        if options.dry_run {
            run.plan(&[]).await;
        } else {
            run.steps().await;
        }
        run.finish().await
    }

    /// The same within a budget: `None` if that was used up first. The next run goes on from there,
    /// and the list of runs says that this one stopped.
    ///
    /// # Errors
    /// As [`Store::gc`].
    #[boxed]
    pub async fn gc_within(
        &self,
        options: &GcOptions,
        budget: &Budget,
        progress: &mut (dyn FnMut(&GcReport) + Send),
    ) -> Result<Option<GcReport>> {
        let mut last = GcReport::default();
        let mut on_progress = |report: &GcReport| {
            last.clone_from(report);
            progress(report);
        };
        let done = tokio::select! {
            done = self.gc(options, &mut on_progress) => Some(done?),
            () = budget.used_up() => None,
        };
        if done.is_none() {
            self.record_stop(options.trigger, last).await;
        }
        Ok(done)
    }

    /// Ends the row of a run that was stopped: the row says that the run goes on.
    async fn record_stop(&self, trigger: GcTrigger, mut report: GcReport) {
        // A run without a row has no client that waits for it.
        let Ok(Some(row)) = self.gc_run(&report.id).await else { return };
        if row.finished_at.is_some() {
            return;
        }
        let now = self.options.clock.now();
        report.finished_at = Some(now);
        report.error.get_or_insert_with(|| "stopped by a pause, or with its process; the next run goes on".into());
        let Ok(text) = serde_json::to_string(&report) else { return };
        let run = GcRun { id: report.id, trigger, started_at: row.started_at, finished_at: Some(now), report: text };
        if let Err(error) = self.metadata.record_gc_run(run).await {
            tracing::warn!(%error, "garbage collection was stopped, but its row still says that it runs");
        }
    }

    /// The row of a run, if it has one.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`].
    #[boxed]
    pub async fn gc_run(&self, id: &str) -> Result<Option<GcRun>> {
        // Ids have one length: only the id itself lies right before its continuation.
        let page = self.metadata.gc_runs(Some(format!("{id}0")), 1).await?;
        Ok(page.rows.into_iter().next().filter(|run| run.id == id))
    }
}
