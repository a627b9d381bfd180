//! Engines on this host: their members, where their pages lie, and how they are paused or hold
//! blocks.
//!
//! ```text
//! socket ─ session ─┐
//!                   ├─▶ register (checks) ─▶ layout (groups with their memory) ─▶ Engine ─▶ pause, table, pins, holds, allocations
//! attach ───────────┘
//! ```
//!
//! The mappings of a member live as long as its connection, and as long as a running capture or
//! restore uses them. Guards own what an engine grants (a pause, a pin, blocks). When a guard is
//! dropped, a task of its own gives the grant back.

mod allocation;
mod attached;
mod engine;
mod hold;
mod layout;
mod link;
mod member;
mod pause;
mod register;
mod session;
mod table;
mod view;
mod wire;

pub use allocation::Allocation;
pub use attached::Attached;
pub use engine::Engine;
pub use hold::Hold;
pub use layout::Group;
pub use pause::{Pause, Pin};
pub use view::Taken;

use crate::config::Config;
use crate::copies::Gate;
use crate::error::{Error, Result, blocking, few};
use crate::memory::{Available, MemoryError, PageMemory, Ring};
use parking_lot::Mutex;
use pfr_schema::agent::EngineInfo;
use pfr_schema::engine::{CallError, Register, ToAgent, ToEngine};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use view::{Shared, View};

/// Logits of a step that can be recorded and compared.
pub(crate) const MAX_LOGITS: usize = 4096;

/// Engines on this host.
#[derive(Clone, Debug)]
pub struct Engines(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    timeout: Duration,
    pause_limit: Duration,
    ring: Ring,
    available: Available,
    /// Every copy into an engine's memory passes through it.
    copies: Gate<()>,
    /// Names of engines that do not register.
    reserved: BTreeSet<String>,
    engines: Mutex<BTreeMap<String, Arc<Shared>>>,
}

/// How calls reach a member of an engine: a socket, or functions in this process.
#[async_trait::async_trait]
pub trait Link: Send + Sync + std::fmt::Debug {
    /// Makes a call. A failure with [`pfr_schema::ErrorCode::EngineLost`] means that the member is
    /// gone.
    async fn call(&self, call: ToEngine) -> std::result::Result<Value, CallError>;
}

/// Answers what engines ask of their own accord: `match`, `resume`, `fill`, `abandon`, `report`,
/// `save`.
#[async_trait::async_trait]
pub trait Answers: Send + Sync {
    /// A member of this engine has joined. Does not wait for the engine.
    fn joined(&self, engine: &str);

    /// Answers a call of the member that serves this rank.
    async fn answer(&self, engine: &Engine, rank: u32, call: ToAgent) -> Result<Value>;
}

impl Engines {
    /// None yet.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self(Arc::new(Inner {
            timeout: config.engine_timeout,
            pause_limit: config.pause_limit,
            ring: Ring::new(config.ring_bytes),
            available: Available::system(),
            copies: Gate::new(()),
            reserved: config.llama.iter().map(|server| server.name.clone()).collect(),
            engines: Mutex::new(BTreeMap::new()),
        }))
    }

    /// Accepts members on a Unix socket until the future is dropped; `answers` answers their calls.
    ///
    /// # Errors
    /// [`Error::Io`] if the socket cannot be made.
    pub async fn serve(&self, answers: impl Answers + 'static, socket: &Path) -> Result<()> {
        session::serve(self.clone(), Arc::new(answers), socket).await
    }

    /// Adds a member that lives in this process; it leaves when the guard is dropped.
    ///
    /// # Errors
    /// As a registration over the socket: [`Error::Protocol`] for what makes no sense,
    /// [`Error::Invalid`] for what does not go together with the engine's other members.
    pub fn attach(&self, register: Register, memories: Vec<Arc<dyn PageMemory>>, link: Arc<dyn Link>) -> Result<Attached> {
        register::check(&register)?;
        if self.0.reserved.contains(&register.engine) {
            return Err(Error::Invalid(format!("engine {:?} is a llama-server in the agent's settings", register.engine)));
        }
        let groups = layout::resolve(&register, &memories)?;
        let mapped = memories.iter().map(|memory| memory.size()).sum();
        let mut engines = self.0.engines.lock();
        let shared = match engines.get(&register.engine) {
            Some(shared) => Arc::clone(shared),
            None => Arc::new(Shared::new(&register, self.0.timeout, self.0.pause_limit)),
        };
        let member = shared.join(&register, groups, mapped, link)?;
        engines.insert(register.engine.clone(), Arc::clone(&shared));
        drop(engines);
        tracing::info!(engine = register.engine, member = register.member, mapped_bytes = mapped, "engine member joined");
        Ok(Attached::new(self.clone(), shared, member))
    }

    /// An engine that is complete.
    ///
    /// # Errors
    /// [`Error::EngineUnknown`], [`Error::Incomplete`].
    pub fn get(&self, name: &str) -> Result<Engine> {
        let engines = self.0.engines.lock();
        let Some(shared) = engines.get(name) else {
            let known: Vec<&str> = engines.keys().chain(&self.0.reserved).map(String::as_str).collect();
            return Err(Error::EngineUnknown { engine: name.into(), known: few(known) });
        };
        View::of(shared).map(Engine::new).map_err(|missing| Error::Incomplete { engine: name.into(), missing })
    }

    /// All engines, by name.
    #[must_use]
    pub fn list(&self) -> Vec<EngineInfo> {
        self.0.engines.lock().values().map(|shared| shared.info()).collect()
    }

    /// The budget for pages in flight.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.0.ring
    }

    /// Waits for [`PageMemory::turn`]. A read that hangs holds up only copies through its ring.
    pub(crate) async fn turn<'a>(&'a self, memory: &'a dyn PageMemory) -> tokio::sync::MutexGuard<'a, ()> {
        memory.turn().unwrap_or_else(|| self.0.ring.turn()).lock().await
    }

    /// The gate of all copies into engines' memory; closed when the agent stops.
    pub(crate) fn copies(&self) -> &Gate<()> {
        &self.0.copies
    }

    /// Begins no copy into an engine's memory from now on, and waits until none is in flight: when
    /// a connection ends, the engine takes its blocks back. Returns whether that was so within
    /// `limit`.
    pub async fn settle(&self, limit: Duration) -> bool {
        let copies = self.0.copies.handle();
        let wait = move || {
            copies.close_and_wait();
            Ok::<_, MemoryError>(())
        };
        matches!(tokio::time::timeout(limit, blocking("waiting for copies", wait)).await, Ok(Ok(())))
    }

    fn leave(&self, shared: &Arc<Shared>, member: &str) {
        let mut engines = self.0.engines.lock();
        if shared.leave(member) && engines.get(&shared.name).is_some_and(|here| Arc::ptr_eq(here, shared)) {
            engines.remove(&shared.name);
        }
    }
}
