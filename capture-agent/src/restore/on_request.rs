//! Engines that ask for state when a request comes: `match`, `resume`, `fill` on each rank,
//! `abandon`, and what became of it. Saves that requests ask for go to [`crate::saves`].

use super::Destination;
use super::automatic::find;
use super::fits::Asked;
use super::records::Filling;
use super::resume::resume;
use super::staged::{self, Staged};
use super::write::Written;
use crate::Agent;
use crate::copies::Gate;
use crate::engines::{Answers, Engine};
use crate::error::{Error, Result, blocking, cuda_handle};
use crate::memory::MemoryError;
use crate::metrics as names;
use pfr_schema::engine::{Abandon, Fill, Filled, Matched, Report, Taking, ToAgent, Verb};
use serde_json::{Value, json};
use std::time::Instant;

#[async_trait::async_trait]
impl Answers for Agent {
    /// The engine learns what lies ready for it: its requests ask for nothing else.
    fn joined(&self, engine: &str) {
        staged::tell_soon(self, engine);
    }

    /// [`Error::NotServed`] for an engine that did not say that it asks. [`Error::Invalid`] for a
    /// restore that is not kept ready. A failed `fill` means that its blocks must not be used; the
    /// state is not offered again.
    async fn answer(&self, engine: &Engine, rank: u32, call: ToAgent) -> Result<Value> {
        handle(self, engine, rank, call).await
    }
}

async fn handle(agent: &Agent, engine: &Engine, rank: u32, call: ToAgent) -> Result<Value> {
    let (verb, name) = if matches!(call, ToAgent::Save(_)) { (Verb::Hold, "hold") } else { (Verb::Request, "request") };
    if !engine.serves(verb) {
        return Err(Error::NotServed { engine: engine.name().into(), verb: name });
    }
    match call {
        ToAgent::Register(_) => Err(Error::Invalid("a connection registers one member".into())),
        ToAgent::Match(request) => {
            let only = request.of;
            Ok(json!(count_match(engine, agent.staged().find(engine, &Asked::Tokens(request), only))))
        }
        ToAgent::MatchKeys(request) => {
            request.check().map_err(Error::Invalid)?;
            Ok(json!(count_match(engine, agent.staged().find(engine, &Asked::Keys(request), None))))
        }
        ToAgent::Fill(request) => {
            let offer = agent.staged().offer(engine.name(), &request.restore);
            let filling = Filling { rank, fill: &request, offer, begun: Instant::now() };
            let filled = fill(agent, engine, rank, &request).await;
            let now = agent.store().options().clock.now();
            agent.records().filled(now, engine.name(), &filling, filled.as_ref().map(|(_, written)| written));
            let outcome = filled.as_ref().map_or_else(|error| error.code().name(), |_| "ok");
            metrics::counter!(names::FILLS, "outcome" => outcome).increment(1);
            if let Err(error) = &filled {
                tracing::warn!(engine = engine.name(), rank, restore = request.restore, %error, "fill failed");
                // Neither other bytes in the engine's own blocks, nor a fill that the engine gave
                // up, nor the end of this agent says anything against the state.
                let given_up = request.fill.as_deref().is_some_and(|fill| engine.fills().was_given_up(fill));
                if !given_up && !matches!(error, Error::Kept { .. } | Error::Ended) {
                    Staged::forget(agent, engine.name(), &request.restore);
                }
            } else if rank == 0 {
                engine.count_restore();
            }
            filled.map(|(filled, _)| json!(filled))
        }
        ToAgent::Abandon(request) => abandon(engine, &request).await,
        ToAgent::Report(report) => {
            count(agent, engine, &report);
            Ok(json!({}))
        }
        ToAgent::Save(save) => Ok(json!(agent.saves().begin(agent, engine.name(), save)?)),
        ToAgent::Resume(request) => {
            request.request.check().map_err(Error::Invalid)?;
            Ok(json!(count_match(engine, resume(agent, engine, request).await)))
        }
        ToAgent::Find(request) => Ok(json!(count_match(engine, find(agent, engine, request).await?))),
    }
}

/// A match reserves nothing: the state stays for the next request. The answer to the end of a fill
/// comes when nothing writes into its blocks any more: then the engine may use them.
async fn abandon(engine: &Engine, request: &Abandon) -> Result<Value> {
    if let Some(fill) = &request.fill {
        let running = engine.fills().give_up(fill);
        tracing::info!(engine = engine.name(), restore = request.restore, fill, copies = running.len(), "fill given up by the engine");
        let wait = move || {
            running.iter().for_each(|fill| fill.close_and_wait());
            Ok::<_, MemoryError>(())
        };
        blocking("waiting for copies", wait).await?;
    }
    Ok(json!({}))
}

fn count(agent: &Agent, engine: &Engine, report: &Report) {
    agent.staged().count(engine.name(), report);
    let now = agent.store().options().clock.now();
    for outcome in &report.outcomes {
        let offer = outcome.restore.as_deref().and_then(|restore| agent.staged().offer(engine.name(), restore));
        agent.records().told(now, engine.name(), outcome, offer.as_ref());
        metrics::counter!(names::TAKINGS, "what" => outcome.what.name()).increment(outcome.count);
        let (restore, what) = (outcome.restore.as_deref().unwrap_or("-"), outcome.what.name());
        if outcome.what == Taking::LogitsDiffer {
            // The request has begun. No other one takes the state.
            tracing::error!(engine = engine.name(), restore, "the logits of the first step differ from those that were recorded");
            Staged::forget(agent, engine.name(), restore);
        } else if outcome.what.is_notable() {
            tracing::warn!(engine = engine.name(), restore, what, requests = outcome.count, "state that lay ready was not taken");
        }
    }
}

fn count_match(engine: &Engine, matched: Matched) -> Matched {
    let answer = match &matched {
        Matched::Ready { .. } => "ready",
        Matched::Later {} => "later",
        Matched::Tokens { .. } => "tokens",
        Matched::None { reason } => {
            tracing::debug!(engine = engine.name(), reason, "no state for a request");
            "none"
        }
    };
    metrics::counter!(names::MATCHES, "answer" => answer).increment(1);
    matched
}

async fn fill(agent: &Agent, engine: &Engine, rank: u32, request: &Fill) -> Result<(Filled, Written)> {
    let (documents, position) = agent.staged().get(engine, &request.restore)?;
    let invalid = || Error::Invalid("after: expected 128 hex digits".into());
    let after = request.after.as_deref().map(|hex| cuda_handle(hex).ok_or_else(invalid)).transpose()?;
    // The engine keeps the blocks until it has this answer, or that to the end of the fill. So the
    // gate owns nothing.
    let gate = Gate::new(());
    engine.fills().begin(request.fill.as_deref(), rank, gate.handle())?;
    let into = Destination { ranks: rank..rank + 1, position, blocks: &request.blocks, kept: request.kept, after };
    let written = super::fill(agent, engine, &documents, into, &gate).await?;
    // Logits were recorded at the end.
    Ok((Filled { oracle: documents.oracle.clone().filter(|_| position.is_none()) }, written))
}
