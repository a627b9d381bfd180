//! The canonical form `pfv1` of a tensor's logical value, and its hash.
//!
//! ```text
//! "pfv1\n" kind "\n" logical dtype "\n" rank: u32 dims: u64 … elements …
//! ```
//!
//! Integers and elements are little-endian, elements in logical row-major order and in the logical
//! type. The hash depends on what the bytes of a payload stand for, and not on where they lie.
//! `docs/checkpoint-abi.md` has the rules in words.

use super::layout::{Walk, Wrong, elements};
use super::number::{Number, translate};
use super::{Dtype, Layout, check_kind};
use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::FormatError;
use crate::limits::Limits;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::Range;

/// Bytes looked at in one go.
const BLOCK: usize = 16 << 10;
/// Bytes hashed between two calls of `go_on`. A few bytes of payload may stand for gigabytes of
/// value.
const STEP: usize = 1 << 20;

/// The hash of a logical value, SHA-256 over its canonical form: `pfv1:sha256:<hex>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueHash(Digest);

impl ValueHash {
    /// The digest of the canonical form.
    #[must_use]
    pub const fn digest(&self) -> &Digest {
        &self.0
    }
}

impl std::fmt::Display for ValueHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pfv1:{}", self.0)
    }
}

impl std::fmt::Debug for ValueHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for ValueHash {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| FormatError::Digest { found: text.chars().take(140).collect(), reason };
        let digest: Digest = text.strip_prefix("pfv1:").ok_or_else(|| fail("expected pfv1:sha256:<hex>"))?.parse()?;
        if digest.algorithm() == Algorithm::Sha256 { Ok(Self(digest)) } else { Err(fail("expected pfv1:sha256:<hex>")) }
    }
}

impl Serialize for ValueHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ValueHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The value hash of a payload: computed for an affine layout, attested for an opaque one (its
/// bytes as `u8`, in one dimension).
///
/// Reads the payload in logical order, block by block; memory does not depend on its size.
///
/// # Errors
/// [`FormatError::InexactStorage`] for an element that the logical type cannot hold exactly;
/// [`FormatError::Field`] for a kind or layout that is not allowed or does not fit the payload;
/// [`FormatError::TooLarge`] over [`Limits::blob_bytes`]'s default.
pub fn value_hash(
    kind: &str,
    logical: Dtype,
    shape: &[u64],
    storage: Dtype,
    layout: &Layout,
    payload: &[u8],
) -> Result<ValueHash, FormatError> {
    let wrong = |(field, expected, found): Wrong| FormatError::field(super::DOCUMENT, field, expected, found);
    check_kind(kind).map_err(wrong)?;
    elements(shape, logical, Limits::default().blob_bytes)?;
    super::check_rank(shape).map_err(wrong)?;
    match layout.check(shape, (payload.len() / storage.bytes()) as u64).map_err(wrong)? {
        Some(walk) => match gather(Canonical::new(kind, kind, logical, shape, storage), walk, payload, &mut || true)? {
            Some(hash) => Ok(hash),
            None => unreachable!("`go_on` never says no"),
        },
        None => Ok(attest(kind, payload)),
    }
}

/// The value hash that our writers give a tensor of an opaque layout.
pub(super) fn attest(kind: &str, payload: &[u8]) -> ValueHash {
    let mut hasher = head(kind, Dtype::U8, &[payload.len() as u64]);
    hasher.update(payload);
    ValueHash(hasher.finish())
}

/// Elements picked from a payload that is in memory. Asks `go_on` after every [`STEP`] bytes of the
/// value; `None` if it says no.
pub(super) fn gather(
    mut canonical: Canonical,
    walk: Walk,
    payload: &[u8],
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Option<ValueHash>, FormatError> {
    let size = canonical.storage.bytes();
    // The payload's bytes for so many of the value: an `f64` may be stored in one byte.
    let step = STEP / canonical.logical.bytes() * size;
    let mut since = 0;
    for span in walk {
        // Within the payload: the layout was checked against it.
        for part in payload[span.start as usize * size..span.end as usize * size].chunks(step) {
            canonical.push(part)?;
            since += part.len();
            if since >= step {
                since = 0;
                if !go_on() {
                    return Ok(None);
                }
            }
        }
    }
    canonical.finish().map(Some)
}

fn head(kind: &str, logical: Dtype, shape: &[u64]) -> Hasher {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    hasher.update(format!("pfv1\n{kind}\n{logical}\n").as_bytes());
    hasher.update(&(shape.len() as u32).to_le_bytes());
    shape.iter().for_each(|dimension| hasher.update(&dimension.to_le_bytes()));
    hasher
}

/// Element number `linear` in logical order is `bits` in one type, and nothing in the other.
pub(super) fn inexact(tensor: &str, shape: &[u64], mut linear: u64, bits: u64, storage: Dtype, logical: Dtype) -> FormatError {
    let mut index: Vec<u64> = shape.iter().rev().map(|d| (linear % d, linear /= d).0).collect();
    index.reverse();
    let tensor = crate::error::shorten(tensor.to_owned());
    let value = Number::decode(storage, bits).to_string();
    FormatError::InexactStorage { tensor, index, value, storage: storage.to_string(), logical: logical.to_string() }
}

/// Hashes elements that are given in logical order, as bytes of the storage type.
#[derive(Clone)]
pub(super) struct Canonical {
    hasher: Hasher,
    tensor: String,
    shape: Vec<u64>,
    storage: Dtype,
    logical: Dtype,
    /// Elements hashed.
    count: u64,
    /// Bytes that wait for a block to be full. Less than a block between calls.
    waiting: Vec<u8>,
    out: Vec<u8>,
}

impl Canonical {
    pub(super) fn new(tensor: &str, kind: &str, logical: Dtype, shape: &[u64], storage: Dtype) -> Self {
        let (hasher, tensor, shape) = (head(kind, logical, shape), tensor.to_owned(), shape.to_vec());
        Self { hasher, tensor, shape, storage, logical, count: 0, waiting: Vec::with_capacity(BLOCK), out: Vec::new() }
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<(), FormatError> {
        if self.waiting.is_empty() {
            while let Some((block, rest)) = bytes.split_at_checked(BLOCK) {
                self.block(block)?;
                bytes = rest;
            }
        }
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(BLOCK - self.waiting.len()));
            self.waiting.extend_from_slice(now);
            bytes = rest;
            if self.waiting.len() == BLOCK {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), FormatError> {
        let mut waiting = std::mem::take(&mut self.waiting);
        let result = self.block(&waiting);
        waiting.clear();
        self.waiting = waiting;
        result
    }

    fn block(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        let plain = self.storage == self.logical && self.plain(bytes);
        if plain {
            self.hasher.update(bytes);
        } else {
            self.out.clear();
            match (self.storage, self.logical) {
                // The common pair of types gets a loop of its own, which the compiler can
                // specialise.
                (Dtype::Bf16, Dtype::F32) => self.convert(bytes, |bits| translate(Dtype::Bf16, Dtype::F32, bits))?,
                (storage, logical) if storage == logical && logical.last_number().is_some() => {
                    let (last, nan) = (logical.last_number().unwrap_or(u64::MAX), logical.canonical_nan());
                    let magnitude = u64::MAX >> (65 - 8 * logical.bytes());
                    self.convert(bytes, |bits| if bits & magnitude > last { nan } else { Some(bits) })?;
                }
                (storage, logical) => self.convert(bytes, |bits| translate(storage, logical, bits))?,
            }
            self.hasher.update(&self.out);
        }
        self.count += (bytes.len() / self.storage.bytes()) as u64;
        Ok(())
    }

    fn convert(&mut self, bytes: &[u8], canonical: impl Fn(u64) -> Option<u64>) -> Result<(), FormatError> {
        for (i, element) in bytes.chunks_exact(self.storage.bytes()).enumerate() {
            let bits = self.storage.load(element);
            let bits = canonical(bits).ok_or_else(|| self.inexact(i as u64, bits))?;
            self.out.extend_from_slice(&bits.to_le_bytes()[..self.logical.bytes()]);
        }
        Ok(())
    }

    /// Whether the bytes are their own canonical form.
    fn plain(&self, bytes: &[u8]) -> bool {
        // The largest element instead of a search for a bad one: a loop that never ends early is
        // compiled to vector instructions.
        macro_rules! largest {
            ($word:ty, $mask:expr) => {
                bytes
                    .as_chunks::<{ size_of::<$word>() }>()
                    .0
                    .iter()
                    .fold(0, |largest: $word, element| largest.max(<$word>::from_le_bytes(*element) & $mask))
            };
        }
        let Some(last) = self.logical.last_number() else {
            return self.logical != Dtype::Bool || largest!(u8, u8::MAX) <= 1;
        };
        let largest = match self.logical.bytes() {
            1 => u64::from(largest!(u8, u8::MAX >> 1)),
            2 => u64::from(largest!(u16, u16::MAX >> 1)),
            4 => u64::from(largest!(u32, u32::MAX >> 1)),
            _ => largest!(u64, u64::MAX >> 1),
        };
        largest <= last
    }

    fn inexact(&self, in_block: u64, bits: u64) -> FormatError {
        inexact(&self.tensor, &self.shape, self.count + in_block, bits, self.storage, self.logical)
    }

    pub(super) fn finish(mut self) -> Result<ValueHash, FormatError> {
        self.flush()?;
        Ok(ValueHash(self.hasher.finish()))
    }
}

/// Computes a value hash over a payload that streams by, first byte to last, in constant memory.
/// Made by [`Tensor::value_hasher`](super::Tensor::value_hasher).
#[derive(Clone)]
pub struct ValueHasher {
    canonical: Canonical,
    walk: Walk,
    /// The current span, in bytes.
    span: Option<Range<u64>>,
    position: u64,
}

impl ValueHasher {
    pub(super) fn new(canonical: Canonical, walk: Walk) -> Self {
        let mut hasher = Self { canonical, walk, span: None, position: 0 };
        hasher.span = hasher.next_span();
        hasher
    }

    fn next_span(&mut self) -> Option<Range<u64>> {
        let size = self.canonical.storage.bytes() as u64;
        self.walk.next().map(|span| span.start * size..span.end * size)
    }

    /// Adds the payload's next bytes.
    ///
    /// # Errors
    /// [`FormatError::InexactStorage`].
    pub fn update(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        let end = self.position + bytes.len() as u64;
        while let Some(span) = self.span.clone() {
            let (from, to) = (span.start.max(self.position), span.end.min(end));
            if from < to {
                self.canonical.push(&bytes[(from - self.position) as usize..(to - self.position) as usize])?;
            }
            if span.end > end {
                break;
            }
            self.span = self.next_span();
        }
        self.position = end;
        Ok(())
    }

    /// The hash of what was added. Call it after the whole payload was added.
    ///
    /// # Errors
    /// [`FormatError::InexactStorage`].
    pub fn finish(self) -> Result<ValueHash, FormatError> {
        self.canonical.finish()
    }
}
