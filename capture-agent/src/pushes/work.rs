//! Working off one job.

use super::{Inner, PER_REGISTRY, REMEMBERED, Target, is_finished};
use crate::error::Error;
use pfr_client::{Progress, PushReport, PushTarget, Source};
use pfr_schema::agent::{PushJob, PushState};
use pfr_schema::{Digest, ErrorCode};
use pfr_store::Pin;
use std::collections::HashSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Tries until it is done or refused. Ends, too, when the queue is gone.
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
        let outcome = attempt.await;
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

/// Pushes to one tag come in the order in which they were asked for: else an old one, tried again, would move the tag back.
async fn wait_for_older(queue: &Weak<Inner>, id: &str) -> Option<()> {
    let mut changed = queue.upgrade()?.changed.subscribe();
    loop {
        {
            let inner = queue.upgrade()?;
            let jobs = inner.jobs.lock();
            let reference = &jobs.get(id)?.reference;
            let mut older = jobs.range(..id.to_owned()).map(|(_, job)| job);
            if !older.any(|job| job.reference == *reference && !is_finished(job)) {
                return Some(());
            }
        }
        changed.changed().await.ok()?;
    }
}

impl Inner {
    /// The job and the places at its registry; `None` if it is gone or not understood.
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
        let open = jobs.values().filter(|job| !is_finished(job)).count();
        drop(jobs);
        metrics::gauge!(crate::telemetry::PUSHES_OPEN).set(open as f64);
        self.changed.send_replace(());
        Some(job)
    }

    /// One try. It does not hold the queue.
    fn attempt(&self, job: &PushJob) -> impl Future<Output = Result<PushReport, Error>> + Send + use<> {
        let (config, digest, reference) = (self.config.clone(), job.digest, job.reference.clone());
        let source = Source::Store { store: self.store.clone(), snapshot: digest };
        async move {
            let Target { registry, repository, tag } = Target::parse(&reference)?;
            let remote = config.remote(&registry)?;
            let target = PushTarget { repository, tag, if_tag_is: None, parents: Vec::new() };
            Ok(pfr_client::push(&source, &remote, target, &Progress::new()).await?)
        }
    }

    /// Writes down what came of a try; how long to wait if there is another.
    async fn settle(&self, id: &str, outcome: Result<PushReport, Error>) -> Option<Duration> {
        let again = outcome.as_ref().is_err_and(retryable);
        // On disk before anybody who waits for it is told.
        let mut settled = self.jobs.lock().get(id).cloned()?;
        settled.attempts = settled.attempts.saturating_add(1);
        (settled.state, settled.error) = match &outcome {
            Ok(_) => (PushState::Done, None),
            Err(error) if again => (PushState::Waiting, Some(error.to_string())),
            Err(error) => (PushState::Failed, Some(error.to_string())),
        };
        settled.code = outcome.as_ref().err().map(Error::code);
        settled.bytes_sent = outcome.as_ref().map_or(0, |report| report.bytes_sent);
        if let Err(error) = self.files.write(&settled).await {
            // It is pushed again after a restart, which changes nothing.
            tracing::error!(push = id, %error, "how far a push is was not written down");
        }
        let (attempts, snapshot, reference) = (settled.attempts, settled.digest, settled.reference.clone());
        self.change(id, move |job| *job = settled);
        match outcome {
            Ok(report) => {
                tracing::info!(push = id, %snapshot, reference, attempts, bytes_sent = report.bytes_sent, "pushed");
                count("done", report.bytes_sent);
                self.unpin(id, snapshot, &reference).await;
            }
            Err(error) if again => {
                let wait = self.wait_after(attempts);
                tracing::warn!(push = id, %snapshot, reference, attempts, %error, again_in = ?wait, "push");
                count("retried", 0);
                return Some(wait);
            }
            Err(error) => {
                tracing::error!(push = id, %snapshot, reference, attempts, %error, "the push was refused for good");
                count("failed", 0);
            }
        }
        self.forget().await;
        None
    }

    /// Keeps a snapshot in the local store until it is pushed, or no longer; what people pinned is theirs. It lies there under the
    /// repository that it is pushed to; false if it does not.
    pub(super) async fn pin(&self, target: &Target, snapshot: Digest, pinned: bool) -> bool {
        match self.store.pin(&target.repository, &snapshot, Pin::UntilPushed, pinned).await {
            Ok(_) => true,
            Err(pfr_store::Error::SnapshotUnknown { .. } | pfr_store::Error::RepositoryUnknown(_)) => false,
            Err(error) => {
                tracing::warn!(%snapshot, pinned, %error, "a snapshot is not pinned as it should be");
                true
            }
        }
    }

    /// The registry has it, or nobody will push it. What was refused for good stays pinned until another push of it is done: it is nowhere else.
    pub(super) async fn unpin(&self, id: &str, snapshot: Digest, reference: &str) {
        let Ok(target) = Target::parse(reference) else { return };
        let waits = |job: &PushJob| job.id != id && job.digest == snapshot && !is_finished(job);
        if !self.jobs.lock().values().any(waits) {
            self.pin(&target, snapshot, false).await;
        }
    }

    /// Forgets the oldest that are done, and what failed and was done later. What else failed is all that tells of a snapshot that is nowhere else.
    async fn forget(&self) {
        let old: Vec<String> = {
            let mut jobs = self.jobs.lock();
            let done: Vec<String> = jobs.values().filter(|job| job.state == PushState::Done).map(|job| job.id.clone()).collect();
            let elsewhere: HashSet<Digest> = jobs.values().filter(|job| job.state == PushState::Done).map(|job| job.digest).collect();
            let made_good = |job: &&PushJob| job.state == PushState::Failed && elsewhere.contains(&job.digest);
            let mut old: Vec<String> = jobs.values().filter(made_good).map(|job| job.id.clone()).collect();
            old.extend_from_slice(&done[..done.len().saturating_sub(REMEMBERED)]);
            old.iter().for_each(|id| drop(jobs.remove(id)));
            old
        };
        for id in old {
            if let Err(error) = self.files.remove(&id).await {
                tracing::warn!(push = id, %error, "a finished push is not forgotten");
            }
        }
    }

    fn wait_after(&self, attempts: u32) -> Duration {
        let doubled = self.config.push_retry.saturating_mul(1 << attempts.saturating_sub(1).min(20));
        let full = doubled.min(self.config.push_retry_max);
        // The keys of the standard hasher are the randomness that needs no dependency.
        let random = RandomState::new().build_hasher().finish() as u32;
        full / 2 + full.mul_f64(0.5 * f64::from(random) / f64::from(u32::MAX))
    }
}

fn count(outcome: &'static str, bytes: u64) {
    metrics::counter!(crate::telemetry::PUSHES, "outcome" => outcome).increment(1);
    metrics::counter!(crate::telemetry::PUSH_BYTES).increment(bytes);
}

/// Whether the same may work later: nobody answered, or the answer was that it may.
fn retryable(error: &Error) -> bool {
    let client = matches!(error, Error::Client(error) if error.retryable());
    client || error.code().retryable() || error.code() == ErrorCode::PushUnknown
}
