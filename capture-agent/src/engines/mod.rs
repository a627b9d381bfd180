//! Engines on this host: who is here, where their pages lie, and how they are told to stand still.
//!
//! ```text
//! socket ─ session ─┐
//!                   ├─▶ register (checks) ─▶ layout (groups with their memory) ─▶ Engine ─▶ pause, table, pins, allocations
//! attach ───────────┘
//! ```
//!
//! A member's mappings live as long as its connection, and as long as a capture or restore that had begun still uses them. What an
//! engine has granted (standing still, a pin, blocks) is held by guards: dropped anywhere, they give it back on a task of their own.

mod allocation;
mod engine;
mod layout;
mod link;
mod member;
mod pause;
mod register;
mod session;
mod table;
mod wire;

pub use allocation::Allocation;
pub use engine::{Engine, Taken};
pub use layout::Group;
pub use member::Attached;
pub use pause::{Pause, Pin};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::memory::{Available, PageMemory, Ring};
use engine::{Shared, View};
use parking_lot::Mutex;
use pfr_schema::agent::EngineInfo;
use pfr_schema::engine::{Failure, Register, ToEngine};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Engines on this host.
#[derive(Clone, Debug)]
pub struct Engines(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    timeout: Duration,
    ring: Ring,
    available: Available,
    turn: tokio::sync::Mutex<()>,
    engines: Mutex<BTreeMap<String, Arc<Shared>>>,
}

/// How calls reach a member of an engine: a socket, or functions in this process.
#[async_trait::async_trait]
pub trait Link: Send + Sync + std::fmt::Debug {
    /// Makes a call. A failure with [`pfr_schema::ErrorCode::EngineLost`] means that the member is gone.
    async fn call(&self, call: ToEngine) -> std::result::Result<Value, Failure>;
}

impl Engines {
    /// None yet.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self(Arc::new(Inner {
            timeout: config.engine_timeout,
            ring: Ring::new(config.ring_bytes),
            available: Available::system(),
            turn: tokio::sync::Mutex::new(()),
            engines: Mutex::new(BTreeMap::new()),
        }))
    }

    /// Accepts members on a Unix socket until the future is dropped.
    ///
    /// # Errors
    /// [`Error::Io`] if the socket cannot be made.
    pub async fn serve(&self, agent: crate::Agent, socket: &Path) -> Result<()> {
        session::serve(self.clone(), agent, socket).await
    }

    /// Adds a member that lives in this process; it leaves when the guard is dropped.
    ///
    /// # Errors
    /// As a registration over the socket: [`Error::Protocol`] for what makes no sense, [`Error::Invalid`] for what does not go
    /// together with the engine's other members.
    pub fn attach(&self, register: Register, memories: Vec<Arc<dyn PageMemory>>, link: Arc<dyn Link>) -> Result<Attached> {
        register::check(&register)?;
        let groups = layout::resolve(&register, &memories)?;
        let mapped = memories.iter().map(|memory| memory.size()).sum();
        let mut engines = self.0.engines.lock();
        let shared = match engines.get(&register.engine) {
            Some(shared) => Arc::clone(shared),
            None => Arc::new(Shared::new(&register, self.0.timeout)),
        };
        let member = shared.join(&register, groups, mapped, link)?;
        engines.insert(register.engine.clone(), Arc::clone(&shared));
        drop(engines);
        tracing::info!(engine = register.engine, member = register.member, mapped_bytes = mapped, "member joined");
        Ok(Attached::new(self.clone(), shared, member))
    }

    /// An engine that is complete.
    ///
    /// # Errors
    /// [`Error::EngineUnknown`], [`Error::Incomplete`].
    pub fn get(&self, name: &str) -> Result<Engine> {
        let engines = self.0.engines.lock();
        let Some(shared) = engines.get(name) else {
            let known: Vec<&str> = engines.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            return Err(Error::EngineUnknown { engine: name.into(), known });
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

    /// Who takes a batch of pages through the ring holds this: of two that each wait for the other's slots none would go on.
    pub(crate) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.turn.lock().await
    }

    fn leave(&self, shared: &Arc<Shared>, member: &str) {
        let mut engines = self.0.engines.lock();
        if shared.leave(member) && engines.get(&shared.name).is_some_and(|here| Arc::ptr_eq(here, shared)) {
            engines.remove(&shared.name);
        }
    }
}
