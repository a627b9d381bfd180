//! Layouts of synthetic engines.

use pfr_schema::checkpoint::{self, Form, Layout};
use pfr_schema::engine::{Component, GroupLayout, Memory, MemoryKind, PROTOCOL, Part, Register, State, Verb};
use pfr_schema::flat;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::tree::GroupKind;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A synthetic engine's groups and manners.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: String,
    pub world: u32,
    pub groups: Vec<Group>,
    pub verbs: Vec<Verb>,
    pub deployment: BTreeMap<String, Value>,
    /// Shuffles blocks, and is the garbage in slots without a token.
    pub placement: u64,
    /// Bytes between blocks.
    pub padding: u64,
    /// Steps that every sequence makes as soon as the engine goes on.
    pub steps_on_resume: u32,
}

/// A group.
#[derive(Clone, Debug)]
pub struct Group {
    pub name: &'static str,
    pub kind: GroupKind,
    pub block_tokens: u32,
    pub blocks: u32,
    pub window: Option<u64>,
    pub layers: u32,
    pub components: &'static [&'static str],
    /// Bytes of one token in one layer of one component.
    pub token_bytes: u64,
    pub flat: bool,
    pub replicated: bool,
    pub required: bool,
    /// Names and element counts (f32) of the states of a recurrent group.
    pub states: &'static [(&'static str, u64)],
    /// Shape of every state and how a block holds it, if not as a row of f32.
    pub form: Option<(Vec<u64>, Form)>,
    /// Whether all states describe the same bytes of a block.
    pub one_part: bool,
}

impl Group {
    pub fn opaque(name: &'static str) -> Self {
        Self {
            name,
            kind: GroupKind::FullAttention,
            block_tokens: 4,
            blocks: 256,
            window: None,
            layers: 3,
            components: &["kv"],
            token_bytes: 64,
            flat: false,
            replicated: false,
            required: true,
            states: &[],
            form: None,
            one_part: false,
        }
    }

    pub fn flat(name: &'static str) -> Self {
        Self { components: &["k", "v"], flat: true, ..Self::opaque(name) }
    }

    pub fn window(name: &'static str, window: u64) -> Self {
        Self { kind: GroupKind::SlidingWindow, window: Some(window), ..Self::opaque(name) }
    }

    pub fn recurrent(name: &'static str, states: &'static [(&'static str, u64)]) -> Self {
        Self { kind: GroupKind::Recurrent, block_tokens: 1, blocks: 8, components: &[], states, ..Self::opaque(name) }
    }

    fn geometry(&self) -> Option<Geometry> {
        let head_dim = (self.token_bytes / 2 / 2) as u32;
        let geometry = Geometry { page_size_tokens: self.block_tokens, n_layers: self.layers, n_heads: 2, head_dim, dtype: Dtype::Bf16 };
        self.flat.then_some(geometry)
    }
}

pub const ALL_VERBS: [Verb; 5] = [Verb::Pause, Verb::Table, Verb::Pin, Verb::Oracle, Verb::Allocate];

impl Spec {
    /// One full-attention group in the flat layout.
    pub fn flat(name: &str) -> Self {
        Self::with(name, vec![Group::flat("main")])
    }

    /// A flat group, an opaque one, a window and recurrent state.
    pub fn hybrid(name: &str) -> Self {
        let groups = vec![
            Group::flat("main"),
            Group::opaque("index"),
            Group::window("near", 10),
            Group::recurrent("mamba", &[("layers.1.conv", 24), ("layers.1.ssm", 100)]),
        ];
        Self::with(name, groups)
    }

    pub fn with(name: &str, groups: Vec<Group>) -> Self {
        let deployment = json!({"weights": "sha256:w", "engine": "synthetic 1", "backend": "reference", "deterministic": true});
        Self {
            name: name.into(),
            world: 1,
            groups,
            verbs: ALL_VERBS.to_vec(),
            deployment: serde_json::from_value(deployment).unwrap(),
            placement: 1,
            padding: 0,
            steps_on_resume: 0,
        }
    }

    pub fn placed(mut self, placement: u64, padding: u64) -> Self {
        (self.placement, self.padding) = (placement, padding);
        self
    }

    pub fn ranks(mut self, world: u32) -> Self {
        self.world = world;
        self
    }

    pub fn without(mut self, verb: Verb) -> Self {
        self.verbs.retain(|v| *v != verb);
        self
    }

    /// The registration of one rank. Rank 0 serves the verbs.
    pub fn register(&self, rank: u32) -> Register {
        let mut at = 0;
        let mut part = |blocks: u32, bytes: u64| {
            let part = Part { memory: "kv".into(), offset: at, block_stride: bytes + self.padding, bytes };
            at += u64::from(blocks) * part.block_stride;
            part
        };
        let groups: Vec<GroupLayout> = self.groups.iter().map(|group| layout(group, &mut part)).collect();
        let memory = Memory { name: "kv".into(), kind: MemoryKind::PosixShm, bytes: at, offset: 0, handle: None, device: None };
        Register {
            protocol: PROTOCOL,
            engine: self.name.clone(),
            member: format!("worker-{rank}"),
            verbs: if rank == 0 { self.verbs.clone() } else { Vec::new() },
            rank,
            world: self.world,
            deployment: self.deployment.clone(),
            memories: vec![memory],
            groups,
        }
    }
}

fn layout(group: &Group, part: &mut impl FnMut(u32, u64) -> Part) -> GroupLayout {
    let component = |name: &&str, part: &mut dyn FnMut(u32, u64) -> Part| Component {
        name: (*name).into(),
        parts: (0..group.layers).map(|_| part(group.blocks, u64::from(group.block_tokens) * group.token_bytes)).collect(),
    };
    GroupLayout {
        name: group.name.into(),
        kind: group.kind,
        block_tokens: group.block_tokens,
        blocks: group.blocks,
        null_block: Some(0),
        window: group.window,
        required: group.required,
        replicated: group.replicated,
        layout: if group.flat { flat::LAYOUT.into() } else { "opaque/synthetic/reference/v1".into() },
        geometry: group.geometry(),
        components: group.components.iter().map(|name| component(name, part)).collect(),
        states: states(group, part),
    }
}

fn states(group: &Group, part: &mut impl FnMut(u32, u64) -> Part) -> Vec<State> {
    let mut states: Vec<State> = Vec::new();
    for (name, elements) in group.states {
        let row = || Form { storage_dtype: checkpoint::Dtype::F32, layout: Layout::row_major(&[*elements]), bytes: elements * 4 };
        let (shape, form) = group.form.clone().unwrap_or_else(|| (vec![*elements], row()));
        let part = match states.first() {
            Some(first) if group.one_part => first.part.clone(),
            _ => part(group.blocks, form.bytes),
        };
        states.push(State {
            name: (*name).into(),
            kind: "recurrent".into(),
            layer: Some(1),
            shape,
            logical_dtype: "f32".into(),
            storage_dtype: form.storage_dtype.to_string(),
            layout: form.layout,
            part,
        });
    }
    states
}
