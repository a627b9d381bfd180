//! Collection: frees what nothing can reach or is about to reach, at a cost in proportion to the garbage.
//!
//! ```text
//! collect  due suspects ─▶ rows of objects that nothing holds and no lease covers, and what hung on them
//! retire   packs that nothing points to, uploads past their lease ─▶ draining
//! compact  packs less than half alive ─▶ their live frames in a new pack; the old ones drain
//! drain    what has been draining for the horizon ─▶ bytes deleted, then rows
//! trim     objects of the journal that a checkpoint made superfluous ─▶ bytes deleted, then rows
//! ```
//!
//! Every step is a transaction or may be repeated, so a run may be killed anywhere and any number may run at once.

mod collect;
mod compact;
mod copy;
mod debris;
mod drain;
mod dry;
mod evacuate;
mod evict;
mod plan;
mod run;
mod usage;

use crate::Store;
use crate::error::Result;
use crate::metadata::GcTrigger;
use pfr_schema::api::GcReport;
use run::Run;
use std::time::Duration;

/// How a collection runs.
#[derive(Clone, Debug)]
pub struct GcOptions {
    /// Why it runs.
    pub trigger: GcTrigger,
    /// Change nothing, say what would be freed.
    pub dry_run: bool,
    /// How long a pack that nothing points to stays on storage: longer than any read, redirect or clock error. Default 1 hour.
    pub horizon: Duration,
    /// Objects deleted in one transaction, at most: an implementation does less while others wait. Default 8,000.
    pub batch: usize,
    /// Whether packs less than half alive are copied together. Default true.
    pub compact: bool,
    /// End every push session first, and give up every upload: what they lease is garbage, and a push or pull that still runs begins anew. For a local
    /// store, whose sessions are those of interrupted pulls. Default false.
    pub end_sessions: bool,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self {
            trigger: GcTrigger::Command,
            dry_run: false,
            horizon: Duration::from_secs(3600),
            batch: 8000,
            compact: true,
            end_sessions: false,
        }
    }
}

impl Store {
    /// Collects garbage until none is due. Any number may run at once, in any number of processes.
    ///
    /// What fails for one pack does not keep it from the others: it does what it can and then returns the first error. `progress` has seen
    /// the last report by then, and so has the list of runs; a scheduled run is in that list only if it found something to do.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`], [`crate::Error::Full`]. A container whose references cannot be read is no error: it is kept, with all that hangs
    /// on it, and counted as parked.
    pub async fn gc(&self, options: &GcOptions, progress: &mut (dyn FnMut(&GcReport) + Send)) -> Result<GcReport> {
        let mut run = Run::start(self, options, progress).await?;
        if options.dry_run {
            run.plan(&[]).await;
        } else {
            run.steps().await;
        }
        run.finish().await
    }
}
