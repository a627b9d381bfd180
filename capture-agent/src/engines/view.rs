//! The members of an engine, and the view of an engine whose members are all here.

use super::layout::Group;
use super::member::Member;
use super::{Link, table};
use crate::copies::{Fills, Turn, Turns};
use crate::error::{Error, Result};
use lru::LruCache;
use parking_lot::Mutex;
use pfr_schema::agent::{EngineInfo, EngineState};
use pfr_schema::engine::{Register, Sequence, Verb};
use pfr_schema::{Digest, prefix};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of sequences whose last snapshot is remembered.
const PARENTS: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// An engine, as long as one of its members is connected.
#[derive(Debug)]
pub(super) struct Shared {
    pub name: String,
    pub world: u32,
    pub deployment: BTreeMap<String, Value>,
    pub fingerprint: Digest,
    pub timeout: Duration,
    /// Time after which the engine goes on by itself.
    pub pause_limit: Duration,
    /// Fills of blocks that the engine allocated.
    pub fills: Fills,
    /// Locked from a pause until its resume was answered, so that a late resume cannot end the next
    /// pause.
    pub still: Arc<tokio::sync::Mutex<()>>,
    members: Mutex<BTreeMap<String, Arc<Member>>>,
    turns: Turns,
    parents: Mutex<LruCache<String, Digest>>,
    snapshots: AtomicU64,
    restores: AtomicU64,
}

impl Shared {
    pub fn new(register: &Register, timeout: Duration, pause_limit: Duration) -> Self {
        Self {
            name: register.engine.clone(),
            world: register.world,
            deployment: register.deployment.clone(),
            fingerprint: prefix::fingerprint(&register.deployment),
            timeout,
            pause_limit,
            fills: Fills::default(),
            still: Arc::default(),
            members: Mutex::default(),
            turns: Turns::default(),
            parents: Mutex::new(LruCache::new(PARENTS)),
            snapshots: AtomicU64::new(0),
            restores: AtomicU64::new(0),
        }
    }

    /// Adds a member if it fits the members that are here.
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
            if other.parallel != register.parallel {
                let (here, there) = (register.parallel.join(", "), other.parallel.join(", "));
                return refuse(format!("it says that ranks share the state by {here:?}, rank {} by {there:?}", other.rank));
            }
            if let Err(difference) = super::layout::agree(&other.groups, &groups) {
                return refuse(format!("its groups are not those of rank {}: {difference}", other.rank));
            }
        }
        let member = Arc::new(Member::new(register, groups, mapped, link));
        members.insert(register.member.clone(), Arc::clone(&member));
        Ok(member)
    }

    /// Takes the engine for one capture or restore.
    pub fn take(&self, with: &str) -> Result<Taken> {
        self.taken(self.turns.take(with))
    }

    /// Waits in line for the engine, and takes it.
    pub async fn wait(&self, with: &str, deadline: Instant) -> Result<Taken> {
        self.taken(self.turns.wait(with, deadline).await)
    }

    fn taken(&self, turn: Result<Turn, String>) -> Result<Taken> {
        turn.map(|turn| Taken { _turn: turn }).map_err(|with| Error::Busy { engine: self.name.clone(), with })
    }

    /// The snapshot that a sequence was last captured as or restored from.
    pub fn parent(&self, sequence: &str) -> Option<Digest> {
        self.parents.lock().get(sequence).copied()
    }

    /// Remembers the snapshot of a sequence.
    pub fn set_parent(&self, sequence: &str, snapshot: Digest) {
        self.parents.lock().put(sequence.into(), snapshot);
    }

    /// Forgets the snapshot of a sequence.
    pub fn forget_parent(&self, sequence: &str) {
        self.parents.lock().pop(sequence);
    }

    pub fn count_snapshot(&self) {
        self.snapshots.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count_restore(&self) {
        self.restores.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a member. Returns whether it was the last.
    pub fn leave(&self, member: &str) -> bool {
        let mut members = self.members.lock();
        members.remove(member);
        members.is_empty()
    }

    pub fn info(self: &Arc<Self>) -> EngineInfo {
        let members: Vec<Arc<Member>> = self.members.lock().values().cloned().collect();
        let state = match (View::of(self), self.turns.holder()) {
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
            staged: Vec::new(),
            restoring: Vec::new(),
            outcomes: BTreeMap::new(),
        }
    }
}

/// A complete engine at the time of the look-up.
#[derive(Debug)]
pub(super) struct View {
    pub shared: Arc<Shared>,
    members: Vec<Arc<Member>>,
    /// The member with each rank's memory.
    ranks: Vec<Arc<Member>>,
}

impl View {
    /// The view of a complete engine. The error names the missing part.
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
            (false, false) if ![Verb::Hold, Verb::Allocate, Verb::Request].into_iter().any(served) => {
                return Err("members that serve pause and table, or hold, or allocate, or request".into());
            }
            _ => {}
        }
        Ok(Self { shared: Arc::clone(shared), members, ranks })
    }

    pub fn groups(&self, rank: u32) -> &[Group] {
        self.ranks.get(rank as usize).map_or(&[], |member| &member.groups)
    }

    /// Keys of the deployment that say only how ranks share the state.
    pub fn parallel(&self) -> &[String] {
        self.ranks.first().map_or(&[], |member| &member.parallel)
    }

    pub fn server(&self, verb: Verb) -> Option<&Arc<Member>> {
        self.members.iter().find(|m| m.verbs.contains(&verb))
    }

    /// All members that serve a verb.
    pub fn servers(&self, verb: Verb) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter(move |m| m.verbs.contains(&verb))
    }

    pub fn must_serve(&self, verb: Verb, name: &'static str) -> Result<&Arc<Member>> {
        self.server(verb).ok_or_else(|| Error::NotServed { engine: self.shared.name.clone(), verb: name })
    }

    /// Checks the blocks of a sequence of `boundary` tokens, for every rank.
    pub fn check_blocks(&self, boundary: u64, blocks: &BTreeMap<String, Vec<u32>>) -> Result<(), String> {
        (0..self.shared.world).try_for_each(|rank| table::check_blocks(self.groups(rank), boundary, blocks, table::Use::Fill))
    }

    /// Checks a sequence that the engine describes, for every rank.
    pub fn check_sequence(&self, sequence: &Sequence) -> Result<()> {
        (0..self.shared.world).try_for_each(|rank| table::check(self.groups(rank), sequence)).map_err(|reason| {
            let reason = format!("sequence {:?}: {reason}", sequence.id);
            Error::Protocol { engine: self.shared.name.clone(), reason }
        })
    }
}

/// The exclusive use of an engine by one capture or restore.
#[derive(Debug)]
pub struct Taken {
    _turn: Turn,
}
