//! Restores for engines in this process. They name a snapshot and hand over blocks. The steps are
//! those of engines on the socket, for all ranks at once.

use super::source::Through;
use super::{Destination, Fitting, Written, documents::Documents, must_be_stored, note, plan::Plan, prove, prove::Values, report};
use crate::Agent;
use crate::copies::Gate;
use crate::error::Result;
use pfr_schema::Digest;
use pfr_schema::agent::{RestoreReport, RestoreRequest};
use pfr_schema::checkpoint::Key;
use pfr_schema::engine::Oracle;
use pfr_schema::snapshot::SnapshotConfig;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A snapshot that is verified and fits the engine.
#[derive(Debug)]
pub(crate) struct Prepared {
    engine: String,
    reference: String,
    documents: Arc<Documents>,
    plan: Arc<Plan>,
    values: Values,
    bytes_pulled: u64,
    started: Instant,
}

impl Prepared {
    /// Pulls, checks and verifies.
    pub async fn make(agent: &Agent, engine: &str, request: &RestoreRequest) -> Result<Self> {
        let started = Instant::now();
        let prepare = async {
            must_be_stored(request, || format!("engine {engine:?} hands over its blocks when all of the state is proven"))?;
            let Fitting { documents, plan, found, .. } = agent.fitting(engine, request, Through::Store).await?;
            let values = prove::all(&documents.source, &plan).await?;
            let bytes_pulled = found.bytes_pulled();
            let (engine, reference) = (engine.to_owned(), request.reference.clone());
            Ok(Self { engine, reference, documents, plan, values, bytes_pulled, started })
        };
        prepare.await.inspect_err(|error| note(agent, engine, &request.reference, started, Err(error)))
    }

    pub fn digest(&self) -> Digest {
        self.documents.digest
    }

    pub fn boundary(&self) -> u64 {
        self.plan.boundary
    }

    pub fn key(&self) -> &Key {
        &self.plan.key
    }

    pub fn tokens(&self) -> &[u32] {
        &self.plan.tokens
    }

    pub fn config(&self) -> &SnapshotConfig {
        &self.documents.config
    }

    pub fn oracle(&self) -> Option<&Oracle> {
        // Logits were recorded at the end.
        self.documents.oracle.as_ref().filter(|_| self.plan.is_end())
    }

    /// Writes into blocks of the engine, and verifies them in place.
    pub async fn fill<T: Send + 'static>(
        &self,
        agent: &Agent,
        sequence: &str,
        blocks: &BTreeMap<String, Vec<u32>>,
        after: Option<[u8; 64]>,
        gate: &Gate<T>,
    ) -> Result<RestoreReport> {
        let fill = async {
            let engine = agent.engines().get(&self.engine)?;
            let into = Destination { ranks: 0..engine.world(), position: Some(self.plan.boundary), blocks, kept: 0, after };
            let Written { bytes: bytes_written, .. } = super::fill(agent, &engine, &self.documents, into, gate).await?;
            engine.set_parent(sequence, self.documents.digest);
            engine.count_restore();
            let (bytes_pulled, total_seconds) = (self.bytes_pulled, self.started.elapsed().as_secs_f64());
            let report = report(&engine, self.documents.digest, &self.plan, self.values);
            Ok(RestoreReport { sequence: Some(sequence.to_owned()), bytes_written, bytes_pulled, total_seconds, ..report })
        };
        let filled = fill.await;
        note(agent, &self.engine, &self.reference, self.started, filled.as_ref());
        filled
    }
}
