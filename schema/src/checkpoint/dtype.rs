//! Element types, and which numbers their bits mean.

use crate::error::{FormatError, shorten};
use serde::{Deserialize, Serialize};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bytes:literal;)*) => {
        /// An element type. Elements are little-endian.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Dtype { $($(#[$doc])* #[serde(rename = $name)] $variant,)* }

        impl Dtype {
            /// Every type.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name in documents.
            #[must_use]
            pub const fn name(self) -> &'static str { match self { $(Self::$variant => $name,)* } }

            /// Bytes of one element: 1, 2, 4 or 8.
            #[must_use]
            pub const fn bytes(self) -> usize { match self { $(Self::$variant => $bytes,)* } }
        }
    };
}

dtypes! {
    /// IEEE 754 binary64.
    F64 = "f64", 8;
    /// IEEE 754 binary32.
    F32 = "f32", 4;
    /// IEEE 754 binary16.
    F16 = "f16", 2;
    /// The upper half of a binary32.
    Bf16 = "bf16", 2;
    /// OCP FP8 E4M3: no infinities, one NaN of each sign, up to 448.
    Fp8E4m3 = "fp8e4m3", 1;
    /// OCP FP8 E5M2: infinities and NaNs as in IEEE 754, up to 57,344.
    Fp8E5m2 = "fp8e5m2", 1;
    /// Signed, two's complement.
    I64 = "i64", 8;
    /// Signed, two's complement.
    I32 = "i32", 4;
    /// Signed, two's complement.
    I16 = "i16", 2;
    /// Signed, two's complement.
    I8 = "i8", 1;
    /// Unsigned.
    U64 = "u64", 8;
    /// Unsigned.
    U32 = "u32", 4;
    /// Unsigned.
    U16 = "u16", 2;
    /// Unsigned.
    U8 = "u8", 1;
    /// The number 0 or 1 in a byte; any other byte is invalid.
    Bool = "bool", 1;
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Dtype {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == text).ok_or_else(|| FormatError::Name {
            what: "dtype",
            found: shorten(text.into()),
            reason: "known are f64, f32, f16, bf16, fp8e4m3, fp8e5m2, i64, i32, i16, i8, u64, u32, u16, u8, bool",
        })
    }
}

/// The bit fields of a floating-point type. Above them is one sign bit.
#[derive(Clone, Copy)]
pub(super) struct Float {
    pub exponent_bits: u32,
    pub fraction_bits: u32,
    /// Whether the largest exponent field stands for infinities and NaNs. If not, only its largest
    /// fraction is a NaN.
    pub infinities: bool,
}

/// What kind of number a type holds.
#[derive(Clone, Copy)]
pub(super) enum Class {
    Float(Float),
    Signed,
    Unsigned,
    Bool,
}

impl Dtype {
    pub(super) const fn class(self) -> Class {
        const fn float(exponent_bits: u32, fraction_bits: u32, infinities: bool) -> Class {
            Class::Float(Float { exponent_bits, fraction_bits, infinities })
        }
        match self {
            Self::F64 => float(11, 52, true),
            Self::F32 => float(8, 23, true),
            Self::F16 => float(5, 10, true),
            Self::Bf16 => float(8, 7, true),
            Self::Fp8E4m3 => float(4, 3, false),
            Self::Fp8E5m2 => float(5, 2, true),
            Self::I64 | Self::I32 | Self::I16 | Self::I8 => Class::Signed,
            Self::U64 | Self::U32 | Self::U16 | Self::U8 => Class::Unsigned,
            Self::Bool => Class::Bool,
        }
    }

    /// The one NaN that stands for all: positive and quiet, no payload. None for types that have
    /// none.
    pub(super) const fn canonical_nan(self) -> Option<u64> {
        match self.class() {
            Class::Float(f) if f.infinities => Some((((1 << f.exponent_bits) - 1) << f.fraction_bits) | 1 << (f.fraction_bits - 1)),
            Class::Float(f) => Some((1 << (f.exponent_bits + f.fraction_bits)) - 1),
            _ => None,
        }
    }

    /// The largest bits without sign that are a number: everything above is NaN. None for types
    /// that have no NaN.
    pub(super) const fn last_number(self) -> Option<u64> {
        match self.class() {
            Class::Float(f) if f.infinities => Some(((1 << f.exponent_bits) - 1) << f.fraction_bits),
            Class::Float(f) => Some((1 << (f.exponent_bits + f.fraction_bits)) - 2),
            _ => None,
        }
    }

    /// The bits of one element, in the low end of the word.
    pub(super) fn load(self, bytes: &[u8]) -> u64 {
        let mut word = [0; 8];
        word[..self.bytes()].copy_from_slice(&bytes[..self.bytes()]);
        u64::from_le_bytes(word)
    }
}
