//! Bringing each blob to its place in the engine's memory, in bounded batches. State tensors whose
//! slots have another form are converted here, and pages for other ranks are put together, in this
//! host's memory, also for a GPU. Blobs that come from a registry meanwhile are written as they
//! come, and state tensors among them are proven here.

use super::blobs::Blobs;
use super::cut;
use super::place::{Place, Places, Recipe};
use super::prove::Values;
use super::source::Source;
use crate::Agent;
use crate::copies::Gate;
use crate::error::{Error, Result, blocking};
use crate::memory::{MemoryError, Page, PageMemory};
use crate::metrics as names;
use bytes::Bytes;
use futures::poll;
use pfr_schema::checkpoint::{Mirror, Proof};
use pfr_schema::{Digest, ErrorCode};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

/// Bytes written at a time, at most; less if the ring is small. A larger page goes alone.
const BATCH: u64 = 64 << 20;

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub bytes: u64,
    /// Pages, over all groups and ranks.
    pub pages: u64,
    /// The engine's own pages, which were compared and not written.
    pub pages_kept: u64,
    /// Of a source whose blobs pass: how state tensors were proven.
    pub values: Values,
}

/// Writes every blob, or what is made from blobs, to its place; afterwards the places say what was
/// written. `after` is a CUDA IPC event to wait for first. Copies pass through the gate.
pub(super) async fn write<T: Send + 'static>(
    agent: &Agent,
    source: &Source,
    places: &mut Places,
    after: Option<[u8; 64]>,
    gate: &Gate<T>,
) -> Result<Written> {
    let most = (agent.engines().ring().total() / 2).clamp(1, BATCH);
    places.in_order_of_need();
    let mut blobs = source.blobs(places.blobs()).await?;
    let (mut batch, mut bytes, mut written) = (Vec::new(), 0, 0);
    let mut values = source.passes().then(Values::default);
    // The page of the place before, if it is a blob as it is.
    let mut before: Option<(Digest, Bytes)> = None;
    for place in &mut places.0 {
        let is_plain = place.is_plain_page();
        // Given back before the next blob is waited for: it counts against the bytes in flight.
        let same = before.take().filter(|(digest, _)| is_plain && *digest == place.digest);
        let payload = if let Some((_, payload)) = same {
            payload
        } else {
            let mut made = pin!(make(place, &mut blobs, values.as_mut()));
            match poll!(made.as_mut()) {
                Poll::Ready(payload) => payload?,
                Poll::Pending => {
                    // So do those of the batch.
                    if source.passes() {
                        flush(agent, std::mem::take(&mut batch), after, gate).await?;
                        bytes = 0;
                    }
                    made.await?
                }
            }
        };
        let length = payload.len() as u64;
        if length != place.page.bytes() {
            return Err(Error::mismatch(ErrorCode::GeometryMismatch, place.describe(), format!("{} bytes", place.page.bytes()), length));
        }
        if bytes + length > most && !batch.is_empty() {
            flush(agent, std::mem::take(&mut batch), after, gate).await?;
            bytes = 0;
        }
        before = is_plain.then(|| (place.digest, payload.clone()));
        batch.push((Arc::clone(&place.memory), place.page.clone(), payload));
        bytes += length;
        written += length;
    }
    flush(agent, batch, after, gate).await?;
    metrics::counter!(names::RESTORE_BYTES, "bytes" => "written").increment(written);
    Ok(Written { bytes: written, pages: places.pages(), pages_kept: 0, values: values.unwrap_or_default() })
}

/// Finds out what pages that are cut have to hold, without writing them: the engine has computed
/// them itself.
pub(super) async fn name(source: &Source, places: &mut Places) -> Result<()> {
    let mut cut: Vec<&mut Place> = places.0.iter_mut().filter(|place| place.is_cut_page()).collect();
    if cut.is_empty() {
        return Ok(());
    }
    let mut blobs = source.blobs(cut.iter().flat_map(|place| place.blobs()).collect()).await?;
    for place in &mut cut {
        make(place, &mut blobs, None).await?;
    }
    Ok(())
}

/// The bytes for a place, from the blobs that come next. With `values`, state tensors are proven.
async fn make(place: &mut Place, blobs: &mut Blobs, values: Option<&mut Values>) -> Result<Bytes> {
    let Mirror { tensor, bytes } = match place.recipe() {
        Recipe::AsIs => {
            let bytes = blobs.next(&place.digest).await?;
            if let (Some(values), Some(tensor)) = (values, place.tensor()) {
                let (tensor, payload) = (tensor.clone(), bytes.clone());
                let check = move || tensor.check_payload(&payload).and_then(|()| tensor.check_value(&payload));
                values.note(blocking("proving", check).await?);
            }
            return Ok(bytes);
        }
        Recipe::Page(cut, sources) => {
            let (digest, bytes) = cut::page(&cut, &sources, blobs).await?;
            place.takes_page(digest);
            return Ok(bytes);
        }
        Recipe::Mirror(tensor, form) => {
            let blob = blobs.next(&place.digest).await?;
            if let Some(values) = values {
                // A mirror has the value hash of its tensor.
                values.note(Proof::Computed);
            }
            blocking("converting", move || tensor.mirror(&blob, &form)).await?
        }
        Recipe::State(cut) => cut::state(&cut, blobs).await?,
    };
    place.takes(tensor);
    Ok(bytes.into())
}

type Batched = (Arc<dyn PageMemory>, Page, Bytes);
/// The pages of one memory.
type Pages = (Arc<dyn PageMemory>, Vec<(Page, Bytes)>);

/// Writes a batch.
async fn flush<T: Send + 'static>(agent: &Agent, batch: Vec<Batched>, after: Option<[u8; 64]>, gate: &Gate<T>) -> Result<()> {
    if batch.is_empty() {
        return Ok(());
    }
    let mut memories: Vec<Pages> = Vec::new();
    for (memory, page, payload) in batch {
        match memories.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &memory)) {
            Some((_, pages)) => pages.push((page, payload)),
            None => memories.push((memory, vec![(page, payload)])),
        }
    }
    for (memory, pages) in memories {
        let _turn = agent.engines().turn(&*memory).await;
        // The thread continues if this future is dropped, so it owns the passes.
        let passes = (gate.enter().ok_or(MemoryError::Stopped)?, agent.engines().copies().enter().ok_or(Error::Ended)?);
        let target = Arc::clone(&memory);
        let write = move || {
            let _passes = passes;
            target.write(&pages, after.as_ref())
        };
        blocking("writing", write).await?;
    }
    Ok(())
}
