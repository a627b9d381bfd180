//! The schedule of background tasks. Time is tokio's, paused: hours pass in milliseconds.

use async_trait::async_trait;
use pfr_schema::api::{TaskInfo, TaskState};
use pfr_store::{Budget, Clock, Error, Lane, Options, Result, RunEnd, Schedule, Store, Task};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// A store whose clock is tokio's.
async fn store() -> Store {
    let start = Instant::now();
    let clock = Clock::new(move || 1_000_000_000 + u64::try_from(start.elapsed().as_millis()).unwrap());
    Store::open_in_memory(Options { clock, ..Options::default() }).await.unwrap()
}

/// What a run of a [`Probe`] does.
#[derive(Clone, Copy)]
enum Does {
    Finish,
    Fail,
    Panic,
    /// Waits for the end of its budget.
    Wait,
    Take(Duration),
}

/// A task that notes its runs.
struct Probe {
    name: &'static str,
    interval: Duration,
    lane: Lane,
    /// What the first runs do; the last of these goes for all others.
    does: Vec<Does>,
    /// Names and beginnings of runs; shared by several.
    runs: Arc<Mutex<Vec<(&'static str, Instant)>>>,
    running: Arc<Mutex<Vec<&'static str>>>,
}

#[derive(Clone, Default)]
struct Log {
    runs: Arc<Mutex<Vec<(&'static str, Instant)>>>,
    running: Arc<Mutex<Vec<&'static str>>>,
}

impl Log {
    fn probe(&self, name: &'static str, interval: Duration, does: &[Does]) -> Arc<dyn Task> {
        self.probe_in(Lane::Upkeep, name, interval, does)
    }

    fn probe_in(&self, lane: Lane, name: &'static str, interval: Duration, does: &[Does]) -> Arc<dyn Task> {
        let (runs, running) = (Arc::clone(&self.runs), Arc::clone(&self.running));
        Arc::new(Probe { name, interval, lane, does: does.to_vec(), runs, running })
    }

    fn names(&self) -> Vec<&'static str> {
        self.runs.lock().unwrap().iter().map(|(name, _)| *name).collect()
    }

    fn count(&self) -> usize {
        self.runs.lock().unwrap().len()
    }

    /// Time between one run and the next.
    fn gaps(&self) -> Vec<Duration> {
        self.runs.lock().unwrap().windows(2).map(|pair| pair[1].1 - pair[0].1).collect()
    }
}

#[async_trait]
impl Task for Probe {
    fn name(&self) -> &'static str {
        self.name
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    fn lane(&self) -> Lane {
        self.lane
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        let mine = {
            let mut runs = self.runs.lock().unwrap();
            runs.push((self.name, Instant::now()));
            runs.iter().filter(|(name, _)| *name == self.name).count() - 1
        };
        self.running.lock().unwrap().push(self.name);
        let end = match self.does[mine.min(self.does.len() - 1)] {
            Does::Finish => Ok(RunEnd::Finished),
            Does::Fail => Err(Error::Unavailable { what: "packs", reason: "the disk is away".into() }),
            Does::Panic => panic!("a panic that a test asked for"),
            Does::Wait => {
                budget.used_up().await;
                Ok(RunEnd::Stopped)
            }
            Does::Take(time) => {
                sleep(time).await;
                Ok(RunEnd::Finished)
            }
        };
        self.running.lock().unwrap().retain(|name| *name != self.name);
        end
    }
}

/// Starts a schedule, as a process does.
fn start(store: &Store, tasks: Vec<Arc<dyn Task>>) -> Schedule {
    let schedule = Schedule::new(store.clone(), tasks);
    let running = schedule.clone();
    tokio::spawn(async move { running.run().await });
    schedule
}

fn task(schedule: &Schedule, name: &str) -> TaskInfo {
    schedule.tasks().into_iter().find(|task| task.name == name).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_task_that_fails_keeps_its_schedule_with_backoff_and_shows_its_error() {
    let (store, log) = (store().await, Log::default());
    let does = [Does::Fail, Does::Panic, Does::Fail, Does::Fail, Does::Fail, Does::Finish];
    let schedule = start(&store, vec![log.probe("t", 10 * MINUTE, &does)]);
    while log.count() < 5 {
        sleep(Duration::from_secs(1)).await;
    }
    let failed = task(&schedule, "t");
    assert_eq!((failed.runs, failed.errors, failed.succeeded_at), (5, 5, None));
    assert!(failed.error.unwrap().contains("disk is away") && failed.next_run_at.is_some(), "it is tried again");
    sleep(HOUR).await;
    let gaps: Vec<u64> = log.gaps().iter().map(Duration::as_secs).collect();
    assert_eq!(gaps[..5], [30, 60, 120, 240, 480]);
    assert!(gaps[5..].iter().all(|gap| (450..=750).contains(gap)) && gaps.len() > 7, "the schedule again: {gaps:?}");
    let healthy = task(&schedule, "t");
    assert_eq!((healthy.errors, healthy.error), (5, None));
    assert!(healthy.succeeded_at.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_paused_task_runs_in_no_replica_and_stays_paused_after_a_restart() {
    let (store, log) = (store().await, Log::default());
    let replica = || start(&store, vec![log.probe("t", 5 * MINUTE, &[Does::Finish])]);
    let (one, two) = (replica(), replica());
    sleep(20 * MINUTE).await;
    assert!(log.count() >= 6, "{}", log.count());
    let end = store.options().clock.now() + 2 * 3_600_000;
    assert_eq!(one.pause("t", end).await.unwrap().unwrap().state, TaskState::Paused);
    assert!(one.pause("other", end).await.unwrap().is_none());
    let before = log.count();
    sleep(HOUR).await;
    assert_eq!(log.count(), before, "neither replica runs it");
    let told = &two.list().await.unwrap()[0];
    assert_eq!((told.state, told.pause_ends_at), (TaskState::Paused, Some(end)));
    two.stop();
    two.ended().await;
    let restarted = replica();
    sleep(50 * MINUTE).await;
    assert_eq!(log.count(), before, "a restart does not end a pause");
    assert_eq!(restarted.list().await.unwrap()[0].pause_ends_at, Some(end));
    sleep(20 * MINUTE).await;
    assert!(log.count() > before + 2, "a pause ends by itself");
    // And by a request to either of them.
    one.pause("t", end + 24 * 3_600_000).await.unwrap();
    let before = log.count();
    sleep(HOUR).await;
    assert_eq!(log.count(), before);
    assert_eq!(restarted.resume("t").await.unwrap().unwrap().state, TaskState::Idle);
    sleep(MINUTE).await;
    assert_eq!(log.count(), before + 2, "what was due runs soon, in both");
}

#[tokio::test(start_paused = true)]
async fn a_pause_ends_a_run_here_at_once_and_in_another_replica_within_seconds() {
    let (store, log) = (store().await, Log::default());
    let replica = || start(&store, vec![log.probe("t", MINUTE, &[Does::Wait])]);
    let (one, two) = (replica(), replica());
    sleep(2 * MINUTE).await;
    assert_eq!(log.running.lock().unwrap().len(), 2);
    let info = one.pause("t", u64::MAX).await.unwrap().unwrap();
    assert!(info.pause_ends_at.is_some());
    sleep(Duration::from_millis(1)).await;
    assert_eq!((task(&one, "t").state, task(&two, "t").state), (TaskState::Paused, TaskState::Running));
    sleep(Duration::from_secs(11)).await;
    assert_eq!((task(&two, "t").state, task(&two, "t").errors), (TaskState::Paused, 0));
}

#[tokio::test(start_paused = true)]
async fn tasks_of_a_lane_run_one_at_a_time_in_order_and_a_scrub_beside_them() {
    let (store, log) = (store().await, Log::default());
    let takes = [Does::Take(MINUTE)];
    let tasks = vec![
        log.probe("first", 5 * MINUTE, &takes),
        log.probe("second", 5 * MINUTE, &takes),
        log.probe_in(Lane::Scrub, "scrub", 5 * MINUTE, &[Does::Take(HOUR)]),
    ];
    let _schedule = start(&store, tasks);
    for _ in 0..3600 {
        sleep(Duration::from_secs(1)).await;
        let running = log.running.lock().unwrap().clone();
        assert!(!(running.contains(&"first") && running.contains(&"second")), "{running:?}");
    }
    assert!(log.running.lock().unwrap().contains(&"scrub"));
    let upkeep: Vec<&str> = log.names().into_iter().filter(|name| *name != "scrub").collect();
    assert!(upkeep.len() >= 12, "{upkeep:?}");
    for pair in upkeep.chunks_exact(2) {
        assert_eq!(pair, ["first", "second"], "those that are due together keep their order");
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_task_that_one_replica_ran_counts_for_all_and_after_a_restart() {
    let (store, log) = (store().await, Log::default());
    let replica = || start(&store, vec![log.probe_in(Lane::Scrub, "scrub", 7 * 24 * HOUR, &[Does::Finish])]);
    let schedules = [replica(), replica()];
    sleep(HOUR).await;
    assert_eq!(log.count(), 1, "the first run is soon, and by one of them");
    for schedule in &schedules {
        schedule.stop();
        schedule.ended().await;
    }
    let _restarted = [replica(), replica()];
    sleep(5 * 24 * HOUR).await;
    assert_eq!(log.count(), 1, "a restart does not repeat it");
    sleep(3 * 24 * HOUR).await;
    assert_eq!(log.count(), 2, "nor does it put it off");
}

#[tokio::test(start_paused = true)]
async fn a_task_without_interval_runs_when_it_is_woken_and_a_stop_ends_it() {
    let (store, log) = (store().await, Log::default());
    let schedule = start(&store, vec![log.probe("t", Duration::ZERO, &[Does::Finish, Does::Wait])]);
    sleep(HOUR).await;
    assert_eq!((log.count(), task(&schedule, "t").state), (0, TaskState::Off));
    assert!(schedule.wake("t") && !schedule.wake("other"));
    sleep(Duration::from_secs(1)).await;
    assert_eq!((log.count(), task(&schedule, "t").state), (1, TaskState::Off));
    schedule.wake("t");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(task(&schedule, "t").state, TaskState::Running);
    schedule.stop();
    schedule.ended().await;
    assert_eq!((log.count(), log.running.lock().unwrap().len()), (2, 0));
}
