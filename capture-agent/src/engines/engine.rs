//! An engine: its members together.

use super::allocation::Allocation;
use super::layout::Group;
use super::member::Member;
use super::pause::Pause;
use super::{Link, table};
use crate::error::{Error, Result};
use parking_lot::Mutex;
use pfr_schema::agent::{EngineInfo, EngineState};
use pfr_schema::engine::{Allocate, Oracle, OracleRequest, Register, Sequence, ToEngine, Verb};
use pfr_schema::{Digest, prefix};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Sequences whose last snapshot is remembered, the latest.
const PARENTS: usize = 4096;

/// What outlives the coming and going of single members.
#[derive(Debug)]
pub(super) struct Shared {
    pub name: String,
    pub world: u32,
    pub deployment: BTreeMap<String, Value>,
    pub fingerprint: Digest,
    pub timeout: Duration,
    /// Held while the engine stands still, until it has been told to go on: a late resume must not end somebody else's pause.
    pub still: Arc<tokio::sync::Mutex<()>>,
    members: Mutex<BTreeMap<String, Arc<Member>>>,
    busy: Mutex<Option<String>>,
    parents: Mutex<Parents>,
    snapshots: AtomicU64,
    restores: AtomicU64,
}

#[derive(Debug, Default)]
struct Parents {
    by_sequence: BTreeMap<String, (u64, Digest)>,
    next: u64,
}

impl Shared {
    pub fn new(register: &Register, timeout: Duration) -> Self {
        Self {
            name: register.engine.clone(),
            world: register.world,
            deployment: register.deployment.clone(),
            fingerprint: prefix::fingerprint(&register.deployment),
            timeout,
            still: Arc::default(),
            members: Mutex::default(),
            busy: Mutex::default(),
            parents: Mutex::default(),
            snapshots: AtomicU64::new(0),
            restores: AtomicU64::new(0),
        }
    }

    /// Adds a member if it goes together with those that are here.
    pub fn join(&self, register: &Register, groups: Vec<Group>, mapped: u64, link: Arc<dyn Link>) -> Result<Arc<Member>> {
        let refuse = |reason: String| Err(Error::Invalid(format!("member {:?} of engine {:?}: {reason}", register.member, self.name)));
        let mut members = self.members.lock();
        if members.contains_key(&register.member) {
            return refuse("another member has this name".into());
        }
        if register.world != self.world {
            return refuse(format!("it says that there are {} ranks, the others {}", register.world, self.world));
        }
        if register.deployment != self.deployment {
            let keys: BTreeSet<&String> = self.deployment.keys().chain(register.deployment.keys()).collect();
            let differ: Vec<&str> =
                keys.into_iter().filter(|k| self.deployment.get(*k) != register.deployment.get(*k)).map(String::as_str).collect();
            return refuse(format!("its deployment is not that of the others: {}", differ.join(", ")));
        }
        for other in members.values().filter(|m| !m.groups.is_empty() && !groups.is_empty()) {
            if other.rank == register.rank {
                return refuse(format!("member {:?} has the memory of rank {} already", other.name, other.rank));
            }
            if let Err(difference) = super::layout::agree(&other.groups, &groups) {
                return refuse(format!("its groups are not those of rank {}: {difference}", other.rank));
            }
        }
        let member = Member::new(&self.name, &register.member, register.rank, &register.verbs, groups, mapped, link);
        let member = Arc::new(member);
        members.insert(register.member.clone(), Arc::clone(&member));
        Ok(member)
    }

    /// Removes a member; whether it was the last.
    pub fn leave(&self, member: &str) -> bool {
        let mut members = self.members.lock();
        members.remove(member);
        members.is_empty()
    }

    pub fn info(self: &Arc<Self>) -> EngineInfo {
        let members: Vec<Arc<Member>> = self.members.lock().values().cloned().collect();
        let state = match (View::of(self), self.busy.lock().clone()) {
            (Err(missing), _) => EngineState::Incomplete { missing },
            (Ok(_), Some(with)) => EngineState::Busy { with },
            (Ok(_), None) => EngineState::Ready {},
        };
        let verbs: BTreeSet<Verb> = members.iter().flat_map(|m| m.verbs.iter().copied()).collect();
        let groups: BTreeSet<String> = members.iter().flat_map(|m| m.groups.iter().map(|g| g.layout.name.clone())).collect();
        EngineInfo {
            engine: self.name.clone(),
            state,
            verbs: verbs.into_iter().collect(),
            world: self.world,
            deployment: self.deployment.clone(),
            fingerprint: self.fingerprint,
            groups: groups.into_iter().collect(),
            mapped_bytes: members.iter().map(|m| m.mapped).sum(),
            snapshots: self.snapshots.load(Ordering::Relaxed),
            restores: self.restores.load(Ordering::Relaxed),
        }
    }
}

/// A complete engine as it was when it was looked up.
#[derive(Debug)]
pub(super) struct View {
    pub shared: Arc<Shared>,
    members: Vec<Arc<Member>>,
    /// The member with each rank's memory.
    ranks: Vec<Arc<Member>>,
}

impl View {
    /// The view, or what is missing.
    pub fn of(shared: &Arc<Shared>) -> Result<Self, String> {
        let members: Vec<Arc<Member>> = shared.members.lock().values().cloned().collect();
        let with_memory = |rank| members.iter().find(|m| m.rank == rank && !m.groups.is_empty());
        let mut ranks = Vec::new();
        for rank in 0..shared.world {
            match with_memory(rank) {
                Some(member) => ranks.push(Arc::clone(member)),
                None => return Err(format!("the memory of rank {rank} of {}", shared.world)),
            }
        }
        let served = |verb| members.iter().any(|m| m.verbs.contains(&verb));
        match (served(Verb::Pause), served(Verb::Table)) {
            (true, false) => return Err("a member that serves table".into()),
            (false, true) => return Err("a member that serves pause".into()),
            (false, false) if !served(Verb::Allocate) && !served(Verb::Request) => {
                return Err("members that serve pause and table, or allocate, or request".into());
            }
            _ => {}
        }
        Ok(Self { shared: Arc::clone(shared), members, ranks })
    }

    pub fn groups(&self, rank: u32) -> &[Group] {
        self.ranks.get(rank as usize).map_or(&[], |member| &member.groups)
    }

    pub fn server(&self, verb: Verb) -> Option<&Arc<Member>> {
        self.members.iter().find(|m| m.verbs.contains(&verb))
    }

    pub fn must_serve(&self, verb: Verb, name: &'static str) -> Result<&Arc<Member>> {
        self.server(verb).ok_or_else(|| Error::NotServed { engine: self.shared.name.clone(), verb: name })
    }
}

/// An engine. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Engine(pub(super) Arc<View>);

impl Engine {
    pub(super) fn new(view: View) -> Self {
        Self(Arc::new(view))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.shared.name
    }

    /// Its deployment.
    #[must_use]
    pub fn deployment(&self) -> &BTreeMap<String, Value> {
        &self.0.shared.deployment
    }

    /// Digest of the deployment.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        self.0.shared.fingerprint
    }

    /// Ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.0.shared.world
    }

    /// The groups of one rank, by name.
    #[must_use]
    pub fn groups(&self, rank: u32) -> &[Group] {
        self.0.groups(rank)
    }

    /// Whether it serves a verb.
    #[must_use]
    pub fn serves(&self, verb: Verb) -> bool {
        self.0.server(verb).is_some()
    }

    /// Takes the engine for one capture or restore; others are refused meanwhile.
    ///
    /// # Errors
    /// [`Error::Busy`].
    pub fn take(&self, with: &str) -> Result<Taken> {
        let mut busy = self.0.shared.busy.lock();
        if let Some(with) = &*busy {
            return Err(Error::Busy { engine: self.name().into(), with: with.clone() });
        }
        *busy = Some(with.into());
        drop(busy);
        Ok(Taken { engine: Arc::clone(&self.0.shared) })
    }

    /// Makes the engine stand still until the guard is dropped (or resumed).
    ///
    /// # Errors
    /// [`Error::NotServed`], [`Error::Lost`], [`Error::Refused`].
    pub async fn pause(&self) -> Result<Pause> {
        Pause::begin(Arc::clone(&self.0)).await
    }

    /// Logits of the step at the boundary; `None` if not served or the step will not come.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Refused`], [`Error::Protocol`] for logits of another step, or in no order.
    pub async fn oracle(&self, sequence: &str, boundary: u64, top: u32) -> Result<Option<Oracle>> {
        let Some(member) = self.0.server(Verb::Oracle) else { return Ok(None) };
        let call = ToEngine::Oracle(OracleRequest { sequence: sequence.into(), boundary, top });
        let oracle: Oracle = member.call_within(self.0.shared.timeout, call).await?;
        if oracle.top.is_empty() {
            return Ok(None);
        }
        table::check_oracle(&oracle, boundary, top).map_err(|reason| member.broke(reason))?;
        Ok(Some(oracle))
    }

    /// Takes blocks for a sequence to be restored. Dropped without [`Allocation::activate`], they are given back.
    ///
    /// # Errors
    /// [`Error::NotServed`], [`Error::Lost`], [`Error::Refused`], [`Error::Protocol`] for blocks that are not there.
    pub async fn allocate(&self, what: Allocate) -> Result<Allocation> {
        Allocation::take(Arc::clone(&self.0), what).await
    }

    /// The snapshot that a sequence was last captured as or restored from.
    #[must_use]
    pub fn parent(&self, sequence: &str) -> Option<Digest> {
        self.0.shared.parents.lock().by_sequence.get(sequence).map(|(_, digest)| *digest)
    }

    /// Remembers the snapshot of a sequence.
    pub fn set_parent(&self, sequence: &str, snapshot: Digest) {
        let mut parents = self.0.shared.parents.lock();
        let turn = parents.next;
        parents.next += 1;
        parents.by_sequence.insert(sequence.into(), (turn, snapshot));
        if parents.by_sequence.len() > PARENTS {
            let oldest = parents.by_sequence.iter().min_by_key(|(_, (turn, _))| *turn).map(|(name, _)| name.clone());
            oldest.map(|name| parents.by_sequence.remove(&name));
        }
    }

    /// Checks blocks by column that the engine has given for a restored sequence of `boundary` tokens: as [`Allocation::blocks`].
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn check_blocks(&self, boundary: u64, blocks: &BTreeMap<String, Vec<u32>>) -> Result<()> {
        let broke = |reason| Error::Protocol { engine: self.name().into(), reason };
        (0..self.world()).try_for_each(|rank| table::check_blocks(self.groups(rank), boundary, blocks, table::Use::Fill).map_err(broke))
    }

    /// Checks a sequence that the engine describes: as [`Pause::sequence`].
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn check_sequence(&self, sequence: &Sequence) -> Result<()> {
        let broke = |reason: String| {
            let reason = format!("sequence {:?}: {reason}", sequence.id);
            Error::Protocol { engine: self.name().into(), reason }
        };
        (0..self.world()).try_for_each(|rank| table::check(self.groups(rank), sequence).map_err(broke))
    }

    /// Counts a snapshot.
    pub fn count_snapshot(&self) {
        self.0.shared.snapshots.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a restore.
    pub fn count_restore(&self) {
        self.0.shared.restores.fetch_add(1, Ordering::Relaxed);
    }
}

/// One capture or restore has the engine.
#[derive(Debug)]
pub struct Taken {
    engine: Arc<Shared>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.engine.busy.lock() = None;
    }
}
