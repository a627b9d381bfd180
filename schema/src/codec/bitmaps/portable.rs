//! The reference: what the other kernels must equal, byte for byte.

use super::{ESCAPE, Encoded, Groups, bitmaps, join, put_bitmaps, split};

pub(super) fn encode(base: u8, groups: Groups<'_>, escapes: &mut [u8]) -> usize {
    let mut count = 0;
    for ((raw, maps), rest) in groups.raw.iter().zip(groups.maps).zip(groups.rest) {
        let mut bits = [0_u64; 3];
        for (i, (word, rest)) in raw.as_chunks::<2>().0.iter().zip(rest).enumerate() {
            let (exponent, other) = split(*word);
            *rest = other;
            let code = exponent.wrapping_sub(base).min(ESCAPE);
            for (bit, map) in bits.iter_mut().enumerate() {
                *map |= u64::from(code >> bit & 1) << i;
            }
            escapes[count] = exponent;
            count += usize::from(code == ESCAPE);
        }
        put_bitmaps(maps, bits);
    }
    count
}

pub(super) fn decode(base: u8, groups: Encoded<'_>, escapes: &[u8]) -> usize {
    let mut count = 0;
    for ((maps, rest), raw) in groups.maps.iter().zip(groups.rest).zip(groups.raw) {
        let [a, b, c] = bitmaps(maps);
        for (i, (word, rest)) in raw.as_chunks_mut::<2>().0.iter_mut().zip(rest).enumerate() {
            let code = (a >> i & 1) as u8 | ((b >> i & 1) as u8) << 1 | ((c >> i & 1) as u8) << 2;
            let mut exponent = base.wrapping_add(code);
            if code == ESCAPE {
                exponent = escapes[count];
                count += 1;
            }
            *word = join(exponent, *rest);
        }
    }
    count
}
