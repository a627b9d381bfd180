//! Layouts of synthetic engines.

use pfr_schema::checkpoint::{self, Form, Layout};
use pfr_schema::engine::{Component, GroupLayout, Memory, MemoryKind, PROTOCOL, Part, Register, State, Verb};
use pfr_schema::flat;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::shards::{AxisShare, LayerShare, Share};
use pfr_schema::tree::GroupKind;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A synthetic engine: its groups, and how it behaves.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: String,
    pub world: u32,
    pub groups: Vec<Group>,
    pub verbs: Vec<Verb>,
    pub deployment: BTreeMap<String, Value>,
    /// Keys of the deployment that say only how ranks share the state.
    pub parallel: Vec<String>,
    /// A number that decides which blocks a sequence gets, and which garbage is in slots that hold
    /// no token.
    pub placement: u64,
    /// Bytes between blocks.
    pub padding: u64,
    /// Steps that every sequence makes as soon as the engine's pause ends.
    pub steps_on_resume: u32,
    /// Whether its pages go through a ring of its own, as those of GPUs do.
    pub own_ring: bool,
}

/// A group of layers.
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
    /// The shape of every state, and how a block holds it. `None`: as a row of f32.
    pub form: Option<(Vec<u64>, Form)>,
    /// Whether all states describe the same bytes of a block.
    pub one_part: bool,
    /// How ranks share the heads. If it is given, `token_bytes` are the bytes of one head.
    pub heads: Option<Heads>,
    /// How ranks share the states: one entry for each state, which also gives its shape and form.
    pub splits: Vec<Split>,
    /// Why the engine does not say which part of the group a rank holds.
    pub uncut: Option<&'static str>,
    /// The type of the elements, if the engine says it. The content of pages is then plausible
    /// numbers of the type `bf16`, which the tensor codecs make smaller.
    pub elements: Option<checkpoint::Dtype>,
}

/// The heads of all ranks. With more ranks than heads, neighbouring ranks have the same head.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub total: u64,
    /// Whether a page is `[token][head]`, not `[head][token]`.
    pub tokens_first: bool,
    /// Whether each rank falsely says that it has the first heads.
    pub lies: bool,
}

impl Heads {
    pub fn new(total: u64, tokens_first: bool) -> Self {
        Self { total, tokens_first, lies: false }
    }

    /// The heads of a rank.
    pub fn of(&self, rank: u32, world: u32) -> Vec<u64> {
        let (rank, world) = (u64::from(rank), u64::from(world));
        if world > self.total {
            return vec![rank * self.total / world];
        }
        let local = self.total / world;
        (rank * local..(rank + 1) * local).collect()
    }
}

/// A state tensor that is split over all ranks.
#[derive(Clone, Debug)]
pub struct Split {
    pub shape: Vec<u64>,
    pub axis: usize,
    /// The numbers of units along the axis, section by section. Each section is spread over the
    /// ranks.
    pub sections: Vec<u64>,
    /// Whether every rank has all of the last section.
    pub replicated: bool,
    pub form: fn(&[u64]) -> Form,
}

impl Split {
    /// The numbers of the units that a rank holds. Units are numbered over all ranks.
    pub fn of(&self, rank: u32, world: u32) -> Vec<u64> {
        let (mut units, mut base) = (Vec::new(), 0);
        for (number, section) in self.sections.iter().enumerate() {
            let (rank, world) =
                if self.replicated && number + 1 == self.sections.len() { (0, 1) } else { (u64::from(rank), u64::from(world)) };
            units.extend(base + rank * section / world..base + (rank + 1) * section / world);
            base += section;
        }
        units
    }

    pub fn shape_of(&self, rank: u32, world: u32) -> Vec<u64> {
        let mut shape = self.shape.clone();
        shape[self.axis] = self.of(rank, world).len() as u64;
        shape
    }

    fn share(&self, rank: u32, world: u32) -> AxisShare {
        AxisShare { axis: self.axis as u32, share: share(&self.of(rank, world), self.sections.iter().sum()) }
    }
}

/// The share that holds these units: consecutive units become one range.
fn share(units: &[u64], of: u64) -> Share {
    Share { of, held: units.chunk_by(|a, b| a + 1 == *b).map(|range| [range[0], range[range.len() - 1] + 1]).collect() }
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
            heads: None,
            splits: Vec::new(),
            uncut: None,
            elements: None,
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

    fn geometry(&self, rank: u32, world: u32) -> Option<Geometry> {
        let n_heads = self.heads.map_or(2, |heads| heads.of(rank, world).len() as u32);
        let head_dim = (self.token_bytes / 2 / if self.heads.is_some() { 1 } else { 2 }) as u32;
        let geometry = Geometry { page_size_tokens: self.block_tokens, n_layers: self.layers, n_heads, head_dim, dtype: Dtype::Bf16 };
        self.flat.then_some(geometry)
    }

    /// Bytes of a block in one layer of a rank, and the rank's share of the layer.
    fn part(&self, layer: u32, (rank, world): (u32, u32)) -> (u64, Option<LayerShare>) {
        let (tokens, bytes) = (u64::from(self.block_tokens), u64::from(self.block_tokens) * self.token_bytes);
        let Some(heads) = self.heads else { return (bytes, None) };
        let (held, said) = (heads.of(rank, world), heads.of(if heads.lies { 0 } else { rank }, world));
        let (outer, cell) = if heads.tokens_first { (tokens, self.token_bytes) } else { (1, bytes) };
        let share = LayerShare { layer: format!("layers.{layer}"), outer, cell, share: share(&said, heads.total) };
        (bytes * held.len() as u64, self.uncut.is_none().then_some(share))
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

    /// Full attention alone, in pages of 4 and of 8 tokens.
    pub fn attention(name: &str) -> Self {
        Self::with(name, vec![Group::flat("main"), Group { block_tokens: 8, ..Group::opaque("other") }])
    }

    pub fn with(name: &str, groups: Vec<Group>) -> Self {
        let deployment = json!({"weights": "sha256:w", "engine": "synthetic 1", "backend": "reference", "deterministic": true});
        Self {
            name: name.into(),
            world: 1,
            groups,
            verbs: ALL_VERBS.to_vec(),
            deployment: serde_json::from_value(deployment).unwrap(),
            parallel: Vec::new(),
            placement: 1,
            padding: 0,
            steps_on_resume: 0,
            own_ring: false,
        }
    }

    /// An engine that only sends requests: it takes no sequence from the agent.
    pub fn requests_only(self) -> Self {
        Self { verbs: vec![Verb::Request], ..self }
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
            let part = Part { memory: "kv".into(), offset: at, block_stride: bytes + self.padding, bytes, share: None };
            at += u64::from(blocks) * part.block_stride;
            part
        };
        let groups: Vec<GroupLayout> = self.groups.iter().map(|group| layout(group, (rank, self.world), &mut part)).collect();
        let memory = Memory { name: "kv".into(), kind: MemoryKind::PosixShm, bytes: at, offset: 0, handle: None, device: None };
        Register {
            protocol: PROTOCOL,
            engine: self.name.clone(),
            member: format!("worker-{rank}"),
            verbs: if rank == 0 { self.verbs.clone() } else { Vec::new() },
            rank,
            world: self.world,
            deployment: self.deployment.clone(),
            parallel: self.parallel.clone(),
            memories: vec![memory],
            groups,
        }
    }
}

fn layout(group: &Group, rank: (u32, u32), part: &mut impl FnMut(u32, u64) -> Part) -> GroupLayout {
    let layer = |layer: u32, part: &mut dyn FnMut(u32, u64) -> Part| {
        let (bytes, share) = group.part(layer, rank);
        Part { share, ..part(group.blocks, bytes) }
    };
    let component = |name: &&str, part: &mut dyn FnMut(u32, u64) -> Part| Component {
        name: (*name).into(),
        parts: (0..group.layers).map(|number| layer(number, part)).collect(),
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
        uncut: group.uncut.map(Into::into),
        layout: if group.flat { flat::LAYOUT.into() } else { "opaque/synthetic/reference/v1".into() },
        geometry: group.geometry(rank.0, rank.1),
        dtype: group.elements.filter(|_| !group.flat),
        components: group.components.iter().map(|name| component(name, part)).collect(),
        states: states(group, rank, part),
    }
}

fn states(group: &Group, (rank, world): (u32, u32), part: &mut impl FnMut(u32, u64) -> Part) -> Vec<State> {
    let mut states: Vec<State> = Vec::new();
    for (number, (name, elements)) in group.states.iter().enumerate() {
        let split = group.splits.get(number).map(|split| (split.shape_of(rank, world), split));
        let row = || Form { storage_dtype: checkpoint::Dtype::F32, layout: Layout::row_major(&[*elements]), bytes: elements * 4 };
        let given = split.as_ref().map(|(shape, split)| (shape.clone(), (split.form)(shape)));
        let (shape, form) = given.or_else(|| group.form.clone()).unwrap_or_else(|| (vec![*elements], row()));
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
            share: split.filter(|_| group.uncut.is_none()).map(|(_, split)| split.share(rank, world)),
        });
    }
    states
}
