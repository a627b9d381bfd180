//! The kernel for AVX2. Loads and stores take references to arrays, so their bounds are checked by
//! types; they are the only unsafe code.

use super::{ESCAPE, Encoded, Groups, bitmaps, join, put_bitmaps, split};
use std::arch::x86_64::*;

/// Order of quarters that undoes what packing does to halves, and what unpacking will do.
const QUARTERS: i32 = 0b11_01_10_00;

#[target_feature(enable = "avx2")]
#[inline]
fn load(from: &[u8; 32]) -> __m256i {
    // SAFETY: `from` has 32 bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store(to: &mut [u8; 32], value: __m256i) {
    // SAFETY: `to` has 32 bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}

/// 16 words, rotated left by one bit.
#[target_feature(enable = "avx2")]
#[inline]
fn load_rotated(from: &[u8; 32]) -> __m256i {
    let words = load(from);
    _mm256_or_si256(_mm256_add_epi16(words, words), _mm256_srli_epi16::<15>(words))
}

/// Bitmaps of 32 words. Their other bits go to `rest`.
#[target_feature(enable = "avx2")]
#[inline]
fn encode32(a: &[u8; 32], b: &[u8; 32], rest: &mut [u8; 32], base: __m256i) -> [u32; 3] {
    let low = _mm256_set1_epi16(0xFF);
    let (a, b) = (load_rotated(a), load_rotated(b));
    let exponents = _mm256_packus_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b));
    let others = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    store(rest, _mm256_permute4x64_epi64::<QUARTERS>(others));
    let codes = _mm256_min_epu8(_mm256_sub_epi8(exponents, base), _mm256_set1_epi8(ESCAPE as i8));
    let codes = _mm256_permute4x64_epi64::<QUARTERS>(codes);
    // The wanted bit of each byte becomes its highest.
    [
        _mm256_movemask_epi8(_mm256_slli_epi16::<7>(codes)) as u32,
        _mm256_movemask_epi8(_mm256_slli_epi16::<6>(codes)) as u32,
        _mm256_movemask_epi8(_mm256_slli_epi16::<5>(codes)) as u32,
    ]
}

#[target_feature(enable = "avx2,popcnt,bmi1")]
pub(super) fn encode(base: u8, groups: Groups<'_>, escapes: &mut [u8]) -> usize {
    let base = _mm256_set1_epi8(base as i8);
    let mut count = 0;
    for ((raw, maps), rest) in groups.raw.iter().zip(groups.maps).zip(groups.rest) {
        let quarters = raw.as_chunks::<32>().0;
        let halves = rest.as_chunks_mut::<32>().0;
        let a = encode32(&quarters[0], &quarters[1], &mut halves[0], base);
        let b = encode32(&quarters[2], &quarters[3], &mut halves[1], base);
        let join = |bit: usize| u64::from(a[bit]) | u64::from(b[bit]) << 32;
        let bits = [join(0), join(1), join(2)];
        put_bitmaps(maps, bits);
        let mut escaped = bits[0] & bits[1] & bits[2];
        let number = escaped.count_ones() as usize;
        let words = raw.as_chunks::<2>().0;
        for escape in &mut escapes[count..count + number] {
            *escape = split(words[escaped.trailing_zeros() as usize % words.len()]).0;
            escaped &= escaped.wrapping_sub(1);
        }
        count += number;
    }
    count
}

/// -1 for each bit that is set, the quarters in the order that unpacking wants.
#[target_feature(enable = "avx2")]
#[inline]
fn spread(bits: u32) -> __m256i {
    // Value `i` is bit `i % 8` of byte `i / 8`: values 0–7, 16–23, 8–15, 24–31.
    let bytes = _mm256_setr_epi64x(0, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0x0303_0303_0303_0303);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), bytes), bit), bit)
}

/// 32 words. Escapes are wrong.
#[target_feature(enable = "avx2")]
#[inline]
fn decode32(bits: [u32; 3], rest: &[u8; 32], base: __m256i) -> (__m256i, __m256i) {
    let four = spread(bits[2]);
    let two = _mm256_add_epi8(spread(bits[1]), _mm256_add_epi8(four, four));
    let code = _mm256_add_epi8(spread(bits[0]), _mm256_add_epi8(two, two));
    let exponents = _mm256_sub_epi8(base, code);
    let rest = _mm256_permute4x64_epi64::<QUARTERS>(load(rest));
    let (a, b) = (_mm256_unpacklo_epi8(rest, exponents), _mm256_unpackhi_epi8(rest, exponents));
    (
        _mm256_or_si256(_mm256_srli_epi16::<1>(a), _mm256_slli_epi16::<15>(a)),
        _mm256_or_si256(_mm256_srli_epi16::<1>(b), _mm256_slli_epi16::<15>(b)),
    )
}

#[target_feature(enable = "avx2,popcnt,bmi1")]
pub(super) fn decode(base: u8, groups: Encoded<'_>, escapes: &[u8]) -> usize {
    let base = _mm256_set1_epi8(base as i8);
    let mut count = 0;
    for ((maps, rest), raw) in groups.maps.iter().zip(groups.rest).zip(groups.raw) {
        let bits = bitmaps(maps);
        let halves = rest.as_chunks::<32>().0;
        let quarters = raw.as_chunks_mut::<32>().0;
        let (a, b) = decode32([bits[0] as u32, bits[1] as u32, bits[2] as u32], &halves[0], base);
        store(&mut quarters[0], a);
        store(&mut quarters[1], b);
        let (a, b) = decode32([(bits[0] >> 32) as u32, (bits[1] >> 32) as u32, (bits[2] >> 32) as u32], &halves[1], base);
        store(&mut quarters[2], a);
        store(&mut quarters[3], b);
        let mut escaped = bits[0] & bits[1] & bits[2];
        let number = escaped.count_ones() as usize;
        let words = raw.as_chunks_mut::<2>().0;
        for escape in &escapes[count..count + number] {
            let at = escaped.trailing_zeros() as usize % rest.len();
            words[at] = join(*escape, rest[at]);
            escaped &= escaped.wrapping_sub(1);
        }
        count += number;
    }
    count
}
