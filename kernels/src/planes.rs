//! Exponents apart from the other bits, for codecs 3 to 5, and zeros.
//!
//! In two-byte types the exponent is the high byte of a word that is rotated left by one bit, as in
//! [`bitmaps`](crate::bitmaps). (Of `f16` that byte also has the three highest bits of the
//! mantissa.) In one-byte types it is the upper half of a byte that is rotated likewise, and two of
//! them make a byte.

/// Bytes of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One byte, as `fp8`.
    One,
    /// Two bytes, as `bf16` and `f16`.
    Two,
}

/// Takes pairs of bytes of `raw` apart: a byte of exponents and a byte of other bits for each. What
/// the shortest of the three has no room for is left out.
pub fn split(width: Width, raw: &[u8], exponents: &mut [u8], rest: &mut [u8]) {
    let pairs = raw.as_chunks::<2>().0.iter().zip(exponents).zip(rest);
    match width {
        Width::One => pairs.for_each(|((pair, exponents), rest)| {
            let [a, b] = pair.map(|byte| byte.rotate_left(1));
            *exponents = a >> 4 | b & 0xF0;
            *rest = a & 0x0F | b << 4;
        }),
        Width::Two => pairs.for_each(|((pair, exponents), rest)| {
            let word = u16::from_le_bytes(*pair).rotate_left(1);
            *exponents = (word >> 8) as u8;
            *rest = word as u8;
        }),
    }
}

/// The way back.
pub fn join(width: Width, exponents: &[u8], rest: &[u8], raw: &mut [u8]) {
    let pairs = raw.as_chunks_mut::<2>().0.iter_mut().zip(exponents).zip(rest);
    match width {
        Width::One => pairs.for_each(|((pair, exponents), rest)| {
            *pair = [exponents << 4 | rest & 0x0F, exponents & 0xF0 | rest >> 4].map(|byte| byte.rotate_right(1));
        }),
        Width::Two => pairs.for_each(|((pair, exponents), rest)| {
            *pair = u16::from_le_bytes([*rest, *exponents]).rotate_right(1).to_le_bytes();
        }),
    }
}

/// Whether all bytes are zero.
#[inline]
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    words.first().is_none_or(|first| *first == [0; 8])
        && words.iter().fold(0, |all, word| all | u64::from_le_bytes(*word)) == 0
        && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_bytes_comes_back_and_its_exponents_lie_where_they_are_said_to() {
        let raw: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for width in [Width::One, Width::Two] {
            let (mut exponents, mut rest, mut back) = (vec![0; raw.len() / 2], vec![0; raw.len() / 2], vec![0; raw.len()]);
            split(width, &raw, &mut exponents, &mut rest);
            join(width, &exponents, &rest, &mut back);
            assert!(back == raw, "{width:?}");
        }
        let (mut exponents, mut rest) = ([0], [0]);
        // 1.0 as `bf16`, 0x3f80: its exponent is 127.
        split(Width::Two, &[0x80, 0x3f], &mut exponents, &mut rest);
        assert_eq!((exponents, rest), ([127], [0]));
        // 1.0 and -2.0 as `fp8` with four bits of exponent, 0x38 and 0xc0: 7 and 8, and a sign.
        split(Width::One, &[0x38, 0xc0], &mut exponents, &mut rest);
        assert_eq!((exponents, rest), ([0x87], [0x10]));
    }

    #[test]
    fn one_bit_anywhere_is_not_zero() {
        for len in [0, 1, 7, 8, 9, 128, 131] {
            assert!(is_zero(&vec![0; len]), "{len}");
            for bit in 0..8 * len {
                let mut bytes = vec![0; len];
                bytes[bit / 8] |= 1 << (bit % 8);
                assert!(!is_zero(&bytes), "bit {bit} of {len} bytes");
            }
        }
    }
}
