//! The weights of the hybrid model, drawn from a seed, and products with them. A product adds in a
//! fixed order, so its bits are always the same.

use super::{CHANNELS, FEED_FORWARD, HEAD, HEADS, HISTORY, KV_HEADS, Kind, LAYERS, STATE, STATES, VOCABULARY, WIDTH};
use crate::math;
use crate::rng::Rng;
use pfr_schema::{Algorithm, Digest, Hasher};

/// Weights of an attention layer.
pub(super) struct Attention {
    /// The projection to the heads of Q, then of K, then of V.
    pub(super) qkv: Vec<f32>,
    pub(super) out: Vec<f32>,
}

/// Weights of a layer with linear attention.
pub(super) struct Linear {
    /// The projection to queries, keys and values, before the convolution.
    pub(super) channels: Vec<f32>,
    /// `[channel][4]`, the weight of the oldest input first.
    pub(super) convolution: Vec<f32>,
    /// The projection to the decay gates, one row for each head.
    pub(super) gate: Vec<f32>,
    pub(super) out: Vec<f32>,
}

pub(super) enum Mixer {
    Attention(Attention),
    Linear(Linear),
}

pub(super) struct Layer {
    pub(super) norm: Vec<f32>,
    pub(super) mixer: Mixer,
    pub(super) ffn_norm: Vec<f32>,
    /// The gate matrix, then the up matrix.
    pub(super) gate_up: Vec<f32>,
    pub(super) down: Vec<f32>,
}

/// All weights; matrices are `[output][input]`.
pub(super) struct Weights {
    /// The embedding of each token. It is also the output matrix.
    pub(super) embedding: Vec<f32>,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
}

impl Weights {
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // Uniform numbers with variance 1 / inputs keep every layer's output near the size of its
        // input.
        let mut matrix = |outputs: usize, inputs: usize| -> Vec<f32> {
            let scale = (3.0 / inputs as f32).sqrt();
            (0..outputs * inputs).map(|_| (2.0 * rng.unit() - 1.0) * scale).collect()
        };
        let embedding = matrix(VOCABULARY, WIDTH);
        let layers = LAYERS.map(|kind| Layer {
            norm: vec![1.0; WIDTH],
            mixer: match kind {
                Kind::Linear => Mixer::Linear(Linear {
                    channels: matrix(CHANNELS, WIDTH),
                    convolution: matrix(CHANNELS, HISTORY + 1),
                    gate: matrix(STATES, WIDTH),
                    out: matrix(WIDTH, STATES * STATE),
                }),
                Kind::Full | Kind::Window => {
                    Mixer::Attention(Attention { qkv: matrix((HEADS + 2 * KV_HEADS) * HEAD, WIDTH), out: matrix(WIDTH, HEADS * HEAD) })
                }
            },
            ffn_norm: vec![1.0; WIDTH],
            gate_up: matrix(2 * FEED_FORWARD, WIDTH),
            down: matrix(WIDTH, FEED_FORWARD),
        });
        Self { embedding, layers: layers.into(), norm: vec![1.0; WIDTH] }
    }

    /// SHA-256 over the bits of all weights that are drawn, in the order of drawing. The weights of
    /// the norms are constant and not included.
    pub(super) fn digest(&self) -> Digest {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        let mut add = |values: &[f32]| values.iter().for_each(|x| hasher.update(&x.to_le_bytes()));
        add(&self.embedding);
        for layer in &self.layers {
            let mixer = match &layer.mixer {
                Mixer::Linear(mixer) => vec![&mixer.channels, &mixer.convolution, &mixer.gate, &mixer.out],
                Mixer::Attention(mixer) => vec![&mixer.qkv, &mixer.out],
            };
            mixer.into_iter().chain([&layer.gate_up, &layer.down]).for_each(|matrix| add(matrix));
        }
        hasher.finish()
    }
}

/// The sum of products. The product of the elements `i` is added to partial sum `i % 16`.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 16];
    for (a, b) in a.chunks(16).zip(b.chunks(16)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// Matrix `[output][input]` times vector.
pub(super) fn multiply(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    matrix.chunks(x.len()).map(|row| dot(row, x)).collect()
}

/// RMSNorm.
pub(super) fn normalise(x: &[f32], weights: &[f32]) -> Vec<f32> {
    let mut sums = [0.0; 16];
    math::add_squares(&mut sums, x);
    let scale = 1.0 / (sums.iter().sum::<f32>() / x.len() as f32 + 1e-6).sqrt();
    x.iter().zip(weights).map(|(x, w)| x * scale * w).collect()
}
