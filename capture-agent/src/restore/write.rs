//! Where each blob goes in the engine's memory, and bringing it there in bounded batches.

use super::blobs::Blobs;
use super::gate::Gate;
use super::plan::{Paged, Plan, Stated};
use crate::Agent;
use crate::engines::Engine;
use crate::error::{Error, Result};
use crate::memory::{MemoryError, Page, PageMemory};
use crate::telemetry;
use bytes::Bytes;
use pfr_schema::Digest;
use pfr_schema::checkpoint::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes written at a time, at most; less if the ring is small. A larger page goes alone.
const BATCH: u64 = 64 << 20;

/// One blob and its place.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub digest: Digest,
    pub memory: Arc<dyn PageMemory>,
    pub page: Page,
    rank: u32,
    of: Of,
}

#[derive(Clone, Debug)]
enum Of {
    Page { group: Arc<str>, column: u64, component: usize },
    State(Box<Tensor>),
}

impl Place {
    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.of {
            Of::State(tensor) => Some(tensor),
            Of::Page { .. } => None,
        }
    }

    /// For people.
    pub fn describe(&self) -> String {
        match &self.of {
            Of::Page { group, column, component } => {
                format!("page {column} (component {component}) of group {group:?} of rank {}", self.rank)
            }
            Of::State(tensor) => format!("state {:?} of rank {}", tensor.name, self.rank),
        }
    }
}

/// The places of a restore.
#[derive(Clone, Debug, Default)]
pub(super) struct Places(pub Vec<Place>);

impl Places {
    /// The places of these ranks, in blocks that were checked. A group that may be missing has none if the engine gave it no blocks.
    pub fn of(engine: &Engine, plan: &Plan, ranks: Range<u32>, blocks: &BTreeMap<String, Vec<u32>>) -> Self {
        let mut places = Self::default();
        let find = |rank, name: &str| Some((engine.groups(rank).iter().find(|g| g.layout.name == name)?, blocks.get(name)?));
        for Paged { rank, group: name, columns, digests } in plan.paged.iter().filter(|paged| ranks.contains(&paged.rank)) {
            let Some((group, blocks)) = find(*rank, name) else { continue };
            let (components, name): (usize, Arc<str>) = (group.layout.components.len(), name.as_str().into());
            for (column, digests) in columns.clone().zip(digests.chunks_exact(components)) {
                for (component, digest) in digests.iter().enumerate() {
                    let (memory, page) = group.page(component, blocks[column as usize]);
                    let of = Of::Page { group: Arc::clone(&name), column, component };
                    places.0.push(Place { digest: *digest, memory, page, rank: *rank, of });
                }
            }
        }
        for Stated { rank, group: name, state, tensor } in plan.states.iter().filter(|stated| ranks.contains(&stated.rank)) {
            let Some((group, blocks)) = find(*rank, name) else { continue };
            let (memory, page) = group.state(state, blocks[0]);
            let of = Of::State(Box::new(tensor.clone()));
            places.0.push(Place { digest: tensor.payload_hash, memory, page, rank: *rank, of });
        }
        places
    }
}

/// Writes every blob to its place; bytes written. `after` is a CUDA IPC event to wait for first. Copies pass through the gate.
pub(super) async fn write<T: Send + 'static>(agent: &Agent, places: &Places, after: Option<[u8; 64]>, gate: &Gate<T>) -> Result<u64> {
    let most = (agent.engines().ring().total() / 2).clamp(1, BATCH);
    let mut blobs = Blobs::open(agent.store(), places.0.iter().map(|place| place.digest).collect()).await?;
    let (mut batch, mut bytes, mut written) = (Vec::new(), 0, 0);
    for place in &places.0 {
        let payload = blobs.next(&place.digest).await?;
        let length = payload.len() as u64;
        if length != place.page.bytes() {
            return Err(Error::Geometry {
                what: place.describe(),
                expected: format!("{} bytes", place.page.bytes()),
                found: format!("{length} bytes"),
            });
        }
        let other_memory = batch.last().is_some_and(|(last, _, _): &Batched| !Arc::ptr_eq(last, &place.memory));
        if other_memory || (bytes + length > most && !batch.is_empty()) {
            flush(agent, std::mem::take(&mut batch), after, gate).await?;
            bytes = 0;
        }
        batch.push((Arc::clone(&place.memory), place.page.clone(), payload));
        bytes += length;
        written += length;
    }
    flush(agent, batch, after, gate).await?;
    metrics::counter!(telemetry::RESTORE_BYTES, "bytes" => "written").increment(written);
    Ok(written)
}

type Batched = (Arc<dyn PageMemory>, Page, Bytes);

/// Writes a batch, all of one memory.
async fn flush<T: Send + 'static>(agent: &Agent, batch: Vec<Batched>, after: Option<[u8; 64]>, gate: &Gate<T>) -> Result<()> {
    let Some((memory, ..)) = batch.first() else { return Ok(()) };
    let memory = Arc::clone(memory);
    let pages: Vec<(Page, Bytes)> = batch.into_iter().map(|(_, page, payload)| (page, payload)).collect();
    let _turn = agent.engines().turn().await;
    // The thread goes on when this future is dropped, and the pass with it.
    let pass = gate.enter().ok_or(MemoryError::Stopped)?;
    let write = move || {
        let _pass = pass;
        memory.write(&pages, after.as_ref())
    };
    Ok(tokio::task::spawn_blocking(write).await.map_err(|panic| Error::Internal(format!("writing: {panic}")))??)
}
