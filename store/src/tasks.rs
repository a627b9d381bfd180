//! Background tasks: one trait for all work that is repeated, and one [`Schedule`] that runs it.
//!
//! ```text
//! Schedule ─▶ lane: one task at a time, in the order given ─▶ paused? ─▶ Task::run(budget) ─▶ next run
//! ```
//!
//! A pause is a note on the storage (`notes`): it holds in every process that works on the store,
//! it survives restarts, and it always has an end.

pub(crate) mod notes;
mod schedule;
mod state;

pub use schedule::Schedule;

pub(crate) use notes::PREFIX;

use crate::error::Result;
use async_trait::async_trait;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Work that is repeated.
#[async_trait]
pub trait Task: Send + Sync + 'static {
    /// Its name, in lower case with hyphens: for operators, requests and metrics.
    fn name(&self) -> &'static str;

    /// Time between the end of a run and the start of the next, about. Zero: it runs only after
    /// [`Schedule::wake`].
    fn interval(&self) -> Duration;

    /// The lane of the task: it does not run at the same time as others of the lane.
    fn lane(&self) -> Lane {
        Lane::Upkeep
    }

    /// Runs once. It ends early, in order, when the budget is used up.
    ///
    /// # Errors
    /// A failed run does not end the schedule: the next one comes sooner than the interval says,
    /// and later after each failure.
    async fn run(&self, budget: &Budget) -> Result<RunEnd>;
}

/// Tasks of one lane run one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Work on garbage and on the journal, in the order in which the tasks were given.
    Upkeep,
    /// Reading the whole store, which may take hours.
    Scrub,
    /// Reading snapshots that an index lacks, which may take as long.
    Index,
    /// Deleting the tables and bytes of deleted domains.
    Domains,
}

impl Lane {
    const ALL: [Self; 4] = [Self::Upkeep, Self::Scrub, Self::Index, Self::Domains];
}

/// The end of a successful run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// All was done.
    Finished,
    /// Its budget was used up first.
    Stopped,
}

/// How long a run may go on: until its task is paused, or the process stops. Clones are one budget.
#[derive(Clone, Debug)]
pub struct Budget(Arc<watch::Sender<bool>>);

impl Default for Budget {
    fn default() -> Self {
        Self(Arc::new(watch::channel(false).0))
    }
}

impl Budget {
    /// Ends it.
    pub fn end(&self) {
        self.0.send_replace(true);
    }

    /// Whether it is used up.
    #[must_use]
    pub fn is_used_up(&self) -> bool {
        *self.0.borrow()
    }

    /// Completes when it is used up.
    pub async fn used_up(&self) {
        // An error means that every sender is gone, and one is here.
        let _ = self.0.subscribe().wait_for(|over| *over).await;
    }
}
