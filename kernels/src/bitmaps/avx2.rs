//! The kernel for AVX2. Loads and stores take references to arrays, so their bounds are checked by
//! types; they are the only unsafe code.

use super::{COMPRESS, ESCAPE, EXPAND, Encoded, GROUP, Groups, bitmaps, fetch, put_bitmaps};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

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

#[target_feature(enable = "avx2")]
#[inline]
fn store_raw(to: &mut [MaybeUninit<u8>; 32], value: __m256i) {
    // SAFETY: as above.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}

/// 16 words, rotated left by one bit.
#[target_feature(enable = "avx2")]
#[inline]
fn load_rotated(from: &[u8; 32]) -> __m256i {
    let words = load(from);
    _mm256_or_si256(_mm256_add_epi16(words, words), _mm256_srli_epi16::<15>(words))
}

/// Eight bytes, and zeros.
#[target_feature(enable = "avx2")]
#[inline]
fn load8(from: [u8; 8]) -> __m128i {
    _mm_cvtsi64_si128(i64::from_le_bytes(from))
}

/// Bitmaps and exponents of 32 words. Their other bits go to `rest`.
#[target_feature(enable = "avx2")]
#[inline]
fn encode32(a: &[u8; 32], b: &[u8; 32], rest: &mut [u8; 32], base: __m256i) -> ([u32; 3], __m256i) {
    let low = _mm256_set1_epi16(0xFF);
    let (a, b) = (load_rotated(a), load_rotated(b));
    let exponents = _mm256_packus_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b));
    let others = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    store(rest, _mm256_permute4x64_epi64::<QUARTERS>(others));
    let exponents = _mm256_permute4x64_epi64::<QUARTERS>(exponents);
    let codes = _mm256_min_epu8(_mm256_sub_epi8(exponents, base), _mm256_set1_epi8(ESCAPE as i8));
    // The wanted bit of each byte becomes its highest.
    let bits = [
        _mm256_movemask_epi8(_mm256_slli_epi16::<7>(codes)) as u32,
        _mm256_movemask_epi8(_mm256_slli_epi16::<6>(codes)) as u32,
        _mm256_movemask_epi8(_mm256_slli_epi16::<5>(codes)) as u32,
    ];
    (bits, exponents)
}

/// Writes those of 16 bytes that are escapes. Returns how many are written then.
#[target_feature(enable = "avx2,popcnt")]
#[inline]
fn compress16(exponents: __m128i, escaped: u32, to: &mut [u8; GROUP], mut at: usize) -> usize {
    for (half, exponents) in [exponents, _mm_unpackhi_epi64(exponents, exponents)].into_iter().enumerate() {
        let set = (escaped >> (8 * half)) as u8;
        let packed = _mm_shuffle_epi8(exponents, load8(COMPRESS[usize::from(set)]));
        // At most seven eights are before this one.
        to[at.min(GROUP - 8)..][..8].copy_from_slice(&_mm_cvtsi128_si64(packed).to_le_bytes());
        at += set.count_ones() as usize;
    }
    at
}

#[target_feature(enable = "avx2,popcnt")]
pub(super) fn encode(base: u8, groups: Groups<'_>, escapes: &mut [u8]) -> usize {
    let base = _mm256_set1_epi8(base as i8);
    let mut count = 0;
    for ((raw, maps), rest) in groups.raw.iter().zip(groups.maps).zip(groups.rest) {
        let quarters = raw.as_chunks::<32>().0;
        let halves = rest.as_chunks_mut::<32>().0;
        let (a, low) = encode32(&quarters[0], &quarters[1], &mut halves[0], base);
        let (b, high) = encode32(&quarters[2], &quarters[3], &mut halves[1], base);
        let join = |bit: usize| u64::from(a[bit]) | u64::from(b[bit]) << 32;
        put_bitmaps(maps, [join(0), join(1), join(2)]);
        let (a, b) = (a[0] & a[1] & a[2], b[0] & b[1] & b[2]);
        // The bytes of these 64 that are no escapes are overwritten by the next group.
        let to = &mut escapes[count..].as_chunks_mut::<GROUP>().0[0];
        let mut at = compress16(_mm256_castsi256_si128(low), a, to, 0);
        at = compress16(_mm256_extracti128_si256::<1>(low), a >> 16, to, at);
        at = compress16(_mm256_castsi256_si128(high), b, to, at);
        compress16(_mm256_extracti128_si256::<1>(high), b >> 16, to, at);
        count += (a.count_ones() + b.count_ones()) as usize;
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

/// The escapes of eight values, where they belong; zeros elsewhere.
#[target_feature(enable = "avx2,popcnt")]
#[inline]
fn expand8(escaped: u32, from: &[u8; GROUP], at: usize) -> __m128i {
    let mut next = [0; 8];
    // At most seven eights are before this one.
    next.copy_from_slice(&from[at.min(GROUP - 8)..][..8]);
    _mm_shuffle_epi8(load8(next), load8(EXPAND[escaped as usize & 0xFF]))
}

/// The escapes of 32 values, the quarters in the order that unpacking wants.
#[target_feature(enable = "avx2,popcnt")]
#[inline]
fn expand32(escaped: u32, from: &[u8; GROUP], at: usize) -> __m256i {
    let before = |bits: u32| at + (escaped & bits).count_ones() as usize;
    let a = expand8(escaped, from, at);
    let b = expand8(escaped >> 8, from, before(0xFF));
    let c = expand8(escaped >> 16, from, before(0xFFFF));
    let d = expand8(escaped >> 24, from, before(0xFF_FFFF));
    _mm256_set_m128i(_mm_unpacklo_epi64(b, d), _mm_unpacklo_epi64(a, c))
}

/// 32 words.
#[target_feature(enable = "avx2")]
#[inline]
fn decode32(bits: [u32; 3], rest: &[u8; 32], base: __m256i, escapes: __m256i) -> (__m256i, __m256i) {
    let (one, two, four) = (spread(bits[0]), spread(bits[1]), spread(bits[2]));
    let upper = _mm256_add_epi8(two, _mm256_add_epi8(four, four));
    let code = _mm256_add_epi8(one, _mm256_add_epi8(upper, upper));
    let escaped = _mm256_and_si256(one, _mm256_and_si256(two, four));
    let exponents = _mm256_blendv_epi8(_mm256_sub_epi8(base, code), escapes, escaped);
    let rest = _mm256_permute4x64_epi64::<QUARTERS>(load(rest));
    let (a, b) = (_mm256_unpacklo_epi8(rest, exponents), _mm256_unpackhi_epi8(rest, exponents));
    (
        _mm256_or_si256(_mm256_srli_epi16::<1>(a), _mm256_slli_epi16::<15>(a)),
        _mm256_or_si256(_mm256_srli_epi16::<1>(b), _mm256_slli_epi16::<15>(b)),
    )
}

#[target_feature(enable = "avx2,popcnt")]
pub(super) fn decode(base: u8, groups: Encoded<'_>, escapes: &[u8]) -> usize {
    let base = _mm256_set1_epi8(base as i8);
    let mut count = 0;
    for ((maps, rest), raw) in groups.maps.iter().zip(groups.rest).zip(groups.raw) {
        fetch(maps, groups.ahead);
        fetch(rest, groups.ahead);
        let left = &escapes[count..];
        let mut last = [0; GROUP];
        let next = left.first_chunk().unwrap_or_else(|| {
            last[..left.len()].copy_from_slice(left);
            &last
        });
        let [one, two, four] = bitmaps(maps);
        let escaped = one & two & four;
        let first = (escaped as u32).count_ones() as usize;
        let halves = rest.as_chunks::<32>().0;
        let quarters = raw.as_chunks_mut::<32>().0;
        let (a, b) = decode32([one as u32, two as u32, four as u32], &halves[0], base, expand32(escaped as u32, next, 0));
        store_raw(&mut quarters[0], a);
        store_raw(&mut quarters[1], b);
        let (one, two, four, upper) = ((one >> 32) as u32, (two >> 32) as u32, (four >> 32) as u32, (escaped >> 32) as u32);
        let (a, b) = decode32([one, two, four], &halves[1], base, expand32(upper, next, first));
        store_raw(&mut quarters[2], a);
        store_raw(&mut quarters[3], b);
        count += escaped.count_ones() as usize;
    }
    count
}
