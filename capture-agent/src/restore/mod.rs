//! Restore: a snapshot into an engine's memory, proven equal before the sequence runs.
//!
//! ```text
//! contract: every check that needs no frame ─▶ source: registry or local store ─▶ documents
//!    ─▶ plan: every check that needs no bytes ─▶ prove: state tensors
//!    engines that take sequences: allocate ─▶ write ─▶ live: hash in place, values ─▶ oracle ─▶ activate
//!       blobs that this host lacks are written as they come from the registry, each verified and
//!       proven before that; the local store is filled behind them, or not at all
//!    engines that ask (on_request): prove pages, keep ready, tell ─▶ match ─▶ fill: write ─▶ live
//!       their requests may name the snapshot (resume), or the agent looks for one (automatic)
//!    engines in this process (in_process): prove pages ─▶ fill: write ─▶ live
//! ```
//!
//! After an error, a panic or a cancellation before `activate`, the guard of the allocation
//! discards the blocks, and no sequence runs. A [`Gate`] owns that guard, so that blocks are not
//! discarded under a copy.

mod automatic;
mod blobs;
mod contract;
mod cut;
mod documents;
mod fits;
mod in_process;
mod into_slot;
mod live;
mod on_request;
mod oracle;
mod overlap;
mod place;
mod plan;
mod prove;
mod records;
mod reshard;
mod resume;
mod source;
mod staged;
mod write;

pub use automatic::Searches;
pub(crate) use in_process::Prepared;
pub use records::Records;
pub use resume::Resumes;
pub use source::Passages;
pub use staged::Staged;

use crate::Agent;
use crate::copies::Gate;
use crate::engines::{Allocation, Engine};
use crate::error::{Error, Result};
use crate::metrics as names;
use documents::Documents;
use pfr_schema::Digest;
use pfr_schema::agent::{Converted, RestoreReport, RestoreRequest, Stored};
use pfr_schema::engine::{Allocate, Verb};
use plan::{Origin, Plan, Stated};
use prove::Values;
use source::{Found, Through};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use tracing::Instrument as _;
use tracing::field::Empty;
use write::Written;

impl Agent {
    /// Restores a snapshot into an engine; into one that asks for state itself, keeps it ready for
    /// the next request.
    ///
    /// # Errors
    /// Anything of [`crate::Error`]. No sequence runs then, and all allocations are given back.
    pub async fn restore(&self, engine: &str, request: RestoreRequest) -> Result<RestoreReport> {
        let started = Instant::now();
        let span = tracing::info_span!("restore", "pf.engine" = engine, "error.type" = Empty, "otel.status_code" = Empty);
        let result = self.restore_within(engine, &request, started).instrument(span.clone()).await;
        if let Err(error) = &result {
            span.record("error.type", error.code().name()).record("otel.status_code", "ERROR");
        }
        drop(span);
        note(self, engine, &request.reference, started, result.as_ref());
        result
    }

    async fn restore_within(&self, name: &str, request: &RestoreRequest, started: Instant) -> Result<RestoreReport> {
        if let Some(llama) = self.llamas().get(name) {
            return self.restore_slot(&llama, request, started).await;
        }
        // Fail before the pull if the engine is unknown.
        let engine = self.engines().get(name)?;
        if request.sequence.is_some() {
            return Err(Error::Invalid(format!(
                "engine {name:?} names restored sequences itself; only slots of a llama-server can be named"
            )));
        }
        must_take_state(&engine)?;
        if request.position.is_some() && !engine.serves(Verb::Allocate) {
            return Err(Error::Invalid(format!(
                "requests of engine {name:?} resume at the last position that they share with the snapshot; none can be given"
            )));
        }
        if engine.serves(Verb::Allocate) {
            return self.restore_sequence(name, request, started).await;
        }
        must_be_stored(request, || format!("engine {name:?} takes state when a request comes"))?;
        // Until the tokens are known, any request may match.
        let expected = Some(Staged::expect(self, name));
        let Fitting { engine, documents, plan, found } = self.fitting(name, request, Through::Store).await?;
        // It counts when a request takes it.
        let mut done = Staged::stage(self, &engine, &request.reference, Arc::clone(&documents), &plan, expected).await?;
        done.bytes_pulled = found.bytes_pulled();
        done.total_seconds = started.elapsed().as_secs_f64();
        Ok(done)
    }

    /// Restores into an engine that takes a sequence at once.
    async fn restore_sequence(&self, name: &str, request: &RestoreRequest, started: Instant) -> Result<RestoreReport> {
        let Fitting { engine, documents, plan, found } = self.fitting(name, request, Through::Engine).await?;
        let shown = source::show(self, name, &request.reference, &found.source);
        let restore = async {
            let _taken = engine.take("a restore")?;
            let values = proven_ahead(&documents, &plan).await?;
            let done = self.write_sequence(&engine, &documents, &plan, values).await?;
            engine.count_restore();
            Ok(done)
        };
        let mut done = found.or_close(restore.await).await?;
        drop(shown);
        done.bytes_pulled = found.bytes_pulled();
        done.in_store = found.stored();
        done.total_seconds = started.elapsed().as_secs_f64();
        found.complete(self).await;
        Ok(done)
    }

    /// Finds a snapshot and runs all checks that need no page.
    async fn fitting(&self, name: &str, request: &RestoreRequest, through: Through) -> Result<Fitting> {
        self.engines().get(name)?;
        let found = source::find(self, name, request, through).await?;
        self.tidy();
        let fitting = async {
            // The engine may have reconnected during the pull.
            let engine = self.engines().get(name)?;
            let documents = Arc::new(Documents::read(&found.source, found.digest, request.reshard).await?);
            let plan = Plan::make(&engine, &documents)?;
            let position = request.position.unwrap_or(plan.boundary);
            let plan = Arc::new(plan.upto(&engine, position)?);
            Ok((engine, documents, plan))
        };
        let (engine, documents, plan) = found.or_close(fitting.await).await?;
        Ok(Fitting { engine, documents, plan, found })
    }

    /// `values` says how state tensors were proven; those that are proven as they are written add
    /// to it. After an error the engine has its blocks back: the next restore may need them. An
    /// engine that did not answer a call is not waited for a second time, and gets them back later.
    async fn write_sequence(
        &self,
        engine: &Engine,
        documents: &Documents,
        plan: &Arc<Plan>,
        values: Option<Values>,
    ) -> Result<RestoreReport> {
        let Plan { tokens, boundary, key, .. } = &**plan;
        let (salt, adapter, sampling) = (key.salt.clone(), key.adapter.clone(), documents.config.sampling.clone());
        let what = Allocate { tokens: tokens.clone(), boundary: *boundary, salt, adapter, sampling };
        let mut allocation = engine.allocate(what).await?;
        let given_back = allocation.given_back();
        let written = self.write_allocated(engine, documents, plan, values, allocation).await;
        if written.as_ref().is_err_and(|error| !matches!(error, Error::Lost { .. })) {
            given_back.await;
        }
        written
    }

    async fn write_allocated(
        &self,
        engine: &Engine,
        documents: &Documents,
        plan: &Arc<Plan>,
        values: Option<Values>,
        allocation: Allocation,
    ) -> Result<RestoreReport> {
        let boundary = &plan.boundary;
        let (sequence, blocks) = (allocation.sequence().to_owned(), allocation.blocks().clone());
        let gate = Gate::new(allocation);
        let into = Destination { ranks: 0..engine.world(), position: Some(*boundary), blocks: &blocks, kept: 0, after: None };
        let Written { bytes: bytes_written, values: as_written, .. } = fill(self, engine, documents, into, &gate).await?;
        // Sums over other ranks differ in low-order bits, and the logits with them.
        let logits = documents.oracle.as_ref().filter(|_| plan.resharded.is_none() && plan.is_end());
        let oracle = oracle::check(engine, &sequence, logits).await?;
        let allocation = gate.take().ok_or_else(|| Error::Internal("a copy is in flight after the last".into()))?;
        let sequence = allocation.activate().await?;
        engine.set_parent(&sequence, documents.digest);
        Ok(RestoreReport {
            sequence: Some(sequence),
            bytes_written,
            oracle,
            ..report(engine, documents.digest, plan, values.unwrap_or(as_written))
        })
    }
}

/// Proves state tensors before blocks are allocated; `None` if they are proven as they are written,
/// because their blobs pass only once. Those that are cut anew are compared with each other first,
/// so their blobs are read twice.
async fn proven_ahead(documents: &Documents, plan: &Plan) -> Result<Option<Values>> {
    if documents.source.passes() && plan.resharded.is_none() {
        return Ok(None);
    }
    prove::states(&documents.source, plan).await.map(Some)
}

/// Refuses a restore by the local store where the snapshot has to lie there.
fn must_be_stored(request: &RestoreRequest, why: impl FnOnce() -> String) -> Result<()> {
    if request.no_store && !request.local {
        let reason = why();
        return Err(Error::Invalid(format!("{reason}: until then the snapshot lies in this host's store; restore it without --no-store")));
    }
    Ok(())
}

/// A snapshot that fits an engine.
struct Fitting {
    engine: Engine,
    documents: Arc<Documents>,
    plan: Arc<Plan>,
    found: Found,
}

/// Blocks of an engine for a snapshot.
struct Destination<'a> {
    ranks: Range<u32>,
    /// Where the sequence resumes, if not at the end of the snapshot.
    position: Option<u64>,
    /// By group and column.
    blocks: &'a BTreeMap<String, Vec<u32>>,
    /// Tokens that the engine had. Blocks with these alone are compared and not written.
    kept: u64,
    /// A CUDA IPC event that writes wait for.
    after: Option<[u8; 64]>,
}

/// Writes the snapshot's pages into blocks, and verifies them in place.
async fn fill<T: Send + 'static>(
    agent: &Agent,
    engine: &Engine,
    documents: &Documents,
    Destination { ranks, position, blocks, kept, after }: Destination<'_>,
    gate: &Gate<T>,
) -> Result<Written> {
    if agent.engines().copies().is_closed() {
        return Err(Error::Ended);
    }
    // The engine may have reconnected with other memory since the snapshot was verified.
    let plan = Plan::make(engine, documents)?;
    let position = position.unwrap_or(plan.boundary);
    let plan = plan.upto(engine, position)?;
    if kept >= plan.boundary {
        return Err(Error::Invalid(format!("the engine keeps {kept} tokens, the state is at {}", plan.boundary)));
    }
    engine.check_blocks(plan.boundary, blocks)?;
    let (mut places, mut shared) = place::Places::of(engine, &plan, ranks, blocks).split(kept);
    places.claim(gate, agent.staged().claims())?;
    let pages_kept = shared.pages();
    let written = write::write(agent, &documents.source, &mut places, after, gate).await?;
    write::name(&documents.source, &mut shared).await?;
    // Writing has waited for the engine's event, so its own blocks are at rest too.
    live::check(agent, &Arc::new(shared)).await.map_err(|error| match error {
        Error::Live { what, .. } => Error::Kept { what },
        other => other,
    })?;
    live::check(agent, &Arc::new(places)).await?;
    Ok(Written { pages_kept, ..written })
}

/// Records the outcome of a restore in metrics, log and list.
fn note(agent: &Agent, engine: &str, reference: &str, started: Instant, result: Result<&RestoreReport, &Error>) {
    let now = agent.store().options().clock.now();
    agent.records().ended(now, engine, reference, started.elapsed().as_secs_f64(), result);
    let outcome = result.map_or_else(|error| error.code().name(), |_| "ok");
    metrics::counter!(names::RESTORES, "outcome" => outcome).increment(1);
    match result {
        Ok(report) => {
            metrics::histogram!(names::RESTORE_SECONDS).record(report.total_seconds);
            metrics::counter!(names::RESTORE_BYTES, "bytes" => "pulled").increment(report.bytes_pulled);
            let RestoreReport { digest, boundary, pages, bytes_pulled, bytes_written, total_seconds, .. } = report;
            let (sequence, converted) = (report.sequence.as_deref().unwrap_or("(when asked)"), report.converted.len());
            let resharded = report.resharded.is_some();
            tracing::info!(
                engine, %digest, sequence, boundary, pages, converted, resharded, bytes_pulled, bytes_written, total_seconds,
                "snapshot restored"
            );
        }
        Err(error) => tracing::warn!(engine, reference, outcome, %error, "restore failed"),
    }
}

fn must_take_state(engine: &Engine) -> Result<()> {
    if engine.serves(Verb::Allocate) || engine.serves(Verb::Request) {
        return Ok(());
    }
    Err(Error::NotServed { engine: engine.name().into(), verb: "allocate" })
}

fn report(engine: &Engine, digest: Digest, plan: &Plan, values: Values) -> RestoreReport {
    RestoreReport {
        digest,
        engine: engine.name().into(),
        sequence: None,
        boundary: plan.boundary,
        partly: !plan.is_end(),
        tokens: plan.tokens.len() as u64,
        pages: plan.pages(),
        bytes_pulled: 0,
        in_store: Stored::Here,
        bytes_written: 0,
        values_computed: values.computed,
        values_attested: values.attested,
        converted: plan.states.iter().filter_map(converted).collect(),
        resharded: plan.resharded.clone(),
        oracle: false,
        total_seconds: 0.0,
    }
}

fn converted(stated: &Stated) -> Option<Converted> {
    let Origin::Tensor { tensor, convert } = &stated.origin else { return None };
    let to = convert.clone()?;
    Some(Converted { state: stated.state.name.clone(), rank: stated.rank, from: tensor.form(), to })
}
