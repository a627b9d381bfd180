//! A paged KV cache: blocks of 16 tokens from a pool, and a block table per sequence.
//!
//! A block holds one K page and one V page in the byte order of `paged-batchinvariant-v1`:
//! `[layer][token][kv head][head_dim]`, little-endian bfloat16. Sequences forked from each other
//! share blocks; a shared block is copied before it is written. Slots not yet written are zero.
//! Nothing here knows a model.

use crate::error::EngineError;
use crate::model::KvSequence;
use std::collections::BTreeMap;

/// Tokens in a page.
pub const PAGE_TOKENS: usize = 16;

/// The part of a page's shape that the model decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes of one token's K (or V) in one layer.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.heads * self.head_dim * 2
    }

    /// Bytes of one layer of a K (or V) page.
    #[must_use]
    pub const fn layer_bytes(&self) -> usize {
        PAGE_TOKENS * self.row_bytes()
    }

    /// Bytes of a K (or V) page.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }
}

/// A physical block's number. Equal numbers mean shared bytes, not the other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// A sequence's number, never used twice in an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

impl std::fmt::Display for SeqId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "seq-{}", self.0)
    }
}

/// Where the bytes of the pool live: ordinary memory here, shared memory elsewhere.
pub trait PageMemory: Send + Sync {
    /// All bytes: block `b`'s K page, then its V page, at `b × 2 × page bytes`.
    fn bytes(&self) -> &[u8];
    /// The same, writable.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl PageMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

#[derive(Clone, Debug, Default)]
struct Table {
    blocks: Vec<BlockId>,
    tokens: usize,
}

/// Pool, block tables and reference counts.
pub struct PagedCache {
    shape: KvShape,
    memory: Box<dyn PageMemory>,
    /// Sequences that hold each block; 0 = free.
    users: Vec<u32>,
    /// Free blocks, the next one last.
    free: Vec<BlockId>,
    tables: BTreeMap<SeqId, Table>,
    next: u64,
}

impl PagedCache {
    /// A pool of `blocks` blocks in ordinary memory (taken from the system when first written).
    ///
    /// `placement` shuffles the order in which blocks are handed out, so that one logical state can
    /// lie in different physical blocks; `None` hands them out in ascending order.
    #[must_use]
    pub fn new(shape: KvShape, blocks: u32, placement: Option<u64>) -> Self {
        let memory = vec![0_u8; blocks as usize * 2 * shape.page_bytes()];
        Self::with_memory(shape, Box::new(memory), placement)
    }

    /// A pool in memory given by the caller, of as many blocks as fit. The memory need not be zero.
    #[must_use]
    pub fn with_memory(shape: KvShape, memory: Box<dyn PageMemory>, placement: Option<u64>) -> Self {
        let blocks = u32::try_from(memory.bytes().len() / (2 * shape.page_bytes())).unwrap_or(u32::MAX);
        let mut free: Vec<BlockId> = (0..blocks).map(BlockId).rev().collect();
        if let Some(seed) = placement {
            crate::rng::Rng::new(seed).shuffle(&mut free);
        }
        Self { shape, memory, users: vec![0; blocks as usize], free, tables: BTreeMap::new(), next: 1 }
    }

    /// The shape of the pages.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Blocks without a holder.
    #[must_use]
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// A new, empty sequence.
    pub fn create(&mut self) -> SeqId {
        self.insert(Table::default())
    }

    fn insert(&mut self, table: Table) -> SeqId {
        let id = SeqId(self.next);
        self.next += 1;
        self.tables.insert(id, table);
        id
    }

    fn table(&self, seq: SeqId) -> Result<&Table, EngineError> {
        self.tables.get(&seq).ok_or(EngineError::NoSequence(seq.0))
    }

    /// A new sequence with the same tokens, sharing every block.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        let table = self.table(seq)?.clone();
        for block in &table.blocks {
            self.users[block.0 as usize] += 1;
        }
        Ok(self.insert(table))
    }

    /// Forgets a sequence. Blocks without another holder become free.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn free(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let table = self.tables.remove(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        for block in table.blocks {
            self.release(block);
        }
        Ok(())
    }

    fn release(&mut self, block: BlockId) {
        let users = &mut self.users[block.0 as usize];
        *users -= 1;
        if *users == 0 {
            self.free.push(block);
        }
    }

    /// Tokens in a sequence.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn tokens(&self, seq: SeqId) -> Result<usize, EngineError> {
        Ok(self.table(seq)?.tokens)
    }

    /// A sequence's blocks in token order.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn blocks(&self, seq: SeqId) -> Result<&[BlockId], EngineError> {
        Ok(&self.table(seq)?.blocks)
    }

    /// A block's K page and V page.
    ///
    /// # Panics
    /// If the block is not of this pool: a bug in the caller.
    #[must_use]
    pub fn page(&self, block: BlockId) -> (&[u8], &[u8]) {
        let page = self.shape.page_bytes();
        self.memory.bytes()[block.0 as usize * 2 * page..][..2 * page].split_at(page)
    }

    fn page_mut(&mut self, block: BlockId) -> (&mut [u8], &mut [u8]) {
        let page = self.shape.page_bytes();
        self.memory.bytes_mut()[block.0 as usize * 2 * page..][..2 * page].split_at_mut(page)
    }

    /// Appends room for `count` tokens: takes zeroed blocks and copies the last one if others hold
    /// it too. The tokens count at once; the caller writes them next. On error nothing has changed.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], [`EngineError::PoolFull`].
    pub fn extend(&mut self, seq: SeqId, count: usize) -> Result<(), EngineError> {
        let table = self.table(seq)?;
        let (held, tokens) = (table.blocks.len(), table.tokens);
        let last = table.blocks.last().copied().filter(|_| tokens % PAGE_TOKENS != 0);
        let shared = last.filter(|b| count > 0 && self.users[b.0 as usize] > 1);
        let fresh = (tokens + count).div_ceil(PAGE_TOKENS) - held;
        if fresh + usize::from(shared.is_some()) > self.free.len() {
            return Err(EngineError::PoolFull { blocks: self.users.len(), page_tokens: PAGE_TOKENS });
        }
        let mut blocks = Vec::with_capacity(fresh);
        if let Some(old) = shared {
            let new = self.take()?;
            let page = 2 * self.shape.page_bytes();
            let start = old.0 as usize * page;
            self.memory.bytes_mut().copy_within(start..start + page, new.0 as usize * page);
            self.release(old);
            blocks.push(new);
        }
        for _ in 0..fresh {
            let block = self.take()?;
            let (k, v) = self.page_mut(block);
            k.fill(0);
            v.fill(0);
            blocks.push(block);
        }
        let table = self.tables.get_mut(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        table.blocks.truncate(held - usize::from(shared.is_some()));
        table.blocks.extend(blocks);
        table.tokens += count;
        Ok(())
    }

    fn take(&mut self) -> Result<BlockId, EngineError> {
        let full = EngineError::PoolFull { blocks: self.users.len(), page_tokens: PAGE_TOKENS };
        let block = self.free.pop().ok_or(full)?;
        self.users[block.0 as usize] = 1;
        Ok(block)
    }

    /// A new sequence of `tokens` tokens with the given K and V pages.
    ///
    /// # Errors
    /// [`EngineError::Restore`] if number or size of the pages is wrong or an unused slot of the
    /// last page is not zero, [`EngineError::PoolFull`].
    pub fn restore(&mut self, tokens: usize, pages: &[(&[u8], &[u8])]) -> Result<SeqId, EngineError> {
        let (want, size) = (tokens.div_ceil(PAGE_TOKENS), self.shape.page_bytes());
        if pages.len() != want {
            return Err(EngineError::Restore(format!("{tokens} tokens need {want} pages, got {}", pages.len())));
        }
        for (i, (k, v)) in pages.iter().enumerate() {
            if k.len() != size || v.len() != size {
                return Err(EngineError::Restore(format!("page {i} has {} and {} bytes, expected {size}", k.len(), v.len())));
            }
        }
        let used = (tokens % PAGE_TOKENS) * self.shape.row_bytes();
        if let (Some((k, v)), true) = (pages.last(), used > 0) {
            let dirty = |page: &[u8]| page.chunks(self.shape.layer_bytes()).any(|layer| layer[used..].iter().any(|b| *b != 0));
            if dirty(k) || dirty(v) {
                return Err(EngineError::Restore("unused slots of the last page are not zero".into()));
            }
        }
        let seq = self.create();
        if let Err(error) = self.extend(seq, tokens) {
            self.tables.remove(&seq);
            return Err(error);
        }
        for (i, (k, v)) in pages.iter().enumerate() {
            let block = self.table(seq)?.blocks[i];
            let (to_k, to_v) = self.page_mut(block);
            to_k.copy_from_slice(k);
            to_v.copy_from_slice(v);
        }
        Ok(seq)
    }

    /// A sequence as the model sees it.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn sequence(&mut self, seq: SeqId) -> Result<SequenceMut<'_>, EngineError> {
        let Self { shape, memory, tables, .. } = self;
        let table = tables.get(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        Ok(SequenceMut { shape: *shape, bytes: memory.bytes_mut(), blocks: &table.blocks })
    }
}

/// One sequence's pages, found through its block table.
pub struct SequenceMut<'a> {
    shape: KvShape,
    bytes: &'a mut [u8],
    blocks: &'a [BlockId],
}

impl SequenceMut<'_> {
    /// Where layer `layer` of page `page` begins, K first.
    fn start(&self, layer: usize, page: usize) -> usize {
        self.blocks[page].0 as usize * 2 * self.shape.page_bytes() + layer * self.shape.layer_bytes()
    }
}

impl KvSequence for SequenceMut<'_> {
    fn k(&self, layer: usize, page: usize) -> &[u8] {
        &self.bytes[self.start(layer, page)..][..self.shape.layer_bytes()]
    }

    fn v(&self, layer: usize, page: usize) -> &[u8] {
        &self.bytes[self.start(layer, page) + self.shape.page_bytes()..][..self.shape.layer_bytes()]
    }

    fn write(&mut self, layer: usize, position: usize, k: &[u16], v: &[u16]) {
        let row = self.shape.row_bytes();
        let at = self.start(layer, position / PAGE_TOKENS) + position % PAGE_TOKENS * row;
        for (at, values) in [(at, k), (at + self.shape.page_bytes(), v)] {
            for (to, value) in self.bytes[at..at + row].as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *to = value.to_le_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests;
