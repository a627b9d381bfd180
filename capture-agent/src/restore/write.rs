//! Bringing each blob to its place in the engine's memory, in bounded batches. State tensors whose
//! slots have another form are converted here, and pages for other ranks are put together, in
//! this host's memory, also for a GPU.

use super::blobs::Blobs;
use super::cut;
use super::place::{Place, Places, Recipe};
use crate::Agent;
use crate::copies::Gate;
use crate::error::{Error, Result, blocking};
use crate::memory::{MemoryError, Page, PageMemory};
use crate::metrics as names;
use bytes::Bytes;
use pfr_schema::ErrorCode;
use pfr_schema::checkpoint::Mirror;
use std::sync::Arc;

/// Bytes written at a time, at most; less if the ring is small. A larger page goes alone.
const BATCH: u64 = 64 << 20;

/// Writes every blob, or what is made from blobs, to its place. Returns the bytes written;
/// afterwards the places say what was written. `after` is a CUDA IPC event to wait for first.
/// Copies pass through the gate.
pub(super) async fn write<T: Send + 'static>(agent: &Agent, places: &mut Places, after: Option<[u8; 64]>, gate: &Gate<T>) -> Result<u64> {
    let most = (agent.engines().ring().total() / 2).clamp(1, BATCH);
    let mut blobs = Blobs::open(agent.store(), places.0.iter().flat_map(Place::blobs).collect()).await?;
    let (mut batch, mut bytes, mut written) = (Vec::new(), 0, 0);
    for place in &mut places.0 {
        let payload = make(place, &mut blobs).await?;
        let length = payload.len() as u64;
        if length != place.page.bytes() {
            return Err(Error::mismatch(ErrorCode::GeometryMismatch, place.describe(), format!("{} bytes", place.page.bytes()), length));
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
    metrics::counter!(names::RESTORE_BYTES, "bytes" => "written").increment(written);
    Ok(written)
}

/// Finds out what pages that are cut have to hold, without writing them: the engine has computed
/// them itself.
pub(super) async fn name(agent: &Agent, places: &mut Places) -> Result<()> {
    let mut cut: Vec<&mut Place> = places.0.iter_mut().filter(|place| place.is_cut_page()).collect();
    if cut.is_empty() {
        return Ok(());
    }
    let mut blobs = Blobs::open(agent.store(), cut.iter().flat_map(|place| place.blobs()).collect()).await?;
    for place in &mut cut {
        make(place, &mut blobs).await?;
    }
    Ok(())
}

/// The bytes for a place, from the blobs that come next.
async fn make(place: &mut Place, blobs: &mut Blobs) -> Result<Bytes> {
    let Mirror { tensor, bytes } = match place.recipe() {
        Recipe::AsIs => return blobs.next(&place.digest).await,
        Recipe::Page(cut, sources) => {
            let (digest, bytes) = cut::page(&cut, &sources, blobs).await?;
            place.takes_page(digest);
            return Ok(bytes);
        }
        Recipe::Mirror(tensor, form) => {
            let blob = blobs.next(&place.digest).await?;
            blocking("converting", move || tensor.mirror(&blob, &form)).await?
        }
        Recipe::State(cut) => cut::state(&cut, blobs).await?,
    };
    place.takes(tensor);
    Ok(bytes.into())
}

type Batched = (Arc<dyn PageMemory>, Page, Bytes);

/// Writes a batch, all of one memory.
async fn flush<T: Send + 'static>(agent: &Agent, batch: Vec<Batched>, after: Option<[u8; 64]>, gate: &Gate<T>) -> Result<()> {
    let Some((memory, ..)) = batch.first() else { return Ok(()) };
    let memory = Arc::clone(memory);
    let pages: Vec<(Page, Bytes)> = batch.into_iter().map(|(_, page, payload)| (page, payload)).collect();
    let _turn = agent.engines().turn().await;
    // The thread continues if this future is dropped, so it owns the passes.
    let passes = (gate.enter().ok_or(MemoryError::Stopped)?, agent.engines().copies().enter().ok_or(Error::Ended)?);
    let write = move || {
        let _passes = passes;
        memory.write(&pages, after.as_ref())
    };
    blocking("writing", write).await
}
