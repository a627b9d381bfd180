//! Checks before the pause, so that a capture without enough room never pauses the engine.

use crate::engines::Engine;
use crate::error::{Result, blocking};
use crate::memory::PageMemory;
use pfr_schema::tree::GroupKind;
use std::sync::Arc;

/// What a capture needs of one memory.
#[derive(Debug)]
struct Need {
    memory: Arc<dyn PageMemory>,
    /// Bytes that are set aside while the engine is paused.
    aside: u64,
    /// The largest piece that is copied out.
    largest: u64,
}

/// Checks that memory and ring suffice for a capture of any sequence of this engine: the bytes set
/// aside do not depend on its length.
pub(super) async fn memory(engine: &Engine) -> Result<()> {
    let needs = needs(engine);
    blocking("preflight", move || needs.iter().try_for_each(|need| need.memory.preflight(need.aside, need.largest))).await
}

fn needs(engine: &Engine) -> Vec<Need> {
    let mut needs: Vec<Need> = Vec::new();
    let mut add = |memory: Arc<dyn PageMemory>, bytes: u64, count: u64| match needs.iter_mut().find(|n| Arc::ptr_eq(&n.memory, &memory)) {
        Some(need) => {
            need.aside += bytes * count;
            need.largest = need.largest.max(bytes);
        }
        None => needs.push(Need { memory, aside: bytes * count, largest: bytes }),
    };
    for group in (0..engine.world()).flat_map(|rank| engine.groups(rank)) {
        if group.layout.kind == GroupKind::Recurrent {
            group.layout.states.iter().for_each(|state| add(group.state(state, 0).0, state.part.bytes, 1));
        } else {
            (0..group.layout.components.len()).for_each(|component| add(group.page(component, 0).0, group.page_bytes(), 1));
        }
    }
    needs
}
