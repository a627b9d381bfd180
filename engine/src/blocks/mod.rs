//! Blocks of several groups in shared memory, and the tables of the sequences that hold them.
//!
//! [`GroupLayout`], a type of the protocol, is the only description of where blocks are. The engine
//! finds its memory by the same description that it gives to the agent. Attention groups hold 16
//! tokens a block; forks share blocks and copy a shared last one before they write it; columns that
//! fell out of a sliding window are given back. A recurrent group holds one block a sequence.

mod held;
mod memory;
mod pool;
mod view;

pub use held::{Pin, Used};
pub use pool::Pool;
pub use view::KvView;

use crate::cache::{PageMemory, SeqId};
use crate::error::EngineError;
use crate::rng::Rng;
use crate::shared::SharedMemory;
use memory::soil;
use pfr_schema::engine::{GroupLayout, Part};
use pfr_schema::tree::GroupKind;
use std::collections::BTreeMap;

/// How blocks are handed out. Results do not depend on it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Placement {
    /// Seed that shuffles the blocks; `None` takes them in order.
    pub seed: Option<u64>,
    /// Seed of garbage that fills all memory at first and every block when it becomes free.
    pub dirty: Option<u64>,
}

/// The first column of a group that a sequence of `boundary` tokens still needs.
#[must_use]
pub fn first_column(layout: &GroupLayout, boundary: usize) -> usize {
    let window = layout.window.and_then(|window| usize::try_from(window).ok()).unwrap_or(usize::MAX);
    (boundary + 1).saturating_sub(window) / layout.block_tokens as usize
}

struct Group {
    layout: GroupLayout,
    pool: Pool,
    /// All parts of a block, in the order of its bytes, each with the number of its memory.
    parts: Vec<(usize, Part)>,
}

impl Group {
    fn recurrent(&self) -> bool {
        self.layout.kind == GroupKind::Recurrent
    }

    fn full(&self) -> EngineError {
        EngineError::PoolFull { blocks: self.layout.blocks as usize, page_tokens: self.layout.block_tokens as usize }
    }
}

#[derive(Clone, Default)]
struct Table {
    tokens: usize,
    /// For each group its blocks by column; `None` where a column fell out of the window.
    columns: Vec<Vec<Option<u32>>>,
}

/// Groups, memory and tables.
pub struct Blocks {
    names: Vec<String>,
    memories: Vec<SharedMemory>,
    groups: Vec<Group>,
    tables: BTreeMap<SeqId, Table>,
    next: u64,
    dirt: Option<Rng>,
}

impl Blocks {
    /// Memories by name, and groups whose parts lie in them.
    ///
    /// # Panics
    /// If a part lies in none of the memories: a bug in the caller.
    #[must_use]
    pub fn new(memories: Vec<(&str, SharedMemory)>, groups: Vec<GroupLayout>, placement: Placement) -> Self {
        let (names, mut memories): (Vec<String>, Vec<_>) = memories.into_iter().map(|(name, memory)| (name.to_owned(), memory)).unzip();
        let mut dirt = placement.dirty.map(Rng::new);
        if let Some(rng) = &mut dirt {
            memories.iter_mut().for_each(|memory| soil(rng, memory.bytes_mut()));
        }
        let group = |layout: GroupLayout| {
            let components = layout.components.iter().flat_map(|component| &component.parts);
            let parts = components.chain(layout.states.iter().map(|state| &state.part));
            let numbered = parts.map(|part| {
                let memory = names.iter().position(|name| *name == part.memory);
                let memory = memory.unwrap_or_else(|| panic!("no memory {:?}", part.memory));
                (memory, part.clone())
            });
            let parts = numbered.collect();
            let first = layout.null_block.map_or(0, |null| null + 1);
            Group { pool: Pool::new(first, layout.blocks, placement.seed), parts, layout }
        };
        let groups = groups.into_iter().map(group).collect();
        Self { memories, groups, tables: BTreeMap::new(), next: 1, dirt, names }
    }

    /// The groups.
    #[must_use]
    pub fn layouts(&self) -> Vec<GroupLayout> {
        self.groups.iter().map(|group| group.layout.clone()).collect()
    }

    fn table(&self, seq: SeqId) -> Result<&Table, EngineError> {
        self.tables.get(&seq).ok_or(EngineError::NoSequence(seq.0))
    }

    fn insert(&mut self, table: Table) -> SeqId {
        let id = SeqId(self.next);
        self.next += 1;
        self.tables.insert(id, table);
        id
    }

    /// Tokens in a sequence.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn tokens(&self, seq: SeqId) -> Result<usize, EngineError> {
        Ok(self.table(seq)?.tokens)
    }

    /// A new, empty sequence; its recurrent state is zero.
    ///
    /// # Errors
    /// [`EngineError::PoolFull`].
    pub fn create(&mut self) -> Result<SeqId, EngineError> {
        let seq = self.allocate(0)?;
        for group in 0..self.groups.len() {
            for block in self.tables[&seq].columns[group].clone().into_iter().flatten() {
                self.fill(group, block, &mut |bytes| bytes.fill(0));
            }
        }
        Ok(seq)
    }

    /// A new sequence of `boundary` tokens with the blocks such a sequence has. The blocks keep
    /// their previous content.
    ///
    /// # Errors
    /// [`EngineError::PoolFull`].
    pub fn allocate(&mut self, boundary: usize) -> Result<SeqId, EngineError> {
        let wanted = |group: &Group| {
            let tokens = group.layout.block_tokens as usize;
            if group.recurrent() { (0, 1) } else { (first_column(&group.layout, boundary), boundary.div_ceil(tokens)) }
        };
        for group in &self.groups {
            let (first, end) = wanted(group);
            group.pool.require(end.saturating_sub(first), group.layout.block_tokens as usize)?;
        }
        let mut table = Table { tokens: boundary, columns: Vec::new() };
        for group in &mut self.groups {
            let (first, end) = wanted(group);
            table.columns.push((0..end).map(|column| if column < first { None } else { group.pool.take() }).collect());
        }
        Ok(self.insert(table))
    }

    /// Makes room for `count` tokens more: takes zeroed blocks, and copies a last one that is
    /// shared. The tokens count at once; the caller writes them next. On error nothing has changed.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], [`EngineError::PoolFull`].
    pub fn extend(&mut self, seq: SeqId, count: usize) -> Result<(), EngineError> {
        let table = self.table(seq)?;
        let mut plan = Vec::with_capacity(self.groups.len());
        for (group, columns) in self.groups.iter().zip(&table.columns) {
            let tokens = group.layout.block_tokens as usize;
            if group.recurrent() {
                plan.push((None, 0));
                continue;
            }
            let open = columns.last().copied().flatten().filter(|_| count > 0 && table.tokens % tokens != 0);
            let shared = open.filter(|block| group.pool.shared(*block));
            let fresh = (table.tokens + count).div_ceil(tokens) - columns.len();
            group.pool.require(fresh + usize::from(shared.is_some()), tokens)?;
            plan.push((shared, fresh));
        }
        for (group, (shared, fresh)) in plan.into_iter().enumerate() {
            if let Some(old) = shared {
                let new = self.take(group)?;
                self.copy(group, old, new);
                self.release(group, old);
                self.column(seq, group, |columns| {
                    columns.pop();
                    columns.push(Some(new));
                });
            }
            for _ in 0..fresh {
                let block = self.take(group)?;
                self.fill(group, block, &mut |bytes| bytes.fill(0));
                self.column(seq, group, |columns| columns.push(Some(block)));
            }
        }
        if let Some(table) = self.tables.get_mut(&seq) {
            table.tokens += count;
        }
        Ok(())
    }

    /// Gives back the columns that no later token looks at.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn retire(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let tokens = self.table(seq)?.tokens;
        for group in 0..self.groups.len() {
            if self.groups[group].recurrent() {
                continue;
            }
            let first = first_column(&self.groups[group].layout, tokens);
            let mut gone = Vec::new();
            self.column(seq, group, |columns| gone.extend(columns.iter_mut().take(first).filter_map(Option::take)));
            gone.into_iter().for_each(|block| self.release(group, block));
        }
        Ok(())
    }

    /// A new sequence with the same tokens. Attention blocks are shared, recurrent state is copied.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], [`EngineError::PoolFull`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        let mut table = self.table(seq)?.clone();
        for group in &self.groups {
            group.pool.require(usize::from(group.recurrent()), 1)?;
        }
        for (group, columns) in table.columns.iter_mut().enumerate() {
            for block in columns.iter_mut().flatten() {
                if self.groups[group].recurrent() {
                    let new = self.take(group)?;
                    self.copy(group, *block, new);
                    *block = new;
                } else {
                    self.groups[group].pool.share(*block);
                }
            }
        }
        Ok(self.insert(table))
    }

    /// Forgets a sequence. Blocks without another holder become free.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn free(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let table = self.tables.remove(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        for (group, columns) in table.columns.into_iter().enumerate() {
            columns.into_iter().flatten().for_each(|block| self.release(group, block));
        }
        Ok(())
    }

    /// A sequence's blocks by group and column, as the protocol has them.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn blocks(&self, seq: SeqId) -> Result<BTreeMap<String, Vec<u32>>, EngineError> {
        let groups = self.groups.iter().zip(&self.table(seq)?.columns).map(|(group, columns)| {
            let null = group.layout.null_block.unwrap_or_default();
            (group.layout.name.clone(), columns.iter().map(|block| block.unwrap_or(null)).collect())
        });
        Ok(groups.collect())
    }

    /// Pages of a sequence in an attention group, for the model.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn view(&mut self, seq: SeqId, group: usize) -> Result<KvView<'_>, EngineError> {
        let table = self.tables.get(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        let Group { layout, parts, .. } = &self.groups[group];
        Ok(KvView::new(layout, self.memories[parts[0].0].bytes_mut(), &table.columns[group]))
    }

    fn column(&mut self, seq: SeqId, group: usize, change: impl FnOnce(&mut Vec<Option<u32>>)) {
        if let Some(table) = self.tables.get_mut(&seq) {
            change(&mut table.columns[group]);
        }
    }

    fn take(&mut self, group: usize) -> Result<u32, EngineError> {
        let group = &mut self.groups[group];
        group.pool.take().ok_or_else(|| group.full())
    }

    fn release(&mut self, group: usize, block: u32) {
        if self.groups[group].pool.release(block) {
            self.soil_block(group, block);
        }
    }
}
