//! Where pages lie: groups as registered, with the memory that holds them.

use crate::error::{Error, Result};
use crate::memory::{Page, PageMemory, Span};
use pfr_schema::engine::{GroupLayout, Part, Register, State};
use pfr_schema::tree::GroupKind;
use std::ops::Range;
use std::sync::Arc;

/// A group of layers of one rank, with its memory.
#[derive(Clone, Debug)]
pub struct Group {
    /// As registered, checked.
    pub layout: GroupLayout,
    /// Its position among the groups of the registration: the order in which layers are needed.
    pub place: usize,
    /// The memory of each component.
    components: Vec<Arc<dyn PageMemory>>,
    /// The memory of each state.
    states: Vec<Arc<dyn PageMemory>>,
}

impl Group {
    /// Columns that a sequence of `boundary` tokens needs: in a window the last ones, in a
    /// recurrent group one.
    #[must_use]
    pub fn columns(&self, boundary: u64) -> Range<u64> {
        let end = self.all_columns(boundary);
        let first_token = self.layout.window.map_or(0, |window| boundary.saturating_add(1).saturating_sub(window));
        let start = first_token / u64::from(self.layout.block_tokens);
        if self.layout.kind == GroupKind::Recurrent { 0..end } else { start.min(end)..end }
    }

    /// Number of columns, those that left the window included.
    #[must_use]
    pub fn all_columns(&self, boundary: u64) -> u64 {
        match self.layout.kind {
            GroupKind::Recurrent => 1,
            _ => boundary.div_ceil(u64::from(self.layout.block_tokens)),
        }
    }

    /// Where a component of a block lies.
    ///
    /// # Panics
    /// If the block is out of range; tables are checked when they come in.
    #[must_use]
    pub fn page(&self, component: usize, block: u32) -> (Arc<dyn PageMemory>, Page) {
        assert!(block < self.layout.blocks, "block {block} of group {:?}, which has {}", self.layout.name, self.layout.blocks);
        let spans = self.layout.components[component].parts.iter().map(|part| span(part, block)).collect();
        (Arc::clone(&self.components[component]), Page { spans })
    }

    /// Bytes of one component of one page; 0 for recurrent groups.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.layout.components.first().map_or(0, |component| component.parts.iter().map(|part| part.bytes).sum())
    }

    /// Where a state tensor of a block lies.
    ///
    /// # Panics
    /// As [`Group::page`], and for a state that is not of this group.
    #[must_use]
    pub fn state(&self, state: &State, block: u32) -> (Arc<dyn PageMemory>, Page) {
        assert!(block < self.layout.blocks, "block {block} of group {:?}, which has {}", self.layout.name, self.layout.blocks);
        let at = self.layout.states.iter().position(|s| s.name == state.name);
        let at = at.unwrap_or_else(|| panic!("group {:?} has no state {:?}", self.layout.name, state.name));
        (Arc::clone(&self.states[at]), Page { spans: vec![span(&self.layout.states[at].part, block)] })
    }
}

fn span(part: &Part, block: u32) -> Span {
    Span { offset: part.offset + u64::from(block) * part.block_stride, bytes: part.bytes }
}

/// Combines a checked registration with its memories, which have the same order. Returns the groups
/// sorted by name.
pub(super) fn resolve(register: &Register, memories: &[Arc<dyn PageMemory>]) -> Result<Vec<Group>> {
    let broke = |reason: String| Error::Protocol { engine: register.engine.clone(), reason };
    if memories.len() != register.memories.len() {
        return Err(broke(format!("{} memories described, {} handed over", register.memories.len(), memories.len())));
    }
    for (described, memory) in register.memories.iter().zip(memories) {
        if described.bytes != memory.size() {
            let reason = format!("memory {:?} is described with {} bytes and has {}", described.name, described.bytes, memory.size());
            return Err(broke(reason));
        }
    }
    let find = |part: &Part| {
        let at = register.memories.iter().position(|m| m.name == part.memory);
        at.map(|at| Arc::clone(&memories[at])).ok_or_else(|| broke(format!("no memory {:?}", part.memory)))
    };
    let mut groups = Vec::with_capacity(register.groups.len());
    for (place, layout) in register.groups.iter().enumerate() {
        let components = layout.components.iter().filter_map(|c| c.parts.first()).map(find).collect::<Result<_>>()?;
        let states = layout.states.iter().map(|state| find(&state.part)).collect::<Result<_>>()?;
        groups.push(Group { layout: layout.clone(), place, components, states });
    }
    groups.sort_by(|a, b| a.layout.name.cmp(&b.layout.name));
    Ok(groups)
}

/// Checks that two ranks have the same groups, so that one table can list their blocks. The error
/// says how they differ.
pub(super) fn agree(one: &[Group], two: &[Group]) -> Result<(), String> {
    let shapes = |groups: &[Group]| -> Vec<String> {
        let shape = |g: &Group| {
            let GroupLayout { name, kind, block_tokens, window, required, replicated, .. } = &g.layout;
            format!("{name:?} ({kind:?}, {block_tokens} tokens a block, window {window:?}, required {required}, replicated {replicated})")
        };
        groups.iter().map(shape).collect()
    };
    let (one, two) = (shapes(one), shapes(two));
    if one != two {
        return Err(format!("{} there, {} here", one.join(", "), two.join(", ")));
    }
    Ok(())
}
