//! Snapshots that requests name to resume from. Each is pulled, verified and kept ready once,
//! however many requests name it at a time.

use super::fits::Asked;
use super::source::Through;
use super::staged::Staged;
use super::{Fitting, note};
use crate::Agent;
use crate::engines::Engine;
use crate::error::Result;
use crate::saves::check_registry;
use parking_lot::Mutex;
use pfr_client::nth_ancestor;
use pfr_schema::agent::RestoreRequest;
use pfr_schema::engine::{Matched, Resume};
use pfr_schema::{Digest, Reference, Selector};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long an answer waits for a snapshot before it says "later". An engine waits longer for it.
const LOOK: Duration = Duration::from_millis(300);
/// References that are looked up at a time, and those that are remembered.
const MAX: usize = 64;

/// The snapshot, or why there is none. `None` while it is not known.
pub(super) type Outcome = Option<std::result::Result<Digest, String>>;

/// References that requests resume from, by engine.
#[derive(Debug, Default)]
pub struct Resumes(Mutex<BTreeMap<(String, String), watch::Receiver<Outcome>>>);

impl Resumes {
    /// The look-up that a request waits for; `None` if too many are under way. A request that asks
    /// for the first time begins one unless one is under way: a tag may have moved.
    pub(super) fn of(&self, agent: &Agent, engine: &str, request: &Resume) -> Option<watch::Receiver<Outcome>> {
        let key = (engine.to_owned(), request.reference.clone());
        let mut known = self.0.lock();
        if let Some(found) = known.get(&key)
            && (is_open(found) || !request.first)
        {
            return Some(found.clone());
        }
        if known.len() >= MAX {
            known.retain(|_, lookup| is_open(lookup));
        }
        if known.len() >= MAX {
            return None;
        }
        let (tell, told) = watch::channel(None);
        let (agent, (engine, reference)) = (agent.clone(), key.clone());
        pfr_service::task::spawn(async move {
            let found = agent.keep_ready(&engine, &reference).await;
            tell.send_replace(Some(found.map_err(|error| format!("{}: {error}", error.code()))));
        });
        known.insert(key, told.clone());
        Some(told)
    }
}

fn is_open(lookup: &watch::Receiver<Outcome>) -> bool {
    // Without a sender its task has panicked.
    lookup.borrow().is_none() && lookup.has_changed().is_ok()
}

/// Answers a request that wants to resume from a snapshot.
pub(super) async fn resume(agent: &Agent, engine: &Engine, request: Resume) -> Matched {
    let Some(mut lookup) = agent.resumes().of(agent, engine.name(), &request) else { return Matched::Later {} };
    let outcome = match tokio::time::timeout(LOOK, lookup.wait_for(Option::is_some)).await {
        Ok(Ok(outcome)) => outcome.clone(),
        Ok(Err(_)) => Some(Err("internal: the look-up ended without an answer".into())),
        Err(_) => None,
    };
    match outcome {
        None => Matched::Later {},
        Some(Ok(digest)) => agent.staged().find(engine, &Asked::Keys(request.request), Some(digest)),
        Some(Err(reason)) => Matched::None { reason },
    }
}

impl Agent {
    /// Pulls and verifies a snapshot, unless it lies ready for the engine, and keeps it ready.
    /// Other requests of the engine do not wait for it.
    async fn keep_ready(&self, name: &str, reference: &str) -> Result<Digest> {
        let started = Instant::now();
        let staged = async {
            check_registry(self, reference)?;
            let request = self.restore_of(reference.parse()?).await?;
            let Fitting { engine, documents, plan, found } = self.fitting(name, &request, Through::Store).await?;
            let digest = documents.digest;
            if self.staged().is_ready(name, &digest) {
                return Ok((digest, None));
            }
            let mut report = Staged::stage(self, &engine, reference, documents, &plan, None).await?;
            report.bytes_pulled = found.bytes_pulled();
            report.total_seconds = started.elapsed().as_secs_f64();
            Ok((digest, Some(report)))
        };
        let staged = staged.await;
        match &staged {
            Ok((_, Some(report))) => note(self, name, reference, started, Ok(report)),
            Ok((_, None)) => {}
            Err(error) => note(self, name, reference, started, Err(error)),
        }
        staged.map(|(digest, _)| digest)
    }

    /// The request to restore a reference, from the local store or from the registry.
    async fn restore_of(&self, reference: Reference) -> Result<RestoreRequest> {
        let local = self.is_newest_here(&reference).await;
        let registry = reference.registry.as_deref().or(self.config().registry.as_deref());
        // The registry may have ancestors of a snapshot of this host that are not here.
        if local
            && let Selector::Tag { tag, back: back @ 1.. } = reference.selector_or_latest()
            && let Some(registry) = registry
        {
            let head = self.store().tag(&reference.repository, &tag).await?.digest;
            let here = self.store().ancestor(&reference.repository, &head, u64::from(back)).await?;
            if here.steps < u64::from(back) {
                let remote = self.config().remote(registry)?;
                if let Some(found) = nth_ancestor(self.store(), &remote, &reference.repository, head, back).await? {
                    let reference = Reference { selector: Some(Selector::Digest(found)), ..reference };
                    return Ok(RestoreRequest { reference: reference.to_string(), ..RestoreRequest::default() });
                }
            }
        }
        Ok(RestoreRequest { reference: reference.to_string(), local, ..RestoreRequest::default() })
    }

    /// Whether a tag is to be looked up in the local store: no registry is known, or this agent has
    /// saved under it what the registry does not have yet. Waits for a save that is under way.
    async fn is_newest_here(&self, reference: &Reference) -> bool {
        let Selector::Tag { tag, .. } = reference.selector_or_latest() else { return false };
        let local = format!("{}:{tag}", reference.repository);
        let stays_here = self.saves().settled(&local).await;
        let Some(registry) = reference.registry.as_deref().or(self.config().registry.as_deref()) else { return true };
        let remote = format!("{}/{local}", registry.trim_end_matches('/'));
        self.pushes().waits(&remote) || (stays_here && reference.registry.is_none())
    }
}
