//! One push job: attempts, waits, and the outcome.

use super::{Inner, PER_REGISTRY, REMEMBERED, Target};
use crate::error::Error;
use pfr_client::{Progress, PushReport, PushTarget, Source};
use pfr_schema::agent::{PushJob, PushState};
use pfr_schema::codec::Compression;
use pfr_schema::{Digest, ErrorCode};
use pfr_service::Backoff;
use pfr_store::Pin;
use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::Semaphore;
use tracing::Instrument as _;

/// Characters of an error that a job keeps.
const ERROR: usize = 4096;

/// Pushes until the registry accepts or refuses. Ends when the queue is dropped, too.
pub(super) async fn run(queue: Weak<Inner>, id: String) {
    if wait_for_older(&queue, &id).await.is_none() {
        return;
    }
    loop {
        let Some(inner) = queue.upgrade() else { return };
        let Some((job, places)) = inner.begin(&id) else { return };
        drop(inner);
        let Ok(place) = places.acquire_owned().await else { return };
        let Some(inner) = queue.upgrade() else { return };
        inner.change(&id, |job| job.state = PushState::Running);
        let attempt = inner.attempt(&job);
        drop(inner);
        // Nothing waits for it: it begins a trace.
        let outcome = attempt.instrument(tracing::info_span!("push snapshot", "pf.push" = id.as_str())).await;
        drop(place);
        let Some(inner) = queue.upgrade() else { return };
        let wait = inner.settle(&id, outcome).await;
        drop(inner);
        match wait {
            Some(wait) => tokio::time::sleep(wait).await,
            None => return,
        }
    }
}

/// Pushes to one tag run in the order of their requests. Otherwise a retry of an old push would
/// move the tag back.
async fn wait_for_older(queue: &Weak<Inner>, id: &str) -> Option<()> {
    let mut changed = queue.upgrade()?.changed.subscribe();
    loop {
        {
            let inner = queue.upgrade()?;
            let jobs = inner.jobs.lock();
            let reference = &jobs.get(id)?.reference;
            let mut older = jobs.range(..id.to_owned()).map(|(_, job)| job);
            if !older.any(|job| job.reference == *reference && !job.is_finished()) {
                return Some(());
            }
        }
        changed.changed().await.ok()?;
    }
}

impl Inner {
    /// The job, and the permits of its registry. `None` if the job is gone.
    fn begin(&self, id: &str) -> Option<(PushJob, Arc<Semaphore>)> {
        let job = self.jobs.lock().get(id).cloned()?;
        let registry = Target::parse(&job.reference).map(|target| target.registry).unwrap_or_default();
        let mut registries = self.registries.lock();
        let places = registries.entry(registry).or_insert_with(|| Arc::new(Semaphore::new(PER_REGISTRY)));
        Some((job, Arc::clone(places)))
    }

    fn change(&self, id: &str, change: impl FnOnce(&mut PushJob)) -> Option<PushJob> {
        let mut jobs = self.jobs.lock();
        let job = jobs.get_mut(id)?;
        change(job);
        let job = job.clone();
        let open = jobs.values().filter(|job| !job.is_finished()).count();
        drop(jobs);
        metrics::gauge!(crate::metrics::PUSHES_OPEN).set(open as f64);
        self.changed.send_replace(());
        Some(job)
    }

    /// One attempt. The future does not keep the queue alive.
    fn attempt(&self, job: &PushJob) -> impl Future<Output = Result<PushReport, Error>> + Send + use<> {
        let (config, digest, reference) = (self.config.clone(), job.digest, job.reference.clone());
        let source = Source::Store { store: self.store.clone(), snapshot: digest };
        async move {
            let Target { registry, repository, tag } = Target::parse(&reference)?;
            let remote = config.remote(&registry)?;
            // Stored frames stay as they are.
            let target = PushTarget { repository, tag, if_tag_is: None, parents: Vec::new(), compression: Compression::Off };
            Ok(pfr_client::push(&source, &remote, target, &Progress::default()).await?)
        }
    }

    /// Records the outcome of an attempt. Returns the wait before the next attempt, if there is
    /// one.
    async fn settle(&self, id: &str, outcome: Result<PushReport, Error>) -> Option<Duration> {
        let again = outcome.as_ref().is_err_and(retryable);
        // Write the file before waking the waiters.
        let mut settled = self.jobs.lock().get(id).cloned()?;
        settled.attempts = settled.attempts.saturating_add(1);
        (settled.state, settled.error) = match &outcome {
            Ok(_) => (PushState::Done, None),
            Err(error) if again => (PushState::Waiting, Some(said(error))),
            Err(error) => (PushState::Failed, Some(said(error))),
        };
        settled.code = outcome.as_ref().err().map(Error::code);
        settled.bytes_sent = outcome.as_ref().map_or(0, |report| report.bytes_sent);
        if let Err(error) = self.files.write(&settled).await {
            // After a restart it is pushed again, which sends nothing twice.
            tracing::error!(push = id, %error, "cannot write the file of a push");
        }
        let (attempts, snapshot, reference) = (settled.attempts, settled.digest, settled.reference.clone());
        self.change(id, move |job| *job = settled);
        match outcome {
            Ok(report) => {
                tracing::info!(push = id, %snapshot, reference, attempts, bytes_sent = report.bytes_sent, "snapshot pushed");
                count("done", report.bytes_sent);
                self.unpin(id, snapshot, &reference).await;
            }
            Err(error) if again => {
                let wait = Backoff::new(self.config.push_retry, self.config.push_retry_max).wait(attempts);
                tracing::warn!(push = id, %snapshot, reference, attempts, %error, again_in = ?wait, "push attempt failed, retrying");
                count("retried", 0);
                // `pf push` to another registry takes the pin back, but without the snapshot this
                // push would fail for good.
                if let Ok(target) = Target::parse(&reference) {
                    self.pin(&target, snapshot, true).await;
                }
                return Some(wait);
            }
            Err(error) => {
                tracing::error!(push = id, %snapshot, reference, attempts, %error, "push failed, not retrying");
                count("failed", 0);
            }
        }
        self.forget().await;
        None
    }

    /// Pins a snapshot of the local store until it is pushed, or removes that pin; pins of users
    /// are separate. The snapshot is looked up in the repository that it is pushed to. Returns
    /// false if it is not there.
    pub(super) async fn pin(&self, target: &Target, snapshot: Digest, pinned: bool) -> bool {
        match self.store.pin(&target.repository, &snapshot, Pin::UntilPushed, pinned).await {
            Ok(_) => true,
            Err(pfr_store::Error::SnapshotUnknown { .. } | pfr_store::Error::RepositoryUnknown(_)) => false,
            Err(error) => {
                tracing::warn!(%snapshot, pinned, %error, "cannot change the pin of a snapshot");
                true
            }
        }
    }

    /// Unpins the snapshot once no open job of its repository needs it: a pin is of one repository.
    /// A snapshot whose push failed for good stays pinned until another push of it succeeds: this
    /// host has the only copy.
    pub(super) async fn unpin(&self, id: &str, snapshot: Digest, reference: &str) {
        let Ok(target) = Target::parse(reference) else { return };
        let is_here = |job: &PushJob| Target::parse(&job.reference).is_ok_and(|other| other.repository == target.repository);
        let waits = |job: &PushJob| job.id != id && job.digest == snapshot && !job.is_finished() && is_here(job);
        let _turn = self.turn.lock().await;
        if !self.jobs.lock().values().any(waits) {
            self.pin(&target, snapshot, false).await;
        }
    }

    /// Removes the oldest finished jobs, and failed jobs whose snapshot was pushed later, with
    /// their pins. Other failed jobs stay: they are the only record of a snapshot that no registry
    /// has.
    async fn forget(&self) {
        let (old, made_good): (Vec<String>, Vec<PushJob>) = {
            let mut jobs = self.jobs.lock();
            let done: Vec<String> = jobs.values().filter(|job| job.state == PushState::Done).map(|job| job.id.clone()).collect();
            let elsewhere: HashSet<Digest> = jobs.values().filter(|job| job.state == PushState::Done).map(|job| job.digest).collect();
            let is_made_good = |job: &&PushJob| job.state == PushState::Failed && elsewhere.contains(&job.digest);
            let made_good: Vec<PushJob> = jobs.values().filter(is_made_good).cloned().collect();
            let mut old: Vec<String> = made_good.iter().map(|job| job.id.clone()).collect();
            old.extend_from_slice(&done[..done.len().saturating_sub(REMEMBERED)]);
            old.iter().for_each(|id| drop(jobs.remove(id)));
            (old, made_good)
        };
        // The file goes last: it is what a restart knows of the pin.
        for job in &made_good {
            self.unpin(&job.id, job.digest, &job.reference).await;
        }
        for id in old {
            if let Err(error) = self.files.remove(&id).await {
                tracing::warn!(push = id, %error, "cannot remove the file of a finished push");
            }
        }
    }
}

/// The error as the job keeps it. A registry may say more than fits into the file of a job.
fn said(error: &Error) -> String {
    error.to_string().chars().take(ERROR).collect()
}

fn count(outcome: &'static str, bytes: u64) {
    metrics::counter!(crate::metrics::PUSHES, "outcome" => outcome).increment(1);
    metrics::counter!(crate::metrics::PUSH_BYTES).increment(bytes);
}

/// Whether a later attempt can succeed: the registry did not answer, or its answer is retryable. A
/// quota has room again when something was deleted, and a token is renewed in its file; until then
/// this host has the only copy.
fn retryable(error: &Error) -> bool {
    let client = matches!(error, Error::Client(error) if error.retryable());
    let may_change = [ErrorCode::PushUnknown, ErrorCode::QuotaExceeded, ErrorCode::Unauthorized];
    client || error.code().retryable() || may_change.contains(&error.code())
}
