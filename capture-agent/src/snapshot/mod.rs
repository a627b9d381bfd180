//! Snapshot: a running sequence into the local store, and on to the registry.
//!
//! ```text
//! preflight ─▶ capture: pause ─▶ table ─▶ set aside ─▶ pin ─▶ resume
//!    copy: hash ─▶ lacking? ─▶ read ─▶ hash again ─▶ store     build: trees, checkpoints, tokens, configuration, manifest ─▶ commit
//! ```
//!
//! Whatever fails, panics or is given up: guards let the engine go on and give pins back, and what was stored is an uncommitted
//! session, which is garbage when its lease ends.

mod build;
mod capture;
mod copy;
mod inventory;
mod keep;
mod preflight;
mod states;
mod target;

use crate::Agent;
use crate::engines::Engine;
use crate::error::{Error, Result};
use crate::restore::MAX_SCORES;
use build::{Documents, Origin};
use bytes::Bytes;
use capture::{Capture, Hold};
pub(crate) use keep::Keep;
use pfr_schema::agent::{Push, PushJob, SnapshotReport, SnapshotRequest};
use pfr_schema::engine::{Oracle, Sequence};
use pfr_schema::frame::end_mark;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Tag};
use pfr_store::{Pin, PushSession, document_frame};
use std::convert::Infallible;
use std::time::{Duration, Instant, UNIX_EPOCH};
use target::Target;
use tokio::task::JoinSet;

/// Scores recorded of the step at the boundary, unless asked otherwise.
const ORACLE_TOP: u32 = 8;

impl Agent {
    /// Captures a sequence of an engine.
    ///
    /// # Errors
    /// Anything of [`crate::Error`]. The engine goes on, and nothing is committed; only if the commit itself was made and not made durable, the
    /// snapshot may be there, and is pushed.
    pub async fn snapshot(&self, engine: &str, request: SnapshotRequest) -> Result<SnapshotReport> {
        let result = self.take_snapshot(engine, &request).await;
        let outcome = result.as_ref().map_or_else(|error| error.code().name(), |_| "ok");
        metrics::counter!("pf_agent_snapshots_total", "outcome" => outcome).increment(1);
        match &result {
            Ok(report) => {
                metrics::histogram!("pf_agent_snapshot_pause_seconds").record(report.pause_seconds);
                metrics::histogram!("pf_agent_snapshot_seconds").record(report.total_seconds);
                let bytes = [("resident", report.bytes_resident), ("moved", report.bytes_moved), ("new", report.bytes_new)];
                for (what, bytes) in bytes {
                    metrics::counter!("pf_agent_snapshot_bytes_total", "bytes" => what).increment(bytes);
                }
                let SnapshotReport { digest, reference, sequence, boundary, pages, bytes_moved, bytes_new, pause_seconds, .. } = report;
                tracing::info!(engine, %digest, reference, sequence, boundary, pages, bytes_moved, bytes_new, pause_seconds, "snapshot");
            }
            Err(error) => tracing::warn!(engine, outcome, %error, "no snapshot"),
        }
        result
    }

    /// Captures a sequence that the engine describes itself, and whose blocks (the recurrent and the partly filled ones too) stay as
    /// they are as long as `pin` lives. Nothing is paused.
    ///
    /// # Errors
    /// As [`Agent::snapshot`].
    pub(crate) async fn snapshot_pinned(
        &self,
        engine: &str,
        sequence: Sequence,
        pin: Keep,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport> {
        self.in_session(engine, request, async |session: &PushSession, engine: &Engine, target: &Target| {
            let (capture, hold) = capture::given(engine, sequence, pin, request.exact).await?;
            self.keep(session, engine, request, target, capture, hold).await
        })
        .await
    }

    async fn take_snapshot(&self, engine: &str, request: &SnapshotRequest) -> Result<SnapshotReport> {
        self.in_session(engine, request, async |session: &PushSession, engine: &Engine, target: &Target| {
            let _taken = engine.take("a snapshot")?;
            let (capture, hold) = capture::capture(engine, request).await?;
            self.keep(session, engine, request, target, capture, hold).await
        })
        .await
    }

    /// Checks what can be checked, opens a session, takes a snapshot in it, and has it pushed.
    async fn in_session(
        &self,
        engine: &str,
        request: &SnapshotRequest,
        take: impl AsyncFnOnce(&PushSession, &Engine, &Target) -> Result<SnapshotReport>,
    ) -> Result<SnapshotReport> {
        let started = Instant::now();
        if request.oracle.is_some_and(|top| top as usize > MAX_SCORES) {
            return Err(Error::Invalid(format!("at most {MAX_SCORES} logits of a step can be recorded and compared")));
        }
        let target = Target::parse(&request.reference, request.push, self.config().registry.as_deref())?;
        let engine = self.engines().get(engine)?;
        preflight::memory(&engine).await?;
        preflight::disk(&self.config().store_dir(), 0)?;
        let session = self.store().open_push(&target.repository).await?;
        let taken = take(&session, &engine, &target).await;
        if taken.is_err() {
            // Its lease would end by itself.
            drop(self.store().abort(&session.id).await);
        }
        let mut report = taken?;
        report.total_seconds = started.elapsed().as_secs_f64();
        if let (Push::Wait, Some(job)) = (request.push, &mut report.push)
            && let Some(ended) = self.pushes().wait(&job.id).await
        {
            *job = ended;
        }
        self.make_room();
        Ok(report)
    }

    /// Copies what was captured into the store, describes it, commits and has it pushed.
    async fn keep(
        &self,
        session: &PushSession,
        engine: &Engine,
        request: &SnapshotRequest,
        target: &Target,
        capture: Capture,
        hold: Hold,
    ) -> Result<SnapshotReport> {
        let tag = target.tag_for(&capture.sequence.id)?;
        let top = request.oracle.unwrap_or(ORACLE_TOP);
        // The step at the boundary comes while pages are copied, if the engine runs by then.
        let early = hold.runs().then(|| Scores::ask(engine, &capture, top));
        let copied = copy::copy(self, session, &capture.inventory, hold.keep()).await?;
        let paused = hold.release().await?;
        let scores = early.unwrap_or_else(|| Scores::ask(engine, &capture, top));

        let mut documents = Documents::of_state(engine, &capture, &copied, &self.store().options().limits)?;
        let oracle = scores.wait().await;
        if let Some(oracle) = &oracle {
            documents.add_oracle(oracle)?;
        }
        let parent = engine.parent(&capture.sequence.id);
        let origin = Origin { agent: request.agent.clone(), labels: request.labels.clone(), parent, created: self.now() };
        let (digest, documents) = documents.finish(engine, &capture, origin);
        self.store_documents(session, documents).await?;
        let push = self.commit(session, digest, tag.clone(), target.remote(&tag)).await?;
        engine.set_parent(&capture.sequence.id, digest);
        engine.count_snapshot();
        let report = SnapshotReport {
            digest,
            reference: target.local(&tag),
            engine: engine.name().into(),
            sequence: capture.sequence.id.clone(),
            boundary: capture.sequence.boundary,
            tokens: capture.sequence.tokens.len() as u64,
            pages: capture.inventory.pages(),
            bytes_resident: capture.inventory.bytes(),
            bytes_moved: copied.bytes_moved,
            bytes_new: copied.bytes_new,
            bytes_state: copied.bytes_state,
            pause_seconds: paused.as_secs_f64(),
            total_seconds: 0.0,
            exactness: capture.exactness,
            unrecorded: capture.sequence.unrecorded.clone(),
            oracle: oracle.is_some(),
            parent,
            push,
        };
        Ok(report)
    }

    /// Commits, and begins the push to `reference` where there is one.
    async fn commit(&self, session: &PushSession, digest: Digest, tag: Tag, reference: Option<String>) -> Result<Option<PushJob>> {
        let (agent, session) = (self.clone(), session.id.clone());
        let commit = async move {
            let Some(reference) = reference else {
                agent.store().commit(&session, digest, Some(tag), None).await?;
                return Ok(None);
            };
            // Before the commit: a pinned snapshot whose push nobody remembers would stay for ever.
            let push = agent.pushes().promise(digest, &reference).await?;
            // Until the registry has it this is the only copy: nothing may evict it in between.
            match agent.store().commit_pinned(&session, digest, Some(tag), Pin::UntilPushed).await {
                Ok(_) => agent.pushes().begin(&push),
                Err(error) => {
                    // It may be there all the same: names are written before the journal.
                    agent.pushes().settle(&push).await;
                    return Err(error.into());
                }
            }
            Ok(Some(push))
        };
        // On a task of its own: who asked may go away in between.
        tokio::spawn(commit).await.map_err(|panic| Error::Internal(format!("committing: {panic}")))?
    }

    /// Stores those documents that are not there, children first.
    async fn store_documents(&self, session: &PushSession, documents: Vec<Document>) -> Result<()> {
        let wanted = documents.iter().map(|document| (document.digest, document.kind)).collect();
        let missing = self.store().missing(&session.id, wanted).await?;
        let mut frames: Vec<Bytes> = missing.iter().map(|at| document_frame(&documents[*at])).collect();
        frames.push(end_mark(frames.len() as u64).into());
        self.store().ingest(&session.id, futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>))).await?;
        Ok(())
    }

    /// The time, as the configuration tells it.
    fn now(&self) -> String {
        let now = UNIX_EPOCH + Duration::from_millis(self.store().options().clock.now());
        humantime::format_rfc3339_millis(now).to_string()
    }
}

/// Scores that are asked for; dropped, nobody waits for them.
#[derive(Debug)]
struct Scores(JoinSet<Option<Oracle>>);

impl Scores {
    fn ask(engine: &Engine, capture: &Capture, top: u32) -> Self {
        let (engine, sequence, boundary) = (engine.clone(), capture.sequence.id.clone(), capture.sequence.boundary);
        let mut task = JoinSet::new();
        if top > 0 {
            task.spawn(async move {
                // The state is whole without them, so they do not fail the snapshot.
                let oracle = engine.oracle(&sequence, boundary, top).await;
                oracle.unwrap_or_else(|error| {
                    tracing::warn!(engine = engine.name(), sequence, %error, "no logits of the step at the boundary");
                    None
                })
            });
        }
        Self(task)
    }

    async fn wait(mut self) -> Option<Oracle> {
        self.0.join_next().await?.ok().flatten()
    }
}
