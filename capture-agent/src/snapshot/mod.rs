//! Snapshot: a running sequence into the local store, and on to the registry.
//!
//! ```text
//! preflight ─▶ capture: pause ─▶ table ─▶ set aside ─▶ pin ─▶ resume, or hold: the engine goes on
//!    copy: hash ─▶ lacking? ─▶ read ─▶ hash again ─▶ store     build: trees, checkpoints, tokens, configuration, manifest ─▶ commit
//! ```
//!
//! After an error, a panic or a cancellation, guards resume the engine, release its pins, and end
//! the session in the store: blobs that were stored in it become garbage.

mod build;
mod capture;
mod copy;
mod deadline;
mod inventory;
mod preflight;
mod session;
mod states;
mod target;

use crate::Agent;
use crate::copies::{SharedPin, Turn};
use crate::engines::{Engine, MAX_LOGITS, Taken};
use crate::error::{Error, Result};
use crate::llama::{Llama, STATE_FILE, Saved};
use build::{Documents, Origin};
use bytes::Bytes;
use capture::{BlockGuard, Capture};
pub(crate) use deadline::Deadline;
use pfr_schema::agent::{Push, PushJob, SnapshotReport, SnapshotRequest};
use pfr_schema::engine::{Oracle, Sequence, Verb};
use pfr_schema::frame::end_mark;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Reference, Tag};
use pfr_store::{Pin, PushSession, document_frame};
use session::CaptureSession;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;
pub(crate) use target::Target;
use tokio::task::JoinSet;
use tracing::Instrument as _;
use tracing::field::Empty;

/// Logits recorded of the next step, unless the request names a number.
const ORACLE_TOP: u32 = 8;

/// How a capture is made.
#[derive(Clone, Copy, Debug, Default)]
struct Terms<'a> {
    /// The ticket of the save that it is for.
    save: Option<&'a str>,
    /// When it is given up, unless its commit has begun.
    deadline: Option<Deadline>,
    /// Whether it waits in line for the engine until then.
    waits: bool,
}

/// An engine that may be captured now.
enum Ready {
    /// With a connector. One that holds blocks is not taken: its captures may overlap.
    Engine(Engine, Option<Taken>),
    /// Slots of a `llama-server`.
    Slots(Arc<Llama>, Turn),
}

impl Agent {
    /// Captures a sequence of an engine.
    ///
    /// # Errors
    /// Any [`crate::Error`]. The engine runs again and nothing is committed. One exception: if the
    /// commit was made but its journal record was not, the snapshot may exist, and is then pushed.
    pub async fn snapshot(&self, engine: &str, request: SnapshotRequest) -> Result<SnapshotReport> {
        self.snapshot_with(engine, request, Terms::default()).await
    }

    /// Captures a sequence as [`Agent::snapshot`] does, but waits in line for a busy engine. The
    /// capture is given up at a deadline, unless its commit has begun: that is waited for.
    ///
    /// # Errors
    /// As [`Agent::snapshot`]; [`Error::Timeout`] if it was given up: the engine runs again, and
    /// nothing is committed.
    pub(crate) async fn snapshot_in_turn(&self, deadline: Deadline, engine: &str, request: SnapshotRequest) -> Result<SnapshotReport> {
        self.snapshot_with(engine, request, Terms { deadline: Some(deadline), waits: true, ..Terms::default() }).await
    }

    /// As [`Agent::snapshot_in_turn`], for the save with this ticket. A busy engine is not waited
    /// for: other saves would wait behind this one.
    pub(crate) async fn snapshot_for(
        &self,
        ticket: &str,
        deadline: Deadline,
        engine: &str,
        request: SnapshotRequest,
    ) -> Result<SnapshotReport> {
        self.snapshot_with(engine, request, Terms { save: Some(ticket), deadline: Some(deadline), waits: false }).await
    }

    async fn snapshot_with(&self, engine: &str, request: SnapshotRequest, terms: Terms<'_>) -> Result<SnapshotReport> {
        let span = tracing::info_span!("capture", "pf.engine" = engine, "error.type" = Empty, "otel.status_code" = Empty);
        let result = self.take(engine, request, terms).instrument(span.clone()).await;
        let outcome = result.as_ref().map_or_else(|error| error.code().name(), |_| "ok");
        if result.is_err() {
            span.record("error.type", outcome).record("otel.status_code", "ERROR");
        }
        drop(span);
        metrics::counter!("pf_agent_snapshots_total", "outcome" => outcome).increment(1);
        match &result {
            Ok(report) => {
                metrics::histogram!("pf_agent_snapshot_pause_seconds").record(report.pause_seconds);
                metrics::histogram!("pf_agent_snapshot_seconds").record(report.total_seconds);
                let SnapshotReport { bytes_resident, bytes_moved, bytes_new, bytes_stored, .. } = *report;
                for (what, bytes) in [("resident", bytes_resident), ("moved", bytes_moved), ("new", bytes_new), ("stored", bytes_stored)] {
                    metrics::counter!("pf_agent_snapshot_bytes_total", "bytes" => what).increment(bytes);
                }
                let SnapshotReport { digest, reference, sequence, boundary, pages, pause_seconds, .. } = report;
                tracing::info!(
                    engine, %digest, reference, sequence, boundary, pages, bytes_moved, bytes_new, bytes_stored, pause_seconds,
                    "snapshot captured"
                );
            }
            Err(error) => tracing::warn!(engine, outcome, %error, "snapshot failed"),
        }
        result
    }

    /// Captures a sequence that the engine describes itself. The engine changes none of its blocks
    /// (recurrent and partly filled ones included) while `pin` lives. Nothing is paused.
    ///
    /// # Errors
    /// As [`Agent::snapshot`].
    pub(crate) async fn snapshot_pinned(
        &self,
        engine: &str,
        sequence: Sequence,
        pin: SharedPin,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport> {
        let target = self.target(request)?;
        self.store_pinned(&self.engines().get(engine)?, &target, sequence, pin, request).await
    }

    async fn store_pinned(
        &self,
        engine: &Engine,
        target: &Target,
        sequence: Sequence,
        pin: SharedPin,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport> {
        self.in_session(engine, target, request, async |session: &PushSession| {
            let (capture, guard) = capture::given(engine, sequence, pin, request.exact).await?;
            self.store_capture(session, engine, request, target, capture, guard).await
        })
        .await
    }

    /// Takes the engine, and captures within the time that there is.
    async fn take(&self, name: &str, request: SnapshotRequest, terms: Terms<'_>) -> Result<SnapshotReport> {
        let mut target = self.target(&request)?;
        target.is_cached = terms.save.is_some_and(|ticket| self.saves().is_automatic(ticket));
        let sequence = request.sequence.clone().unwrap_or_else(|| "a sequence".into());
        let ready = self.ready(name, terms.deadline.filter(|_| terms.waits)).await;
        let ready = ready.map_err(|error| match (error, terms.deadline) {
            (Error::Busy { with, .. }, Some(deadline)) if terms.waits => deadline.missed(name, &sequence, Some(&with)),
            (error, _) => error,
        })?;
        let taking = async {
            match ready {
                Ready::Engine(engine, taken) => self.take_snapshot(terms.save, &engine, taken, &target, &request).await,
                Ready::Slots(llama, turn) => self.take_slot(&llama, turn, &target, request).await,
            }
        };
        match terms.deadline {
            Some(deadline) => {
                let taken = deadline.bound(taking, &target.commit_begun).await;
                taken.unwrap_or_else(|| Err(deadline.missed(name, &sequence, None)))
            }
            None => taking.await,
        }
    }

    /// Takes an engine if it is free, or waits in line for it until a deadline. Nothing is opened
    /// or checked for the capture before that.
    async fn ready(&self, name: &str, deadline: Option<Deadline>) -> Result<Ready> {
        const WITH: &str = "a snapshot";
        if let Some(llama) = self.llamas().get(name) {
            let turn = match deadline {
                Some(deadline) => llama.wait(WITH, deadline.at).await?,
                None => llama.take(WITH)?,
            };
            return Ok(Ready::Slots(llama, turn));
        }
        loop {
            let engine = self.engines().get(name)?;
            if engine.serves(Verb::Hold) {
                return Ok(Ready::Engine(engine, None));
            }
            let taken = match deadline {
                Some(deadline) => engine.wait(WITH, deadline.at).await?,
                None => engine.take(WITH)?,
            };
            // Its members may have connected again during the wait. Those of before answer no call.
            let now = self.engines().get(name)?;
            if now.is_same(&engine) {
                return Ok(Ready::Engine(now, Some(taken)));
            }
        }
    }

    /// Captures a slot of a `llama-server`, which computes nothing while it writes the slot's file.
    async fn take_slot(&self, llama: &Llama, turn: Turn, target: &Target, mut request: SnapshotRequest) -> Result<SnapshotReport> {
        let started = Instant::now();
        drop(self.room().take(0).await?);
        let Saved { engine, sequence, pin, digest, wrote } = llama.capture(turn, request.sequence.as_deref()).await?;
        request.labels.insert(STATE_FILE.into(), digest.to_string());
        let mut report = self.store_pinned(&engine, target, sequence, pin, &request).await?;
        report.pause_seconds = wrote.as_secs_f64();
        report.total_seconds = started.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Captures a sequence of an engine. One that is not taken holds blocks, and is not paused.
    async fn take_snapshot(
        &self,
        save: Option<&str>,
        engine: &Engine,
        taken: Option<Taken>,
        target: &Target,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport> {
        let holds = taken.is_none();
        self.in_session(engine, target, request, async |session: &PushSession| {
            // Dropped at the end of this block: the engine is free during the wait for a push.
            let _taken = taken;
            let (capture, guard) = match holds {
                true => capture::held(engine, request, save).await?,
                false => capture::capture(engine, request).await?,
            };
            self.store_capture(session, engine, request, target, capture, guard).await
        })
        .await
    }

    /// Where a snapshot goes, if the request makes sense.
    fn target(&self, request: &SnapshotRequest) -> Result<Target> {
        if request.oracle.is_some_and(|top| top as usize > MAX_LOGITS) {
            return Err(Error::Invalid(format!("at most {MAX_LOGITS} logits of a step can be recorded and compared")));
        }
        Target::parse(&request.reference, request.push, self.config().registry.as_deref())
    }

    /// Runs all checks that need no pause, opens a session, captures in it, and queues the push.
    async fn in_session(
        &self,
        engine: &Engine,
        target: &Target,
        request: &SnapshotRequest,
        take: impl AsyncFnOnce(&PushSession) -> Result<SnapshotReport>,
    ) -> Result<SnapshotReport> {
        let started = Instant::now();
        preflight::memory(engine).await?;
        drop(self.room().take(0).await?);
        let session = CaptureSession::open(self.store(), target).await?;
        let taken = take(&session.push).await;
        let mut report = match taken {
            Ok(report) => report,
            Err(error) => {
                session.abort().await;
                return Err(error);
            }
        };
        report.total_seconds = started.elapsed().as_secs_f64();
        if let (Push::Wait, Some(job)) = (request.push, &mut report.push)
            && let Some(ended) = self.pushes().wait_unless_stuck(&job.id).await
        {
            *job = ended;
        }
        self.tidy();
        Ok(report)
    }

    /// Copies the captured state into the store, writes its documents, commits, and queues the
    /// push.
    async fn store_capture(
        &self,
        session: &PushSession,
        engine: &Engine,
        request: &SnapshotRequest,
        target: &Target,
        capture: Capture,
        guard: BlockGuard,
    ) -> Result<SnapshotReport> {
        let tag = target.tag_for(&capture.sequence.id)?;
        let parent = match &request.parent {
            Some(parent) => Some(self.find_here(parent).await?),
            None => engine.parent(&capture.sequence.id),
        };
        let top = request.oracle.unwrap_or(ORACLE_TOP);
        // A running engine computes the next step while pages are copied.
        let early = guard.runs().then(|| Logits::ask(engine, &capture, top));
        let copied = guard.within(copy::copy(self, session, &capture.inventory, guard.shared_pin())).await?;
        let paused = guard.release().await?;
        let logits = early.unwrap_or_else(|| Logits::ask(engine, &capture, top));

        let mut documents = Documents::of_state(engine, &capture, &copied, &self.store().options().limits)?;
        let oracle = logits.wait().await;
        if let Some(oracle) = &oracle {
            documents.add_oracle(oracle)?;
        }
        let origin = Origin { agent: request.agent.clone(), labels: request.labels.clone(), parent, created: self.now() };
        let (digest, documents) = documents.finish(engine, &capture, origin);
        self.store_documents(session, documents).await?;
        let push = self.commit(session, digest, tag.clone(), target).await?;
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
            bytes_stored: copied.bytes_stored,
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

    /// The snapshot that a digest, or a reference in the local store, names.
    async fn find_here(&self, name: &str) -> Result<Digest> {
        if let Ok(digest) = name.parse() {
            // It need not lie here: the registry may have it, or have had it.
            return Ok(digest);
        }
        let reference: Reference = name.parse()?;
        Ok(self.store().resolve(&reference.repository, &reference.selector_or_latest()).await?)
    }

    /// Commits, and queues a push if the target is in a registry. This is the only copy until a
    /// registry has it, so it must not be evicted, unless it is a cached one.
    async fn commit(&self, session: &PushSession, digest: Digest, tag: Tag, target: &Target) -> Result<Option<PushJob>> {
        let (agent, session) = (self.clone(), session.id.clone());
        let (reference, is_cached) = (target.remote(&tag), target.is_cached);
        let commit = async move {
            let Some(reference) = reference else {
                match is_cached {
                    true => agent.store().commit(&session, digest, Some(tag), None).await?,
                    false => agent.store().commit_pinned(&session, digest, Some(tag), Pin::UntilPushed).await?,
                };
                return Ok(None);
            };
            // Write the job before the commit: without a job, a pinned snapshot would never be
            // unpinned.
            let push = agent.pushes().promise(digest, &reference).await?;
            match agent.store().commit_pinned(&session, digest, Some(tag), Pin::UntilPushed).await {
                Ok(_) => agent.pushes().begin(&push),
                Err(error) => {
                    // The commit may have happened: the names are written before the journal.
                    agent.pushes().settle(&push).await;
                    return Err(error.into());
                }
            }
            Ok(Some(push))
        };
        target.commit_begun.set();
        // Runs in a task of its own, so that a cancelled request cannot stop it halfway.
        pfr_service::task::spawn(commit).await.map_err(|panic| Error::Internal(format!("committing: {panic}")))?
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
        pfr_client::human::rfc3339(self.store().options().clock.now())
    }
}

/// A request for logits in flight. Dropping it cancels the request.
#[derive(Debug)]
struct Logits(JoinSet<Option<Oracle>>);

impl Logits {
    fn ask(engine: &Engine, capture: &Capture, top: u32) -> Self {
        let (engine, sequence, boundary) = (engine.clone(), capture.sequence.id.clone(), capture.sequence.boundary);
        let mut task = JoinSet::new();
        if top > 0 {
            pfr_service::task::spawn_in(&mut task, async move {
                // The snapshot is complete without logits, so an error does not fail it.
                let oracle = engine.oracle(&sequence, boundary, top).await;
                oracle.unwrap_or_else(|error| {
                    tracing::warn!(engine = engine.name(), sequence, %error, "logits not recorded");
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
