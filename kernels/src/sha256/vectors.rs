//! SHA-256 in the lanes of vectors: a word of each message in each vector, and every operation of
//! FIPS 180-4, 6.2.2, on all of them.

/// A kernel out of a few operations on vectors: `add`, `xor3`, `choose`, `majority`, `right` and
/// `rotate`, all as in FIPS 180-4, and `load`, which brings a block of each message.
macro_rules! kernel {
    ($features:literal, $lanes:literal, $vector:ty, $splat:ident, $zero:ident, $store:ident) => {
        /// Takes blocks of messages into their states: `parts` are whole blocks, equally many each.
        #[target_feature(enable = $features)]
        pub(in super::super) fn blocks(states: &mut States<$lanes>, parts: &[&[u8]; $lanes]) {
            let blocks: [&[[u8; BLOCK]]; $lanes] = parts.map(|part| part.as_chunks().0);
            let count = blocks.iter().map(|blocks| blocks.len()).min().unwrap_or(0);
            let mut state = [$zero(); 8];
            for (vector, words) in state.iter_mut().zip(&*states) {
                // SAFETY: a vector has as many bytes as the words of all lanes.
                *vector = unsafe { words.as_ptr().cast::<$vector>().read_unaligned() };
            }
            for block in 0..count {
                // SAFETY: each has `count` blocks or more.
                let mut w = load(&blocks.map(|blocks| unsafe { blocks.get_unchecked(block) }));
                let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
                // The words of a round change places: instead, each round names them anew.
                macro_rules! round {
                    ($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident $g:ident $h:ident, $at:expr, $k:expr) => {
                        let sum = add(add($h, add(w[$at], $splat($k[$at].cast_signed()))), add(upper_1($e), choose($e, $f, $g)));
                        $d = add($d, sum);
                        $h = add(sum, add(upper_0($a), majority($a, $b, $c)));
                    };
                }
                macro_rules! eight {
                    ($at:expr, $k:expr) => {
                        round!(a b c d e f g h, $at, $k);
                        round!(h a b c d e f g, $at + 1, $k);
                        round!(g h a b c d e f, $at + 2, $k);
                        round!(f g h a b c d e, $at + 3, $k);
                        round!(e f g h a b c d, $at + 4, $k);
                        round!(d e f g h a b c, $at + 5, $k);
                        round!(c d e f g h a b, $at + 6, $k);
                        round!(b c d e f g h a, $at + 7, $k);
                    };
                }
                let [first, later @ ..] = K.as_chunks::<16>().0 else { return };
                eight!(0, first);
                eight!(8, first);
                for k in later {
                    for at in 0..16 {
                        let [before, near, far] = [1, 9, 14].map(|ahead| w[(at + ahead) % 16]);
                        w[at] = add(add(w[at], lower_0(before)), add(near, lower_1(far)));
                    }
                    eight!(0, k);
                    eight!(8, k);
                }
                for (sum, word) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
                    *sum = add(*sum, word);
                }
            }
            for (words, vector) in states.iter_mut().zip(state) {
                // SAFETY: as above.
                unsafe { $store(words.as_mut_ptr().cast(), vector) };
            }
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn upper_0(x: $vector) -> $vector {
            xor3(rotate::<2, 30>(x), rotate::<13, 19>(x), rotate::<22, 10>(x))
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn upper_1(x: $vector) -> $vector {
            xor3(rotate::<6, 26>(x), rotate::<11, 21>(x), rotate::<25, 7>(x))
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn lower_0(x: $vector) -> $vector {
            xor3(rotate::<7, 25>(x), rotate::<18, 14>(x), right::<3>(x))
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn lower_1(x: $vector) -> $vector {
            xor3(rotate::<17, 15>(x), rotate::<19, 13>(x), right::<10>(x))
        }
    };
}

pub(super) mod avx512 {
    use super::super::{BLOCK, K, States};
    use std::arch::x86_64::*;

    kernel!("avx512f,avx512bw", 16, __m512i, _mm512_set1_epi32, _mm512_setzero_si512, _mm512_storeu_si512);

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn add(x: __m512i, y: __m512i) -> __m512i {
        _mm512_add_epi32(x, y)
    }

    // The operations on three bits, as tables of their eight results.

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn xor3(x: __m512i, y: __m512i, z: __m512i) -> __m512i {
        _mm512_ternarylogic_epi32::<0x96>(x, y, z)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn choose(x: __m512i, y: __m512i, z: __m512i) -> __m512i {
        _mm512_ternarylogic_epi32::<0xca>(x, y, z)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn majority(x: __m512i, y: __m512i, z: __m512i) -> __m512i {
        _mm512_ternarylogic_epi32::<0xe8>(x, y, z)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn rotate<const RIGHT: i32, const LEFT: i32>(x: __m512i) -> __m512i {
        _mm512_ror_epi32::<RIGHT>(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn right<const BITS: u32>(x: __m512i) -> __m512i {
        _mm512_srli_epi32::<BITS>(x)
    }

    /// Word `i` of each block in vector `i`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn load(blocks: &[&[u8; BLOCK]; 16]) -> [__m512i; 16] {
        let big_endian = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203));
        // SAFETY: a vector has as many bytes as a block.
        let row = |lane: usize| _mm512_shuffle_epi8(unsafe { _mm512_loadu_si512(blocks[lane].as_ptr().cast()) }, big_endian);
        // Quarter q of `fours[k][j]`: word 4q + j of messages 4k to 4k + 3.
        let mut fours = [[_mm512_setzero_si512(); 4]; 4];
        for (k, four) in fours.iter_mut().enumerate() {
            let [r0, r1, r2, r3] = [row(4 * k), row(4 * k + 1), row(4 * k + 2), row(4 * k + 3)];
            let (low, low_2) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpacklo_epi32(r2, r3));
            let (high, high_2) = (_mm512_unpackhi_epi32(r0, r1), _mm512_unpackhi_epi32(r2, r3));
            *four = [
                _mm512_unpacklo_epi64(low, low_2),
                _mm512_unpackhi_epi64(low, low_2),
                _mm512_unpacklo_epi64(high, high_2),
                _mm512_unpackhi_epi64(high, high_2),
            ];
        }
        let mut words = [_mm512_setzero_si512(); 16];
        for j in 0..4 {
            let [a, b, c, d] = [fours[0][j], fours[1][j], fours[2][j], fours[3][j]];
            // Quarters 0 and 2 of two vectors, and quarters 1 and 3.
            let (even, even_2) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d));
            let (odd, odd_2) = (_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d));
            words[j] = _mm512_shuffle_i32x4::<0x88>(even, even_2);
            words[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd, odd_2);
            words[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even, even_2);
            words[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_2);
        }
        words
    }
}

pub(super) mod avx2 {
    use super::super::{BLOCK, K, States};
    use std::arch::x86_64::*;

    kernel!("avx2", 8, __m256i, _mm256_set1_epi32, _mm256_setzero_si256, _mm256_storeu_si256);

    #[inline]
    #[target_feature(enable = "avx2")]
    fn add(x: __m256i, y: __m256i) -> __m256i {
        _mm256_add_epi32(x, y)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn xor3(x: __m256i, y: __m256i, z: __m256i) -> __m256i {
        _mm256_xor_si256(_mm256_xor_si256(x, y), z)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn choose(x: __m256i, y: __m256i, z: __m256i) -> __m256i {
        _mm256_xor_si256(z, _mm256_and_si256(x, _mm256_xor_si256(y, z)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn majority(x: __m256i, y: __m256i, z: __m256i) -> __m256i {
        _mm256_or_si256(_mm256_and_si256(x, y), _mm256_and_si256(z, _mm256_or_si256(x, y)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn rotate<const RIGHT: i32, const LEFT: i32>(x: __m256i) -> __m256i {
        _mm256_or_si256(_mm256_srli_epi32::<RIGHT>(x), _mm256_slli_epi32::<LEFT>(x))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn right<const BITS: i32>(x: __m256i) -> __m256i {
        _mm256_srli_epi32::<BITS>(x)
    }

    /// Word `i` of each block in vector `i`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(blocks: &[&[u8; BLOCK]; 8]) -> [__m256i; 16] {
        let big_endian = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203));
        let mut words = [_mm256_setzero_si256(); 16];
        for half in 0..2 {
            // SAFETY: a vector has half as many bytes as a block.
            let row =
                |lane: usize| _mm256_shuffle_epi8(unsafe { _mm256_loadu_si256(blocks[lane].as_ptr().add(32 * half).cast()) }, big_endian);
            // Half q of `fours[k][j]`: word 4q + j of messages 4k to 4k + 3.
            let mut fours = [[_mm256_setzero_si256(); 4]; 2];
            for (k, four) in fours.iter_mut().enumerate() {
                let [r0, r1, r2, r3] = [row(4 * k), row(4 * k + 1), row(4 * k + 2), row(4 * k + 3)];
                let (low, low_2) = (_mm256_unpacklo_epi32(r0, r1), _mm256_unpacklo_epi32(r2, r3));
                let (high, high_2) = (_mm256_unpackhi_epi32(r0, r1), _mm256_unpackhi_epi32(r2, r3));
                *four = [
                    _mm256_unpacklo_epi64(low, low_2),
                    _mm256_unpackhi_epi64(low, low_2),
                    _mm256_unpacklo_epi64(high, high_2),
                    _mm256_unpackhi_epi64(high, high_2),
                ];
            }
            for j in 0..4 {
                words[8 * half + j] = _mm256_permute2x128_si256::<0x20>(fours[0][j], fours[1][j]);
                words[8 * half + 4 + j] = _mm256_permute2x128_si256::<0x31>(fours[0][j], fours[1][j]);
            }
        }
        words
    }
}
