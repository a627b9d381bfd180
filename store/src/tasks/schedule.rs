//! The one place where background work is started.

use super::notes::Note;
use super::state::Entry;
use super::{Budget, Lane, RunEnd, Task};
use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use futures::future::{join_all, pending};
use pfr_schema::api::TaskInfo;
use pfr_service::backoff::jitter;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

/// How often a process looks whether another one has paused a task that runs, or has resumed one.
const LOOK: Duration = Duration::from_secs(10);
/// Interval from which on all processes share the work: a run of one of them counts for all, also
/// after a restart. Below it, asking costs more than running.
const SHARED: Duration = Duration::from_secs(3600);
/// How long reading or writing a note may take.
const NOTE: Duration = Duration::from_secs(5);
/// Wait before the first run of a shared task that never ran.
const FIRST: Duration = Duration::from_secs(600);
/// Factor of an interval: replicas that started together drift apart.
const DRIFT: Range<f64> = 0.75..1.25;

/// Tasks of a process, and when they run. Clones are one schedule.
#[derive(Clone)]
pub struct Schedule(Arc<Inner>);

struct Inner {
    store: Store,
    entries: Vec<Arc<Entry>>,
    stopping: Budget,
    /// A due time has changed.
    changed: Notify,
    /// Lanes that run.
    lanes: watch::Sender<usize>,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.entries.iter().map(|entry| entry.task.name())).finish()
    }
}

impl Schedule {
    /// A schedule that runs nothing yet. In a lane, tasks that are due together run in this order.
    #[must_use]
    pub fn new(store: Store, tasks: Vec<Arc<dyn Task>>) -> Self {
        let entries = tasks.into_iter().map(|task| Arc::new(Entry::new(task))).collect();
        Self(Arc::new(Inner { store, entries, stopping: Budget::default(), changed: Notify::new(), lanes: watch::Sender::new(0) }))
    }

    /// Runs tasks until [`Self::stop`].
    #[boxed]
    pub async fn run(&self) {
        let mut lanes = JoinSet::new();
        for lane in Lane::ALL {
            let schedule = self.clone();
            schedule.0.lanes.send_modify(|lanes| *lanes += 1);
            pfr_service::task::spawn_in(&mut lanes, async move {
                schedule.lane(lane).await;
                schedule.0.lanes.send_modify(|lanes| *lanes -= 1);
            });
        }
        while let Some(ended) = lanes.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "background tasks ended by a bug: no more of them run in this process");
            }
        }
    }

    /// Ends the schedule, and each run that is under way.
    pub fn stop(&self) {
        self.0.stopping.end();
        self.0.entries.iter().for_each(|entry| entry.stop());
    }

    /// Waits until nothing runs.
    #[boxed]
    pub async fn ended(&self) {
        // An error means that the sender is gone, and it is here.
        let _ = self.0.lanes.subscribe().wait_for(|lanes| *lanes == 0).await;
    }

    /// Runs a task soon, whatever its interval says. Returns whether there is such a task.
    pub fn wake(&self, name: &str) -> bool {
        let Some(entry) = self.entry(name) else { return false };
        entry.set_due(Instant::now(), Duration::ZERO);
        self.0.changed.notify_waiters();
        true
    }

    /// All tasks, with pauses as last read.
    #[must_use]
    pub fn tasks(&self) -> Vec<TaskInfo> {
        let now = self.now();
        self.0.entries.iter().map(|entry| entry.info(now)).collect()
    }

    /// All tasks, with pauses as they are now.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[boxed]
    pub async fn list(&self) -> Result<Vec<TaskInfo>> {
        let read = self.0.entries.iter().map(|entry| async move {
            let until = self.0.store.read_note(entry.task.name(), Note::PausedUntil).await?;
            entry.set_paused(until.filter(|until| *until > self.now()));
            Ok::<_, Error>(())
        });
        join_all(read).await.into_iter().collect::<Result<()>>()?;
        self.0.changed.notify_waiters();
        Ok(self.tasks())
    }

    /// Pauses a task in every process that uses the store, until a time in milliseconds since 1970.
    /// A current run ends early: in this process at once, in others within seconds. `None` if there
    /// is no such task.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`]: nothing is paused.
    #[boxed]
    pub async fn pause(&self, name: &str, until: u64) -> Result<Option<TaskInfo>> {
        self.note_pause(name, until).await
    }

    /// Ends a pause, in every process that works on the store. `None` if there is no such task.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`]: it stays paused.
    #[boxed]
    pub async fn resume(&self, name: &str) -> Result<Option<TaskInfo>> {
        self.note_pause(name, 0).await
    }

    async fn note_pause(&self, name: &str, until: u64) -> Result<Option<TaskInfo>> {
        let Some(entry) = self.entry(name) else { return Ok(None) };
        self.0.store.write_note(name, Note::PausedUntil, until).await?;
        entry.set_paused(Some(until).filter(|until| *until > self.now()));
        self.0.changed.notify_waiters();
        Ok(Some(entry.info(self.now())))
    }

    fn entry(&self, name: &str) -> Option<&Arc<Entry>> {
        self.0.entries.iter().find(|entry| entry.task.name() == name)
    }

    fn now(&self) -> u64 {
        self.0.store.options().clock.now()
    }

    async fn lane(&self, lane: Lane) {
        let entries: Vec<&Arc<Entry>> = self.0.entries.iter().filter(|entry| entry.lane() == lane).collect();
        let factor = jitter(DRIFT);
        for entry in &entries {
            self.plan_first(entry, factor).await;
        }
        loop {
            let mut changed = std::pin::pin!(self.0.changed.notified());
            changed.as_mut().enable();
            let (mut ran, round) = (Vec::new(), Instant::now());
            for entry in entries.iter().filter(|entry| entry.is_due(round)) {
                if self.0.stopping.is_used_up() {
                    return;
                }
                if let Some(retry) = self.turn(entry).await {
                    ran.push((*entry, retry));
                }
            }
            // One factor for the round: tasks with the same interval stay together, in their order.
            let (now, factor) = (Instant::now(), jitter(DRIFT));
            for (entry, retry) in ran {
                let interval = entry.task.interval();
                if entry.due().is_none() && !interval.is_zero() {
                    entry.set_due(now, retry.unwrap_or(interval.mul_f64(factor)));
                }
            }
            let next = entries.iter().filter_map(|entry| entry.due()).min();
            let due = async {
                match next {
                    Some(next) => sleep_until(next).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = self.0.stopping.used_up() => return,
                () = changed => {}
                () = due => {}
            }
        }
    }

    /// Sets when a task is due first.
    async fn plan_first(&self, entry: &Entry, factor: f64) {
        let interval = entry.task.interval();
        if interval.is_zero() || entry.due().is_some() {
            return;
        }
        let wait = match interval < SHARED {
            true => interval.mul_f64(factor),
            false => self.shared_wait(entry, interval).await.unwrap_or(FIRST.mul_f64(factor)),
        };
        entry.set_due(Instant::now(), wait);
    }

    /// How long a shared task still waits; `None` if it never succeeded, or that cannot be read.
    async fn shared_wait(&self, entry: &Entry, interval: Duration) -> Option<Duration> {
        let succeeded = self.in_time(self.0.store.read_note(entry.task.name(), Note::SucceededAt)).await.ok().flatten()?;
        let age = Duration::from_millis(self.now().saturating_sub(succeeded));
        // Up to a tenth of the interval later: a task that is due in all replicas at once would run
        // in all of them.
        Some(interval.saturating_sub(age) + interval.mul_f64(jitter(0.0..0.1)))
    }

    /// Runs a task that is due, unless it is paused or another process ran it. If it ran: when it
    /// is tried again in case it failed.
    async fn turn(&self, entry: &Arc<Entry>) -> Option<Option<Duration>> {
        if let Some(until) = self.read_pause(entry).await {
            entry.postpone(Instant::now(), LOOK.min(Duration::from_millis(until.saturating_sub(self.now()).max(1))));
            return None;
        }
        let (name, interval) = (entry.task.name(), entry.task.interval());
        if interval >= SHARED
            && let Some(wait) = self.shared_wait(entry, interval).await.filter(|wait| *wait > interval / 4)
        {
            tracing::debug!(task = name, "background task skipped: another process ran it");
            entry.set_due(Instant::now(), wait);
            return None;
        }
        let budget = entry.begin(self.now());
        if self.0.stopping.is_used_up() {
            budget.end();
        }
        let task = Arc::clone(&entry.task);
        let mut run = pfr_service::task::spawn(async move { task.run(&budget).await });
        let paused_elsewhere = async {
            loop {
                sleep(LOOK).await;
                self.read_pause(entry).await;
            }
        };
        let result = tokio::select! {
            result = &mut run => result.unwrap_or_else(|error| Err(Error::Internal(format!("task {name}: {error}")))),
            never = paused_elsewhere => never,
        };
        let retry = entry.ended(&result, self.now());
        match &result {
            Ok(RunEnd::Finished) if interval >= SHARED => {
                if let Err(error) = self.in_time(self.0.store.write_note(name, Note::SucceededAt, self.now())).await {
                    tracing::warn!(%error, task = name, "noting the end of a background task failed: another process may repeat the task");
                }
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, task = name, retry_in_seconds = retry.map(|wait| wait.as_secs()), "background task failed")
            }
        }
        Some(retry)
    }

    /// Until when a task is paused. If that cannot be read, the last answer counts.
    async fn read_pause(&self, entry: &Entry) -> Option<u64> {
        let now = self.now();
        match self.in_time(self.0.store.read_note(entry.task.name(), Note::PausedUntil)).await {
            Ok(until) => entry.set_paused(until.filter(|until| *until > now)),
            Err(error) => tracing::debug!(%error, task = entry.task.name(), "the pause of a background task cannot be read"),
        }
        entry.paused_until().filter(|until| *until > now)
    }

    /// Waits for a note, within its time and until the schedule ends.
    async fn in_time<T>(&self, note: impl Future<Output = Result<T>>) -> Result<T> {
        let late = |reason: &str| Error::Unavailable { what: "packs", reason: reason.to_owned() };
        tokio::select! {
            note = note => note,
            () = sleep(NOTE) => Err(late("no answer in time")),
            () = self.0.stopping.used_up() => Err(late("the process stops")),
        }
    }
}
