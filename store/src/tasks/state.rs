//! What one process knows of a task: when it ran, how it ended, and when it runs next.

use super::{Budget, Lane, RunEnd, Task};
use crate::error::Result;
use parking_lot::Mutex;
use pfr_schema::api::{TaskInfo, TaskState};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The first wait after a failed run; it doubles with each failure, up to the interval.
const RETRY: Duration = Duration::from_secs(30);

/// A task of a schedule.
pub(super) struct Entry {
    pub(super) task: Arc<dyn Task>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The budget of the run that is under way, and when it began.
    running: Option<(Budget, Instant)>,
    /// When the next run is due.
    due: Option<Instant>,
    /// It was due, and paused.
    postponed: bool,
    paused_until: Option<u64>,
    runs: u64,
    errors: u64,
    /// Runs that failed since the last that succeeded.
    failures: u32,
    error: Option<String>,
    started_at: Option<u64>,
    succeeded_at: Option<u64>,
    took: Option<Duration>,
    busy: Duration,
}

impl Entry {
    pub(super) fn new(task: Arc<dyn Task>) -> Self {
        Self { task, state: Mutex::default() }
    }

    pub(super) fn lane(&self) -> Lane {
        self.task.lane()
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.state.lock().due
    }

    /// Whether a run is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|due| due <= now)
    }

    /// Sets when the next run is due, after `wait`.
    pub(super) fn set_due(&self, now: Instant, wait: Duration) {
        self.state.lock().due = Some(now + wait);
    }

    /// The task is paused: it is looked at again after `wait`.
    pub(super) fn postpone(&self, now: Instant, wait: Duration) {
        let mut state = self.state.lock();
        state.due = Some(now + wait);
        state.postponed = true;
    }

    /// Notes until when it is paused, as last read. Ends the run that is under way.
    pub(super) fn set_paused(&self, until: Option<u64>) {
        let mut state = self.state.lock();
        state.paused_until = until;
        if until.is_some()
            && let Some((budget, _)) = &state.running
        {
            budget.end();
        }
        // A task that waited for the end of its pause runs at once.
        if until.is_none() && std::mem::take(&mut state.postponed) {
            state.due = Some(Instant::now());
        }
    }

    /// Until when it is paused, as last read.
    pub(super) fn paused_until(&self) -> Option<u64> {
        self.state.lock().paused_until
    }

    /// A run begins.
    pub(super) fn begin(&self, now: u64) -> Budget {
        let budget = Budget::default();
        let mut state = self.state.lock();
        state.running = Some((budget.clone(), Instant::now()));
        state.started_at = Some(now);
        (state.due, state.postponed) = (None, false);
        budget
    }

    /// Ends the run that is under way.
    pub(super) fn stop(&self) {
        if let Some((budget, _)) = &self.state.lock().running {
            budget.end();
        }
    }

    /// A run has ended. Returns after how long a failed one is tried again.
    pub(super) fn ended(&self, result: &Result<RunEnd>, now: u64) -> Option<Duration> {
        let mut state = self.state.lock();
        let took = state.running.take().map(|(_, began)| began.elapsed()).unwrap_or_default();
        state.runs += 1;
        state.took = Some(took);
        state.busy += took;
        match result {
            Ok(RunEnd::Stopped) => None,
            Ok(RunEnd::Finished) => {
                state.succeeded_at = Some(now);
                (state.failures, state.error) = (0, None);
                None
            }
            Err(error) => {
                state.errors += 1;
                state.failures = state.failures.saturating_add(1);
                state.error = Some(error.to_string());
                Some(retry_in(self.task.interval(), state.failures))
            }
        }
    }

    /// What operators are told.
    pub(super) fn info(&self, now: u64) -> TaskInfo {
        let state = self.state.lock();
        let pause_ends_at = state.paused_until.filter(|until| *until > now);
        let millis = |wait: Duration| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let next = state.due.map(|due| now.saturating_add(millis(due.saturating_duration_since(Instant::now()))));
        TaskInfo {
            name: self.task.name().to_owned(),
            state: match (&state.running, pause_ends_at) {
                (Some(_), _) => TaskState::Running,
                (None, Some(_)) => TaskState::Paused,
                (None, None) if state.due.is_none() && self.task.interval().is_zero() => TaskState::Off,
                (None, None) => TaskState::Idle,
            },
            interval_seconds: self.task.interval().as_secs(),
            runs: state.runs,
            errors: state.errors,
            busy_seconds: state.busy.as_secs_f64(),
            started_at: state.started_at,
            succeeded_at: state.succeeded_at,
            last_seconds: state.took.map(|took| took.as_secs_f64()),
            error: state.error.clone(),
            next_run_at: next.max(pause_ends_at.filter(|_| next.is_some())),
            pause_ends_at,
        }
    }
}

/// When a failed run is tried again: soon, then later after each failure, never later than the
/// schedule says. A task without an interval waits to be woken.
fn retry_in(interval: Duration, failures: u32) -> Duration {
    RETRY.saturating_mul(1 << (failures - 1).min(16)).min(interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_runs_are_tried_again_soon_then_as_often_as_the_schedule_says() {
        let (minute, week) = (Duration::from_secs(60), Duration::from_secs(7 * 86_400));
        let waits = |interval, n| (1..=n).map(|failures| retry_in(interval, failures).as_secs()).collect::<Vec<_>>();
        assert_eq!(waits(minute, 4), [30, 60, 60, 60]);
        assert_eq!(waits(week, 6), [30, 60, 120, 240, 480, 960]);
        assert_eq!(retry_in(week, u32::MAX), week);
    }
}
