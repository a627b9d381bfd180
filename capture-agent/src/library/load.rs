//! Loads: a snapshot is pulled and proven, the engine brings blocks for it, and polls until they
//! are filled and proven.

use crate::Agent;
use crate::copies::Gate;
use crate::error::Error;
use crate::restore::Prepared;
use parking_lot::Mutex;
use pfr_schema::Digest;
use pfr_schema::agent::{RestoreReport, RestoreRequest};
use pfr_schema::engine::Oracle;
use serde_json::Value;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

/// A snapshot to be loaded.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// The engine; it is attached, and need not serve `allocate` or `request`.
    pub engine: String,
    /// Which snapshot, and from where.
    pub from: RestoreRequest,
}

/// Blocks for a snapshot that is [`LoadState::Staged`].
pub struct Destination {
    /// The engine's name for the sequence: the parent of its next snapshot is this one.
    pub sequence: String,
    /// As in [`pfr_schema::engine::Sequence::blocks`]. Only this load reads or writes them until it
    /// ends.
    pub blocks: BTreeMap<String, Vec<u32>>,
    /// Guarantees that the engine does not reuse the blocks until it is dropped.
    pub guard: Box<dyn Any + Send>,
    /// A CUDA IPC event that writes wait for.
    pub after: Option<[u8; 64]>,
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Destination").field("sequence", &self.sequence).field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

/// What a staged snapshot is: enough to take blocks for it, and to run it once they are filled.
#[derive(Clone, Debug)]
pub struct Ready {
    /// The snapshot.
    pub digest: Digest,
    /// T: tokens with state.
    pub boundary: u64,
    /// All tokens; `tokens[T]` is computed next.
    pub tokens: Vec<u32>,
    /// Tenant salt of the prefix.
    pub salt: String,
    /// Adapter in use.
    pub adapter: Option<String>,
    /// Settings that decide the next tokens.
    pub sampling: BTreeMap<String, Value>,
    /// Logits of the step at T, if they were recorded: the engine compares them before the sequence
    /// has consequences.
    pub oracle: Option<Oracle>,
}

/// How far a load is.
#[derive(Clone, Debug)]
pub enum LoadState {
    /// It is pulled and proven.
    Pending,
    /// It lies here, proven, and waits for [`Load::fill`].
    Staged(Arc<Ready>),
    /// The blocks are being filled and hashed.
    Filling,
    /// They hold the snapshot. The guard was dropped.
    Filled(Arc<RestoreReport>),
    /// It failed, for good; the content of the blocks must not be used. The guard was dropped.
    Failed(Arc<Error>),
}

/// Loads snapshots into blocks of engines in this process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Loader {
    agent: Agent,
    runtime: Handle,
    room: Arc<Semaphore>,
}

impl Loader {
    /// A loader that pulls or fills at most `at_a_time`; further loads wait. Call it within the
    /// agent's runtime.
    #[must_use]
    pub fn new(agent: Agent, at_a_time: usize) -> Self {
        Self { agent, runtime: Handle::current(), room: Arc::new(Semaphore::new(at_a_time.max(1))) }
    }

    /// Begins to pull and prove a snapshot. Never waits.
    #[must_use]
    pub fn load(&self, request: LoadRequest) -> Load {
        let progress = Arc::new(Progress { state: Mutex::new(State::Pending), gate: Mutex::new(None) });
        let (agent, room, ending) = (self.agent.clone(), Arc::clone(&self.room), Ending::of(&progress));
        let task = pfr_service::task::spawn_on(&self.runtime, async move {
            let _place = room.acquire().await;
            let prepared = Prepared::make(&agent, &request.engine, &request.from).await;
            ending.set(match prepared {
                Ok(prepared) => State::Staged(Arc::new(ready(&prepared)), Arc::new(prepared)),
                Err(error) => State::Failed(Arc::new(error)),
            });
        });
        Load { loader: self.clone(), progress, task: Mutex::new(task.abort_handle()) }
    }
}

fn ready(prepared: &Prepared) -> Ready {
    let key = prepared.key();
    Ready {
        digest: prepared.digest(),
        boundary: prepared.boundary(),
        tokens: prepared.tokens().to_vec(),
        salt: key.salt.clone(),
        adapter: key.adapter.clone(),
        sampling: prepared.config().sampling.clone(),
        oracle: prepared.oracle().cloned(),
    }
}

/// A load. Dropping it cancels the load. The drop waits for a copy in flight (one batch, at most 64
/// MiB) and then drops the guard. The blocks may still be read for a moment; the result of that
/// read is not used.
#[derive(Debug)]
pub struct Load {
    loader: Loader,
    progress: Arc<Progress>,
    task: Mutex<AbortHandle>,
}

#[derive(Debug)]
struct Progress {
    state: Mutex<State>,
    /// From the fill on.
    gate: Mutex<Option<Arc<Guarded>>>,
}

type Guarded = Gate<Box<dyn Any + Send>>;

#[derive(Debug)]
enum State {
    Pending,
    Staged(Arc<Ready>, Arc<Prepared>),
    Filling,
    Filled(Arc<RestoreReport>),
    Failed(Arc<Error>),
}

impl Load {
    /// How far it is; never waits.
    #[must_use]
    pub fn poll(&self) -> LoadState {
        let state = match &*self.progress.state.lock() {
            State::Pending => LoadState::Pending,
            State::Staged(ready, _) => LoadState::Staged(Arc::clone(ready)),
            State::Filling => LoadState::Filling,
            State::Filled(report) => LoadState::Filled(Arc::clone(report)),
            State::Failed(error) => LoadState::Failed(Arc::clone(error)),
        };
        // The runtime may have ended before the last copy.
        let is_held = self.progress.gate.lock().as_ref().is_some_and(|gate| gate.is_holding());
        if is_held { LoadState::Filling } else { state }
    }

    /// Hands over blocks for a staged snapshot. Never waits: [`Load::poll`] tells what
    /// stands in the way of them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is not staged, or blocks were handed over before. The guard is
    /// dropped then, nothing was written.
    pub fn fill(&self, destination: Destination) -> Result<(), Error> {
        let Destination { sequence, blocks, guard, after } = destination;
        let mut state = self.progress.state.lock();
        let State::Staged(_, prepared) = &*state else {
            return Err(Error::Invalid("this load does not wait for blocks".into()));
        };
        let (prepared, gate) = (Arc::clone(prepared), Arc::new(Gate::new(guard)));
        *self.progress.gate.lock() = Some(Arc::clone(&gate));
        *state = State::Filling;
        drop(state);
        let (agent, room, ending) = (self.loader.agent.clone(), Arc::clone(&self.loader.room), Ending::of(&self.progress));
        let task = pfr_service::task::spawn_on(&self.loader.runtime, async move {
            let _place = room.acquire().await;
            let filled = prepared.fill(&agent, &sequence, &blocks, after, &gate).await;
            ending.set(match filled {
                Ok(report) => State::Filled(Arc::new(report)),
                Err(error) => State::Failed(Arc::new(error)),
            });
        });
        *self.task.lock() = task.abort_handle();
        Ok(())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.task.lock().abort();
        let gate = self.progress.gate.lock().take();
        if let Some(gate) = gate {
            gate.close_and_wait();
        }
    }
}

/// Ends a load even if its task panics or is cancelled.
struct Ending(Option<Arc<Progress>>);

impl Ending {
    fn of(progress: &Arc<Progress>) -> Self {
        Self(Some(Arc::clone(progress)))
    }

    /// Sets the final state. A caller that sees `Staged` may call `fill` at once.
    fn set(mut self, state: State) {
        if let Some(progress) = self.0.take() {
            progress.end(state);
        }
    }
}

impl Progress {
    fn end(&self, state: State) {
        if !matches!(state, State::Staged(..)) {
            // Drop the guard first: a caller that sees the end may reuse the blocks.
            let gate = self.gate.lock().clone();
            if let Some(gate) = gate {
                gate.close();
            }
        }
        *self.state.lock() = state;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(progress) = self.0.take() {
            let error = if std::thread::panicking() { Error::Internal("a load panicked".into()) } else { Error::Ended };
            progress.end(State::Failed(Arc::new(error)));
        }
    }
}
