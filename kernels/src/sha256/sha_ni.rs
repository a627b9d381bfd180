//! SHA instructions of x86-64: two rounds each, of one message.

use super::{BLOCK, K, States};
use std::arch::x86_64::{
    __m128i, _mm_add_epi32, _mm_alignr_epi8, _mm_extract_epi32, _mm_loadu_si128, _mm_set_epi32, _mm_set_epi64x, _mm_setzero_si128,
    _mm_sha256msg1_epu32, _mm_sha256msg2_epu32, _mm_sha256rnds2_epu32, _mm_shuffle_epi8, _mm_shuffle_epi32,
};

/// Takes blocks of messages into their states: `parts` are whole blocks, equally many each.
#[target_feature(enable = "sha,ssse3,sse4.1")]
pub(super) fn blocks<const N: usize>(states: &mut States<N>, parts: &[&[u8]; N]) {
    let blocks: [&[[u8; BLOCK]]; N] = parts.map(|part| part.as_chunks().0);
    let count = blocks.iter().map(|blocks| blocks.len()).min().unwrap_or(0);
    let big_endian = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
    // The instructions want the words a, b, e, f of the state in one register, c, d, g, h in the
    // other, the first one highest.
    let words = |a: usize, b: usize, c: usize, d: usize, lane: usize| {
        let word = |number: usize| states[number][lane].cast_signed();
        _mm_set_epi32(word(a), word(b), word(c), word(d))
    };
    let mut abef: [__m128i; N] = std::array::from_fn(|lane| words(0, 1, 4, 5, lane));
    let mut cdgh: [__m128i; N] = std::array::from_fn(|lane| words(2, 3, 6, 7, lane));
    for block in 0..count {
        let before = (abef, cdgh);
        // The last sixteen words of the message schedule, four to a register.
        let mut w = [[_mm_setzero_si128(); N]; 4];
        for four in 0..16 {
            // SAFETY: there are 4 × 16 constants, 4 × 16 bytes in a block, and `count` blocks in
            // each part.
            let k = unsafe { _mm_loadu_si128(K.as_ptr().add(4 * four).cast()) };
            for lane in 0..N {
                let [w0, w1, w2, w3] = [0, 1, 2, 3].map(|back| w[(four + back) % 4][lane]);
                w[four % 4][lane] = if four < 4 {
                    let bytes = unsafe { _mm_loadu_si128(blocks[lane].get_unchecked(block).as_ptr().add(16 * four).cast()) };
                    _mm_shuffle_epi8(bytes, big_endian)
                } else {
                    _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8::<4>(w3, w2)), w3)
                };
                let sum = _mm_add_epi32(w[four % 4][lane], k);
                cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], sum);
                abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32::<0x0e>(sum));
            }
        }
        for lane in 0..N {
            abef[lane] = _mm_add_epi32(abef[lane], before.0[lane]);
            cdgh[lane] = _mm_add_epi32(cdgh[lane], before.1[lane]);
        }
    }
    for lane in 0..N {
        let (x, y) = (abef[lane], cdgh[lane]);
        let found = [
            _mm_extract_epi32::<3>(x),
            _mm_extract_epi32::<2>(x),
            _mm_extract_epi32::<3>(y),
            _mm_extract_epi32::<2>(y),
            _mm_extract_epi32::<1>(x),
            _mm_extract_epi32::<0>(x),
            _mm_extract_epi32::<1>(y),
            _mm_extract_epi32::<0>(y),
        ];
        states.iter_mut().zip(found).for_each(|(word, found)| word[lane] = found.cast_unsigned());
    }
}
