//! A small hybrid model with random weights: gated linear attention, full attention and
//! sliding-window attention.
//!
//! Its text means nothing; its state is what matters. It has every kind of state that real hybrids
//! have, in one process: pages that all later tokens read, pages that fall out of a window, and
//! tensors that every step overwrites. The layers are linear, full, linear, window, full, linear.
//! Tokens are computed one at a time, so a prompt and single steps cannot differ.

mod attention;
mod layout;
mod linear;
mod weights;

use crate::blocks::{Blocks, Placement};
use crate::cache::SeqId;
use crate::compute::{Core, check};
use crate::error::EngineError;
use crate::kernel::Isa;
use crate::math;
use crate::shared::SharedMemory;
use pfr_schema::Digest;
use weights::{Mixer, Weights, multiply, normalise};

/// Width of the residual stream.
pub const WIDTH: usize = 128;
/// Tokens in the vocabulary: bytes, and as many that are no text.
pub const VOCABULARY: usize = 512;
/// Maximum number of tokens of a sequence.
pub const CONTEXT: usize = 8192;
/// Tokens that the window layer looks back on, itself included.
pub const WINDOW: usize = 40;

const HEAD: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const FEED_FORWARD: usize = 256;
/// Heads of a linear layer.
const STATES: usize = 2;
/// Width of a linear layer's keys, and of its values.
const STATE: usize = 32;
/// Channels that go through a linear layer's convolution: queries, keys, values.
const CHANNELS: usize = 3 * STATES * STATE;
/// Inputs before the present one that the convolution sees.
const HISTORY: usize = 3;

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Linear,
    Full,
    Window,
}

const LAYERS: [Kind; 6] = [Kind::Linear, Kind::Full, Kind::Linear, Kind::Window, Kind::Full, Kind::Linear];

/// Number of a layer among those of its kind.
fn ordinal(layer: usize) -> usize {
    LAYERS[..layer].iter().filter(|kind| **kind == LAYERS[layer]).count()
}

/// The hybrid model with its memory.
pub struct Hybrid {
    weights: Weights,
    digest: Digest,
    isa: Isa,
    blocks: Blocks,
}

impl Hybrid {
    /// Draws weights from `seed` and takes memory for `blocks` blocks in each group.
    ///
    /// # Errors
    /// [`EngineError::Memory`].
    pub fn new(seed: u64, blocks: u32, placement: Placement) -> Result<Self, EngineError> {
        let (pages, states) = layout::bytes(blocks);
        let memories = vec![("pages", SharedMemory::new("pf-kv-pages", pages)?), ("states", SharedMemory::new("pf-kv-states", states)?)];
        let weights = Weights::draw(seed);
        let digest = weights.digest();
        Ok(Self { weights, digest, isa: Isa::detect(), blocks: Blocks::new(memories, layout::groups(blocks), placement) })
    }

    fn token(&mut self, seq: SeqId, token: u32) -> Result<Vec<f32>, EngineError> {
        let position = self.blocks.tokens(seq)?;
        self.blocks.extend(seq, 1)?;
        let mut x = self.weights.embedding[token as usize * WIDTH..][..WIDTH].to_vec();
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let normal = normalise(&x, &layer.norm);
            let mixed = match &layer.mixer {
                Mixer::Attention(mixer) => attention::mix(self.isa, mixer, &normal, position, index, seq, &mut self.blocks)?,
                Mixer::Linear(mixer) => linear::mix(mixer, &normal, index, seq, &mut self.blocks)?,
            };
            add(&mut x, &mixed);
            let mut gate = multiply(&layer.gate_up, &normalise(&x, &layer.ffn_norm));
            let up = gate.split_off(FEED_FORWARD);
            math::swiglu(self.isa, &mut gate, &up);
            add(&mut x, &multiply(&layer.down, &gate));
        }
        self.blocks.retire(seq)?;
        Ok(x)
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

impl Core for Hybrid {
    fn weights(&self) -> String {
        self.digest.to_string()
    }

    fn model(&self) -> &'static str {
        "hybrid-random"
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn context(&self) -> usize {
        CONTEXT
    }

    fn tokenize(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn detokenize(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().map(|token| u8::try_from(*token).unwrap_or(b'?')).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    fn blocks_mut(&mut self) -> &mut Blocks {
        &mut self.blocks
    }

    fn compute(&mut self, seq: SeqId, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        check(self, self.blocks.tokens(seq)?, tokens)?;
        let mut hidden = Vec::new();
        for token in tokens {
            hidden = self.token(seq, *token)?;
        }
        Ok(multiply(&self.weights.embedding, &normalise(&hidden, &self.weights.norm)))
    }
}
