//! The kernel for AVX-512 with VBMI2. Loads and stores take references, so their bounds are checked
//! by types; they are the only unsafe code.

use super::{ESCAPE, Encoded, Groups, bitmaps, fetch, put_bitmaps};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

#[target_feature(enable = "avx512f")]
#[inline]
fn load(from: &[u8; 64]) -> __m512i {
    // SAFETY: `from` has 64 bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

/// The first 64 bytes, or all and then zeros.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn load_first(from: &[u8]) -> __m512i {
    match from.first_chunk() {
        Some(all) => load(all),
        // SAFETY: the mask has a bit for each byte of `from`, fewer than 64. The others are not
        // read.
        None => unsafe { _mm512_maskz_loadu_epi8((1 << from.len()) - 1, from.as_ptr().cast()) },
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store(to: &mut [u8; 64], value: __m512i) {
    // SAFETY: `to` has 64 bytes; the store needs no alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store_raw(to: &mut [MaybeUninit<u8>; 64], value: __m512i) {
    // SAFETY: as above.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

/// Every second byte of two vectors.
const fn every_second(first: u8) -> [u8; 64] {
    let mut all = [0; 64];
    let mut i = 0;
    while i < 64 {
        all[i] = first + 2 * i as u8;
        i += 1;
    }
    all
}

/// Alternately a byte of the first vector and of the second.
const fn pairs(first: u8) -> [u8; 64] {
    let mut all = [0; 64];
    let mut i = 0;
    while i < 64 {
        all[i] = first + i as u8 / 2 + 64 * (i as u8 % 2);
        i += 1;
    }
    all
}

const EVEN: [u8; 64] = every_second(0);
const ODD: [u8; 64] = every_second(1);
const LOW: [u8; 64] = pairs(0);
const HIGH: [u8; 64] = pairs(32);

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) fn encode(base: u8, groups: Groups<'_>, escapes: &mut [u8]) -> usize {
    let (even, odd) = (load(&EVEN), load(&ODD));
    let (base, largest) = (_mm512_set1_epi8(base as i8), _mm512_set1_epi8(ESCAPE as i8));
    let (one, two, four) = (_mm512_set1_epi8(1), _mm512_set1_epi8(2), _mm512_set1_epi8(4));
    let mut count = 0;
    for ((raw, maps), rest) in groups.raw.iter().zip(groups.maps).zip(groups.rest) {
        let halves = raw.as_chunks::<64>().0;
        let (a, b) = (load(&halves[0]), load(&halves[1]));
        // Rotates each word left by one bit.
        let (a, b) = (_mm512_shldi_epi16::<1>(a, a), _mm512_shldi_epi16::<1>(b, b));
        let exponents = _mm512_permutex2var_epi8(a, odd, b);
        store(rest, _mm512_permutex2var_epi8(a, even, b));
        let codes = _mm512_min_epu8(_mm512_sub_epi8(exponents, base), largest);
        let bits = [_mm512_test_epi8_mask(codes, one), _mm512_test_epi8_mask(codes, two), _mm512_test_epi8_mask(codes, four)];
        put_bitmaps(maps, bits);
        let escaped = bits[0] & bits[1] & bits[2];
        // The bytes of these 64 that are no escapes are overwritten by the next group.
        store(&mut escapes[count..].as_chunks_mut::<64>().0[0], _mm512_maskz_compress_epi8(escaped, exponents));
        count += escaped.count_ones() as usize;
    }
    count
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
pub(super) fn decode(base: u8, groups: Encoded<'_>, escapes: &[u8]) -> usize {
    let (low, high) = (load(&LOW), load(&HIGH));
    let base = _mm512_set1_epi8(base as i8);
    let (one, two, four) = (_mm512_set1_epi8(1), _mm512_set1_epi8(2), _mm512_set1_epi8(4));
    let mut count = 0;
    for ((maps, rest), raw) in groups.maps.iter().zip(groups.rest).zip(groups.raw) {
        fetch(maps, groups.ahead);
        fetch(rest, groups.ahead);
        let bits = bitmaps(maps);
        let escaped = bits[0] & bits[1] & bits[2];
        let exponents = _mm512_mask_add_epi8(base, bits[0], base, one);
        let exponents = _mm512_mask_add_epi8(exponents, bits[1], exponents, two);
        let exponents = _mm512_mask_add_epi8(exponents, bits[2], exponents, four);
        let exponents = _mm512_mask_expand_epi8(exponents, escaped, load_first(&escapes[count..]));
        count += escaped.count_ones() as usize;
        let rest = load(rest);
        let (a, b) = (_mm512_permutex2var_epi8(rest, low, exponents), _mm512_permutex2var_epi8(rest, high, exponents));
        let halves = raw.as_chunks_mut::<64>().0;
        // Left by fifteen bits is right by one.
        store_raw(&mut halves[0], _mm512_shldi_epi16::<15>(a, a));
        store_raw(&mut halves[1], _mm512_shldi_epi16::<15>(b, b));
    }
    count
}
