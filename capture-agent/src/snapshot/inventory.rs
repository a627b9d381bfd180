//! The parts of a sequence's state in canonical order, and where they lie.

use crate::engines::{Engine, Group};
use crate::memory::{Page, PageMemory, Span};
use pfr_schema::checkpoint::Dtype;
use pfr_schema::engine::{Sequence, State};
use pfr_schema::flat;
use pfr_schema::tree::GroupKind;
use std::sync::Arc;

/// One blob of the state: a component of a page, or a state tensor.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// Position in [`Inventory::memories`].
    pub memory: usize,
    pub page: Page,
    /// Whether the engine writes it no more while it is pinned.
    pub sealed: bool,
    /// Spans of the page that are cleared in its copy.
    pub clear: Vec<Span>,
    /// Type of its elements, if the engine says it.
    pub elements: Option<Dtype>,
}

/// The pages of one paged group of one rank.
#[derive(Clone, Debug)]
pub(super) struct Paged {
    pub rank: u32,
    pub group: Group,
    /// The columns captured: a window's are not all.
    pub columns: std::ops::Range<u64>,
    /// Positions in [`Inventory::sources`]: column by column, component by component.
    pub sources: std::ops::Range<usize>,
}

/// A state tensor of one rank.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub rank: u32,
    pub state: State,
    pub source: usize,
}

/// All of a sequence's state.
#[derive(Clone, Debug, Default)]
pub(super) struct Inventory {
    pub memories: Vec<Arc<dyn PageMemory>>,
    pub sources: Vec<Source>,
    pub paged: Vec<Paged>,
    pub tensors: Vec<Tensor>,
}

impl Inventory {
    /// Lists the state of a checked sequence.
    pub fn of(engine: &Engine, sequence: &Sequence) -> Self {
        let mut inventory = Self::default();
        for rank in 0..engine.world() {
            for group in engine.groups(rank).iter().filter(|group| rank == 0 || !group.layout.replicated) {
                // Only optional groups have no blocks.
                let Some(blocks) = sequence.blocks.get(&group.layout.name) else { continue };
                match group.layout.kind {
                    GroupKind::Recurrent => inventory.add_states(rank, group, blocks[0]),
                    _ => inventory.add_pages(rank, group, sequence.boundary, blocks),
                }
            }
        }
        inventory
    }

    fn add_states(&mut self, rank: u32, group: &Group, block: u32) {
        for state in &group.layout.states {
            let source = self.sources.len();
            self.add(group.state(state, block), false, Vec::new(), state.storage_dtype.parse().ok());
            self.tensors.push(Tensor { rank, state: state.clone(), source });
        }
    }

    fn add_pages(&mut self, rank: u32, group: &Group, boundary: u64, blocks: &[u32]) {
        let fill = boundary % u64::from(group.layout.block_tokens);
        let columns = group.columns(boundary);
        let first = self.sources.len();
        for column in columns.clone() {
            let sealed = fill == 0 || column + 1 != columns.end;
            for component in 0..group.layout.components.len() {
                let clear = if sealed { Vec::new() } else { unfilled(group, fill) };
                self.add(group.page(component, blocks[column as usize]), sealed, clear, group.layout.elements());
            }
        }
        let sources = first..self.sources.len();
        self.paged.push(Paged { rank, group: group.clone(), columns, sources });
    }

    fn add(&mut self, (memory, page): (Arc<dyn PageMemory>, Page), sealed: bool, clear: Vec<Span>, elements: Option<Dtype>) {
        let at = self.memories.iter().position(|known| Arc::ptr_eq(known, &memory));
        let memory = at.unwrap_or_else(|| {
            self.memories.push(memory);
            self.memories.len() - 1
        });
        self.sources.push(Source { memory, page, sealed, clear, elements });
    }

    /// Bytes of everything.
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.page.bytes()).sum()
    }

    /// Pages, over all groups and ranks.
    pub fn pages(&self) -> u64 {
        self.paged.iter().map(|paged| paged.columns.end - paged.columns.start).sum()
    }

    /// Describes a source in an error message.
    pub fn describe(&self, source: usize) -> String {
        if let Some(tensor) = self.tensors.iter().find(|tensor| tensor.source == source) {
            return format!("state {:?} of rank {}", tensor.state.name, tensor.rank);
        }
        let Some(paged) = self.paged.iter().find(|paged| paged.sources.contains(&source)) else { return "an unknown blob".into() };
        let components = &paged.group.layout.components;
        let at = source - paged.sources.start;
        let column = paged.columns.start + (at / components.len()) as u64;
        let (name, component) = (&paged.group.layout.name, &components[at % components.len()].name);
        format!("page {column} ({component}) of group {name:?} of rank {}", paged.rank)
    }
}

/// The slots of a page that hold no token yet, where its layout is known:
/// `[layer][token][head][dim]`.
fn unfilled(group: &Group, fill: u64) -> Vec<Span> {
    let Some(geometry) = group.layout.geometry.filter(|_| group.layout.layout == flat::LAYOUT) else { return Vec::new() };
    let token = u64::from(geometry.n_heads) * u64::from(geometry.head_dim) * geometry.dtype.bytes();
    let layer = u64::from(geometry.page_size_tokens) * token;
    let span = |n| Span { offset: n * layer + fill * token, bytes: layer - fill * token };
    (0..u64::from(geometry.n_layers)).map(span).collect()
}
