//! Checkpoints: the non-KV state tensors at one boundary, the hybrid checkpoint ABI (vLLM RFC 40533).
//!
//! This module holds the document and its structure; `payload_hash` is the digest of a tensor's stored blob and is
//! verified like any blob. `value_hash` is carried, and checked where tensors are captured and restored.

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
    /// Distance between neighbours along each dimension; absent for an opaque layout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<i64>>,
    /// Position of the first element.
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
    pub logical_dtype: String,
    /// Element type of the payload.
    pub storage_dtype: String,
    /// Layout of the payload.
    pub layout: Layout,
    /// Digest of the payload blob.
    pub payload_hash: Digest,
    /// Bytes of the payload blob.
    pub payload_bytes: u64,
    /// `pfv1:<digest>` of the canonical logical value.
    pub value_hash: String,
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
        for (i, tensor) in checkpoint.tensors.iter().enumerate() {
            let field = |name: &str, expected: &str, found: String| {
                Err(FormatError::field(DOCUMENT, format!("$.tensors[{i}].{name}"), expected, found))
            };
            if !names.insert(&tensor.name) {
                return field("name", "every name once", format!("{:?} again", tensor.name));
            }
            const KINDS: [&str; 7] = ["recurrent", "conv", "ssm", "window", "mtp", "last-hidden", "rng"];
            if !KINDS.contains(&tensor.kind.as_str()) && tensor.kind.strip_prefix("other:").is_none_or(str::is_empty) {
                return field("kind", "recurrent, conv, ssm, window, mtp, last-hidden, rng or other:<name>", format!("{:?}", tensor.kind));
            }
            let value = tensor.value_hash.strip_prefix("pfv1:").map(str::parse::<Digest>);
            if !matches!(value, Some(Ok(_))) {
                return field("value_hash", "pfv1:<digest>", format!("{:?}", tensor.value_hash));
            }
            if tensor.layout.strides.as_ref().is_some_and(|s| s.len() != tensor.shape.len()) {
                return field("layout.strides", "one stride for each dimension", format!("{:?}", tensor.layout.strides));
            }
            if tensor.payload_bytes > limits.blob_bytes {
                return Err(FormatError::TooLarge {
                    what: "a tensor payload in bytes",
                    found: tensor.payload_bytes,
                    limit: limits.blob_bytes,
                });
            }
        }
        Ok(checkpoint)
    }

    /// Compact JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        json::bytes(self)
    }
}
