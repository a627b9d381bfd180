//! Deletes the rows of objects that nothing holds, then empties the packs that nothing points to.

use super::run::Run;

/// Packs emptied in one transaction.
const PACKS: usize = 1000;

impl Run<'_> {
    /// Takes GC candidates until none is due.
    pub(super) async fn collect(&mut self) {
        loop {
            let batch = self.batch();
            let step = self.store.metadata.collect(batch).await;
            let Some(step) = self.note(step) else { return };
            self.report.released += step.released;
            self.report.unclaimed += step.unclaimed;
            self.report.freed_bytes += step.frame_bytes;
            self.report.sessions += step.sessions;
            if step.deferred > 0 {
                self.report.deferred += step.deferred;
                tracing::error!(
                    run = self.report.id,
                    deferred = step.deferred,
                    "nodes that nothing holds are kept for a day, with all below them: their rows cannot be read, so their children are not known; run fsck"
                );
            }
            self.progress().await;
            // Candidates that are due and were not taken are claimed by another run.
            if !step.more || step.examined == 0 {
                return;
            }
        }
    }

    /// Marks as emptied the packs that nothing points to, and uploads that outlived their lease.
    pub(super) async fn empty_packs(&mut self) {
        loop {
            let step = self.store.metadata.empty_packs(PACKS).await;
            let Some(step) = self.note(step) else { return };
            self.report.packs_emptied += step.empty;
            self.report.packs_abandoned += step.abandoned;
            self.progress().await;
            if step.empty == 0 && step.abandoned == 0 {
                return;
            }
        }
    }
}
