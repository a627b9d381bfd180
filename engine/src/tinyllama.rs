//! Snapshot directories of TinyLlama's shape in any size, filled with real head vectors.
//!
//! Benchmarks need thousands of pages of a larger model; running one is out of reach here.
//! TinyLlama's KV heads are 64 wide like SmolLM2's, so each of a page's 88 slots (22 layers × 4 KV
//! heads) takes 16 consecutive tokens of one layer and head of a SmolLM2 cache: K vectors into K
//! pages, V vectors into V pages. Within a page no two slots have the same source layer and head;
//! between pages the choice and the first token vary with the seed, so no two pages are equal.
//! Along tokens the numbers are as real as their source.

use crate::Engine;
use crate::cache::{KvShape, PAGE_TOKENS, SeqId};
use crate::dump::{LogicalSeq, Manifest, Page, SnapshotWriter, Written};
use crate::error::EngineError;
use crate::rng::Rng;
use std::collections::BTreeSet;
use std::path::Path;

/// TinyLlama 1.1B: 180,224 bytes per K or V page.
pub const SHAPE: KvShape = KvShape { layers: 22, heads: 4, head_dim: 64 };
/// Pages of one sequence: TinyLlama's context of 2,048 tokens.
pub const SEQUENCE_PAGES: usize = 128;
const VECTOR_BYTES: usize = SHAPE.head_dim * 2;

/// Where the vectors come from.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    engine: &'a Engine,
    sequences: &'a [SeqId],
    seed: u64,
}

impl<'a> Source<'a> {
    /// Vectors of the given sequences (each of at least 16 tokens), arranged by `seed`.
    ///
    /// # Errors
    /// [`EngineError::Snapshot`] if there is no sequence, one is too short or the model's heads do
    /// not fit, [`EngineError::NoSequence`].
    pub fn new(engine: &'a Engine, sequences: &'a [SeqId], seed: u64) -> Result<Self, EngineError> {
        let shape = engine.cache().shape();
        if shape.head_dim != SHAPE.head_dim || shape.layers * shape.heads < SHAPE.layers * SHAPE.heads {
            return Err(EngineError::Snapshot(format!("{shape:?} cannot fill {SHAPE:?}")));
        }
        if sequences.is_empty() {
            return Err(EngineError::Snapshot("no source sequence".into()));
        }
        for seq in sequences {
            let tokens = engine.tokens(*seq)?.len();
            if tokens < PAGE_TOKENS {
                return Err(EngineError::Snapshot(format!("{seq} has {tokens} tokens, at least {PAGE_TOKENS} are needed")));
            }
        }
        Ok(Self { engine, sequences, seed })
    }

    /// Fills K and V of page `page` of edition `edition` (0 = the base, others for forks).
    fn fill(&self, edition: u64, page: usize, k: &mut [u8], v: &mut [u8]) -> Result<(), EngineError> {
        let shape = self.engine.cache().shape();
        let mut rng = Rng::from_parts(&[self.seed, edition, page as u64]);
        let mut lanes: Vec<usize> = (0..shape.layers * shape.heads).collect();
        rng.shuffle(&mut lanes);
        for (slot, lane) in lanes.into_iter().take(SHAPE.layers * SHAPE.heads).enumerate() {
            let seq = self.sequences[rng.below(self.sequences.len())];
            let blocks = self.engine.pages(seq)?;
            let start = rng.below(self.engine.tokens(seq)?.len() - PAGE_TOKENS + 1);
            for token in 0..PAGE_TOKENS {
                let (from_k, from_v) = self.engine.page_bytes(blocks[(start + token) / PAGE_TOKENS]);
                let layer = lane / shape.heads * PAGE_TOKENS + (start + token) % PAGE_TOKENS;
                let from = (layer * shape.heads + lane % shape.heads) * VECTOR_BYTES;
                let layer = slot / SHAPE.heads * PAGE_TOKENS + token;
                let to = (layer * SHAPE.heads + slot % SHAPE.heads) * VECTOR_BYTES;
                k[to..to + VECTOR_BYTES].copy_from_slice(&from_k[from..from + VECTOR_BYTES]);
                v[to..to + VECTOR_BYTES].copy_from_slice(&from_v[from..from + VECTOR_BYTES]);
            }
        }
        Ok(())
    }
}

/// Pages being made, one at a time.
struct Maker<'a> {
    source: Source<'a>,
    edition: u64,
    k: Vec<u8>,
    v: Vec<u8>,
    seen: BTreeSet<String>,
}

impl<'a> Maker<'a> {
    fn new(source: Source<'a>, edition: u64) -> Self {
        let page = || vec![0; SHAPE.page_bytes()];
        Self { source, edition, k: page(), v: page(), seen: BTreeSet::new() }
    }

    fn write(&mut self, page: usize, writer: &mut SnapshotWriter) -> Result<Page, EngineError> {
        self.source.fill(self.edition, page, &mut self.k, &mut self.v)?;
        let page = Page { ix: page as u32, k: writer.blob(&self.k)?, v: writer.blob(&self.v)? };
        if !self.seen.insert(page.k.clone()) || !self.seen.insert(page.v.clone()) {
            return Err(EngineError::Snapshot(format!("page {} repeats another: give longer source sequences", page.ix)));
        }
        Ok(page)
    }
}

/// Writes `pages` unique pages, in sequences of 128 pages (the last may be shorter), holding one
/// page in memory at a time.
///
/// # Errors
/// [`EngineError::Snapshot`] if the directory holds a snapshot, [`EngineError::Io`].
pub fn write_tinyllama_dir(dir: &Path, source: Source<'_>, pages: usize) -> Result<Written, EngineError> {
    let count = u32::try_from(pages).map_err(|_| EngineError::Snapshot(format!("{pages} pages are too many")))?;
    let mut writer = SnapshotWriter::create(dir)?;
    let mut manifest = Manifest::new(SHAPE);
    let mut maker = Maker::new(source, 0);
    for page in 0..pages {
        manifest.pages.push(maker.write(page, &mut writer)?);
    }
    let all: Vec<u32> = (0..count).collect();
    for (i, page_ixs) in all.chunks(SEQUENCE_PAGES).enumerate() {
        let id = format!("seq-{:06}", i + 1);
        manifest.logical_seqs.push(LogicalSeq { id, page_ixs: page_ixs.to_vec(), fill_in_last_page: 0 });
    }
    writer.finish(manifest)
}

/// Writes a fork of a directory written by [`write_tinyllama_dir`]: the last `percent` % of its
/// pages are new (rounded to whole pages, at least one unless `percent` is 0), the other blobs are
/// hard links to the base's. Different `edition`s (from 1) give different forks.
///
/// # Errors
/// [`EngineError::Snapshot`] if the base has another shape, `percent` is not in 0..=100 or
/// `edition` is 0, [`EngineError::Io`].
pub fn write_tinyllama_fork(base: &Path, dir: &Path, source: Source<'_>, percent: f64, edition: u64) -> Result<Written, EngineError> {
    let mut manifest = Manifest::read(base)?;
    let empty = Manifest::new(SHAPE);
    let shape = |m: &Manifest| (m.layout.clone(), m.page_size_tokens, m.n_layers, m.n_heads, m.head_dim, m.dtype.clone());
    if shape(&manifest) != shape(&empty) {
        return Err(EngineError::Snapshot(format!("{} is not of TinyLlama's shape", base.display())));
    }
    if !(0.0..=100.0).contains(&percent) || edition == 0 {
        return Err(EngineError::Snapshot(format!("{percent} % of edition {edition}: expected 0 to 100 % and an edition from 1")));
    }
    let total = manifest.pages.len();
    let at_least = usize::from(percent > 0.0).min(total);
    let new = ((total as f64 * percent / 100.0).round() as usize).clamp(at_least, total);
    let mut writer = SnapshotWriter::create(dir)?;
    let mut maker = Maker::new(source, edition);
    for (i, page) in manifest.pages.iter_mut().enumerate() {
        if i < total - new {
            writer.share(base, &page.k)?;
            writer.share(base, &page.v)?;
        } else {
            let ix = page.ix;
            *page = Page { ix, ..maker.write(i, &mut writer)? };
        }
    }
    writer.finish(manifest)
}
