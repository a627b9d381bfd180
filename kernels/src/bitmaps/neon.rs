//! The kernel for 64-bit ARM. Loads and stores take references to arrays, so their bounds are
//! checked by types; they are the only unsafe code.

use super::{ESCAPE, Encoded, Groups, bitmaps, join, put_bitmaps};
use std::arch::aarch64::*;
use std::mem::MaybeUninit;

/// The bit of each value in its byte of a bitmap.
const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];

#[target_feature(enable = "neon")]
#[inline]
fn load(from: &[u8; 16]) -> uint8x16_t {
    // SAFETY: `from` has 16 bytes.
    unsafe { vld1q_u8(from.as_ptr()) }
}

#[target_feature(enable = "neon")]
#[inline]
fn store(to: &mut [u8; 16], value: uint8x16_t) {
    // SAFETY: `to` has 16 bytes.
    unsafe { vst1q_u8(to.as_mut_ptr(), value) }
}

/// Low and high bytes of 16 words.
#[target_feature(enable = "neon")]
#[inline]
fn load_words(from: &[u8; 32]) -> uint8x16x2_t {
    // SAFETY: `from` has 32 bytes.
    unsafe { vld2q_u8(from.as_ptr()) }
}

#[target_feature(enable = "neon")]
#[inline]
fn store_words(to: &mut [MaybeUninit<u8>; 32], value: uint8x16x2_t) {
    // SAFETY: `to` has 32 bytes.
    unsafe { vst2q_u8(to.as_mut_ptr().cast(), value) }
}

/// The bitmap of 64 values, each 0 or its bit of [`BITS`].
#[target_feature(enable = "neon")]
#[inline]
fn gather(bits: [uint8x16_t; 4]) -> u64 {
    let pairs = vpaddq_u8(vpaddq_u8(bits[0], bits[1]), vpaddq_u8(bits[2], bits[3]));
    vgetq_lane_u64::<0>(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)))
}

#[target_feature(enable = "neon")]
pub(super) fn encode(base: u8, groups: Groups<'_>, escapes: &mut [u8]) -> usize {
    let (base, largest, place) = (vdupq_n_u8(base), vdupq_n_u8(ESCAPE), load(&BITS));
    let mut count = 0;
    for ((raw, maps), rest) in groups.raw.iter().zip(groups.maps).zip(groups.rest) {
        let mut exponents = [[0; 16]; 4];
        let mut set = [[vdupq_n_u8(0); 4]; 3];
        let quarters = raw.as_chunks::<32>().0.iter().zip(rest.as_chunks_mut::<16>().0);
        for (quarter, (raw, rest)) in quarters.enumerate() {
            let uint8x16x2_t(low, high) = load_words(raw);
            let exponent = vsliq_n_u8::<1>(vshrq_n_u8::<7>(low), high);
            store(rest, vsliq_n_u8::<1>(vshrq_n_u8::<7>(high), low));
            store(&mut exponents[quarter], exponent);
            let code = vminq_u8(vsubq_u8(exponent, base), largest);
            for (bit, set) in set.iter_mut().enumerate() {
                set[quarter] = vandq_u8(vtstq_u8(code, vdupq_n_u8(1 << bit)), place);
            }
        }
        let bits = [gather(set[0]), gather(set[1]), gather(set[2])];
        put_bitmaps(maps, bits);
        let mut escaped = bits[0] & bits[1] & bits[2];
        let number = escaped.count_ones() as usize;
        let exponents = exponents.as_flattened();
        for escape in &mut escapes[count..count + number] {
            *escape = exponents[escaped.trailing_zeros() as usize % exponents.len()];
            escaped &= escaped.wrapping_sub(1);
        }
        count += number;
    }
    count
}

#[target_feature(enable = "neon")]
pub(super) fn decode(base: u8, groups: Encoded<'_>, escapes: &[u8]) -> usize {
    let (base, place) = (vdupq_n_u8(base), load(&BITS));
    // Byte 0 for eight values, then byte 1.
    let spread = load(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
    let mut count = 0;
    for ((maps, rest), raw) in groups.maps.iter().zip(groups.rest).zip(groups.raw) {
        let bits = bitmaps(maps);
        let quarters = raw.as_chunks_mut::<32>().0.iter_mut().zip(rest.as_chunks::<16>().0);
        for (quarter, (raw, rest)) in quarters.enumerate() {
            let mut exponent = base;
            for (bit, bits) in bits.iter().enumerate() {
                let word = vreinterpretq_u8_u16(vdupq_n_u16((bits >> (16 * quarter)) as u16));
                let set = vtstq_u8(vqtbl1q_u8(word, spread), place);
                exponent = vaddq_u8(exponent, vandq_u8(set, vdupq_n_u8(1 << bit)));
            }
            let rest = load(rest);
            let low = vsliq_n_u8::<7>(vshrq_n_u8::<1>(rest), exponent);
            let high = vsliq_n_u8::<7>(vshrq_n_u8::<1>(exponent), rest);
            store_words(raw, uint8x16x2_t(low, high));
        }
        let mut escaped = bits[0] & bits[1] & bits[2];
        let number = escaped.count_ones() as usize;
        let words = raw.as_chunks_mut::<2>().0;
        for escape in &escapes[count..count + number] {
            let at = escaped.trailing_zeros() as usize % rest.len();
            words[at] = join(*escape, rest[at]).map(MaybeUninit::new);
            escaped &= escaped.wrapping_sub(1);
        }
        count += number;
    }
    count
}
