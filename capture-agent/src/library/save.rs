//! Saves: a sequence is handed over with a pin and lands in the local store in the background.

use crate::Agent;
use crate::copies::SharedPin;
use crate::error::Error;
use parking_lot::Mutex;
use pfr_schema::agent::{SnapshotReport, SnapshotRequest};
use pfr_schema::engine::Sequence;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc;

/// A sequence to be saved.
#[derive(Debug)]
pub struct Save {
    /// The engine.
    pub engine: String,
    /// The sequence, as in a table.
    pub sequence: Sequence,
    /// Guarantees that its blocks stay as they are until it is dropped.
    pub pin: Box<dyn Any + Send>,
    /// Where it goes. The sequence named in it is not looked at.
    pub request: SnapshotRequest,
}

/// How far a save is.
#[derive(Clone, Debug)]
pub enum SaveState {
    /// Waiting or under way.
    Pending,
    /// It lies in the local store.
    Saved(Arc<SnapshotReport>),
    /// It failed; nothing was stored under a name.
    Failed(Arc<Error>),
    /// It was not begun.
    Dropped(Refusal),
}

/// Why a save was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// As many saves as may wait are waiting.
    #[error("too many saves are waiting")]
    Full,
    /// The agent's runtime has ended.
    #[error("the agent has ended")]
    Ended,
}

/// Tells how far a save is. Dropping it changes nothing.
#[derive(Clone, Debug)]
pub struct Ticket(Arc<Mutex<SaveState>>);

impl Ticket {
    /// How far it is; never waits.
    #[must_use]
    pub fn poll(&self) -> SaveState {
        self.0.lock().clone()
    }

    fn set(&self, state: SaveState) {
        *self.0.lock() = state;
    }
}

/// Takes sequences to be saved, one after another, in the background. Dropped, it still saves what
/// it has taken.
#[derive(Debug)]
pub struct Saver {
    queue: mpsc::Sender<(Save, Ticket)>,
    dropped: AtomicU64,
}

impl Saver {
    /// A saver on which `waiting` saves may wait. Call it within the agent's runtime.
    #[must_use]
    pub fn new(agent: Agent, waiting: usize) -> Self {
        let (queue, jobs) = mpsc::channel(waiting.max(1));
        pfr_service::task::spawn(work(agent, jobs));
        Self { queue, dropped: AtomicU64::new(0) }
    }

    /// Hands over a sequence. Never waits: a save that finds no room is dropped, and counted.
    pub fn save(&self, save: Save) -> Ticket {
        let ticket = Ticket(Arc::new(Mutex::new(SaveState::Pending)));
        let (reason, name) = match self.queue.try_send((save, ticket.clone())) {
            Ok(()) => return ticket,
            Err(mpsc::error::TrySendError::Full(_)) => (Refusal::Full, "full"),
            Err(mpsc::error::TrySendError::Closed(_)) => (Refusal::Ended, "ended"),
        };
        self.dropped.fetch_add(1, Ordering::Relaxed);
        metrics::counter!("pf_agent_saves_dropped_total", "reason" => name).increment(1);
        ticket.set(SaveState::Dropped(reason));
        ticket
    }

    /// Saves that were dropped for want of room.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

async fn work(agent: Agent, mut jobs: mpsc::Receiver<(Save, Ticket)>) {
    while let Some((save, ticket)) = jobs.recv().await {
        let agent = agent.clone();
        // On a task of its own: a panic ends this save, not the saver.
        let saving = pfr_service::task::spawn(async move {
            let Save { engine, sequence, pin, request } = save;
            agent.snapshot_pinned(&engine, sequence, SharedPin::new(pin), &request).await
        });
        ticket.set(match saving.await {
            Ok(Ok(report)) => SaveState::Saved(Arc::new(report)),
            Ok(Err(error)) => {
                tracing::warn!(%error, "sequence save failed");
                SaveState::Failed(Arc::new(error))
            }
            Err(panic) => SaveState::Failed(Arc::new(Error::Internal(format!("saving: {panic}")))),
        });
    }
}
