//! What happens while the engine stands still, and only that.

use super::inventory::Inventory;
use super::keep::Keep;
use crate::engines::{Engine, Pause, Pin};
use crate::error::{Error, Result};
use crate::memory::{MemoryError, Page, PageMemory, Span};
use bytes::Bytes;
use pfr_schema::agent::SnapshotRequest;
use pfr_schema::engine::Sequence;
use pfr_schema::snapshot::Exactness;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// A sequence's state, and where it lies as long as it is held.
#[derive(Debug)]
pub(super) struct Capture {
    pub sequence: Sequence,
    pub inventory: Arc<Inventory>,
    pub exactness: Exactness,
}

/// What keeps the sealed pages as they are until their bytes have left.
#[derive(Debug)]
pub(super) enum Hold {
    /// The engine runs.
    Pinned { _pin: Pin, paused: Duration },
    /// The engine stands still: it does not serve pins.
    Paused(Pause),
    /// The engine runs, and keeps the blocks by means of its own.
    Kept(Keep),
}

impl Hold {
    /// Whether the engine runs meanwhile.
    pub fn runs(&self) -> bool {
        !matches!(self, Self::Paused(_))
    }

    /// What threads that copy have to hold.
    pub fn keep(&self) -> Keep {
        if let Self::Kept(keep) = self { keep.clone() } else { Keep::default() }
    }

    /// Lets go; how long the engine stood still in all.
    pub async fn release(self) -> Result<Duration> {
        match self {
            Self::Pinned { paused, .. } => Ok(paused),
            Self::Paused(pause) => pause.resume().await,
            Self::Kept(_) => Ok(Duration::ZERO),
        }
    }
}

/// Pauses, looks, sets aside what the next step overwrites, pins the rest and lets the engine go on.
pub(super) async fn capture(engine: &Engine, request: &SnapshotRequest) -> Result<(Capture, Hold)> {
    let pause = engine.pause().await?;
    let sequence = pause.sequence(request.sequence.as_deref()).await?;
    require_state(engine, &sequence)?;
    let exactness = exactness(engine, &sequence, request.exact)?;
    let inventory = set_aside(Inventory::of(engine, &sequence), Keep::default()).await?;
    let hold = match pause.pin(&sequence.id).await? {
        Some(pin) => Hold::Pinned { _pin: pin, paused: pause.resume().await? },
        None => Hold::Paused(pause),
    };
    Ok((Capture { sequence, inventory: Arc::new(inventory), exactness }, hold))
}

/// The same for a sequence that an engine describes and keeps by itself.
pub(super) async fn given(engine: &Engine, sequence: Sequence, keep: Keep, exact: bool) -> Result<(Capture, Hold)> {
    engine.check_sequence(&sequence)?;
    require_state(engine, &sequence)?;
    let exactness = exactness(engine, &sequence, exact)?;
    // Only for slots that are cleared in the copy; everything is kept anyway.
    let inventory = set_aside(Inventory::of(engine, &sequence), keep.clone()).await?;
    Ok((Capture { sequence, inventory: Arc::new(inventory), exactness }, Hold::Kept(keep)))
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
            unrecorded.push("order of arithmetic (the deployment is not \"deterministic\": true)".into());
        }
        return Err(Error::NotExact { unrecorded: unrecorded.join(", ") });
    }
    Ok(Exactness::NearExact)
}

/// Copies what is not sealed within its device, and lets the inventory point to the copies.
async fn set_aside(mut inventory: Inventory, keep: Keep) -> Result<Inventory> {
    let copy = move || {
        let _keep = keep;
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
    Ok(tokio::task::spawn_blocking(copy).await.map_err(|panic| Error::Internal(format!("setting aside: {panic}")))??)
}

/// Clears the slots that hold no token in copies of partly filled pages, so that one state has one digest. Blocks.
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
