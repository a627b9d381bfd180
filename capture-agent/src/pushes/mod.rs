//! Pushes in the background: a queue on disk that continues after a restart.
//!
//! Each job is one file. If the registry does not answer, takes no token or has no room, a job is
//! retried for ever with growing waits. If the registry refuses otherwise, the job fails.

mod work;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::{Files, Record};
use parking_lot::Mutex;
use pfr_schema::agent::{PushJob, PushState};
use pfr_schema::{Digest, Reference};
use pfr_store::Store;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Finished jobs that stay in the list.
const REMEMBERED: usize = 100;
/// Pushes to one registry at a time.
const PER_REGISTRY: usize = 2;

impl Record for PushJob {
    const WHAT: &'static str = "push queue";
    const MAX_BYTES: u64 = 64 << 10;

    fn id(&self) -> &str {
        &self.id
    }
}

/// The queue. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Pushes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Config,
    store: Store,
    files: Files<PushJob>,
    /// By id, which is by age.
    jobs: Mutex<BTreeMap<String, PushJob>>,
    /// Raised whenever a job changes.
    changed: watch::Sender<()>,
    registries: Mutex<HashMap<String, Arc<Semaphore>>>,
    /// Held while a push is promised, and while a pin ends because none is.
    turn: tokio::sync::Mutex<()>,
    /// Aborted when the queue is dropped. The tasks do not keep the queue alive.
    tasks: Mutex<JoinSet<()>>,
}

impl Pushes {
    /// Opens the queue and continues its jobs.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub async fn open(config: &Config, store: Store) -> Result<Self> {
        let files: Files<PushJob> = Files::open(config.pushes_dir()).await?;
        let mut jobs = files.load().await?;
        for job in jobs.values_mut().filter(|job| job.state == PushState::Running) {
            job.state = PushState::Waiting;
        }
        let found: Vec<PushJob> = jobs.values().cloned().collect();
        let pushes = Self(Arc::new(Inner {
            config: config.clone(),
            store,
            files,
            jobs: Mutex::new(jobs),
            changed: watch::Sender::new(()),
            registries: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            tasks: Mutex::default(),
        }));
        for job in found {
            match job.state {
                // The agent may have ended between the push and the unpinning.
                PushState::Done => pushes.0.unpin(&job.id, job.digest, &job.reference).await,
                PushState::Failed => {}
                PushState::Waiting | PushState::Running => pushes.settle(&job).await,
            }
        }
        Ok(pushes)
    }

    /// Adds a push of a snapshot of the local store to `reference` (with host). On disk when it
    /// returns.
    ///
    /// # Errors
    /// As [`Pushes::promise`].
    pub async fn add(&self, snapshot: Digest, reference: &str) -> Result<PushJob> {
        let (pushes, reference) = (self.clone(), reference.to_owned());
        let add = async move {
            let job = pushes.promise(snapshot, &reference).await?;
            // Until the registry has it this is the only copy.
            pushes.0.pin(&Target::parse(&reference)?, snapshot, true).await;
            pushes.begin(&job);
            Ok::<_, Error>(job)
        };
        // In a task of its own: a job that was listed and not begun would hold up all later pushes
        // to its tag.
        pfr_service::task::spawn(add).await.map_err(|panic| Error::Internal(format!("adding a push: {panic}")))?
    }

    /// Adds a push of a snapshot that will be committed to the repository of `reference`. The job
    /// is on disk when this returns, and not started. Call [`Pushes::begin`] next, or
    /// [`Pushes::settle`] if the outcome of the commit is unknown.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a reference that names no registry or a snapshot by digest;
    /// [`crate::Error::Token`]; [`crate::Error::Io`].
    pub(crate) async fn promise(&self, snapshot: Digest, reference: &str) -> Result<PushJob> {
        let target = Target::parse(reference)?;
        self.0.config.remote(&target.registry)?;
        let job = PushJob {
            id: uuid::Uuid::now_v7().to_string(),
            digest: snapshot,
            reference: reference.into(),
            state: PushState::Waiting,
            attempts: 0,
            error: None,
            code: None,
            bytes_sent: 0,
        };
        // Insert the job first: the end of another push then sees it and does not unpin the
        // snapshot.
        let turn = self.0.turn.lock().await;
        self.0.jobs.lock().insert(job.id.clone(), job.clone());
        drop(turn);
        if let Err(error) = self.0.files.write(&job).await {
            self.take_back(&job).await;
            return Err(error);
        }
        self.0.changed.send_replace(());
        Ok(job)
    }

    /// Begins a promised push.
    pub(crate) fn begin(&self, job: &PushJob) {
        self.start(job.id.clone());
    }

    /// Begins a promised push if its snapshot is in the store, and forgets it if not.
    pub(crate) async fn settle(&self, job: &PushJob) {
        match Target::parse(&job.reference) {
            Ok(target) if !self.0.pin(&target, job.digest, true).await => {
                tracing::warn!(push = job.id, snapshot = %job.digest, "push dropped: its snapshot is not in the store");
                self.take_back(job).await;
            }
            _ => self.begin(job),
        }
    }

    /// Forgets a promised push.
    async fn take_back(&self, job: &PushJob) {
        self.0.jobs.lock().remove(&job.id);
        self.0.changed.send_replace(());
        if let Err(error) = self.0.files.remove(&job.id).await {
            tracing::warn!(push = job.id, %error, "cannot remove the file of a dropped push");
        }
        self.0.unpin(&job.id, job.digest, &job.reference).await;
    }

    /// Waits until a push is done or has failed for good.
    pub async fn wait(&self, id: &str) -> Option<PushJob> {
        self.wait_until(id, PushJob::is_finished).await
    }

    /// The same, or until it needs another token, or room in a quota: a user has to provide these,
    /// and learns of it from the job.
    pub async fn wait_unless_stuck(&self, id: &str) -> Option<PushJob> {
        self.wait_until(id, |job| job.is_finished() || job.needs_user()).await
    }

    async fn wait_until(&self, id: &str, is_over: impl Fn(&PushJob) -> bool) -> Option<PushJob> {
        let mut changed = self.0.changed.subscribe();
        loop {
            let job = self.0.jobs.lock().get(id).cloned()?;
            if is_over(&job) || changed.changed().await.is_err() {
                return Some(job);
            }
        }
    }

    /// All of them, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<PushJob> {
        self.0.jobs.lock().values().cloned().collect()
    }

    /// Whether a push to this reference has not ended.
    #[must_use]
    pub(crate) fn waits(&self, reference: &str) -> bool {
        self.0.jobs.lock().values().any(|job| job.reference == reference && !job.is_finished())
    }

    fn start(&self, id: String) {
        let mut tasks = self.0.tasks.lock();
        while tasks.try_join_next().is_some() {}
        pfr_service::task::spawn_in(&mut tasks, work::run(Arc::downgrade(&self.0), id));
    }
}

/// A reference to push to.
#[derive(Clone, Debug)]
struct Target {
    registry: String,
    repository: pfr_schema::RepositoryName,
    tag: Option<pfr_schema::Tag>,
}

impl Target {
    fn parse(text: &str) -> Result<Self> {
        let reference: Reference = text.parse()?;
        let registry = reference.registry.ok_or_else(|| Error::Invalid(format!("{text:?} names no registry to push to")))?;
        let tag = reference.selector.map(|selector| selector.tag().cloned().ok_or(selector)).transpose();
        let tag = tag.map_err(|_| Error::Invalid(format!("{text:?}: a push goes to a tag")))?;
        Ok(Self { registry, repository: reference.repository, tag })
    }
}
