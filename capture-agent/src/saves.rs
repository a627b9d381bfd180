//! Saves that requests of engines ask for: a few at a time, and remembered, so that a client can
//! ask what became of them. They are forgotten when the agent ends; what was saved has a tag.

use crate::Agent;
use crate::error::{Error, Result};
use crate::metrics as names;
use crate::snapshot::Target;
use parking_lot::Mutex;
use pfr_schema::Reference;
use pfr_schema::agent::{Push, SaveInfo, SaveState, SnapshotReport, SnapshotRequest};
use pfr_schema::engine::Save;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::{Semaphore, watch};

/// Saves that are carried out at a time.
const AT_A_TIME: usize = 4;
/// Saves that wait or are carried out, of all engines; more are refused.
const OPEN: usize = 256;
/// Saves that are remembered.
const REMEMBERED: usize = 1024;

/// Checks the registry of a reference that a request gave: clients of an engine's server name it, and
/// the agent would go to any address of theirs.
pub(crate) fn check_registry(agent: &Agent, reference: &str) -> Result<()> {
    let reference: Reference = reference.parse()?;
    let own = agent.config().registry.as_deref().map(|url| url.trim_end_matches('/'));
    match reference.registry.as_deref() {
        Some(other) if Some(other) != own => {
            Err(Error::Invalid(format!("a request may name no other registry than the agent's, found {other:?}")))
        }
        _ => Ok(()),
    }
}

/// Saves that requests of engines asked for.
#[derive(Debug)]
pub struct Saves {
    list: Mutex<VecDeque<Entry>>,
    turns: Arc<Semaphore>,
    ended: watch::Sender<()>,
}

#[derive(Debug)]
struct Entry {
    info: SaveInfo,
    /// `repository:tag` in the local store.
    local: String,
    push: Push,
}

impl Default for Saves {
    fn default() -> Self {
        Self { list: Mutex::default(), turns: Arc::new(Semaphore::new(AT_A_TIME)), ended: watch::Sender::new(()) }
    }
}

impl Saves {
    /// Queues a save. Never waits.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Busy`] if too many wait.
    pub(crate) fn begin(&self, agent: &Agent, engine: &str, save: Save) -> Result<()> {
        let Save { ticket, sequence, reference, parent, push } = save;
        if !(1..=64).contains(&ticket.len()) {
            return Err(Error::Invalid(format!("a ticket has 1 to 64 bytes, found {}", ticket.len())));
        }
        check_registry(agent, &reference)?;
        // The engine goes on before the save ends, so nothing waits for the push.
        let push = if push == Push::Wait { Push::Background } else { push };
        let target = Target::parse(&reference, push, agent.config().registry.as_deref())?;
        let local = target.local(&target.tag_for(&sequence)?);
        let info = SaveInfo {
            ticket: ticket.clone(),
            engine: engine.into(),
            sequence: sequence.clone(),
            reference: reference.clone(),
            state: SaveState::Pending,
            digest: None,
            boundary: None,
            error: None,
            code: None,
            push: None,
        };
        self.add(Entry { info, local, push })?;
        let (agent, engine, turns) = (agent.clone(), engine.to_owned(), Arc::clone(&self.turns));
        let request = SnapshotRequest { sequence: Some(sequence), reference, push, parent, ..SnapshotRequest::default() };
        tokio::spawn(async move {
            let _turn = turns.acquire_owned().await;
            let (saving, save) = (agent.clone(), ticket.clone());
            // On a task of its own: a panic ends this save, and the save says so.
            let done = tokio::spawn(async move { saving.snapshot_for(Some(&save), &engine, request).await }).await;
            let done = done.unwrap_or_else(|panic| Err(Error::Internal(format!("saving: {panic}"))));
            agent.saves().end(&ticket, &done);
            if let Ok(report) = &done {
                agent.rate().note(report);
            }
        });
        Ok(())
    }

    fn add(&self, entry: Entry) -> Result<()> {
        let mut list = self.list.lock();
        if list.iter().any(|other| other.info.ticket == entry.info.ticket) {
            return Err(Error::Invalid(format!("ticket {:?} twice", entry.info.ticket)));
        }
        let open = list.iter().filter(|other| other.info.state == SaveState::Pending).count();
        if open >= OPEN {
            return Err(Error::Busy { engine: entry.info.engine, with: format!("{open} saves") });
        }
        if list.len() >= REMEMBERED
            && let Some(oldest) = list.iter().position(|other| other.info.state != SaveState::Pending)
        {
            list.remove(oldest);
        }
        list.push_back(entry);
        Ok(())
    }

    fn end(&self, ticket: &str, done: &Result<SnapshotReport>) {
        let outcome = done.as_ref().map_or_else(|error| error.code().name(), |_| "ok");
        metrics::counter!(names::SAVES, "outcome" => outcome).increment(1);
        if let Some(entry) = self.list.lock().iter_mut().find(|entry| entry.info.ticket == ticket) {
            let info = &mut entry.info;
            match done {
                Ok(report) => {
                    info.state = SaveState::Saved;
                    (info.digest, info.boundary) = (Some(report.digest), Some(report.boundary));
                    info.push = report.push.as_ref().map(|push| push.id.clone());
                }
                Err(error) => {
                    info.state = SaveState::Failed;
                    (info.error, info.code) = (Some(error.to_string()), Some(error.code()));
                }
            }
        }
        self.ended.send_replace(());
    }

    /// What became of a save.
    #[must_use]
    pub fn get(&self, ticket: &str) -> Option<SaveInfo> {
        self.list.lock().iter().map(|entry| &entry.info).find(|info| info.ticket == ticket).cloned()
    }

    /// The saves of an engine, oldest first.
    #[must_use]
    pub fn of(&self, engine: &str) -> Vec<SaveInfo> {
        self.list.lock().iter().map(|entry| &entry.info).filter(|info| info.engine == engine).cloned().collect()
    }

    /// Waits until no save under this name (`repository:tag`) is under way. Returns whether the last
    /// one was saved and is not pushed anywhere.
    pub(crate) async fn settled(&self, local: &str) -> bool {
        let mut ended = self.ended.subscribe();
        loop {
            let last = {
                let list = self.list.lock();
                let last = list.iter().rev().find(|entry| entry.local == local);
                last.map(|entry| (entry.info.state, entry.push))
            };
            match last {
                Some((SaveState::Pending, _)) => {}
                Some((state, push)) => return state == SaveState::Saved && push == Push::Never,
                None => return false,
            }
            if ended.changed().await.is_err() {
                return false;
            }
        }
    }
}
