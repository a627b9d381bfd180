//! Weights of a llama-style model, in the form the kernel wants.
//!
//! Matrices are widened from the file's blocks, rounded to bfloat16 and stored as panels of 64
//! outputs, `[panel][input][64]`. Q and K rows are put back from GGUF's interleaved order into the
//! order of the published checkpoint, so that K pages have the element order other engines' pages
//! have.

use crate::error::EngineError;
use crate::gguf::{Gguf, Tensor};
use crate::kernel::{Isa, LANES, MAX_ROWS};
use crate::parallel::split;
use crate::quant;

/// What the model needs of a KV cache: one sequence, page by page.
///
/// The model writes K and V of new tokens and reads them back as bfloat16, so a restored cache and
/// a freshly computed one cannot differ.
pub trait KvSequence: Sync {
    /// K of one layer in one page: `[16 tokens][kv head][64]`, little-endian bfloat16.
    fn k(&self, layer: usize, page: usize) -> &[u8];
    /// V, likewise.
    fn v(&self, layer: usize, page: usize) -> &[u8];
    /// Stores one token's K and V of one layer: `[kv head][64]` bfloat16 bits each.
    fn write(&mut self, layer: usize, position: usize, k: &[u16], v: &[u16]);
}

/// Sizes of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads; each is 64 wide.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of the feed-forward layer.
    pub feed_forward: usize,
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f64,
    /// Added to the mean square before its root.
    pub epsilon: f32,
}

impl Config {
    fn from_gguf(gguf: &Gguf<'_>) -> Result<Self, EngineError> {
        let architecture = gguf.text("general.architecture")?;
        if architecture != "llama" {
            return Err(EngineError::Unsupported(format!("architecture {architecture:?}, expected \"llama\"")));
        }
        let config = Self {
            layers: gguf.integer("llama.block_count")?,
            width: gguf.integer("llama.embedding_length")?,
            heads: gguf.integer("llama.attention.head_count")?,
            kv_heads: gguf.integer("llama.attention.head_count_kv")?,
            feed_forward: gguf.integer("llama.feed_forward_length")?,
            vocabulary: gguf.integer("llama.vocab_size")?,
            context: gguf.integer("llama.context_length")?,
            rope_base: gguf.float("llama.rope.freq_base")?,
            epsilon: gguf.float("llama.attention.layer_norm_rms_epsilon")? as f32,
        };
        let panels = [config.width, config.feed_forward, config.vocabulary].iter().all(|n| *n > 0 && n % LANES == 0);
        let heads = config.kv_heads > 0 && config.heads.is_multiple_of(config.kv_heads) && config.heads / config.kv_heads <= MAX_ROWS;
        let width = config.heads.checked_mul(LANES) == Some(config.width) && gguf.integer("llama.rope.dimension_count")? == LANES;
        if !panels || !heads || !width || config.layers == 0 {
            return Err(EngineError::Unsupported(format!(
                "needs 64-wide heads, widths in steps of 64 and at most 6 query heads per KV head: {config:?}"
            )));
        }
        Ok(config)
    }
}

/// A matrix of `panels × 64` outputs by `inputs` inputs, bfloat16, `[panel][input][64]`.
pub(crate) struct Matrix {
    pub(crate) inputs: usize,
    data: Vec<u16>,
}

impl Matrix {
    /// Packs rows; `source(output)` says which row of which tensor is that output's.
    fn pack<'a>(
        outputs: usize,
        inputs: usize,
        threads: usize,
        source: impl Fn(usize) -> (&'a Tensor<'a>, usize) + Sync,
    ) -> Result<Self, EngineError> {
        for output in 0..outputs {
            let (tensor, row) = source(output);
            if tensor.columns != inputs || row >= tensor.rows {
                return Err(EngineError::Gguf(format!("a matrix is {} × {}, expected {inputs} columns", tensor.rows, tensor.columns)));
            }
        }
        let mut data = vec![0_u16; outputs * inputs];
        let failed = std::sync::Mutex::new(None);
        split(threads, &mut data, inputs * LANES, |first, run| {
            let mut row = vec![0.0; inputs];
            for (i, panel) in run.chunks_mut(inputs * LANES).enumerate() {
                for lane in 0..LANES {
                    let (tensor, index) = source((first + i) * LANES + lane);
                    if let (Err(error), Ok(mut failed)) = (quant::row_into(tensor, index, &mut row), failed.lock()) {
                        *failed = Some(error);
                    }
                    for (to, x) in panel[lane..].iter_mut().step_by(LANES).zip(&row) {
                        *to = crate::math::bf16(*x).to_le();
                    }
                }
            }
        });
        match failed.into_inner() {
            Ok(Some(error)) => Err(error),
            _ => Ok(Self { inputs, data }),
        }
    }

    pub(crate) fn panels(&self) -> usize {
        self.data.len() / (self.inputs * LANES)
    }

    /// One panel's bytes, `[input][64]`.
    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        bytes_of(&self.data[panel * self.inputs * LANES..][..self.inputs * LANES])
    }

    /// Weight of one output and input.
    pub(crate) fn at(&self, output: usize, input: usize) -> f32 {
        let bits = self.data[output / LANES * self.inputs * LANES + input * LANES + output % LANES];
        crate::math::from_bf16(u16::from_le(bits))
    }
}

/// Integers without padding or forbidden values.
pub(crate) trait Plain: Copy {}
impl Plain for u16 {}
impl Plain for u64 {}

/// The bytes of integers as they lie in memory.
pub(crate) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: integers may be read as bytes; same start, same size, same lifetime.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values)) }
}

/// Weights of one layer.
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    /// Q heads, K heads, V heads: one panel each.
    pub(crate) qkv: Matrix,
    pub(crate) attention_out: Matrix,
    pub(crate) ffn_norm: Vec<f32>,
    /// Gate, then up.
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
}

/// A model ready to run. It is immutable: several engines may share one.
pub struct Model {
    pub(crate) config: Config,
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
    /// Rotary frequency of each of the 32 pairs of a head, radians per position.
    pub(crate) frequencies: Vec<f64>,
    pub(crate) isa: Isa,
}

impl Model {
    /// Widens and packs the weights of a parsed file.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if the file is another kind of model, [`EngineError::Gguf`] if
    /// tensors are missing or have the wrong shape.
    pub fn from_gguf(gguf: &Gguf<'_>, threads: usize) -> Result<Self, EngineError> {
        let config = Config::from_gguf(gguf)?;
        let embedding = gguf.tensor("token_embd.weight")?;
        let embedding = Matrix::pack(config.vocabulary, config.width, threads, |row| (&embedding, row))?;
        let layers = (0..config.layers).map(|layer| load_layer(gguf, &config, layer, threads)).collect::<Result<_, _>>()?;
        let final_norm = quant::vector(&gguf.tensor("output_norm.weight")?, config.width)?;
        let frequencies = frequencies(config.rope_base);
        Ok(Self { config, embedding, layers, final_norm, frequencies, isa: Isa::detect() })
    }

    /// Sizes of the model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

fn load_layer(gguf: &Gguf<'_>, config: &Config, layer: usize, threads: usize) -> Result<Layer, EngineError> {
    let tensor = |name: &str| gguf.tensor(&format!("blk.{layer}.{name}.weight"));
    let (q, k, v) = (tensor("attn_q")?, tensor("attn_k")?, tensor("attn_v")?);
    let (gate, up, down, out) = (tensor("ffn_gate")?, tensor("ffn_up")?, tensor("ffn_down")?, tensor("attn_output")?);
    let (q_rows, kv_rows) = (config.width, config.kv_heads * LANES);
    let qkv = Matrix::pack(q_rows + 2 * kv_rows, config.width, threads, |row| {
        if row < q_rows {
            (&q, stored_row(row))
        } else if row < q_rows + kv_rows {
            (&k, stored_row(row - q_rows))
        } else {
            (&v, row - q_rows - kv_rows)
        }
    })?;
    let wide = config.feed_forward;
    let gate_up = Matrix::pack(2 * wide, config.width, threads, |row| if row < wide { (&gate, row) } else { (&up, row - wide) })?;
    Ok(Layer {
        attention_norm: quant::vector(&tensor("attn_norm")?, config.width)?,
        qkv,
        attention_out: Matrix::pack(config.width, config.width, threads, |row| (&out, row))?,
        ffn_norm: quant::vector(&tensor("ffn_norm")?, config.width)?,
        gate_up,
        down: Matrix::pack(config.width, wide, threads, |row| (&down, row))?,
    })
}

/// GGUF keeps the two halves of a rotated head interleaved: element `32 j + i` lies in row
/// `2 i + j`.
fn stored_row(row: usize) -> usize {
    let (head, element) = (row / LANES, row % LANES);
    head * LANES + 2 * (element % (LANES / 2)) + element / (LANES / 2)
}

/// `base^(−i/32)` by square roots and products only, so that every machine gets the same bits.
pub(crate) fn frequencies(base: f64) -> Vec<f64> {
    let root = (0..5).fold(base, |x, _| x.sqrt());
    (0..LANES as i32 / 2).map(|i| 1.0 / (0..i).fold(1.0, |x, _| x * root)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_rows_are_a_permutation_of_each_head() {
        let mut rows: Vec<usize> = (0..128).map(stored_row).collect();
        assert_eq!((rows[0], rows[1], rows[32], rows[33], rows[64]), (0, 2, 1, 3, 64));
        rows.sort_unstable();
        assert_eq!(rows, (0..128).collect::<Vec<_>>());
    }

    #[test]
    fn frequencies_fall_from_one_to_the_base() {
        let f = frequencies(100_000.0);
        assert_eq!((f.len(), f[0]), (32, 1.0));
        for (i, f) in f.iter().enumerate() {
            assert!((f * 100_000_f64.powf(i as f64 / 32.0) - 1.0).abs() < 1e-13);
        }
    }
}
