//! Snapshots that are verified and wait for a request with their tokens.

use super::documents::Documents;
use super::gate::Claims;
use super::plan::Plan;
use super::{prove, report};
use crate::Agent;
use crate::engines::Engine;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use pfr_schema::agent::RestoreReport;
use pfr_schema::engine::{Match, Matched};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Entries at a time; the oldest goes first.
const MAX: usize = 64;

/// Snapshots that wait for a request with their tokens.
#[derive(Debug, Default)]
pub struct Staged {
    entries: Mutex<Vec<Entry>>,
    /// Number of snapshots by engine that are being pulled and are not entries yet.
    expected: Mutex<BTreeMap<String, usize>>,
    claims: Arc<Claims>,
}

#[derive(Clone, Debug)]
struct Entry {
    id: String,
    engine: String,
    documents: Arc<Documents>,
    plan: Arc<Plan>,
    /// Whether all of it is verified.
    proven: bool,
}

impl Staged {
    /// The places that restores are writing to.
    pub(super) fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// While the guard lives, a snapshot with unknown tokens is being pulled for the engine.
    pub(super) fn expect(&self, engine: &str) -> Expected<'_> {
        *self.expected.lock().entry(engine.into()).or_default() += 1;
        Expected { staged: self, engine: engine.into() }
    }

    /// Verifies a snapshot and keeps it ready for requests.
    pub(super) async fn stage(
        &self,
        agent: &Agent,
        engine: &Engine,
        documents: Arc<Documents>,
        plan: &Arc<Plan>,
        expected: Option<Expected<'_>>,
    ) -> Result<RestoreReport> {
        let id = uuid::Uuid::now_v7().to_string();
        let digest = documents.digest;
        let entry = Entry { id: id.clone(), engine: engine.name().into(), documents, plan: Arc::clone(plan), proven: false };
        self.add(agent, entry);
        drop(expected);
        // The end of this future ends the entry, in any case.
        let mut unproven = Unproven { staged: self, id: Some(id) };
        let values = prove::all(agent.store(), plan).await?;
        if let Some(id) = unproven.id.take() {
            self.entries.lock().iter_mut().filter(|entry| entry.id == id).for_each(|entry| entry.proven = true);
        }
        Ok(report(engine, digest, plan, values))
    }

    fn add(&self, agent: &Agent, entry: Entry) {
        let here: HashSet<String> = agent.engines().list().into_iter().map(|info| info.engine).collect();
        let mut entries = self.entries.lock();
        // Drop entries of engines that left, and the entry of the same snapshot, which this one
        // replaces.
        entries.retain(|other| {
            here.contains(&other.engine)
                && !(other.engine == entry.engine && other.documents.digest == entry.documents.digest && other.proven)
        });
        if entries.len() == MAX {
            entries.remove(0);
        }
        entries.push(entry);
    }

    /// The deepest state for a request.
    pub(super) fn find(&self, engine: &Engine, request: &Match) -> Matched {
        // Read this first: a snapshot leaves it only after it became an entry.
        let is_expected = self.expected.lock().contains_key(engine.name());
        let entries = self.entries.lock();
        let (mut best, mut reason): (Option<&Entry>, Option<(u64, String)>) = (None, None);
        for entry in entries.iter().filter(|entry| entry.engine == engine.name()) {
            match fits(&entry.plan, request) {
                Ok(()) if best.is_none_or(|best| best.plan.boundary < entry.plan.boundary) => best = Some(entry),
                Ok(()) => {}
                // Report the reason of the entry that matches most tokens.
                Err((near, why)) if reason.as_ref().is_none_or(|(other, _)| *other <= near) => reason = Some((near, why)),
                Err(_) => {}
            }
        }
        match best {
            Some(entry) if entry.proven => Matched::Ready { boundary: entry.plan.boundary, restore: entry.id.clone() },
            Some(_) => Matched::Later {},
            None if is_expected => Matched::Later {},
            None => Matched::None { reason: reason.map_or_else(|| "nothing is kept ready for this engine".into(), |(_, why)| why) },
        }
    }

    pub(super) fn get(&self, engine: &Engine, id: &str) -> Result<Arc<Documents>> {
        let entries = self.entries.lock();
        let entry = entries.iter().find(|entry| entry.id == id && entry.engine == engine.name() && entry.proven);
        entry.map(|entry| Arc::clone(&entry.documents)).ok_or_else(|| Error::Invalid(format!("no restore {id:?} is kept ready")))
    }

    pub(super) fn forget(&self, id: &str) {
        self.entries.lock().retain(|entry| entry.id != id);
    }
}

/// Checks that the state belongs to the prefix of the request. The error has the number of equal
/// tokens, and the reason.
fn fits(plan: &Plan, request: &Match) -> std::result::Result<(), (u64, String)> {
    let Plan { boundary, key, tokens, .. } = plan;
    if key.salt != request.salt || key.adapter != request.adapter {
        return Err((0, format!("the prefix key does not hold: salt or adapter of the state at {boundary} are not the request's")));
    }
    let computed = tokens.iter().take(usize::try_from(*boundary).unwrap_or(usize::MAX));
    let agree = computed.zip(&request.tokens).take_while(|(a, b)| a == b).count() as u64;
    let length = request.tokens.len() as u64;
    if agree < *boundary {
        let why = if agree == length {
            format!("the state is at {boundary} tokens, the request has {length}")
        } else {
            format!("the prefix key does not hold: token {agree} differs from that of the state at {boundary}")
        };
        return Err((agree, why));
    }
    if length == *boundary {
        return Err((agree, format!("the state is at {boundary} tokens, the request has no more: no token is left to compute")));
    }
    if *boundary <= request.computed {
        return Err((agree, format!("the engine has state for {} tokens already, kept ready is {boundary}", request.computed)));
    }
    Ok(())
}

/// A snapshot is being pulled for an engine.
pub(super) struct Expected<'a> {
    staged: &'a Staged,
    engine: String,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        let mut expected = self.staged.expected.lock();
        match expected.get_mut(&self.engine) {
            Some(more) if *more > 1 => *more -= 1,
            _ => drop(expected.remove(&self.engine)),
        }
    }
}

struct Unproven<'a> {
    staged: &'a Staged,
    id: Option<String>,
}

impl Drop for Unproven<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.staged.forget(&id);
        }
    }
}
