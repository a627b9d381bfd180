//! Attention of one token over paged K and V, all earlier tokens or those in the window.

use super::layout::{MAIN, SLIDING};
use super::weights::{Attention, dot, multiply};
use super::{HEAD, HEADS, KV_HEADS, Kind, LAYERS, WINDOW, ordinal};
use crate::blocks::Blocks;
use crate::cache::{PAGE_TOKENS, SeqId};
use crate::error::EngineError;
use crate::kernel::Isa;
use crate::math;
use crate::model::{KvSequence, frequencies};

const ROW: usize = KV_HEADS * HEAD * 2;

/// One token through an attention layer; its K and V are stored first.
pub(super) fn mix(
    isa: Isa,
    weights: &Attention,
    x: &[f32],
    position: usize,
    layer: usize,
    seq: SeqId,
    blocks: &mut Blocks,
) -> Result<Vec<f32>, EngineError> {
    let (group, first) = match LAYERS[layer] {
        Kind::Window => (SLIDING, (position + 1).saturating_sub(WINDOW)),
        Kind::Full | Kind::Linear => (MAIN, 0),
    };
    let mut qkv = multiply(&weights.qkv, x);
    rotate(&mut qkv[..(HEADS + KV_HEADS) * HEAD], position);
    let bits: Vec<u16> = qkv[HEADS * HEAD..].iter().map(|x| math::bf16(*x)).collect();
    let (k, v) = bits.split_at(KV_HEADS * HEAD);
    let layer = ordinal(layer);
    let mut kv = blocks.view(seq, group)?;
    kv.write(layer, position, k, v);
    let row = |page: &[u8], position: usize, head: usize| -> [f32; HEAD] {
        let bytes = page[position % PAGE_TOKENS * ROW + head * HEAD * 2..].as_chunks::<2>().0;
        std::array::from_fn(|i| math::from_bf16(u16::from_le_bytes(bytes[i])))
    };
    let mut out = vec![0.0; HEADS * HEAD];
    for (head, out) in out.chunks_mut(HEAD).enumerate() {
        let (q, kv_head) = (&qkv[head * HEAD..][..HEAD], head / (HEADS / KV_HEADS));
        let score = |at: usize| dot(q, &row(kv.k(layer, at / PAGE_TOKENS), at, kv_head)) * 0.125; // 1 / √64
        let mut scores: Vec<f32> = (first..=position).map(score).collect();
        let scale = 1.0 / math::softmax_terms(isa, &mut scores);
        for (at, score) in (first..).zip(scores) {
            let v = row(kv.v(layer, at / PAGE_TOKENS), at, kv_head);
            out.iter_mut().zip(v).for_each(|(out, v)| *out += score * v);
        }
        out.iter_mut().for_each(|x| *x *= scale);
    }
    Ok(multiply(&weights.out, &out))
}

/// Rotates the pairs (i, i + 32) of every head.
fn rotate(heads: &mut [f32], position: usize) {
    let angles = frequencies(10_000.0).into_iter().map(|frequency| math::sin_cos(position as f64 * frequency));
    let angles: Vec<(f32, f32)> = angles.map(|(sin, cos)| (cos as f32, sin as f32)).collect();
    for head in heads.chunks_mut(HEAD) {
        let (low, high) = head.split_at_mut(HEAD / 2);
        for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(&angles) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
