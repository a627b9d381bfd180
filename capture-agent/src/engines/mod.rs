//! Engines on this host: who is here, where their pages lie, and how they are told to stand still.

use crate::config::Config;
use crate::error::Result;
use crate::memory::{Page, PageMemory};
use pfr_schema::Digest;
use pfr_schema::agent::EngineInfo;
use pfr_schema::engine::{Allocate, Failure, GroupLayout, Oracle, Register, Sequence, State, ToEngine};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Engines on this host.
#[derive(Clone, Debug)]
pub struct Engines(Arc<Inner>);

#[derive(Debug)]
struct Inner;

/// How calls reach a member of an engine: a socket, or functions in this process.
#[async_trait::async_trait]
pub trait Link: Send + Sync + std::fmt::Debug {
    /// Makes a call.
    async fn call(&self, call: ToEngine) -> std::result::Result<Value, Failure>;
}

impl Engines {
    /// None yet.
    #[must_use]
    pub fn new(_config: &Config) -> Self {
        todo!()
    }

    /// Accepts members on a Unix socket until the future is dropped.
    ///
    /// # Errors
    /// [`crate::Error::Io`] if the socket cannot be made.
    pub async fn serve(&self, _agent: crate::Agent, _socket: &Path) -> Result<()> {
        todo!()
    }

    /// Adds a member that lives in this process; it leaves when the guard is dropped.
    ///
    /// # Errors
    /// As a registration over the socket.
    pub fn attach(&self, _register: Register, _memories: Vec<Arc<dyn PageMemory>>, _link: Arc<dyn Link>) -> Result<Attached> {
        todo!()
    }

    /// An engine that is complete.
    ///
    /// # Errors
    /// [`crate::Error::EngineUnknown`], [`crate::Error::Incomplete`].
    pub fn get(&self, _name: &str) -> Result<Engine> {
        todo!()
    }

    /// All engines, by name.
    #[must_use]
    pub fn list(&self) -> Vec<EngineInfo> {
        todo!()
    }
}

/// A member in this process.
#[derive(Debug)]
pub struct Attached;

/// An engine. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Engine(Arc<()>);

impl Engine {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        todo!()
    }
    /// Its deployment.
    #[must_use]
    pub fn deployment(&self) -> &BTreeMap<String, Value> {
        todo!()
    }
    /// Digest of the deployment.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        todo!()
    }
    /// Ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        todo!()
    }
    /// The groups of one rank, by name.
    #[must_use]
    pub fn groups(&self, _rank: u32) -> &[Group] {
        todo!()
    }
    /// Whether it serves a verb.
    #[must_use]
    pub fn serves(&self, _verb: pfr_schema::engine::Verb) -> bool {
        todo!()
    }
    /// Takes the engine for one capture or restore; others are refused meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Busy`].
    pub fn take(&self, _with: &str) -> Result<Taken> {
        todo!()
    }
    /// Makes the engine stand still until the guard is dropped (or resumed).
    ///
    /// # Errors
    /// [`crate::Error::NotServed`], [`crate::Error::Lost`], [`crate::Error::Refused`].
    pub async fn pause(&self) -> Result<Pause> {
        todo!()
    }
    /// Scores of the step at the boundary; `None` if not served or the step will not come.
    ///
    /// # Errors
    /// [`crate::Error::Lost`].
    pub async fn oracle(&self, _sequence: &str, _boundary: u64, _top: u32) -> Result<Option<Oracle>> {
        todo!()
    }
    /// Takes blocks for a sequence to be restored. Dropped without [`Allocation::activate`], they are given back.
    ///
    /// # Errors
    /// [`crate::Error::NotServed`], [`crate::Error::Refused`], [`crate::Error::Protocol`] for blocks that are not there.
    pub async fn allocate(&self, _what: Allocate) -> Result<Allocation> {
        todo!()
    }
    /// The snapshot that a sequence was last captured as or restored from.
    #[must_use]
    pub fn parent(&self, _sequence: &str) -> Option<Digest> {
        todo!()
    }
    /// Remembers the snapshot of a sequence.
    pub fn set_parent(&self, _sequence: &str, _snapshot: Digest) {
        todo!()
    }
}

/// One capture or restore has the engine.
#[derive(Debug)]
pub struct Taken;

/// The engine stands still. Dropping it lets the engine go on, also in a panic.
#[derive(Debug)]
pub struct Pause;

impl Pause {
    /// The one sequence asked for, or the only one there is. Checked: blocks exist, none is null where the window needs it, their number fits T.
    ///
    /// # Errors
    /// [`crate::Error::SequenceUnknown`], [`crate::Error::SequenceAmbiguous`], [`crate::Error::Protocol`].
    pub async fn sequence(&self, _sequence: Option<&str>) -> Result<Sequence> {
        todo!()
    }
    /// All sequences, checked likewise.
    ///
    /// # Errors
    /// [`crate::Error::Protocol`].
    pub async fn sequences(&self) -> Result<Vec<Sequence>> {
        todo!()
    }
    /// Keeps a sequence's sealed blocks; `None` if the engine does not serve pins.
    ///
    /// # Errors
    /// [`crate::Error::Refused`], [`crate::Error::Lost`].
    pub async fn pin(&self, _sequence: &str) -> Result<Option<Pin>> {
        todo!()
    }
    /// Lets the engine go on; how long it stood still.
    ///
    /// # Errors
    /// [`crate::Error::Lost`].
    pub async fn resume(self) -> Result<std::time::Duration> {
        todo!()
    }
}

/// Sealed blocks of a sequence are kept until this is dropped.
#[derive(Debug)]
pub struct Pin;

/// Blocks for a sequence to be restored.
#[derive(Debug)]
pub struct Allocation;

impl Allocation {
    /// The new sequence.
    #[must_use]
    pub fn sequence(&self) -> &str {
        todo!()
    }
    /// Its blocks.
    #[must_use]
    pub fn blocks(&self) -> &BTreeMap<String, Vec<u32>> {
        todo!()
    }
    /// The sequence may run.
    ///
    /// # Errors
    /// [`crate::Error::Refused`], [`crate::Error::Lost`]: then it was discarded.
    pub async fn activate(self) -> Result<String> {
        todo!()
    }
}

/// A group of layers of one rank, with its memory.
#[derive(Clone, Debug)]
pub struct Group {
    /// As registered, checked.
    pub layout: GroupLayout,
}

impl Group {
    /// Columns of a sequence of `boundary` tokens: for a window those that it still needs, for recurrent groups one.
    #[must_use]
    pub fn columns(&self, _boundary: u64) -> std::ops::Range<u64> {
        todo!()
    }
    /// Where a component of a block lies.
    ///
    /// # Panics
    /// If the block is out of range; tables are checked when they come in.
    #[must_use]
    pub fn page(&self, _component: usize, _block: u32) -> (Arc<dyn PageMemory>, Page) {
        todo!()
    }
    /// Bytes of one component of one page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        todo!()
    }
    /// Where a state tensor of a block lies.
    ///
    /// # Panics
    /// As [`Group::page`].
    #[must_use]
    pub fn state(&self, _state: &State, _block: u32) -> (Arc<dyn PageMemory>, Page) {
        todo!()
    }
}
