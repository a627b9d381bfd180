//! A state file as groups of an engine: pages of attention, and tensors for state of bounded size.

use super::file::{Of, PAGE_TOKENS, StateFile};
use pfr_schema::checkpoint::{Dtype, Layout};
use pfr_schema::engine::{Component, GroupLayout, Memory, MemoryKind, PROTOCOL, Part, Register, Sequence, State, Verb};
use pfr_schema::llama::{Block, Role};
use pfr_schema::tree::GroupKind;
use serde_json::Value;
use std::collections::BTreeMap;

/// Name of the tensor with the head.
pub(crate) const HEAD: &str = "state-file.head";
/// Its kind.
const HEAD_KIND: &str = "other:llama.cpp-state-file";
/// Name of the file as a memory.
const MEMORY: &str = "state-file";

/// A member without memory, so that the engine is there between captures.
pub(super) fn server(engine: &str, deployment: &BTreeMap<String, Value>) -> Register {
    Register {
        protocol: PROTOCOL,
        engine: engine.into(),
        member: "server".into(),
        verbs: vec![Verb::Allocate],
        rank: 0,
        world: 1,
        deployment: deployment.clone(),
        parallel: Vec::new(),
        memories: Vec::new(),
        groups: Vec::new(),
    }
}

/// The member with the memory of one file.
pub(super) fn slot(engine: &str, deployment: &BTreeMap<String, Value>, file: &StateFile) -> Register {
    let bytes = file.regions.iter().map(|region| region.bytes).sum();
    let memory = Memory { name: MEMORY.into(), kind: MemoryKind::PosixShm, bytes, offset: 0, handle: None, device: None };
    Register { member: "slot".into(), verbs: Vec::new(), memories: vec![memory], groups: groups(file), ..server(engine, deployment) }
}

/// The blocks of a sequence that has the whole file.
pub(super) fn blocks(register: &Register) -> BTreeMap<String, Vec<u32>> {
    register.groups.iter().map(|group| (group.name.clone(), (0..group.blocks).collect())).collect()
}

/// The sequence of a slot.
pub(super) fn sequence(slot: u32, file: &StateFile, register: &Register) -> Sequence {
    Sequence {
        id: slot.to_string(),
        tokens: file.state.tokens.clone(),
        boundary: file.state.boundary,
        blocks: blocks(register),
        unrecorded: vec!["sampling settings (each request has its own)".into()],
        ..Sequence::default()
    }
}

fn groups(file: &StateFile) -> Vec<GroupLayout> {
    let mut groups: Vec<GroupLayout> = Vec::new();
    for region in &file.regions {
        let part = |bytes| Part { memory: MEMORY.into(), offset: region.start, block_stride: bytes, bytes, share: None };
        let (name, state) = match region.of {
            Of::Pages { section: number, page_bytes } => {
                let section = &file.state.sections[number];
                groups.push(GroupLayout {
                    kind: if section.blocks.iter().any(|block| block.role == Role::V) { GroupKind::FullAttention } else { GroupKind::Mla },
                    block_tokens: PAGE_TOKENS,
                    blocks: (region.bytes / page_bytes) as u32,
                    layout: section.layout(),
                    dtype: dtype(&section.blocks),
                    components: vec![Component { name: "kv".into(), parts: vec![part(page_bytes)] }],
                    ..group(format!("attention-{number}"))
                });
                continue;
            }
            Of::Head => {
                let layout = Layout { tag: "row-major".into(), strides: Some(vec![1]), offset: Some(0) };
                (
                    MEMORY.to_owned(),
                    State { kind: HEAD_KIND.into(), shape: vec![region.bytes], layout, ..tensor(HEAD.into(), part(region.bytes)) },
                )
            }
            Of::Block { section: number, block } => {
                let section = &file.state.sections[number];
                let (block, cells) = (&section.blocks[block], section.positions.len() as u64);
                let kind = if section.streams > 0 { "window" } else { "recurrent" };
                let name = format!("{kind}-{number}.{:?}.{}", block.role, block.number);
                (format!("{kind}-{number}"), state(tensor(name, part(region.bytes)), block, cells))
            }
        };
        match groups.iter_mut().find(|group| group.name == name) {
            Some(group) => group.states.push(state),
            None => groups.push(GroupLayout { states: vec![state], ..group(name) }),
        }
    }
    groups
}

/// A group of one block for state tensors, with none yet.
fn group(name: String) -> GroupLayout {
    GroupLayout {
        name,
        kind: GroupKind::Recurrent,
        block_tokens: 1,
        blocks: 1,
        null_block: None,
        window: None,
        required: true,
        replicated: false,
        uncut: None,
        layout: String::new(),
        geometry: None,
        dtype: None,
        components: Vec::new(),
        states: Vec::new(),
    }
}

/// The type of all elements of a page, if there is one.
fn dtype(blocks: &[Block]) -> Option<Dtype> {
    let first = blocks.first()?.element.dtype()?;
    blocks.iter().all(|block| block.element.dtype() == Some(first)).then_some(first)
}

/// A tensor of plain bytes.
fn tensor(name: String, part: Part) -> State {
    let layout = Layout { tag: "llama.cpp".into(), strides: None, offset: None };
    let (shape, logical_dtype, storage_dtype) = (vec![part.bytes], "u8".into(), "u8".into());
    State { name, kind: "window".into(), layer: None, shape, logical_dtype, storage_dtype, layout, part, share: None }
}

/// The rows of a layer as a tensor of cells × elements. Quantized ones stay bytes.
fn state(bytes: State, block: &Block, cells: u64) -> State {
    let kind = match block.role {
        Role::K | Role::V => "window",
        Role::R => "conv",
        Role::S => "recurrent",
    };
    let Some(dtype) = block.element.dtype() else {
        let tag = format!("llama.cpp/{}", block.element.name());
        return State { kind: kind.into(), layout: Layout { tag, ..bytes.layout }, ..bytes };
    };
    let elements = block.row / block.element.bytes();
    let (tag, strides) =
        if block.transposed { ("column-major", vec![1, cells.cast_signed()]) } else { ("row-major", vec![elements.cast_signed(), 1]) };
    let layout = Layout { tag: tag.into(), strides: Some(strides), offset: Some(0) };
    let (shape, dtype) = (vec![cells, elements], dtype.to_string());
    State { kind: kind.into(), shape, logical_dtype: dtype.clone(), storage_dtype: dtype, layout, ..bytes }
}
