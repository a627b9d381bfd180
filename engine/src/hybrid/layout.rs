//! The layout of the hybrid's state, deliberately in several forms.
//!
//! Full-attention pages lie layer by layer with K and V apart; window pages have K beside V and a
//! null block; of the state tensors some are row-major, others transposed and padded, so that a
//! test fails if an agent ignores strides.

use super::{CHANNELS, HEAD, HISTORY, KV_HEADS, Kind, LAYERS, STATE, STATES, WINDOW, ordinal};
use crate::cache::KvShape;
use crate::compute::full_attention;
use pfr_schema::checkpoint::Layout;
use pfr_schema::engine::{Component, GroupLayout, Part, State};
use pfr_schema::tree::GroupKind;

/// Number of each group.
pub(super) const MAIN: usize = 0;
pub(super) const SLIDING: usize = 1;
pub(super) const STATE_GROUP: usize = 2;

/// Elements from one row of a padded state matrix to the next.
const PADDED: usize = STATE + 8;
/// Element of a padded state at which its values begin.
const LEAD: usize = 4;
/// Bytes at the head of every state block that belong to no tensor.
const HEADER: usize = 64;

/// Where each element of a state tensor lies, in elements.
pub(super) struct Affine {
    pub(super) strides: [usize; 3],
    pub(super) offset: usize,
    /// Elements of the whole.
    pub(super) elements: usize,
    tag: &'static str,
}

/// Recurrent matrices `[head][key][value]` of the `ordinal`th linear layer; the second is
/// transposed and padded.
pub(super) fn recurrent(ordinal: usize) -> Affine {
    if ordinal == 1 {
        let head = STATE * PADDED;
        return Affine { strides: [head, 1, PADDED], offset: LEAD, elements: LEAD + STATES * head, tag: "value-major-padded" };
    }
    Affine { strides: [STATE * STATE, STATE, 1], offset: 0, elements: STATES * STATE * STATE, tag: "row-major" }
}

/// Inputs `[channel][age]` that a convolution still needs, oldest first; the second layer keeps
/// them input by input.
pub(super) fn convolution(ordinal: usize) -> Affine {
    let (strides, tag) = if ordinal == 1 { ([0, 1, CHANNELS], "time-major") } else { ([0, HISTORY, 1], "row-major") };
    Affine { strides, offset: 0, elements: CHANNELS * HISTORY, tag }
}

/// Bytes of the page memory and of the state memory.
pub(super) fn bytes(blocks: u32) -> (usize, usize) {
    let blocks = blocks as usize;
    let pages = (2 * shape(Kind::Full).page_bytes() + 2 * shape(Kind::Window).page_bytes()) * blocks;
    (pages, states().1 as usize * blocks)
}

fn shape(kind: Kind) -> KvShape {
    KvShape { layers: LAYERS.iter().filter(|k| **k == kind).count(), heads: KV_HEADS, head_dim: HEAD }
}

/// The groups, by the numbers above.
pub(super) fn groups(blocks: u32) -> Vec<GroupLayout> {
    let (main, sliding) = (shape(Kind::Full), shape(Kind::Window));
    let layer = main.layer_bytes() as u64;
    let region = layer * u64::from(blocks);
    let layers = main.layers as u64;
    let part = |offset, block_stride, bytes| Part { memory: "pages".into(), offset, block_stride, bytes, share: None };
    let apart = |first: u64| (0..layers).map(|l| part((first + l) * region, layer, layer)).collect();
    let page = sliding.page_bytes() as u64;
    let beside = |n: u64| vec![part(2 * layers * region + n * page, 2 * page, page)];
    let component = |name: &str, parts| Component { name: name.into(), parts };
    let full = full_attention("main", &main, blocks, vec![component("k", apart(0)), component("v", apart(layers))]);
    let window = full_attention("window", &sliding, blocks, vec![component("k", beside(0)), component("v", beside(1))]);
    let state = GroupLayout {
        block_tokens: 1,
        layout: "opaque/pf-reference/reference-cpu/state".into(),
        geometry: None,
        states: states().0,
        ..full_attention("state", &main, blocks, Vec::new())
    };
    vec![
        full,
        GroupLayout { kind: GroupKind::SlidingWindow, null_block: Some(0), window: Some(WINDOW as u64), ..window },
        GroupLayout { kind: GroupKind::Recurrent, ..state },
    ]
}

/// State tensors, two for each linear layer, and the bytes of a block.
fn states() -> (Vec<State>, u64) {
    let mut at = HEADER as u64;
    let mut states = Vec::new();
    for layer in (0..LAYERS.len()).filter(|layer| LAYERS[*layer] == Kind::Linear) {
        let (matrix, inputs) = (recurrent(ordinal(layer)), convolution(ordinal(layer)));
        let shapes = [vec![STATES, STATE, STATE], vec![CHANNELS, HISTORY]];
        for ((affine, shape), (kind, dtype, size)) in
            [matrix, inputs].into_iter().zip(shapes).zip([("recurrent", "f32", 4), ("conv", "bf16", 2)])
        {
            let bytes = affine.elements as u64 * size;
            let strides = affine.strides[3 - shape.len()..].iter().map(|stride| *stride as i64).collect();
            states.push(State {
                name: format!("layers.{layer}.{kind}"),
                kind: kind.into(),
                layer: Some(layer as u32),
                shape: shape.iter().map(|n| *n as u64).collect(),
                logical_dtype: dtype.into(),
                storage_dtype: dtype.into(),
                layout: Layout { tag: affine.tag.into(), strides: Some(strides), offset: Some(affine.offset as u64) },
                part: Part { memory: "states".into(), offset: at, block_stride: 0, bytes, share: None },
                share: None,
            });
            at += bytes.next_multiple_of(64);
        }
    }
    states.iter_mut().for_each(|state| state.part.block_stride = at);
    (states, at)
}
