//! Gated linear attention behind a short convolution: `S ← g·S + kᵀv`, `o = q·S`, one matrix a
//! head.
//!
//! State is read from its block and written back in every step, through the strides of its layout;
//! nothing is kept elsewhere.

use super::layout::{Affine, STATE_GROUP, convolution, recurrent};
use super::weights::{Linear, dot, multiply};
use super::{CHANNELS, HISTORY, STATE, STATES, ordinal};
use crate::blocks::Blocks;
use crate::cache::SeqId;
use crate::error::EngineError;
use crate::math;

/// One token through a linear layer.
pub(super) fn mix(weights: &Linear, x: &[f32], layer: usize, seq: SeqId, blocks: &mut Blocks) -> Result<Vec<f32>, EngineError> {
    let number = ordinal(layer);
    let inputs: Vec<u16> = multiply(&weights.channels, x).into_iter().map(math::bf16).collect();
    let channels = convolve(weights, &inputs, &convolution(number), blocks.state(seq, STATE_GROUP, 2 * number + 1)?);
    let gates: Vec<f32> = multiply(&weights.gate, x).into_iter().map(|x| 1.0 / (1.0 + math::exp(-2.0 - x))).collect();
    let mixed = recur(&channels, &gates, &recurrent(number), blocks.state(seq, STATE_GROUP, 2 * number)?);
    Ok(multiply(&weights.out, &mixed))
}

/// Convolves every channel with its last inputs, moves the state on by one, and applies SiLU.
/// Inputs count as bfloat16.
fn convolve(weights: &Linear, inputs: &[u16], layout: &Affine, state: &mut [u8]) -> Vec<f32> {
    let state = state.as_chunks_mut::<2>().0;
    let mut out = Vec::with_capacity(CHANNELS);
    for (channel, input) in inputs.iter().enumerate() {
        let place = |age: usize| layout.offset + channel * layout.strides[1] + age * layout.strides[2];
        let mut seen = [*input; HISTORY + 1];
        (0..HISTORY).for_each(|age| seen[age] = u16::from_le_bytes(state[place(age)]));
        (0..HISTORY).for_each(|age| state[place(age)] = seen[age + 1].to_le_bytes());
        let sum = dot(&weights.convolution[channel * (HISTORY + 1)..][..HISTORY + 1], &seen.map(math::from_bf16));
        out.push(sum / (1.0 + math::exp(-sum)));
    }
    out
}

fn recur(channels: &[f32], gates: &[f32], layout: &Affine, state: &mut [u8]) -> Vec<f32> {
    let state = state.as_chunks_mut::<4>().0;
    let (queries, rest) = channels.split_at(STATES * STATE);
    let (keys, values) = rest.split_at(STATES * STATE);
    let mut out = vec![0.0; STATES * STATE];
    for (head, gate) in gates.iter().enumerate() {
        let row = head * STATE;
        for key in 0..STATE {
            for value in 0..STATE {
                let place = layout.offset + head * layout.strides[0] + key * layout.strides[1] + value * layout.strides[2];
                let now = f32::from_le_bytes(state[place]) * gate + keys[row + key] * values[row + value];
                state[place] = now.to_le_bytes();
                out[row + value] += queries[row + key] * now;
            }
        }
    }
    out
}
