//! Jobs: work that lasts longer than a request. A job warms the local store, or drains the host.
//!
//! Each job is one file. A job goes on when its caller goes away. After a restart of the agent it
//! is listed as interrupted with what was done; the same request again does only the rest.

mod handle;
mod keeps;
mod wanted;
mod warm;

pub(crate) use handle::Handle;
pub(crate) use warm::check_speed;

use crate::Agent;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::{Files, Record};
use crate::metrics as names;
use futures::FutureExt as _;
use handle::Live;
use keeps::Keeps;
use parking_lot::Mutex;
use pfr_schema::agent::{Drain, DrainRequest, Job, JobRequest, JobState};
use pfr_schema::{Digest, RepositoryName};
use pfr_store::Store;
use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Jobs that are under way at a time.
const OPEN: usize = 16;
/// Jobs that have ended and stay in the list.
const REMEMBERED: usize = 100;
/// How long they stay there: a week.
const REMEMBERED_FOR: Duration = Duration::from_secs(7 * 24 * 60 * 60);

impl Record for Job {
    const WHAT: &'static str = "list of jobs";
    // A drain of thousands of sequences lists each.
    const MAX_BYTES: u64 = 64 << 20;

    fn id(&self) -> &str {
        &self.id
    }
}

/// The jobs of an agent. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Jobs(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    files: Files<Job>,
    keeps: Keeps,
    /// By id, which is by age.
    jobs: Mutex<BTreeMap<String, Entry>>,
    /// Raised whenever a job changes.
    changed: watch::Sender<()>,
    tasks: Mutex<JoinSet<()>>,
    /// Held while a snapshot is fetched: two jobs that want it fetch it once.
    fetches: Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>,
}

#[derive(Debug)]
struct Entry {
    job: Job,
    /// While it is under way.
    live: Option<Live>,
}

impl Entry {
    /// The job as it is now.
    fn now(&self) -> Job {
        let mut job = self.job.clone();
        if let Some(live) = &self.live {
            live.tell(&mut job);
        }
        job
    }
}

impl Jobs {
    /// Opens the list. Jobs that were under way when the agent ended are interrupted.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) async fn open(config: &Config, store: Store) -> Result<Self> {
        let files: Files<Job> = Files::open(config.jobs_dir()).await?;
        let mut jobs = files.load().await?;
        for job in jobs.values_mut().filter(|job| job.state.is_open()) {
            job.state = JobState::Interrupted;
            (job.note, job.finished_at) = (None, Some(store.options().clock.now()));
            // A start needs no free space. The next start finds the job under way again, and says
            // the same of it.
            if let Err(error) = files.write(job).await {
                tracing::warn!(job = job.id, %error, "cannot write the file of an interrupted job");
            }
        }
        let jobs = jobs.into_iter().map(|(id, job)| (id, Entry { job, live: None })).collect();
        let keeps = Keeps::open(config, store.clone()).await?;
        Ok(Self(Arc::new(Inner {
            store,
            files,
            keeps,
            jobs: Mutex::new(jobs),
            changed: watch::Sender::new(()),
            tasks: Mutex::default(),
            fetches: Mutex::default(),
        })))
    }

    /// All of them, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<Job> {
        self.0.jobs.lock().values().map(Entry::now).collect()
    }

    /// Those under way, and those that ended at `since` (milliseconds since 1970) or later; oldest
    /// first.
    pub(crate) fn recent(&self, since: u64) -> Vec<Job> {
        let jobs = self.0.jobs.lock();
        let is_recent = |job: &Job| job.state.is_open() || job.finished_at.is_some_and(|at| at >= since);
        jobs.values().filter(|entry| is_recent(&entry.job)).map(Entry::now).collect()
    }

    /// One of them.
    ///
    /// # Errors
    /// [`Error::JobUnknown`].
    pub fn get(&self, id: &str) -> Result<Job> {
        self.0.jobs.lock().get(id).map(Entry::now).ok_or_else(|| Error::JobUnknown { id: id.to_owned() })
    }

    /// Cancels a job, and returns it when it has ended. What it has done stays. A job that has
    /// ended before is returned as it is.
    ///
    /// # Errors
    /// [`Error::JobUnknown`].
    pub async fn cancel(&self, id: &str) -> Result<Job> {
        {
            let jobs = self.0.jobs.lock();
            let entry = jobs.get(id).ok_or_else(|| Error::JobUnknown { id: id.to_owned() })?;
            entry.live.iter().for_each(Live::cancel);
        }
        self.wait(id).await
    }

    /// Waits until a job has ended.
    ///
    /// # Errors
    /// [`Error::JobUnknown`].
    pub async fn wait(&self, id: &str) -> Result<Job> {
        let mut changed = self.0.changed.subscribe();
        loop {
            let job = self.get(id)?;
            if !job.state.is_open() || changed.changed().await.is_err() {
                return Ok(job);
            }
        }
    }

    /// Ends the work of all jobs at once, as the end of the process does: their files say that they
    /// are under way.
    pub async fn stop(&self) {
        let mut tasks = std::mem::take(&mut *self.0.tasks.lock());
        tasks.shutdown().await;
    }

    /// Raw bytes of the snapshots that eviction leaves alone for a time.
    fn kept_bytes(&self) -> u64 {
        self.0.keeps.bytes()
    }

    async fn keep(&self, repository: &RepositoryName, digest: Digest, ends_at: u64, bytes: u64) -> Result<u64> {
        self.0.keeps.keep(repository, digest, ends_at, bytes).await
    }

    /// The lock of a snapshot that is fetched.
    fn fetch(&self, digest: Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut fetches = self.0.fetches.lock();
        fetches.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = fetches.get(&digest).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        fetches.insert(digest, Arc::downgrade(&lock));
        lock
    }

    /// Adds a job. On disk when it returns.
    async fn add(&self, job: Job) -> Result<Handle> {
        let live = Live::default();
        let handle = Handle::new(self.clone(), &job.id, &live);
        {
            let mut jobs = self.0.jobs.lock();
            let open = jobs.values().filter(|entry| entry.job.state.is_open()).count();
            if open >= OPEN {
                return Err(Error::TooManyJobs { open });
            }
            jobs.insert(job.id.clone(), Entry { job: job.clone(), live: Some(live) });
        }
        if let Err(error) = self.0.files.write(&job).await {
            self.0.jobs.lock().remove(&job.id);
            return Err(error);
        }
        self.0.forget(job.started_at).await;
        self.0.tell();
        Ok(handle)
    }

    /// Records the end of a job.
    async fn end(&self, id: &str, outcome: Result<(), Ending>) {
        let now = self.0.store.options().clock.now();
        let ended = {
            let mut jobs = self.0.jobs.lock();
            let Some(entry) = jobs.get_mut(id) else { return };
            let mut job = entry.now();
            (job.note, job.seconds_left, job.finished_at) = (None, None, Some(now));
            job.state = match outcome {
                Err(Ending::Cancelled) => JobState::Cancelled,
                Err(Ending::Failed(error)) => {
                    job.error = Some(error.problem());
                    JobState::Failed
                }
                Ok(()) if job.error.is_some() => JobState::Failed,
                Ok(()) => JobState::Done,
            };
            job
        };
        // Write the file before waking the waiters.
        if let Err(error) = self.0.files.write(&ended).await {
            tracing::error!(job = id, %error, "cannot write the file of a job");
        }
        let (kind, outcome) = (ended.request.kind(), ended.state.name());
        let error = ended.error.as_ref().map(|problem| problem.detail.clone());
        tracing::info!(job = id, kind, outcome, bytes = ended.bytes_done, error, "job ended");
        metrics::counter!(names::JOBS, "kind" => kind, "outcome" => outcome).increment(1);
        self.0.jobs.lock().insert(id.to_owned(), Entry { job: ended, live: None });
        self.0.tell();
    }
}

impl Inner {
    /// Wakes the waiters, and counts.
    fn tell(&self) {
        let open = self.jobs.lock().values().filter(|entry| entry.job.state.is_open()).count();
        metrics::gauge!(names::JOBS_OPEN).set(open as f64);
        self.changed.send_replace(());
    }

    /// Removes the oldest jobs that have ended.
    async fn forget(&self, now: u64) {
        let old: Vec<String> = {
            let mut jobs = self.jobs.lock();
            let ended = |entry: &Entry| !entry.job.state.is_open();
            let least = now.saturating_sub(REMEMBERED_FOR.as_millis() as u64);
            let beyond = jobs.values().filter(|entry| ended(entry)).count().saturating_sub(REMEMBERED);
            let listed = jobs.values().filter(|entry| ended(entry)).enumerate();
            let old = listed.filter(|(number, entry)| *number < beyond || entry.job.finished_at.is_some_and(|at| at < least));
            let old: Vec<String> = old.map(|(_, entry)| entry.job.id.clone()).collect();
            old.iter().for_each(|id| drop(jobs.remove(id)));
            old
        };
        for id in old {
            if let Err(error) = self.files.remove(&id).await {
                tracing::warn!(job = id, %error, "cannot remove the file of an old job");
            }
        }
    }
}

/// Why a job has ended without doing everything.
enum Ending {
    Cancelled,
    Failed(Box<Error>),
}

impl Agent {
    /// Begins a job, or only plans it. The job goes on by itself.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a request that makes no sense; [`Error::TooManyJobs`]; those of a
    /// plan, if the registry does not answer.
    pub async fn begin(&self, request: JobRequest) -> Result<Job> {
        let mut job = Job {
            id: uuid::Uuid::now_v7().to_string(),
            request: request.clone(),
            state: JobState::Planned,
            started_at: self.store().options().clock.now(),
            finished_at: None,
            bytes_done: 0,
            bytes_total: 0,
            rate: None,
            seconds_left: None,
            note: None,
            error: None,
            warm: None,
            drain: None,
        };
        let plan_only = match &request {
            JobRequest::Warm(request) => {
                self.check_warm(request)?;
                request.plan_only
            }
            JobRequest::Drain(request) => {
                self.check_drain(request)?;
                request.plan_only
            }
        };
        if plan_only {
            match &request {
                JobRequest::Warm(request) => job.warm = Some(self.plan_warm(request).await?),
                JobRequest::Drain(request) => job.drain = Some(self.plan_drain(request).await?),
            }
            let of_drain = job.drain.as_ref().map_or(0, |drain| drain.bytes);
            job.bytes_total = job.warm.as_ref().map_or(of_drain, |warm| warm.bytes);
            return Ok(job);
        }
        job.state = JobState::Running;
        // By itself: if the caller goes away now, no job is listed that nothing works on.
        let begins = pfr_service::task::spawn(self.clone().list_and_work(job.clone(), request));
        begins.await.map_err(|error| Error::Internal(error.to_string()))??;
        Ok(job)
    }

    async fn list_and_work(self, job: Job, request: JobRequest) -> Result<()> {
        let (id, kind) = (job.id.clone(), request.kind());
        let handle = self.jobs().add(job).await?;
        tracing::info!(job = id, kind, "job begins");
        let agent = self.clone();
        let mut tasks = self.jobs().0.tasks.lock();
        while tasks.try_join_next().is_some() {}
        pfr_service::task::spawn_in(&mut tasks, agent.work(handle, request));
        Ok(())
    }

    async fn work(self, handle: Handle, request: JobRequest) {
        let work = async {
            match request {
                JobRequest::Warm(request) => self.warm(&request, &handle).await,
                JobRequest::Drain(request) => self.drain_host(&request, &handle).await,
            }
        };
        let outcome = tokio::select! {
            biased;
            () = handle.cancelled() => Err(Ending::Cancelled),
            worked = AssertUnwindSafe(work).catch_unwind() => match worked {
                Ok(outcome) => outcome.map_err(|error| Ending::Failed(Box::new(error))),
                Err(_) => Err(Ending::Failed(Box::new(Error::Internal("the job panicked".into())))),
            },
        };
        self.jobs().end(handle.id(), outcome).await;
    }

    /// Drains as a job, and waits for its end. The job goes on if the caller does not wait.
    ///
    /// # Errors
    /// As [`Agent::begin`]; [`Error::JobEnded`] if the job was cancelled.
    pub async fn drain(&self, request: DrainRequest) -> Result<Drain> {
        let begun = self.begin(JobRequest::Drain(request)).await?;
        let ended = if begun.state.is_open() { self.jobs().wait(&begun.id).await? } else { begun };
        match (ended.state, ended.drain) {
            (JobState::Planned | JobState::Done | JobState::Failed, Some(drain)) => Ok(drain),
            (state, _) => Err(Error::JobEnded { id: ended.id, how: state.name() }),
        }
    }
}
