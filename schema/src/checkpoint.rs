//! Checkpoints: the non-KV state tensors at one boundary, the hybrid checkpoint ABI (vLLM RFC
//! 40533).
//!
//! A tensor is named twice: by the digest of its stored bytes (`payload_hash`, verified like that
//! of any blob) and by the hash of what they mean (`value_hash`), which anyone can compute from the
//! payload and the tensor's [`Layout`]. `docs/checkpoint-abi.md` is the specification in words,
//! `tests/golden/checkpoint-vectors.json` has vectors.

mod coherence;
mod dtype;
mod layout;
mod mirror;
mod number;
mod recut;
mod tensor;
mod value;

pub use coherence::{coherent, rank};
pub use dtype::Dtype;
pub use layout::{GATHER_BYTES, MAX_RANK};
pub use mirror::{Form, Mirror};
pub use recut::Recut;
pub use tensor::Proof;
pub use value::{ValueHash, ValueHasher, value_hash};

use tensor::{check_kind, check_rank};

use crate::digest::Digest;
use crate::error::FormatError;
use crate::flat::too_many;
use crate::json;
use crate::limits::Limits;
use serde::{Deserialize, Serialize};

const DOCUMENT: &str = "checkpoint";
/// Value of the `abi` field.
pub const ABI: &str = "pf.checkpoint.v1";

/// Which prefix the state belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Prefix scheme, `pf-prefix-v1` or an engine's own.
    pub scheme: String,
    /// Digest of the prefix.
    pub prefix: Digest,
    /// Tokens in the prefix.
    pub tokens: u64,
    /// The boundary is a multiple of this many tokens.
    pub alignment: u64,
    /// Tenant salt.
    pub salt: String,
    /// Adapter (LoRA) id, or null.
    pub adapter: Option<String>,
}

/// Where each element of a tensor lies in its payload, in elements of the storage type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// The backend's own name for it.
    pub tag: String,
    /// Distance between neighbours along each dimension, any sign or 0; absent for an opaque
    /// layout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<i64>>,
    /// Position of the element whose indices are all 0. Present exactly if there are strides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
}

/// One state tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Name, unique in the checkpoint.
    pub name: String,
    /// `recurrent`, `conv`, `ssm`, `window`, `mtp`, `last-hidden`, `rng` or `other:<name>`.
    pub kind: String,
    /// Layer, if the tensor belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// Logical dimensions.
    pub shape: Vec<u64>,
    /// Element type of the logical value.
    pub logical_dtype: Dtype,
    /// Element type of the payload.
    pub storage_dtype: Dtype,
    /// Layout of the payload.
    pub layout: Layout,
    /// Digest of the payload blob.
    pub payload_hash: Digest,
    /// Bytes of the payload blob.
    pub payload_bytes: u64,
    /// Hash of the canonical logical value; only attested by the writer if the layout is opaque.
    pub value_hash: ValueHash,
}

/// A checkpoint. The order of the fields is the order of the bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// [`ABI`].
    pub abi: String,
    /// Which prefix the state belongs to.
    pub key: Key,
    /// The tensors.
    pub tensors: Vec<Tensor>,
}

impl Checkpoint {
    /// Parses and checks a checkpoint.
    ///
    /// # Errors
    /// [`FormatError`] with JSON path, expected and found.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let checkpoint: Self = json::parse(DOCUMENT, bytes, limits.document_bytes)?;
        if checkpoint.abi != ABI {
            return Err(FormatError::field(DOCUMENT, "$.abi", format!("{ABI:?}"), format!("{:?}", checkpoint.abi)));
        }
        let Key { tokens, alignment, .. } = checkpoint.key;
        if alignment == 0 || !tokens.is_multiple_of(alignment) {
            let found = format!("{tokens} tokens, alignment {alignment}");
            return Err(FormatError::field(DOCUMENT, "$.key.tokens", "a multiple of a positive alignment", found));
        }
        too_many("tensors in a checkpoint", checkpoint.tensors.len() as u64, limits.tensors)?;
        let mut names = std::collections::HashSet::new();
        let mut values = 0_u64;
        for (i, tensor) in checkpoint.tensors.iter().enumerate() {
            let path = |field: &str| format!("$.tensors[{i}].{field}");
            if !names.insert(&tensor.name) {
                return Err(FormatError::field(DOCUMENT, path("name"), "every name once", format!("{:?} again", tensor.name)));
            }
            let walk = tensor.check(limits, |_, field| path(field))?;
            // With strides of 0, a few bytes of payload stand for a large value, and a proof hashes
            // the whole value. So the values are bounded too.
            if walk.is_some() {
                values = values.saturating_add(tensor.value_bytes());
            }
        }
        too_many("the logical values of a checkpoint in bytes", values, limits.blob_bytes)?;
        Ok(checkpoint)
    }

    /// Compact JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        json::bytes(self)
    }
}
