//! A run: what it has done so far, and its row.

use super::plan::{Leases, Plan};
use super::{GcOptions, GcPart};
use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{GcRun, GcTrigger};
use crate::room::{Freeing, MadeRoom};
use pfr_schema::api::GcReport;
use std::time::{Duration, Instant};

/// Maximum age of the row during a run. Another process takes the run for dead if its row gets
/// older.
const KEEP: Duration = Duration::from_secs(5);
/// Emptied packs that are added up for the report.
const EMPTIED_SHOWN: usize = 100_000;
/// Objects of the journal deleted in one run.
pub(super) const JOURNAL: usize = 50_000;

/// A collection while it runs.
pub(super) struct Run<'a> {
    pub store: &'a Store,
    pub options: &'a GcOptions,
    pub report: GcReport,
    progress: &'a mut (dyn FnMut(&GcReport) + Send),
    /// The first error: the others go to the log.
    error: Option<Error>,
    /// When its row was written, if it was.
    recorded: Option<Instant>,
    /// Space for what it writes.
    room: MadeRoom,
}

impl<'a> Run<'a> {
    pub(super) async fn start(store: &'a Store, options: &'a GcOptions, progress: &'a mut (dyn FnMut(&GcReport) + Send)) -> Result<Self> {
        store.names_are_known().await?;
        let room = match options.dry_run {
            true => MadeRoom::default(),
            false => store.metadata.make_room(Freeing::Collection).await?,
        };
        let report = GcReport {
            id: uuid::Uuid::now_v7().to_string(),
            trigger: word(options.trigger).into(),
            dry_run: options.dry_run,
            started_at: store.options.clock.now(),
            ..GcReport::default()
        };
        let mut run = Self { store, options, report, progress, error: None, recorded: None, room };
        // A schedule that finds nothing leaves no trace, or its rows would outgrow everything else.
        // A dry run writes nothing at all.
        if options.trigger != GcTrigger::Schedule && !options.dry_run {
            run.record().await?;
        }
        (run.progress)(&run.report);
        Ok(run)
    }

    /// The steps of its part, once.
    pub(super) async fn steps(&mut self) {
        if self.options.end_sessions {
            let ended = self.store.metadata.end_pushes().await;
            self.report.sessions += self.note(ended).unwrap_or(0);
        }
        let part = self.options.part;
        let (collection, compaction, merging) = (part.has(GcPart::Collection), part.has(GcPart::Compaction), part.has(GcPart::Merging));
        if collection {
            self.collect().await;
            if self.is_tight() {
                // The next steps write: a summary of the journal, packs of compaction.
                self.empty_packs().await;
                self.delete_emptied().await;
            }
        }
        if part.has(GcPart::JournalSummary) {
            self.journal_upkeep().await;
        }
        if collection {
            self.empty_packs().await;
        }
        // First what is well, and then what this run may have written is not merged.
        if merging && self.options.compact && !self.is_tight() {
            self.merge().await;
        }
        if compaction && self.options.compact {
            self.compact().await;
        }
        if collection || compaction || merging {
            self.delete_emptied().await;
        }
        if part.has(GcPart::JournalSummary) {
            self.trim_journal().await;
        }
    }

    /// Summaries keep the journal short; and if something was healed, nodes that were marked for
    /// damage below them are looked at again.
    async fn journal_upkeep(&mut self) {
        // First writes the changes that a killed process left unwritten: a summary needs them.
        let flushed = self.store.flush_journal().await;
        self.note(flushed);
        let written = self.store.summarize_journal().await;
        self.note(written);
        let reassessed = self.store.metadata.reassess().await;
        self.note(reassessed);
    }

    /// Comes last, and deletes a bounded number of objects: they are small, and no other step waits
    /// for their space.
    async fn trim_journal(&mut self) {
        let unfinished = self.store.remove_unfinished_objects().await;
        self.note(unfinished);
        let deleted = self.store.trim_journal(JOURNAL).await;
        self.report.journal_deleted += self.note(deleted).unwrap_or(0);
    }

    /// Whether the disk is nearly full: then space is freed before anything else is written.
    pub(super) fn is_tight(&self) -> bool {
        self.room.is_tight()
    }

    /// Objects to collect in the next transaction.
    pub(super) fn batch(&mut self) -> usize {
        let again = self.room.again(Freeing::Collection);
        self.note(again);
        self.room.batch(self.options.batch.max(1))
    }

    /// Reports progress, and writes the row once there is something to report, then every few
    /// seconds.
    pub(super) async fn progress(&mut self) {
        (self.progress)(&self.report);
        let due = self.recorded.is_none_or(|at| at.elapsed() >= KEEP);
        if due && !self.options.dry_run && self.did_something() {
            let recorded = self.record().await;
            self.note(recorded);
        }
    }

    /// Keeps the first error; the run goes on.
    pub(super) fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                tracing::warn!(%error, run = self.report.id, "a step of collection failed");
                if self.error.is_none() {
                    self.report.error = Some(error.to_string());
                    self.error = Some(error);
                }
                None
            }
        }
    }

    pub(super) async fn finish(mut self) -> Result<GcReport> {
        if !self.options.dry_run {
            let left = self.left().await;
            self.note(left);
        }
        self.report.finished_at = Some(self.store.options.clock.now());
        (self.progress)(&self.report);
        if self.recorded.is_some() || (!self.options.dry_run && (self.did_something() || self.error.is_some())) {
            let recorded = self.record().await;
            self.note(recorded);
            self.store.note_collections().await;
        }
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.report),
        }
    }

    /// What stays for now, and until when.
    async fn left(&mut self) -> Result<()> {
        let packs = self.store.metadata.emptied_packs(Duration::ZERO, EMPTIED_SHOWN).await?;
        self.report.draining_bytes = self.store.bytes_of(&packs).await?;
        let last = packs.iter().filter_map(|pack| pack.draining_since).max().filter(|_| self.report.draining_bytes > 0);
        self.report.draining_ends_at = last.map(|since| since.saturating_add(self.grace_ms()));
        self.report.disk_bytes = Some(self.store.metadata.disk_bytes().await?);
        // Only the report of a requested run shows what is protected: counting it reads every
        // leased object.
        if self.options.trigger != GcTrigger::Schedule {
            self.report.protected = Some(Plan::new(self.store, self.options.batch, Leases::All).protected().await?);
            self.report.unfinished = Some(self.store.unfinished_packs(0).await?);
        }
        Ok(())
    }

    pub(super) fn grace_ms(&self) -> u64 {
        u64::try_from(self.options.grace.as_millis()).unwrap_or(u64::MAX)
    }

    fn did_something(&self) -> bool {
        let r = &self.report;
        let done = [
            r.released,
            r.unclaimed,
            r.packs_emptied,
            r.packs_abandoned,
            r.packs_compacted,
            r.packs_merged,
            r.packs_deleted,
            r.journal_deleted,
            r.evicted,
            r.deferred,
        ];
        done.iter().any(|n| *n > 0)
    }

    async fn record(&mut self) -> Result<()> {
        let report = serde_json::to_string(&self.report).map_err(|e| Error::Internal(e.to_string()))?;
        let run = GcRun {
            id: self.report.id.clone(),
            trigger: self.options.trigger,
            started_at: self.report.started_at,
            finished_at: self.report.finished_at,
            report,
        };
        self.store.metadata.record_gc_run(run).await?;
        self.recorded = Some(Instant::now());
        Ok(())
    }
}

fn word(trigger: GcTrigger) -> &'static str {
    match trigger {
        GcTrigger::Schedule => "schedule",
        GcTrigger::Command => "command",
        GcTrigger::Request => "request",
    }
}
