//! SmolLM2 over blocks in shared memory: one full-attention group, pages of all layers, K beside V.

use super::{Core, check};
use crate::blocks::{Blocks, Placement};
use crate::cache::{KvShape, PAGE_TOKENS, SeqId};
use crate::error::EngineError;
use crate::gguf::Gguf;
use crate::kernel::LANES;
use crate::model::Model;
use crate::shared::SharedMemory;
use crate::tokenizer::Tokenizer;
use pfr_schema::Digest;
use pfr_schema::engine::{Component, GroupLayout, Part};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::tree::GroupKind;
use std::path::Path;

/// The dense model.
pub struct Dense {
    model: Model,
    tokenizer: Tokenizer,
    threads: usize,
    weights: Digest,
    blocks: Blocks,
}

impl Dense {
    /// Loads a model file; `blocks` blocks of 16 tokens, `threads` threads for prompts.
    ///
    /// # Errors
    /// [`EngineError::Io`], [`EngineError::Gguf`], [`EngineError::Unsupported`],
    /// [`EngineError::Memory`].
    pub fn load(path: &Path, threads: usize, blocks: u32, placement: Placement) -> Result<Self, EngineError> {
        let bytes = std::fs::read(path).map_err(EngineError::io("read", path))?;
        let gguf = Gguf::parse(&bytes)?;
        let model = Model::from_gguf(&gguf, threads)?;
        let tokenizer = Tokenizer::from_gguf(&gguf)?;
        let shape = KvShape { layers: model.config().layers, heads: model.config().kv_heads, head_dim: LANES };
        let memory = SharedMemory::new("pf-kv", blocks as usize * 2 * shape.page_bytes())?;
        let blocks = Blocks::new(vec![("kv", memory)], vec![layout(&shape, blocks)], placement);
        Ok(Self { model, tokenizer, threads, weights: Digest::sha256(&bytes), blocks })
    }
}

fn layout(shape: &KvShape, blocks: u32) -> GroupLayout {
    let page = shape.page_bytes() as u64;
    let component = |name: &str, offset| Component {
        name: name.into(),
        parts: vec![Part { memory: "kv".into(), offset, block_stride: 2 * page, bytes: page, share: None }],
    };
    full_attention("main", shape, blocks, vec![component("k", 0), component("v", page)])
}

/// A group of full attention in the flat layout.
pub(crate) fn full_attention(name: &str, shape: &KvShape, blocks: u32, components: Vec<Component>) -> GroupLayout {
    GroupLayout {
        name: name.into(),
        kind: GroupKind::FullAttention,
        block_tokens: PAGE_TOKENS as u32,
        blocks,
        null_block: None,
        window: None,
        required: true,
        replicated: false,
        uncut: None,
        layout: pfr_schema::flat::LAYOUT.into(),
        geometry: Some(geometry(shape)),
        dtype: None,
        components,
        states: Vec::new(),
    }
}

/// A page's shape in the words of the formats.
pub(crate) fn geometry(shape: &KvShape) -> Geometry {
    let [page_size_tokens, n_layers, n_heads, head_dim] = [PAGE_TOKENS, shape.layers, shape.heads, shape.head_dim].map(|n| n as u32);
    Geometry { page_size_tokens, n_layers, n_heads, head_dim, dtype: Dtype::Bf16 }
}

impl Core for Dense {
    fn weights(&self) -> String {
        self.weights.to_string()
    }

    fn model(&self) -> &'static str {
        "smollm2-135m-instruct"
    }

    fn vocabulary(&self) -> usize {
        self.model.config().vocabulary
    }

    fn context(&self) -> usize {
        self.model.config().context
    }

    fn tokenize(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        self.tokenizer.encode(text)
    }

    fn detokenize(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens)
    }

    fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    fn blocks_mut(&mut self) -> &mut Blocks {
        &mut self.blocks
    }

    fn compute(&mut self, seq: SeqId, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let start = self.blocks.tokens(seq)?;
        check(self, start, tokens)?;
        self.blocks.extend(seq, tokens.len())?;
        let hidden = self.model.forward(self.threads, tokens, start, &mut self.blocks.view(seq, 0)?, true);
        Ok(self.model.logits(&hidden))
    }
}
