//! Snapshots that are verified and wait for a request with their tokens.

use super::documents::Documents;
use super::fits::{self, Asked};
use super::plan::Plan;
use super::{prove, report};
use crate::Agent;
use crate::copies::Claims;
use crate::engines::Engine;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use pfr_schema::agent::{RestoreReport, StagedInfo};
use pfr_schema::engine::{Matched, Report, StagedStates, Taking, ToEngine, Verb};
use pfr_schema::{Digest, prefix};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// Entries at a time, of all engines; the oldest goes first.
const MAX: usize = 64;
/// How long a restore waits until the engine knows that it may ask.
const TELL: Duration = Duration::from_secs(2);

/// Snapshots that wait for a request with their tokens.
#[derive(Debug, Default)]
pub struct Staged {
    state: Mutex<State>,
    claims: Arc<Claims>,
}

#[derive(Debug, Default)]
struct State {
    entries: Vec<Entry>,
    /// Number of snapshots by engine that are being pulled and are not entries yet.
    expected: BTreeMap<String, usize>,
    /// Number of changes of the above.
    version: u64,
    /// What engines reported of requests that came to no match.
    unmatched: BTreeMap<String, BTreeMap<Taking, u64>>,
}

#[derive(Clone, Debug)]
struct Entry {
    id: String,
    engine: String,
    /// As it was asked for.
    reference: String,
    documents: Arc<Documents>,
    plan: Arc<Plan>,
    /// Keys of shorter prefixes, so that a reason can say where two prefixes part.
    rungs: Vec<(u64, Digest)>,
    /// Whether all of it is verified.
    proven: bool,
    outcomes: BTreeMap<Taking, u64>,
}

impl Staged {
    /// The places that restores are writing to.
    pub(super) fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// While the guard lives, a snapshot with unknown tokens is being pulled for the engine.
    pub(super) fn expect(agent: &Agent, engine: &str) -> Expected {
        agent.staged().change(|state| *state.expected.entry(engine.into()).or_default() += 1);
        tell_soon(agent, engine);
        Expected { agent: agent.clone(), engine: engine.into() }
    }

    /// Verifies a snapshot and keeps it ready for requests. The engine knows it when this returns.
    pub(super) async fn stage(
        agent: &Agent,
        engine: &Engine,
        reference: &str,
        documents: Arc<Documents>,
        plan: &Arc<Plan>,
        expected: Option<Expected>,
    ) -> Result<RestoreReport> {
        let source = documents.source.clone();
        let (id, digest) = (uuid::Uuid::now_v7().to_string(), documents.digest);
        let computed = &plan.tokens[..usize::try_from(plan.boundary).unwrap_or(usize::MAX).min(plan.tokens.len())];
        let rungs = prefix::rungs(&engine.fingerprint(), &plan.key.salt, plan.key.adapter.as_deref(), computed);
        let (name, reference, plan) = (engine.name().to_owned(), reference.to_owned(), Arc::clone(plan));
        let outcomes = BTreeMap::new();
        let entry = Entry { id: id.clone(), engine: name, reference, documents, plan: Arc::clone(&plan), rungs, proven: false, outcomes };
        if let Some(other) = agent.staged().add(agent, entry) {
            tell_soon(agent, &other);
        }
        drop(expected);
        // The end of this future ends the entry, in any case.
        let mut unproven = Unproven { agent, engine: engine.name(), id: Some(id) };
        let values = prove::all(&source, &plan).await?;
        if let Some(id) = unproven.id.take() {
            agent.staged().change(|state| state.entries.iter_mut().filter(|entry| entry.id == id).for_each(|entry| entry.proven = true));
        }
        tell(agent, engine.name()).await;
        Ok(report(engine, digest, &plan, values))
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        state.version += 1;
    }

    /// Adds an entry. Returns the engine that loses one, if there are too many.
    fn add(&self, agent: &Agent, entry: Entry) -> Option<String> {
        let here: HashSet<String> = agent.engines().list().into_iter().map(|info| info.engine).collect();
        let mut loses = None;
        self.change(|state| {
            // Drop entries of engines that left, and the entry of the same snapshot, which this one
            // replaces.
            state.entries.retain(|other| {
                here.contains(&other.engine)
                    && !(other.engine == entry.engine && other.documents.digest == entry.documents.digest && other.proven)
            });
            state.unmatched.retain(|engine, _| here.contains(engine));
            if state.entries.len() >= MAX {
                // A restore waits for each of the others.
                let oldest = state.entries.iter().position(|other| other.proven).unwrap_or(0);
                loses = Some(state.entries.remove(oldest).engine);
            }
            state.entries.push(entry);
        });
        loses
    }

    /// Whether a snapshot lies ready for an engine.
    pub(super) fn is_ready(&self, engine: &str, digest: &Digest) -> bool {
        self.state.lock().entries.iter().any(|entry| entry.engine == engine && entry.documents.digest == *digest && entry.proven)
    }

    /// The deepest state for a request; of one snapshot, if only that is wanted.
    pub(super) fn find(&self, engine: &Engine, request: &Asked, only: Option<Digest>) -> Matched {
        let state = self.state.lock();
        let mut best: Option<(&Entry, u64)> = None;
        let mut reason: Option<(u64, String)> = None;
        let (mut is_unknown, mut perhaps) = (false, 0);
        let is_wanted = |entry: &&Entry| entry.engine == engine.name() && only.is_none_or(|only| entry.documents.digest == only);
        for entry in state.entries.iter().filter(is_wanted) {
            match fits::fits(&entry.plan, &entry.rungs, request) {
                fits::Fit::At(position) if best.is_none_or(|(_, best)| best < position) => best = Some((entry, position)),
                fits::Fit::At(_) => {}
                fits::Fit::Tokens(position) => perhaps = perhaps.max(position),
                fits::Fit::NotAsked => is_unknown = true,
                // Report the reason of the entry that matches most tokens.
                fits::Fit::Not(near, why) if reason.as_ref().is_none_or(|(other, _)| *other <= near) => reason = Some((near, why)),
                fits::Fit::Not(..) => {}
            }
        }
        match best {
            best if best.is_none_or(|(_, best)| best < perhaps) && perhaps > 0 => Matched::Tokens { of: only },
            Some((entry, boundary)) if entry.proven => {
                let partly = boundary < entry.plan.boundary;
                Matched::Ready { boundary, restore: name(entry, boundary), digest: entry.documents.digest, partly, tier: None }
            }
            Some(_) => Matched::Later {},
            None if is_unknown || (only.is_none() && state.expected.contains_key(engine.name())) => Matched::Later {},
            None => Matched::None { reason: reason.map_or_else(|| "nothing is kept ready for this engine".into(), |(_, why)| why) },
        }
    }

    /// The snapshot of a match, and the token position if that is not its end.
    pub(super) fn get(&self, engine: &Engine, restore: &str) -> Result<(Arc<Documents>, Option<u64>)> {
        let unknown = || Error::Invalid(format!("no restore {restore:?} is kept ready"));
        let (id, position) = match restore.split_once(AT) {
            Some((id, position)) => (id, Some(position.parse().map_err(|_| unknown())?)),
            None => (restore, None),
        };
        let state = self.state.lock();
        let entry = state.entries.iter().find(|entry| entry.id == id && entry.engine == engine.name() && entry.proven);
        entry.map(|entry| (Arc::clone(&entry.documents), position)).ok_or_else(unknown)
    }

    /// What lies ready under the name of a match.
    pub(super) fn offer(&self, engine: &str, restore: &str) -> Option<Offer> {
        let state = self.state.lock();
        let entry = state.entries.iter().find(|entry| entry.id == entry_of(restore) && entry.engine == engine)?;
        let position = position_of(restore).unwrap_or(entry.plan.boundary);
        Some(Offer { reference: entry.reference.clone(), digest: entry.documents.digest, position })
    }

    /// Drops an entry, and tells the engine.
    pub(super) fn forget(agent: &Agent, engine: &str, restore: &str) {
        let id = entry_of(restore);
        agent.staged().change(|state| state.entries.retain(|entry| entry.id != id));
        tell_soon(agent, engine);
    }

    /// Counts what an engine reports.
    pub(super) fn count(&self, engine: &str, report: &Report) {
        let mut state = self.state.lock();
        for outcome in &report.outcomes {
            let entry =
                outcome.restore.as_ref().and_then(|id| state.entries.iter().position(|e| e.id == entry_of(id) && e.engine == engine));
            let counts = match entry {
                Some(at) => &mut state.entries[at].outcomes,
                None => state.unmatched.entry(engine.into()).or_default(),
            };
            let count = counts.entry(outcome.what).or_default();
            *count = count.saturating_add(outcome.count);
        }
    }

    /// What lies ready for an engine, and what became of the requests that it was ready for.
    #[must_use]
    pub fn info(&self, engine: &str) -> (Vec<StagedInfo>, BTreeMap<Taking, u64>) {
        let state = self.state.lock();
        let of = state.entries.iter().filter(|entry| entry.engine == engine);
        let infos = of.map(|entry| StagedInfo {
            restore: entry.id.clone(),
            digest: entry.documents.digest,
            boundary: entry.plan.boundary,
            ready: entry.proven,
            outcomes: entry.outcomes.clone(),
        });
        (infos.collect(), state.unmatched.get(engine).cloned().unwrap_or_default())
    }

    fn states(&self, engine: &str) -> StagedStates {
        let state = self.state.lock();
        let mut boundaries: Vec<u64> = state.entries.iter().filter(|e| e.engine == engine).map(|e| e.plan.boundary).collect();
        boundaries.sort_unstable();
        boundaries.dedup();
        let shortest = state.entries.iter().filter(|e| e.engine == engine).filter_map(|e| e.plan.legal.first()).min();
        StagedStates { version: state.version, boundaries, expected: state.expected.contains_key(engine), shortest }
    }
}

/// A snapshot that lies ready, up to a token position.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    /// As it was asked for.
    pub reference: String,
    pub digest: Digest,
    pub position: u64,
}

/// What stands between an entry and a token position in the name of a match.
const AT: char = '@';

/// The name of a match: what an engine says of it tells where it resumes.
fn name(entry: &Entry, boundary: u64) -> String {
    if boundary == entry.plan.boundary { entry.id.clone() } else { format!("{}{AT}{boundary}", entry.id) }
}

/// The entry that a match is of.
fn entry_of(restore: &str) -> &str {
    restore.split_once(AT).map_or(restore, |(id, _)| id)
}

/// The token position of a match that is before the end of its snapshot.
pub(super) fn position_of(restore: &str) -> Option<u64> {
    restore.split_once(AT)?.1.parse().ok()
}

/// Tells the engine what lies ready for it. Waits for its answer, but not for long: an engine that
/// is not told asks for nothing, and that is all.
pub(super) async fn tell(agent: &Agent, engine: &str) {
    // An engine that is not complete is told when its last member joins.
    let Ok(engine) = agent.engines().get(engine) else { return };
    let call = ToEngine::Staged(agent.staged().states(engine.name()));
    engine.tell(Verb::Request, call, TELL).await;
}

/// The same in a task of its own.
pub(super) fn tell_soon(agent: &Agent, engine: &str) {
    // A guard may be dropped while the runtime ends: then there is no engine to tell.
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let (agent, engine) = (agent.clone(), engine.to_owned());
    pfr_service::task::spawn_on(&runtime, async move { tell(&agent, &engine).await });
}

/// A snapshot is being pulled for an engine.
pub(super) struct Expected {
    agent: Agent,
    engine: String,
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.agent.staged().change(|state| match state.expected.get_mut(&self.engine) {
            Some(more) if *more > 1 => *more -= 1,
            _ => drop(state.expected.remove(&self.engine)),
        });
        tell_soon(&self.agent, &self.engine);
    }
}

struct Unproven<'a> {
    agent: &'a Agent,
    engine: &'a str,
    id: Option<String>,
}

impl Drop for Unproven<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            Staged::forget(self.agent, self.engine, &id);
        }
    }
}
