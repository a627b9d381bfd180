//! Conversion between element types: which number the bits of an element stand for, and which bits
//! stand for the same number in another type, if any do.

use super::dtype::{Class, Dtype, Float};
use std::fmt;

/// What the bits of an element stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Nan,
    Infinity {
        negative: bool,
    },
    /// ± `magnitude` · 2^`exponent`. Minus zero is a number of its own.
    Finite {
        negative: bool,
        magnitude: u64,
        exponent: i32,
    },
    /// A boolean that is neither 0 nor 1.
    InvalidBool(u64),
}

/// The bits that stand in `to` for the number that `bits` stand for in `from`, if there are any.
pub(super) fn translate(from: Dtype, to: Dtype, bits: u64) -> Option<u64> {
    match (from, to) {
        // A shortcut for the common pair: bf16 is the upper half of f32. Only NaNs are replaced, by
        // the canonical one.
        (Dtype::Bf16, Dtype::F32) => Some(if bits & 0x7fff > 0x7f80 { 0x7fc0_0000 } else { bits << 16 }),
        (Dtype::F32, Dtype::Bf16) if bits & 0x7fff_ffff > 0x7f80_0000 => Some(0x7fc0),
        (Dtype::F32, Dtype::Bf16) => (bits & 0xffff == 0).then_some(bits >> 16),
        _ => Number::decode(from, bits).encode(to),
    }
}

impl Number {
    pub(super) fn decode(dtype: Dtype, bits: u64) -> Self {
        let integer = |negative, magnitude| Self::Finite { negative, magnitude, exponent: 0 };
        match dtype.class() {
            Class::Float(float) => Self::decode_float(float, bits),
            Class::Unsigned => integer(false, bits),
            Class::Signed => {
                let unused = 64 - 8 * dtype.bytes() as u32;
                let value = (bits << unused).cast_signed() >> unused;
                integer(value < 0, value.unsigned_abs())
            }
            Class::Bool if bits <= 1 => integer(false, bits),
            Class::Bool => Self::InvalidBool(bits),
        }
    }

    fn decode_float(float: Float, bits: u64) -> Self {
        let Float { exponent_bits, fraction_bits, infinities } = float;
        let negative = bits >> (exponent_bits + fraction_bits) & 1 == 1;
        let fraction = bits & ((1 << fraction_bits) - 1);
        let field = bits >> fraction_bits & ((1 << exponent_bits) - 1);
        let largest = (1 << exponent_bits) - 1;
        if field == largest {
            match (infinities, fraction) {
                (true, 0) => return Self::Infinity { negative },
                (true, _) => return Self::Nan,
                (false, all) if all == (1 << fraction_bits) - 1 => return Self::Nan,
                (false, _) => {}
            }
        }
        let magnitude = if field == 0 { fraction } else { fraction | 1 << fraction_bits };
        // The field is below 2^11, so it fits.
        Self::Finite { negative, magnitude, exponent: (field.max(1) as i32) + float.least_exponent() - 1 }
    }

    /// The bits that stand for exactly this in `dtype`, if there are any.
    pub(super) fn encode(self, dtype: Dtype) -> Option<u64> {
        match (dtype.class(), self) {
            (_, Self::InvalidBool(_)) => None,
            (_, Self::Nan) => dtype.canonical_nan(),
            (Class::Float(float), Self::Infinity { negative }) if float.infinities => {
                Some(dtype.last_number()? | u64::from(negative) << (8 * dtype.bytes() - 1))
            }
            (_, Self::Infinity { .. }) => None,
            (Class::Float(float), Self::Finite { negative, magnitude, exponent }) => {
                let bits = float.encode(magnitude, exponent)?;
                Some(bits | u64::from(negative) << (8 * dtype.bytes() - 1))
            }
            (class, Self::Finite { negative, magnitude, exponent }) => {
                let magnitude = integral(magnitude, exponent)?;
                let bits = 8 * dtype.bytes() as u32;
                match class {
                    // Integers have no minus zero.
                    _ if negative && magnitude == 0 => None,
                    Class::Signed if negative => {
                        (magnitude <= 1 << (bits - 1)).then(|| magnitude.wrapping_neg() & (u64::MAX >> (64 - bits)))
                    }
                    Class::Signed => (magnitude < 1 << (bits - 1)).then_some(magnitude),
                    _ if negative => None,
                    Class::Bool => (magnitude <= 1).then_some(magnitude),
                    _ => (magnitude <= u64::MAX >> (64 - bits)).then_some(magnitude),
                }
            }
        }
    }
}

/// `magnitude` · 2^`exponent` as a whole number below 2^64.
fn integral(magnitude: u64, exponent: i32) -> Option<u64> {
    let shift = exponent.unsigned_abs();
    match (magnitude, exponent) {
        (0, _) => Some(0),
        (_, 0..) => (shift <= magnitude.leading_zeros()).then(|| magnitude << shift),
        (_, _) => (shift <= magnitude.trailing_zeros()).then(|| magnitude >> shift),
    }
}

impl Float {
    /// The exponent of the last fraction bit of the smallest numbers.
    fn least_exponent(self) -> i32 {
        let bias = (1_i32 << (self.exponent_bits - 1)) - 1;
        1 - bias - self.fraction_bits as i32
    }

    /// Bits without the sign.
    fn encode(self, magnitude: u64, exponent: i32) -> Option<u64> {
        if magnitude == 0 {
            return Some(0);
        }
        let (odd, exponent) = (magnitude >> magnitude.trailing_zeros(), exponent + magnitude.trailing_zeros() as i32);
        // The number in units of the smallest number of the type: `odd << above`.
        let least = self.least_exponent();
        let length = 64 - odd.leading_zeros();
        let above = exponent - least;
        if above < 0 || length > self.fraction_bits + 1 {
            return None;
        }
        // How many bits the number has in this unit. A subnormal has at most as many as the
        // fraction; a longer number needs an exponent.
        let height = above as u32 + length;
        if height <= self.fraction_bits {
            return Some(odd << above);
        }
        let field = u64::from(height - self.fraction_bits);
        let fraction = (odd << (self.fraction_bits + 1 - length)) & ((1 << self.fraction_bits) - 1);
        let largest = (1 << self.exponent_bits) - 1;
        let allowed = if self.infinities {
            field < largest
        } else {
            field < largest || (field == largest && fraction != (1 << self.fraction_bits) - 1)
        };
        allowed.then_some(field << self.fraction_bits | fraction)
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = |negative| if negative { "-" } else { "" };
        match *self {
            Self::Nan => f.write_str("NaN"),
            Self::Infinity { negative } => write!(f, "{}infinity", sign(negative)),
            Self::InvalidBool(bits) => write!(f, "byte {bits}"),
            Self::Finite { negative, magnitude, exponent } => match integral(magnitude, exponent) {
                Some(whole) => write!(f, "{}{whole}", sign(negative)),
                // A fraction of any type is a binary64 number.
                None => write!(
                    f,
                    "{}{:e}",
                    sign(negative),
                    magnitude as f64 * 2_f64.powi(exponent.max(-1022)) * 2_f64.powi((exponent + 1022).min(0))
                ),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_number_comes_back_through_every_larger_type_that_holds_it() {
        use Dtype::{Bf16, Bool, F16, F32, F64, Fp8E4m3, Fp8E5m2, I8, I16, I32, I64, U8, U16, U32, U64};
        let wider: [(Dtype, &[Dtype]); 9] = [
            (Bf16, &[F32, F64]),
            (F16, &[F32, F64]),
            (Fp8E4m3, &[F16, Bf16, F32, F64]),
            (Fp8E5m2, &[F16, Bf16, F32, F64]),
            (I8, &[I16, I32, I64, F16, Bf16, F32, F64]),
            (U8, &[I16, I32, I64, U16, U32, U64, F16, Bf16, F32, F64]),
            (I16, &[I32, I64, F32, F64]),
            (U16, &[I32, I64, U32, U64, F32, F64]),
            (Bool, &[U8, I8, U64, F16, Bf16, F32, F64, Fp8E4m3, Fp8E5m2]),
        ];
        for (small, wide) in wider {
            for bits in 0..1_u64 << (8 * small.bytes()) {
                let number = Number::decode(small, bits);
                if number == Number::InvalidBool(bits) {
                    assert_eq!(number.encode(U8), None);
                    continue;
                }
                let canonical = if number == Number::Nan { small.canonical_nan() } else { Some(bits) };
                assert_eq!(number.encode(small), canonical, "{small} {bits:#x}");
                for wide in wide {
                    let there = number.encode(*wide).unwrap_or_else(|| panic!("{small} {bits:#x} is no {wide}"));
                    assert_eq!(Number::decode(*wide, there).encode(small), canonical, "{small} {bits:#x} by {wide}");
                }
            }
        }
    }

    #[test]
    fn the_shortcut_gives_the_same_bits_as_the_general_way() {
        let check = |from: Dtype, to: Dtype, bits: u64| {
            assert_eq!(translate(from, to, bits), Number::decode(from, bits).encode(to), "{from} {bits:#x} as {to}");
        };
        for upper in 0..1_u64 << 16 {
            check(Dtype::Bf16, Dtype::F32, upper);
            for lower in [0, 1, 0x8000, 0xffff] {
                check(Dtype::F32, Dtype::Bf16, upper << 16 | lower);
            }
        }
    }

    #[test]
    fn floating_point_numbers_mean_what_the_machine_says() {
        let mut state = 1_u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (double, single) = (f64::from_bits(state), f32::from_bits((state >> 32) as u32));
            let narrowed = double as f32;
            let exact = f64::from(narrowed) == double;
            let number = Number::decode(Dtype::F64, state);
            if !double.is_nan() {
                assert_eq!(number.encode(Dtype::F64), Some(state));
                assert_eq!(number.encode(Dtype::F32), exact.then(|| u64::from(narrowed.to_bits())), "{double:e}");
            }
            if !single.is_nan() {
                let widened = Number::decode(Dtype::F32, u64::from(single.to_bits())).encode(Dtype::F64);
                assert_eq!(widened, Some(f64::from(single).to_bits()), "{single:e}");
                let whole = single.fract() == 0.0 && single.abs() < 1e9 && single.to_bits() != (-0.0_f32).to_bits();
                if single.abs() < 1e9 {
                    let integer = Number::decode(Dtype::F32, u64::from(single.to_bits())).encode(Dtype::I32);
                    assert_eq!(integer, whole.then(|| u64::from((single as i32).cast_unsigned())), "{single:e}");
                }
            }
        }
    }

    #[test]
    fn the_edges_of_each_type_are_its_own() {
        let of = |dtype, bits| Number::decode(dtype, bits);
        assert_eq!(of(Dtype::Fp8E4m3, 0x7e).encode(Dtype::I32), Some(448));
        assert_eq!(of(Dtype::Fp8E4m3, 0x7f), Number::Nan);
        assert_eq!(of(Dtype::Fp8E5m2, 0x7b).encode(Dtype::I32), Some(57344));
        assert_eq!(of(Dtype::Fp8E5m2, 0x7c), Number::Infinity { negative: false });
        assert_eq!(of(Dtype::U64, u64::MAX).encode(Dtype::F64), None);
        assert_eq!(of(Dtype::I64, 1 << 63).encode(Dtype::F32), Some(u64::from((-(2_f32.powi(63))).to_bits())));
        assert_eq!(of(Dtype::F32, u64::from((-0.0_f32).to_bits())).encode(Dtype::I32), None);
        assert_eq!(of(Dtype::F32, u64::from(f32::INFINITY.to_bits())).encode(Dtype::Fp8E4m3), None);
        assert_eq!(of(Dtype::I16, 480).encode(Dtype::Fp8E4m3), None);
        let nans = [
            (Dtype::F64, 0x7ff8_0000_0000_0000),
            (Dtype::F32, 0x7fc0_0000),
            (Dtype::F16, 0x7e00),
            (Dtype::Bf16, 0x7fc0),
            (Dtype::Fp8E4m3, 0x7f),
            (Dtype::Fp8E5m2, 0x7e),
        ];
        for dtype in Dtype::ALL {
            assert_eq!(dtype.canonical_nan(), nans.iter().find(|(d, _)| d == dtype).map(|(_, bits)| *bits), "{dtype}");
        }
        assert_eq!(of(Dtype::F64, 1).to_string(), "5e-324");
        assert_eq!(of(Dtype::F32, u64::from((-1.5_f32).to_bits())).to_string(), "-1.5e0");
    }
}
