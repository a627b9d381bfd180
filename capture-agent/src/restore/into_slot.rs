//! Restores into slots of a `llama-server`: the file that the server reads is filled like the
//! memory of an engine, and compared with what the slot holds afterwards.

use super::documents::{Documents, field};
use super::plan::{self, Plan};
use super::source::Through;
use super::{Destination, Written, fill, must_be_stored, prove, report, source};
use crate::Agent;
use crate::copies::Gate;
use crate::error::{Error, Result};
use crate::llama::{HEAD, Llama, STATE_FILE};
use pfr_schema::Digest;
use pfr_schema::agent::{RestoreReport, RestoreRequest};
use std::sync::Arc;
use std::time::Instant;

impl Agent {
    pub(super) async fn restore_slot(&self, llama: &Arc<Llama>, request: &RestoreRequest, started: Instant) -> Result<RestoreReport> {
        if request.position.is_some() {
            return Err(Error::Invalid("a slot of a llama-server is restored at the end of a snapshot only".into()));
        }
        must_be_stored(request, || "the file of a slot is made when the whole state is proven".into())?;
        if !request.local {
            // The contract is checked before the pull, by what the server says now. A server that
            // cannot be asked refuses below.
            drop(llama.begin_restore().await);
        }
        let found = source::find(self, llama.name(), request, Through::Store).await?;
        self.tidy();
        let documents = Documents::read(&found.source, found.digest, false).await?;
        let turn = llama.begin_restore().await?;
        let (deployment, fingerprint) = llama.deployment();
        plan::fingerprint(&deployment, &[], fingerprint, &documents)?;
        let (head, saved) = self.state_file(&documents).await?;
        let (engine, blocks, laid_out) = llama.lay_out(turn, request.sequence.as_deref(), &head).await?;
        // From here as for an engine with memory; the gate deletes the file.
        let gate = Gate::new(laid_out);
        let plan = Plan::make(&engine, &documents)?;
        let values = prove::states(&documents.source, &plan).await?;
        let into = Destination { ranks: 0..1, position: None, blocks: &blocks, kept: 0, after: None };
        let Written { bytes: bytes_written, .. } = fill(self, &engine, &documents, into, &gate).await?;
        let laid_out = gate.take().ok_or_else(|| Error::Internal("a copy is in flight after the last".into()))?;
        let slot = laid_out.activate(&saved).await?;
        engine.set_parent(&slot, documents.digest);
        engine.count_restore();
        let (bytes_pulled, total_seconds) = (found.bytes_pulled(), started.elapsed().as_secs_f64());
        let report = report(&engine, documents.digest, &plan, values);
        Ok(RestoreReport { sequence: Some(slot), bytes_written, bytes_pulled, total_seconds, ..report })
    }

    /// The head of the file that was saved, and the digest of that file.
    async fn state_file(&self, documents: &Documents) -> Result<(bytes::Bytes, Digest)> {
        let manifest = self.store().manifest(&documents.digest).await?;
        let label = manifest.annotations.get(STATE_FILE).map_or("", String::as_str);
        let saved = label.parse().map_err(|_| field(&format!("$.annotations[{STATE_FILE:?}]"), "the digest of a state file", label))?;
        let mut tensors = documents.checkpoints.iter().flat_map(|(_, checkpoint)| &checkpoint.tensors);
        let head = tensors.find(|tensor| tensor.name == HEAD);
        let head = head.ok_or_else(|| field("checkpoint.tensors", format!("a tensor {HEAD:?}"), "none"))?;
        let mut blobs = documents.source.blobs(vec![head.payload_hash]).await?;
        Ok((blobs.next(&head.payload_hash).await?, saved))
    }
}
