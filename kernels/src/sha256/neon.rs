//! SHA instructions of ARMv8: four rounds of one message in a pair of them.

use super::{BLOCK, K, States};
use std::arch::aarch64::{
    uint32x4_t, vaddq_u32, vdupq_n_u32, vld1q_u8, vld1q_u32, vreinterpretq_u32_u8, vrev32q_u8, vsha256h2q_u32, vsha256hq_u32,
    vsha256su0q_u32, vsha256su1q_u32, vst1q_u32,
};

/// Takes blocks of messages into their states: `parts` are whole blocks, equally many each.
#[target_feature(enable = "sha2")]
pub(super) fn blocks<const N: usize>(states: &mut States<N>, parts: &[&[u8]; N]) {
    let blocks: [&[[u8; BLOCK]]; N] = parts.map(|part| part.as_chunks().0);
    let count = blocks.iter().map(|blocks| blocks.len()).min().unwrap_or(0);
    let words = |from: usize, lane: usize| {
        let four: [u32; 4] = std::array::from_fn(|number| states[from + number][lane]);
        // SAFETY: four words are read.
        unsafe { vld1q_u32(four.as_ptr()) }
    };
    let mut abcd: [uint32x4_t; N] = std::array::from_fn(|lane| words(0, lane));
    let mut efgh: [uint32x4_t; N] = std::array::from_fn(|lane| words(4, lane));
    for block in 0..count {
        let before = (abcd, efgh);
        // The last sixteen words of the message schedule, four to a register.
        let mut w = [[vdupq_n_u32(0); N]; 4];
        for four in 0..16 {
            // SAFETY: there are 4 × 16 constants, 4 × 16 bytes in a block, and `count` blocks in
            // each part.
            let k = unsafe { vld1q_u32(K.as_ptr().add(4 * four)) };
            for lane in 0..N {
                let [w0, w1, w2, w3] = [0, 1, 2, 3].map(|back| w[(four + back) % 4][lane]);
                w[four % 4][lane] = if four < 4 {
                    let bytes = unsafe { vld1q_u8(blocks[lane].get_unchecked(block).as_ptr().add(16 * four)) };
                    vreinterpretq_u32_u8(vrev32q_u8(bytes))
                } else {
                    vsha256su1q_u32(vsha256su0q_u32(w0, w1), w2, w3)
                };
                let sum = vaddq_u32(w[four % 4][lane], k);
                let first = abcd[lane];
                abcd[lane] = vsha256hq_u32(first, efgh[lane], sum);
                efgh[lane] = vsha256h2q_u32(efgh[lane], first, sum);
            }
        }
        for lane in 0..N {
            abcd[lane] = vaddq_u32(abcd[lane], before.0[lane]);
            efgh[lane] = vaddq_u32(efgh[lane], before.1[lane]);
        }
    }
    for lane in 0..N {
        let mut found = [0; 8];
        // SAFETY: eight words are written.
        unsafe {
            vst1q_u32(found.as_mut_ptr(), abcd[lane]);
            vst1q_u32(found.as_mut_ptr().add(4), efgh[lane]);
        }
        states.iter_mut().zip(found).for_each(|(word, found)| word[lane] = found);
    }
}
