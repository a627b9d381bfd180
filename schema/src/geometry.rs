//! The shape of a page.

use crate::checkpoint;
use crate::error::FormatError;
use crate::limits::Limits;
use serde::{Deserialize, Serialize};

/// Element type of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// IEEE binary32.
    F32,
    /// 8-bit float, 4 exponent and 3 mantissa bits.
    Fp8E4m3,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
            Self::Fp8E4m3 => 1,
        }
    }
}

impl From<Dtype> for checkpoint::Dtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
            Dtype::F32 => Self::F32,
            Dtype::Fp8E4m3 => Self::Fp8E4m3,
        }
    }
}

/// Shape of one K or V page: `[n_layers][page_size_tokens][n_heads][head_dim]`, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    /// Tokens in a page.
    pub page_size_tokens: u32,
    /// Layers held by this rank.
    pub n_layers: u32,
    /// KV heads held by this rank.
    pub n_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Element type.
    pub dtype: Dtype,
}

impl Geometry {
    /// Bytes of one K page, or of one V page.
    ///
    /// # Errors
    /// [`FormatError::Field`] on a zero, [`FormatError::TooLarge`] over `limits.page_bytes`
    /// (overflow included).
    pub fn page_bytes(&self, limits: &Limits) -> Result<u64, FormatError> {
        const DOCUMENT: &str = "page geometry";
        let factors = [
            ("$.page_size_tokens", self.page_size_tokens),
            ("$.n_layers", self.n_layers),
            ("$.n_heads", self.n_heads),
            ("$.head_dim", self.head_dim),
        ];
        let mut bytes = self.dtype.bytes();
        for (path, factor) in factors {
            if factor == 0 {
                return Err(FormatError::field(DOCUMENT, path, "a positive number", 0));
            }
            bytes = bytes.saturating_mul(u64::from(factor));
        }
        if bytes > limits.page_bytes {
            return Err(FormatError::TooLarge {
                what: "a page in bytes (layers × tokens × heads × head_dim × element)",
                found: bytes,
                limit: limits.page_bytes,
            });
        }
        Ok(bytes)
    }
}
