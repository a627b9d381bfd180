//! Element types of rows: those that llama.cpp can have in a cache.

use crate::checkpoint::Dtype;

/// A type of llama.cpp (`ggml_type`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Element(&'static Row);

#[derive(PartialEq, Eq, Hash)]
struct Row {
    number: i32,
    name: &'static str,
    /// Elements that are encoded together.
    elements: u64,
    /// Bytes of these.
    bytes: u64,
    dtype: Option<Dtype>,
}

const fn row(number: i32, name: &'static str, elements: u64, bytes: u64, dtype: Option<Dtype>) -> Row {
    Row { number, name, elements, bytes, dtype }
}

static TABLE: [Row; 9] = [
    row(0, "f32", 1, 4, Some(Dtype::F32)),
    row(1, "f16", 1, 2, Some(Dtype::F16)),
    row(2, "q4_0", 32, 18, None),
    row(3, "q4_1", 32, 20, None),
    row(6, "q5_0", 32, 22, None),
    row(7, "q5_1", 32, 24, None),
    row(8, "q8_0", 32, 34, None),
    row(20, "iq4_nl", 32, 18, None),
    row(30, "bf16", 1, 2, Some(Dtype::Bf16)),
];

impl Element {
    /// The type with this number, if it is known here.
    #[must_use]
    pub fn from_number(number: i32) -> Option<Self> {
        TABLE.iter().find(|row| row.number == number).map(Self)
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> i32 {
        self.0.number
    }

    /// Its name, as `--cache-type-k` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Bytes of the smallest piece: one element, or 32 quantized ones.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0.bytes
    }

    /// The same type in a checkpoint; `None` if elements are quantized together.
    #[must_use]
    pub fn dtype(self) -> Option<Dtype> {
        self.0.dtype
    }

    /// Whether each element is for itself.
    #[must_use]
    pub fn is_plain(self) -> bool {
        self.0.elements == 1
    }
}

impl std::fmt::Debug for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name)
    }
}
