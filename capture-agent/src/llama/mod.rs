//! Slots of `llama-server`: each is captured and restored through the files that the server itself
//! writes and reads (`POST /slots/ID?action=save|restore`). The server needs no connector.
//!
//! ```text
//! capture: save ─▶ open, unlink ─▶ parse ─▶ pages and state tensors where they lie in the file ─▶ snapshot, as of any engine
//! restore: head ─▶ lay the file out ─▶ write pages and tensors ─▶ hash in place ─▶ digest of the file ─▶ restore ─▶ save again, compare
//! ```
//!
//! A file is the memory of an engine for as long as it is open. So everything else is the same as
//! for engines with a connector.

mod capture;
mod compare;
mod file;
mod folder;
mod groups;
mod http;
mod model;
mod restore;
pub(crate) mod settings;
mod slots;

pub(crate) use capture::Saved;
pub(crate) use groups::HEAD;
pub use settings::LlamaServer;

use crate::config::Config;
use crate::copies::{Turn, Turns};
use crate::engines::{Attached, Engines, Link};
use crate::error::{Error, Result};
use crate::memory::Ring;
use folder::{Folder, Used, agent_id};
use http::{Http, Props};
use model::Digests;
use parking_lot::Mutex;
use pfr_schema::agent::{EngineInfo, EngineState};
use pfr_schema::engine::{CallError, ToEngine};
use pfr_schema::{Digest, ErrorCode, prefix};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// The label of a snapshot with the digest of the file that was saved.
pub(crate) const STATE_FILE: &str = "llama.cpp.state-file";
/// How often servers are looked at, and files in no use removed.
const LOOK: Duration = Duration::from_secs(5);

/// The servers of this host, by name.
#[derive(Debug)]
pub struct Llamas {
    servers: BTreeMap<String, Arc<Llama>>,
    /// Ends with this value.
    _watching: JoinSet<()>,
}

/// One server.
#[derive(Debug)]
pub(crate) struct Llama {
    server: LlamaServer,
    http: Http,
    folder: Arc<Folder>,
    digests: Arc<Digests>,
    /// This server alone.
    engines: Engines,
    ring: Ring,
    /// One capture or restore at a time uses its slots.
    turns: Turns,
    known: Mutex<Known>,
}

/// What is known of a server.
#[derive(Debug, Default)]
struct Known {
    member: Option<Attached>,
    deployment: BTreeMap<String, Value>,
    /// Why it cannot be used.
    trouble: Option<String>,
    /// Prefix of each slot that was last captured or restored: its length and its key.
    prefixes: BTreeMap<u32, (u64, Digest)>,
    /// Bytes that a token had in the last file.
    token_bytes: u64,
}

impl Llamas {
    /// Begins to watch the servers of a configuration.
    ///
    /// # Errors
    /// [`Error::Io`] of an API key, or of the agent's data folder.
    pub(crate) fn open(config: &Config, ring: &Ring) -> Result<Self> {
        let (mut servers, mut watching) = (BTreeMap::new(), JoinSet::new());
        if config.llama.is_empty() {
            return Ok(Self { servers, _watching: watching });
        }
        let (id, digests) = (agent_id(&config.data)?, Arc::new(Digests::open(config.data.join("llama-digests.json"))));
        let used = Used::default();
        for server in &config.llama {
            let llama = Arc::new(Llama {
                http: Http::new(server, config.engine_timeout)?,
                folder: Arc::new(Folder::new(&server.slot_save_path, &id, &used)),
                digests: Arc::clone(&digests),
                engines: Engines::new(&Config { llama: Vec::new(), ..config.clone() }),
                ring: ring.clone(),
                turns: Turns::default(),
                known: Mutex::default(),
                server: server.clone(),
            });
            let watched = Arc::clone(&llama);
            pfr_service::task::spawn_in(&mut watching, async move {
                loop {
                    watched.folder.sweep();
                    // The reason is shown with the engine.
                    let _ = watched.look().await;
                    tokio::time::sleep(LOOK).await;
                }
            });
            servers.insert(server.name.clone(), llama);
        }
        Ok(Self { servers, _watching: watching })
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Llama>> {
        self.servers.get(name).cloned()
    }

    /// The servers as engines, by name.
    #[must_use]
    pub fn list(&self) -> Vec<EngineInfo> {
        self.servers.values().map(|llama| llama.info()).collect()
    }
}

impl Llama {
    pub fn name(&self) -> &str {
        &self.server.name
    }

    /// Takes the server's slots for one capture or restore.
    pub fn take(&self, with: &str) -> Result<Turn> {
        self.turns.take(with).map_err(|with| self.busy(with))
    }

    /// Waits in line for the server's slots, and takes them.
    pub async fn wait(&self, with: &str, deadline: Instant) -> Result<Turn> {
        self.turns.wait(with, deadline).await.map_err(|with| self.busy(with))
    }

    fn busy(&self, with: String) -> Error {
        Error::Busy { engine: self.name().into(), with }
    }

    /// Asks the server which model it runs, and registers it under that configuration.
    async fn look(&self) -> Result<()> {
        let looked = model::deployment(&self.server, &self.http, &self.digests).await;
        let looked = looked.and_then(|(_, deployment)| self.register(deployment, None));
        self.known.lock().trouble = looked.as_ref().err().map(ToString::to_string);
        looked
    }

    /// The same, for the holder of the turn.
    async fn identify(&self, turn: &Turn) -> Result<Props> {
        let (props, deployment) = model::deployment(&self.server, &self.http, &self.digests).await?;
        self.register(deployment, Some(turn))?;
        Ok(props)
    }

    fn register(&self, deployment: BTreeMap<String, Value>, turn: Option<&Turn>) -> Result<()> {
        let mut known = self.known.lock();
        // A capture or restore is of the configuration that it began with.
        if (self.turns.holder().is_some() && turn.is_none()) || (known.member.is_some() && known.deployment == deployment) {
            return Ok(());
        }
        // The last member of the old configuration must leave first.
        known.member = None;
        known.prefixes.clear();
        known.member = Some(self.engines.attach(groups::server(self.name(), &deployment), Vec::new(), Arc::new(Silent))?);
        known.deployment = deployment;
        Ok(())
    }

    /// Its configuration, and the digest of that.
    pub fn deployment(&self) -> (BTreeMap<String, Value>, Digest) {
        let deployment = self.known.lock().deployment.clone();
        let fingerprint = prefix::fingerprint(&deployment);
        (deployment, fingerprint)
    }

    /// Checks that the server was not started anew with something else since the turn began.
    async fn unchanged(&self) -> Result<()> {
        let (_, now) = model::deployment(&self.server, &self.http, &self.digests).await?;
        if now == self.known.lock().deployment {
            return Ok(());
        }
        Err(Error::Lost { engine: self.name().into(), reason: "the server was started anew with another configuration meanwhile".into() })
    }

    fn info(&self) -> EngineInfo {
        let registered = self.engines.list().pop();
        let known = self.known.lock();
        let state = match (&known.trouble, self.turns.holder(), &known.member) {
            (_, Some(with), _) => EngineState::Busy { with },
            (Some(missing), None, _) => EngineState::Incomplete { missing: missing.clone() },
            (None, None, Some(_)) => EngineState::Ready {},
            (None, None, None) => EngineState::Incomplete { missing: "the digest of its model, which is being computed".into() },
        };
        let info = registered.unwrap_or_else(|| EngineInfo {
            engine: self.name().into(),
            state: EngineState::Ready {},
            verbs: Vec::new(),
            world: 1,
            deployment: BTreeMap::new(),
            fingerprint: prefix::fingerprint(&BTreeMap::new()),
            groups: Vec::new(),
            mapped_bytes: 0,
            snapshots: 0,
            restores: 0,
            staged: Vec::new(),
            restoring: Vec::new(),
            outcomes: BTreeMap::new(),
        });
        EngineInfo { state, ..info }
    }
}

/// A server is not called as engines with a connector are.
#[derive(Debug)]
struct Silent;

#[async_trait::async_trait]
impl Link for Silent {
    async fn call(&self, call: ToEngine) -> std::result::Result<Value, CallError> {
        let detail = format!("llama-server has no connector, and serves no {}", call.name());
        Err(CallError { code: ErrorCode::InvalidRequest, detail })
    }
}
