//! Which codec a writer uses for which blob: by a setting and by the type of the elements, never by
//! the content.

use super::tensor::zero_bytes;
use super::{Codec, Codecs, Kernel, TensorEncoder};
use crate::checkpoint::Dtype;
use crate::error::{FormatError, shorten};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// Blobs of which at least one byte in so many is zero are stored without their zeros, whatever the
/// setting. Below that, reading them is not worth a decoder.
const SPARSE: usize = 16;

/// How a writer encodes tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// For links and disks that are faster than Huffman coding: `bf16` in codec 2.
    Hot,
    /// For slow links and for storage: `bf16`, `f16` and `fp8e4m3` in codecs 3 to 5.
    Cold,
    /// Tensors stay raw. Only zeros are left out.
    Off,
}

impl Compression {
    /// Every setting.
    pub const ALL: [Self; 3] = [Self::Hot, Self::Cold, Self::Off];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Cold => "cold",
            Self::Off => "off",
        }
    }

    /// The codec for elements of this type; `None` if they stay raw.
    #[must_use]
    pub const fn codec(self, elements: Dtype) -> Option<Codec> {
        match (self, elements) {
            (Self::Hot, Dtype::Bf16) => Some(Codec::Bf16Bitmaps),
            (Self::Cold, Dtype::Bf16) => Some(Codec::Bf16Huffman),
            (Self::Cold, Dtype::F16) => Some(Codec::F16Huffman),
            (Self::Cold, Dtype::Fp8E4m3) => Some(Codec::Fp8Huffman),
            _ => None,
        }
    }
}

/// [`Compression::Hot`] where this processor has vector instructions for it; else
/// [`Compression::Off`].
impl Default for Compression {
    fn default() -> Self {
        if Kernel::detect() == Kernel::PORTABLE { Self::Off } else { Self::Hot }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Compression {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        Self::ALL.into_iter().find(|setting| setting.name() == text).ok_or_else(|| FormatError::Name {
            what: "compression",
            found: shorten(text.into()),
            reason: "known are hot, cold and off",
        })
    }
}

/// Encodes blobs, one after the other, in the same memory.
pub struct BlobEncoder {
    compression: Compression,
    codecs: Codecs,
    /// Made when a blob needs them.
    tensors: Vec<(Codec, TensorEncoder)>,
    zeros: TensorEncoder,
}

impl BlobEncoder {
    /// An encoder for a reader of `codecs`.
    #[must_use]
    pub fn new(compression: Compression, codecs: Codecs) -> Self {
        Self { compression, codecs, tensors: Vec::new(), zeros: TensorEncoder::of_zeros() }
    }

    /// The codec for elements of this type, if the reader knows it.
    #[must_use]
    pub fn codec(&self, elements: Option<Dtype>) -> Option<Codec> {
        self.compression.codec(elements?).filter(|codec| self.codecs.contains(*codec))
    }

    /// Codec and payload of a blob, whose elements have this type if it is known. `None` if the
    /// bytes stay raw: nothing is encoded unless that makes it smaller.
    #[must_use]
    pub fn encode(&mut self, raw: &[u8], elements: Option<Dtype>) -> Option<(Codec, Cow<'_, [u8]>)> {
        if let Some(codec) = self.codec(elements) {
            return Some((codec, self.tensor(codec)?.encode(raw)?.into()));
        }
        let zeros = zero_bytes(raw);
        if zeros == 0 || zeros < raw.len() / SPARSE {
            return None;
        }
        if self.codecs.contains(TensorEncoder::ZEROS) {
            return Some((TensorEncoder::ZEROS, self.zeros.encode(raw)?.into()));
        }
        // The others are numbers, of which zstd makes little, slowly.
        if zeros < raw.len() / 2 {
            return None;
        }
        let encoded = zstd::bulk::compress(raw, 1).ok().filter(|encoded| encoded.len() < raw.len())?;
        Some((Codec::Zstd, encoded.into()))
    }

    /// The encoder of a codec; none if it cannot be set up: raw is always right.
    fn tensor(&mut self, codec: Codec) -> Option<&mut TensorEncoder> {
        let at = match self.tensors.iter().position(|(known, _)| *known == codec) {
            Some(at) => at,
            None => {
                self.tensors.push((codec, TensorEncoder::new(codec).ok()?));
                self.tensors.len() - 1
            }
        };
        self.tensors.get_mut(at).map(|(_, encoder)| encoder)
    }
}
