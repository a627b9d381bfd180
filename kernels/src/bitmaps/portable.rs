//! The reference: what the other kernels must equal, byte for byte.
//!
//! Eight values at a time in a word of 64 bits, a byte each.

use super::{ESCAPE, Encoded, Groups, bitmaps, join, put_bitmaps, split};
use std::mem::MaybeUninit;

/// The lowest bit of each byte.
const LOWEST: u64 = 0x0101_0101_0101_0101;

/// The lowest bits of eight bytes, as a byte.
const fn gather(bytes: u64) -> u64 {
    // Each of the eight products puts one of the bits into the highest byte.
    (bytes & LOWEST).wrapping_mul(0x0102_0408_1020_4080) >> 56
}

/// The way back.
const fn scatter(bits: u64) -> u64 {
    let own = ((bits & 0xFF) * LOWEST) & 0x8040_2010_0804_0201;
    // A byte that is not zero reaches its highest bit, and none reaches the next byte.
    (own + 0x7F * LOWEST) >> 7 & LOWEST
}

pub(super) fn encode(base: u8, groups: Groups<'_>, escapes: &mut [u8]) -> usize {
    let mut count = 0;
    for ((raw, maps), rest) in groups.raw.iter().zip(groups.maps).zip(groups.rest) {
        let mut bits = [0_u64; 3];
        let mut exponents = [0; 64];
        for ((word, rest), exponent) in raw.as_chunks::<2>().0.iter().zip(rest).zip(&mut exponents) {
            (*exponent, *rest) = split(*word);
        }
        let codes = exponents.map(|exponent| exponent.wrapping_sub(base).min(ESCAPE));
        for (eight, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
            let codes = u64::from_le_bytes(*codes);
            for (bit, map) in bits.iter_mut().enumerate() {
                *map |= gather(codes >> bit) << (8 * eight);
            }
        }
        put_bitmaps(maps, bits);
        let mut escaped = bits[0] & bits[1] & bits[2];
        while escaped != 0 {
            escapes[count] = exponents[escaped.trailing_zeros() as usize];
            count += 1;
            escaped &= escaped - 1;
        }
    }
    count
}

pub(super) fn decode(base: u8, groups: Encoded<'_>, escapes: &[u8]) -> usize {
    let mut count = 0;
    for ((maps, rest), raw) in groups.maps.iter().zip(groups.rest).zip(groups.raw) {
        let [a, b, c] = bitmaps(maps);
        let mut exponents = [0; 64];
        for (eight, exponents) in exponents.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let codes = scatter(a >> (8 * eight)) | scatter(b >> (8 * eight)) << 1 | scatter(c >> (8 * eight)) << 2;
            *exponents = codes.to_le_bytes().map(|code| base.wrapping_add(code));
        }
        let mut escaped = a & b & c;
        while escaped != 0 {
            exponents[escaped.trailing_zeros() as usize] = escapes[count];
            count += 1;
            escaped &= escaped - 1;
        }
        for ((word, rest), exponent) in raw.as_chunks_mut::<2>().0.iter_mut().zip(rest).zip(exponents) {
            *word = join(exponent, *rest).map(MaybeUninit::new);
        }
    }
    count
}
