//! Engines that ask for state when a request comes: `match`, `fill` on each rank, `abandon`.

use super::gate::Gate;
use crate::Agent;
use crate::engines::{Answers, Engine};
use crate::error::{Error, Result, cuda_handle};
use crate::metrics as names;
use pfr_schema::engine::{Fill, Match, Matched, ToAgent, Verb};
use serde_json::{Value, json};

#[async_trait::async_trait]
impl Answers for Agent {
    /// [`Error::NotServed`] for an engine that did not say that it asks. [`Error::Invalid`] for a
    /// restore that is not kept ready. A failed `fill` means that its blocks must not be used; the
    /// state is not offered again.
    async fn answer(&self, engine: &Engine, rank: u32, call: ToAgent) -> Result<Value> {
        handle(self, engine, rank, call).await
    }
}

async fn handle(agent: &Agent, engine: &Engine, rank: u32, call: ToAgent) -> Result<Value> {
    if !engine.serves(Verb::Request) {
        return Err(Error::NotServed { engine: engine.name().into(), verb: "request" });
    }
    match call {
        ToAgent::Register(_) => Err(Error::Invalid("a connection registers one member".into())),
        ToAgent::Match(request) => Ok(json!(find(agent, engine, &request))),
        ToAgent::Fill(request) => {
            let filled = fill(agent, engine, rank, &request).await;
            let outcome = filled.as_ref().map_or_else(|error| error.code().name(), |()| "ok");
            metrics::counter!(names::FILLS, "outcome" => outcome).increment(1);
            if let Err(error) = &filled {
                tracing::warn!(engine = engine.name(), rank, restore = request.restore, %error, "fill failed");
                agent.staged().forget(&request.restore);
            }
            filled.map(|()| json!({}))
        }
        // A match reserves nothing: the state stays for the next request.
        ToAgent::Abandon(_) => Ok(json!({})),
    }
}

fn find(agent: &Agent, engine: &Engine, request: &Match) -> Matched {
    let matched = agent.staged().find(engine, request);
    let answer = match &matched {
        Matched::Ready { .. } => "ready",
        Matched::Later {} => "later",
        Matched::None { .. } => "none",
    };
    metrics::counter!(names::MATCHES, "answer" => answer).increment(1);
    matched
}

async fn fill(agent: &Agent, engine: &Engine, rank: u32, request: &Fill) -> Result<()> {
    let documents = agent.staged().get(engine, &request.restore)?;
    let invalid = || Error::Invalid("after: expected 128 hex digits".into());
    let after = request.after.as_deref().map(|hex| cuda_handle(hex).ok_or_else(invalid)).transpose()?;
    // The engine keeps the blocks until it has the answer, so the gate owns nothing.
    super::fill(agent, engine, &documents, rank..rank + 1, &request.blocks, after, &Gate::new(())).await?;
    Ok(())
}
