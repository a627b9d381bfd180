//! Compares the engine's memory with the snapshot. Pages are hashed in place; state tensors are
//! read back and compared by payload and value.

use super::place::{Place, Places};
use crate::Agent;
use crate::error::{Error, Result, blocking};
use crate::memory::{MemoryError, Page, PageMemory, Span};
use pfr_schema::{Algorithm, FormatError};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of a state tensor that are read back at a time, at most; less if the ring is small.
const PIECE: u64 = 16 << 20;

pub(super) async fn check(agent: &Agent, places: &Arc<Places>) -> Result<()> {
    let hashed = Arc::clone(places);
    blocking("hashing restored pages", move || pages(&hashed)).await?;
    let piece = (agent.engines().ring().total() / 2).clamp(1, PIECE);
    for at in (0..places.0.len()).filter(|at| places.0[*at].tensor().is_some()) {
        let (places, memory) = (Arc::clone(places), Arc::clone(&places.0[at].memory));
        let _turn = agent.engines().turn(&*memory).await;
        blocking("verifying restored state", move || state(&places.0[at], piece)).await?;
    }
    Ok(())
}

/// Hashes all pages, memory by memory.
fn pages(places: &Places) -> Result<()> {
    let mut memories: Vec<&Arc<dyn PageMemory>> = Vec::new();
    let mut groups: BTreeMap<(usize, Algorithm), Vec<&Place>> = BTreeMap::new();
    for place in &places.0 {
        let at = memories.iter().position(|memory| Arc::ptr_eq(memory, &place.memory)).unwrap_or_else(|| {
            memories.push(&place.memory);
            memories.len() - 1
        });
        groups.entry((at, place.digest.algorithm())).or_default().push(place);
    }
    for ((memory, algorithm), here) in groups {
        let pages: Vec<Page> = here.iter().map(|place| place.page.clone()).collect();
        let found = memories[memory].hash(algorithm, &pages)?;
        if found.len() != here.len() {
            return Err(MemoryError::Unreachable { what: "hash", reason: "fewer digests than pages".into() }.into());
        }
        if let Some((place, found)) = here.iter().zip(&found).find(|(place, found)| place.digest != **found) {
            return Err(Error::Live { what: place.describe(), expected: place.digest.to_string(), found: found.to_string() });
        }
    }
    Ok(())
}

/// Reads a state tensor back and verifies its value.
fn state(place: &Place, piece: u64) -> Result<()> {
    let Some(tensor) = place.tensor() else { return Ok(()) };
    let mut pieces = Vec::new();
    for Span { offset, bytes } in &place.page.spans {
        let starts = (0..*bytes).step_by(usize::try_from(piece).unwrap_or(usize::MAX));
        pieces.extend(starts.map(|start| Page { spans: vec![Span { offset: offset + start, bytes: piece.min(bytes - start) }] }));
    }
    let mut payload = Vec::with_capacity(usize::try_from(place.page.bytes()).unwrap_or_default());
    let mut take = |_: usize, bytes: bytes::Bytes| {
        payload.extend_from_slice(&bytes);
        true
    };
    place.memory.read(&pieces, &mut take)?;
    let live = |expected: String, found: String| Error::Live { what: place.describe(), expected, found };
    match tensor.check_payload(&payload).and_then(|()| tensor.check_value(&payload)) {
        Ok(_) => Ok(()),
        Err(FormatError::PayloadHashMismatch { expected, found, .. } | FormatError::ValueHashMismatch { expected, found, .. }) => {
            Err(live(expected, found))
        }
        Err(error) => Err(error.into()),
    }
}
