//! The steps that need a paused engine, and no others.

use super::inventory::Inventory;
use crate::copies::SharedPin;
use crate::engines::{Engine, Hold, Pause, Pin};
use crate::error::{Error, Result, blocking};
use crate::memory::{MemoryError, Page, PageMemory, Span};
use bytes::Bytes;
use pfr_schema::agent::SnapshotRequest;
use pfr_schema::engine::Sequence;
use pfr_schema::snapshot::Exactness;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// The state of a sequence, and where it lies while its guard lives.
#[derive(Debug)]
pub(super) struct Capture {
    pub sequence: Sequence,
    pub inventory: Arc<Inventory>,
    pub exactness: Exactness,
}

/// Guarantees that the engine does not overwrite the captured pages until they are copied.
#[derive(Debug)]
pub(super) enum BlockGuard {
    /// The engine runs; it serves `pin`.
    Pinned { _pin: Pin, paused: Duration },
    /// The engine is paused: it does not serve `pin`.
    Paused(Pause),
    /// The engine runs in this process and gave a pin of its own.
    Given(SharedPin),
    /// The engine runs and holds the blocks.
    Held(Hold),
}

impl BlockGuard {
    /// Whether the engine runs meanwhile.
    pub fn runs(&self) -> bool {
        !matches!(self, Self::Paused(_))
    }

    /// The pin that each copying thread must own.
    pub fn shared_pin(&self) -> SharedPin {
        if let Self::Given(pin) = self { pin.clone() } else { SharedPin::default() }
    }

    /// Waits for `work` while the blocks are guaranteed: a paused engine goes on by itself.
    pub async fn within<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        if let Self::Paused(pause) = self { pause.within(work).await } else { work.await }
    }

    /// Releases the blocks; returns how long the engine was paused.
    pub async fn release(self) -> Result<Duration> {
        match self {
            Self::Pinned { paused, .. } => Ok(paused),
            Self::Paused(pause) => pause.resume().await,
            Self::Given(_) => Ok(Duration::ZERO),
            Self::Held(hold) => hold.release().await.map(|()| Duration::ZERO),
        }
    }
}

/// Pauses the engine, reads its table, copies the pages that the next step overwrites, pins the
/// others, and resumes the engine.
pub(super) async fn capture(engine: &Engine, request: &SnapshotRequest) -> Result<(Capture, BlockGuard)> {
    let pause = engine.pause().await?;
    let sequence = pause.sequence(request.sequence.as_deref()).await?;
    require_state(engine, &sequence)?;
    let exactness = exactness(engine, &sequence, request.exact)?;
    let inventory = pause.within(set_aside(Inventory::of(engine, &sequence), SharedPin::default())).await?;
    let guard = match pause.pin(&sequence.id).await? {
        Some(pin) => BlockGuard::Pinned { _pin: pin, paused: pause.resume().await? },
        None => BlockGuard::Paused(pause),
    };
    Ok((Capture { sequence, inventory: Arc::new(inventory), exactness }, guard))
}

/// The same for a sequence whose blocks the engine holds while it runs. `save` is the ticket of the
/// save that it is for.
pub(super) async fn held(engine: &Engine, request: &SnapshotRequest, save: Option<&str>) -> Result<(Capture, BlockGuard)> {
    let (sequence, hold) = engine.hold(request.sequence.as_deref(), save).await?;
    Ok((at_rest(engine, sequence, SharedPin::default(), request.exact).await?, BlockGuard::Held(hold)))
}

/// The same for a sequence that an engine describes and pins by itself.
pub(super) async fn given(engine: &Engine, sequence: Sequence, pin: SharedPin, exact: bool) -> Result<(Capture, BlockGuard)> {
    engine.check_sequence(&sequence)?;
    Ok((at_rest(engine, sequence, pin.clone(), exact).await?, BlockGuard::Given(pin)))
}

/// A sequence none of whose blocks is written. Copies are made only to clear slots without tokens.
async fn at_rest(engine: &Engine, sequence: Sequence, pin: SharedPin, exact: bool) -> Result<Capture> {
    require_state(engine, &sequence)?;
    let exactness = exactness(engine, &sequence, exact)?;
    let inventory = set_aside(Inventory::of(engine, &sequence), pin).await?;
    Ok(Capture { sequence, inventory: Arc::new(inventory), exactness })
}

fn require_state(engine: &Engine, sequence: &Sequence) -> Result<()> {
    if sequence.boundary == 0 {
        return Err(Error::Invalid(format!("sequence {:?} of engine {:?} has no state yet", sequence.id, engine.name())));
    }
    Ok(())
}

fn exactness(engine: &Engine, sequence: &Sequence, asked: bool) -> Result<Exactness> {
    let deterministic = engine.deployment().get("deterministic") == Some(&Value::Bool(true));
    if deterministic && sequence.unrecorded.is_empty() {
        return Ok(Exactness::BitExact);
    }
    if asked {
        let mut unrecorded = sequence.unrecorded.clone();
        if !deterministic {
            unrecorded.push("order of arithmetic (the engine configuration does not say \"deterministic\": true)".into());
        }
        return Err(Error::NotExact { unrecorded: unrecorded.join(", ") });
    }
    Ok(Exactness::NearExact)
}

/// Copies unsealed pages within their device, and replaces them in the inventory by the copies.
async fn set_aside(mut inventory: Inventory, pin: SharedPin) -> Result<Inventory> {
    let copy = move || {
        let _pin = pin;
        for memory in 0..inventory.memories.len() {
            let unsealed = |s: &super::inventory::Source| s.memory == memory && !s.sealed;
            let pages: Vec<Page> = inventory.sources.iter().filter(|s| unsealed(s)).map(|s| s.page.clone()).collect();
            if pages.is_empty() {
                continue;
            }
            let copy: Arc<dyn PageMemory> = Arc::from(inventory.memories[memory].set_aside(&pages)?);
            let (at, mut offset) = (inventory.memories.len(), 0);
            for source in inventory.sources.iter_mut().filter(|s| unsealed(s)) {
                let bytes = source.page.bytes();
                source.page = Page { spans: vec![Span { offset, bytes }] };
                source.memory = at;
                offset += bytes;
            }
            inventory.memories.push(copy);
        }
        Ok::<_, MemoryError>(inventory)
    };
    blocking("setting aside", copy).await
}

/// Clears the slots that hold no token in copies of partly filled pages, so that one state has one
/// digest. Blocks.
pub(super) fn canonicalise(inventory: &Inventory) -> std::result::Result<(), MemoryError> {
    for source in inventory.sources.iter().filter(|source| !source.clear.is_empty()) {
        let base = source.page.spans[0].offset;
        let spans: Vec<Span> = source.clear.iter().map(|span| Span { offset: base + span.offset, bytes: span.bytes }).collect();
        let page = Page { spans };
        let zeros = Bytes::from(vec![0; page.bytes() as usize]);
        inventory.memories[source.memory].write(&[(page, zeros)], None)?;
    }
    Ok(())
}
