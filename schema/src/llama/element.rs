//! The element types that llama.cpp can use in a KV cache.

use crate::checkpoint::Dtype;

/// An element type of llama.cpp (`ggml_type`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Element(&'static Entry);

#[derive(PartialEq, Eq, Hash)]
struct Entry {
    number: i32,
    name: &'static str,
    /// Number of elements in one block: the elements that llama.cpp encodes together.
    elements: u64,
    /// Bytes of one block.
    bytes: u64,
    /// The same type in a checkpoint, if a block is one element.
    dtype: Option<Dtype>,
}

const fn entry(number: i32, name: &'static str, elements: u64, bytes: u64, dtype: Option<Dtype>) -> Entry {
    Entry { number, name, elements, bytes, dtype }
}

static TABLE: [Entry; 9] = [
    entry(0, "f32", 1, 4, Some(Dtype::F32)),
    entry(1, "f16", 1, 2, Some(Dtype::F16)),
    entry(2, "q4_0", 32, 18, None),
    entry(3, "q4_1", 32, 20, None),
    entry(6, "q5_0", 32, 22, None),
    entry(7, "q5_1", 32, 24, None),
    entry(8, "q8_0", 32, 34, None),
    entry(20, "iq4_nl", 32, 18, None),
    entry(30, "bf16", 1, 2, Some(Dtype::Bf16)),
];

impl Element {
    /// The type with this number of `ggml_type`, if a KV cache can have it.
    #[must_use]
    pub fn from_number(number: i32) -> Option<Self> {
        TABLE.iter().find(|entry| entry.number == number).map(Self)
    }

    /// The number of the type in `ggml_type`.
    #[must_use]
    pub fn number(self) -> i32 {
        self.0.number
    }

    /// The name of the type, as `--cache-type-k` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Bytes of one block: of one element, or of 32 quantized ones.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0.bytes
    }

    /// The same type in a checkpoint; `None` if elements are quantized together.
    #[must_use]
    pub fn dtype(self) -> Option<Dtype> {
        self.0.dtype
    }

    /// Whether each element is encoded by itself: the type is not quantized.
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
