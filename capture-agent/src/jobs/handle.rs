//! How a running job tells how far it is, and learns that it is cancelled.

use super::Jobs;
use crate::Agent;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use pfr_client::Progress;
use pfr_schema::agent::{Job, WarmItem};
use pfr_service::Backoff;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// The counters of a running job. All clones are one.
#[derive(Clone, Debug)]
pub(super) struct Live {
    cancelled: Arc<watch::Sender<bool>>,
    moved: Arc<Mutex<Moved>>,
}

#[derive(Debug, Default)]
struct Moved {
    /// Raw bytes of what is finished.
    done: u64,
    /// The transfer under way.
    progress: Option<Progress>,
    /// When the first byte was asked for.
    since: Option<Instant>,
}

impl Moved {
    fn bytes(&self) -> u64 {
        self.done.saturating_add(self.progress.as_ref().map_or(0, Progress::bytes_done))
    }
}

impl Default for Live {
    fn default() -> Self {
        Self { cancelled: Arc::new(watch::Sender::new(false)), moved: Arc::default() }
    }
}

impl Live {
    pub fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    /// Adds what is counted to the job.
    pub fn tell(&self, job: &mut Job) {
        let moved = self.moved.lock();
        job.bytes_done = moved.bytes();
        let seconds = moved.since.map_or(0.0, |since| since.elapsed().as_secs_f64());
        if job.bytes_done == 0 || seconds <= 0.0 {
            return;
        }
        let rate = job.bytes_done as f64 / seconds;
        job.rate = Some(rate);
        job.seconds_left = Some(job.bytes_total.saturating_sub(job.bytes_done) as f64 / rate);
    }
}

/// A running job, as its work sees it.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    jobs: Jobs,
    id: String,
    live: Live,
    /// Held while the job is written: parts of a job that run at the same time write one file.
    saving: Arc<tokio::sync::Mutex<()>>,
}

/// Failures in a row.
#[derive(Debug, Default)]
pub(crate) struct Tries(u32);

impl Handle {
    pub(super) fn new(jobs: Jobs, id: &str, live: &Live) -> Self {
        Self { jobs, id: id.to_owned(), live: live.clone(), saving: Arc::default() }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// Waits until the job is cancelled.
    pub(super) async fn cancelled(&self) {
        // The sender lives as long as this does.
        let _ = self.live.cancelled.subscribe().wait_for(|cancelled| *cancelled).await;
    }

    /// Changes what the list says of the job.
    pub fn update(&self, change: impl FnOnce(&mut Job)) {
        if let Some(entry) = self.jobs.0.jobs.lock().get_mut(&self.id) {
            change(&mut entry.job);
        }
        self.jobs.0.changed.send_replace(());
    }

    /// Changes what the list says of one snapshot of a warm job.
    pub fn item(&self, number: usize, change: impl FnOnce(&mut WarmItem)) {
        self.update(|job| {
            if let Some(item) = job.warm.as_mut().and_then(|warm| warm.items.get_mut(number)) {
                change(item);
            }
        });
    }

    /// Writes the job as it is: so much is known after a kill.
    pub async fn save(&self) {
        let _alone = self.saving.lock().await;
        let Ok(job) = self.jobs.get(&self.id) else { return };
        if let Err(error) = self.jobs.0.files.write(&job).await {
            tracing::error!(job = self.id, %error, "cannot write the file of a job");
        }
    }

    /// Counts what moves from now on.
    pub fn follow(&self, progress: &Progress) {
        let mut moved = self.live.moved.lock();
        moved.since.get_or_insert_with(Instant::now);
        moved.progress = Some(progress.clone());
    }

    /// The transfer has ended: this many bytes are done over all.
    pub fn done(&self, bytes: u64) {
        let mut moved = self.live.moved.lock();
        moved.since.get_or_insert_with(Instant::now);
        (moved.done, moved.progress) = (bytes, None);
    }

    /// Waits before the next try, and says so, if a registry may answer then.
    ///
    /// # Errors
    /// The failure, if not.
    pub async fn again(&self, agent: &Agent, tries: &mut Tries, error: Error) -> Result<()> {
        if !matches!(&error, Error::Client(error) if error.retryable()) {
            return Err(error);
        }
        self.wait(agent, tries, error).await;
        Ok(())
    }

    /// The same for work of this host alone, whose disk or store may fail for a while.
    ///
    /// # Errors
    /// The failure, if a later try cannot succeed.
    pub async fn again_here(&self, agent: &Agent, tries: &mut Tries, error: Error) -> Result<()> {
        if !error.code().retryable() {
            return Err(error);
        }
        self.wait(agent, tries, error).await;
        Ok(())
    }

    async fn wait(&self, agent: &Agent, tries: &mut Tries, error: Error) {
        tries.0 += 1;
        let wait = Backoff::new(agent.config().push_retry, agent.config().push_retry_max).wait(tries.0);
        tracing::warn!(job = self.id, %error, again_in = ?wait, "a job waits for its next try");
        self.update(|job| job.note = Some(format!("{error}; the next try is in {:.1} s", wait.as_secs_f64())));
        tokio::time::sleep(wait).await;
        self.update(|job| job.note = None);
    }
}
