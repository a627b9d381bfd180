//! Saves that requests of engines ask for: a few at a time, and remembered, so that a client can
//! ask what became of them. They are forgotten when the agent ends; each saved state has a tag.

use crate::Agent;
use crate::error::{Error, Result};
use crate::metrics as names;
use crate::snapshot::{Deadline, Target};
use parking_lot::Mutex;
use pfr_schema::Reference;
use pfr_schema::agent::{Push, PushState, SaveInfo, SaveState, SnapshotReport, SnapshotRequest};
use pfr_schema::engine::{Automatic, Dropped, Save, Saving};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// Saves that are carried out at a time.
const AT_A_TIME: usize = 4;
/// A save that takes longer than so many times `pause-limit` counts as hung and is given up,
/// because others wait behind it. With default settings, engines hold blocks for a fifth of that.
const PAUSES: u32 = 10;
/// The longest `pause-limit` that counts here: a day. A larger one could overflow the deadline.
const LONGEST_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);
/// Saves that wait or are carried out, of all engines; more are refused.
const OPEN: usize = 256;
/// Automatic saves that wait or are carried out, of all engines; more are dropped.
const AUTOMATIC: usize = 32;
/// Open pushes with which an automatic save that would be pushed is dropped.
const PUSHES: usize = 64;
/// Seconds of its budget that an engine may use at once.
const AT_ONCE: f64 = 10.0;
/// Saves that are remembered.
const REMEMBERED: usize = 1024;

/// Checks the registry of a reference that a request gave: clients of an engine's server name it,
/// and the agent would go to any address of theirs.
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
    /// By engine.
    budgets: Mutex<BTreeMap<String, Budget>>,
    ended: watch::Sender<()>,
}

#[derive(Debug)]
struct Entry {
    info: SaveInfo,
    /// `repository:tag` in the local store.
    local: String,
    push: Push,
    is_automatic: bool,
}

/// New bytes of automatic saves. The cost of a save is known afterwards: a large one leaves a debt.
#[derive(Clone, Copy, Debug)]
struct Budget {
    left: f64,
    at: Instant,
}

impl Budget {
    fn new(rate: f64, now: Instant) -> Self {
        Self { left: rate * AT_ONCE, at: now }
    }

    fn is_used_up(&mut self, rate: f64, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        *self = Self { left: (self.left + passed * rate).min(rate * AT_ONCE), at: now };
        self.left <= 0.0
    }

    fn spend(&mut self, bytes: u64) {
        self.left -= bytes as f64;
    }
}

impl Default for Saves {
    fn default() -> Self {
        let (turns, ended) = (Arc::new(Semaphore::new(AT_A_TIME)), watch::Sender::new(()));
        Self { list: Mutex::default(), turns, budgets: Mutex::default(), ended }
    }
}

impl Saves {
    /// Queues a save, or drops it if no request asked for it. Never waits.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Busy`] if too many wait.
    pub(crate) fn begin(&self, agent: &Agent, engine: &str, save: Save) -> Result<Saving> {
        let Save { ticket, sequence, reference, parent, push, automatic } = save;
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
        let dropped = automatic.and_then(|bounds| self.drops(agent, engine, bounds, push));
        if dropped.is_some() {
            let outcome = if dropped == Some(Dropped::Budget) { "dropped-budget" } else { "dropped-behind" };
            metrics::counter!(names::SAVES, "outcome" => outcome).increment(1);
            return Ok(Saving { dropped });
        }
        self.add(Entry { info, local, push, is_automatic: automatic.is_some() })?;
        let (agent, engine, turns) = (agent.clone(), engine.to_owned(), Arc::clone(&self.turns));
        let request = SnapshotRequest { sequence: Some(sequence), reference, push, parent, ..SnapshotRequest::default() };
        let limit = agent.config().pause_limit.min(LONGEST_PAUSE) * PAUSES;
        pfr_service::task::spawn(async move {
            let _turn = turns.acquire_owned().await;
            let deadline = Deadline { at: Instant::now() + limit, seconds: limit.as_secs() };
            let (saving, save) = (agent.clone(), ticket.clone());
            // On a task of its own: a panic ends this save, and the save says so.
            let done = pfr_service::task::spawn(async move { saving.snapshot_for(&save, deadline, &engine, request).await }).await;
            let done = done.unwrap_or_else(|panic| Err(Error::Internal(format!("saving: {panic}"))));
            if let (Ok(report), Some(Automatic { bytes_per_second: Some(_) })) = (&done, automatic) {
                agent.saves().spend(&report.engine, report.bytes_new);
            }
            agent.saves().end(&ticket, &done);
            if let Ok(report) = &done {
                agent.rate().note(report.bytes_moved, report.total_seconds);
            }
        });
        Ok(Saving::default())
    }

    /// Whether an automatic save is to be dropped: engines save every turn, and the queue
    /// must have a bound.
    fn drops(&self, agent: &Agent, engine: &str, bounds: Automatic, push: Push) -> Option<Dropped> {
        let waiting = |entry: &&Entry| entry.is_automatic && entry.info.state == SaveState::Pending;
        if self.list.lock().iter().filter(waiting).count() >= AUTOMATIC {
            return Some(Dropped::Behind);
        }
        let is_open = |state| matches!(state, PushState::Waiting | PushState::Running);
        if push != Push::Never && agent.pushes().list().iter().filter(|job| is_open(job.state)).count() >= PUSHES {
            return Some(Dropped::Behind);
        }
        let (rate, now) = (bounds.bytes_per_second? as f64, Instant::now());
        let mut budgets = self.budgets.lock();
        let budget = budgets.entry(engine.to_owned()).or_insert_with(|| Budget::new(rate, now));
        budget.is_used_up(rate, now).then_some(Dropped::Budget)
    }

    fn spend(&self, engine: &str, bytes: u64) {
        if let Some(budget) = self.budgets.lock().get_mut(engine) {
            budget.spend(bytes);
        }
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

    /// The tickets of saves that wait or are carried out.
    pub(crate) fn under_way(&self) -> Vec<String> {
        let list = self.list.lock();
        list.iter().filter(|entry| entry.info.state == SaveState::Pending).map(|entry| entry.info.ticket.clone()).collect()
    }

    /// How many of these saves have not ended.
    pub(crate) fn left(&self, tickets: &[String]) -> usize {
        self.under_way().iter().filter(|ticket| tickets.contains(ticket)).count()
    }

    /// Waits until these saves have ended.
    pub(crate) async fn wait(&self, tickets: &[String]) {
        let mut ended = self.ended.subscribe();
        while self.left(tickets) > 0 && ended.changed().await.is_ok() {}
    }

    /// Whether the engine saves this by itself: no request asked for it.
    pub(crate) fn is_automatic(&self, ticket: &str) -> bool {
        self.list.lock().iter().any(|entry| entry.info.ticket == ticket && entry.is_automatic)
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

    /// Waits until no save under this name (`repository:tag`) is under way. Returns whether the
    /// last one that was saved is not pushed anywhere. A save that failed has changed nothing.
    pub(crate) async fn settled(&self, local: &str) -> bool {
        let mut ended = self.ended.subscribe();
        loop {
            let last = {
                let list = self.list.lock();
                let last = list.iter().rev().find(|entry| entry.local == local && entry.info.state != SaveState::Failed);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_kept_on_average_and_saves_no_more_than_some_seconds() {
        let begun = Instant::now();
        let mut budget = Budget::new(100.0, begun);
        let used_up = |budget: &mut Budget, seconds| budget.is_used_up(100.0, begun + Duration::from_secs(seconds));
        assert!(!used_up(&mut budget, 0));
        budget.spend(999);
        assert!(!used_up(&mut budget, 0), "a byte is left");
        budget.spend(2001);
        assert!(used_up(&mut budget, 0) && used_up(&mut budget, 20), "a large save is paid back first");
        assert!(!used_up(&mut budget, 21));
        // An idle hour saves ten seconds.
        assert!(!used_up(&mut budget, 3600));
        budget.spend(1000);
        assert!(used_up(&mut budget, 3600));
    }
}
