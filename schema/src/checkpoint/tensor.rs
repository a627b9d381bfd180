//! Checks of a tensor: its fields, its payload, its value.

use super::layout::{GATHER_BYTES, MAX_RANK, Walk, Wrong, elements};
use super::value::{Canonical, ValueHash, ValueHasher, attest, gather};
use super::{DOCUMENT, Dtype, Layout, Tensor};
use crate::digest::Digest;
use crate::error::FormatError;
use crate::limits::Limits;

/// Bytes of a tensor's name, kind or layout tag.
const MAX_NAME: usize = 200;

/// How a check proved that a tensor has the value of its value hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Its canonical form was hashed.
    Computed,
    /// The layout is opaque: the bytes equal those of the writer, by the payload hash.
    Attested,
}

impl Tensor {
    /// Describes a payload: computes payload hash and value hash.
    ///
    /// # Errors
    /// The errors of [`super::value_hash`], and those of [`super::Checkpoint::parse`] for a tensor.
    #[expect(clippy::too_many_arguments, reason = "a tensor has as many fields")]
    pub fn describe(
        name: String,
        kind: String,
        layer: Option<u32>,
        shape: Vec<u64>,
        logical: Dtype,
        storage: Dtype,
        layout: Layout,
        payload: &[u8],
        limits: &Limits,
    ) -> Result<Self, FormatError> {
        let mut tensor = Self {
            name,
            kind,
            layer,
            shape,
            logical_dtype: logical,
            storage_dtype: storage,
            layout,
            payload_hash: Digest::sha256(payload),
            payload_bytes: payload.len() as u64,
            // A placeholder, replaced below.
            value_hash: attest("", &[]),
        };
        let walk = tensor.check(limits, |tensor, field| format!("{}: {field}", tensor.name))?;
        tensor.value_hash = match walk {
            Some(walk) => gather(tensor.canonical(), walk, payload, &mut || true)?.unwrap_or(tensor.value_hash),
            None => attest(&tensor.kind, payload),
        };
        Ok(tensor)
    }

    /// Checks that these bytes are the payload.
    ///
    /// # Errors
    /// [`FormatError::LengthMismatch`], [`FormatError::PayloadHashMismatch`].
    pub fn check_payload(&self, payload: &[u8]) -> Result<(), FormatError> {
        self.check_length(payload)?;
        let found = Digest::of(self.payload_hash.algorithm(), payload);
        if found == self.payload_hash {
            return Ok(());
        }
        let (expected, found) = (self.payload_hash.to_string(), found.to_string());
        Err(FormatError::PayloadHashMismatch { tensor: self.short_name(), expected, found })
    }

    /// Checks that these bytes, read by the tensor's layout, have the value of the value hash.
    /// Bytes between the elements do not count, so a live slot of an engine can be checked too. The
    /// bytes of an opaque tensor are compared as they are.
    ///
    /// # Errors
    /// [`FormatError::ValueHashMismatch`], [`FormatError::InexactStorage`];
    /// [`FormatError::PayloadHashMismatch`] if it is opaque; [`FormatError::LengthMismatch`], and
    /// [`FormatError::Field`] for a tensor that was not parsed and contradicts itself.
    pub fn check_value(&self, payload: &[u8]) -> Result<Proof, FormatError> {
        match self.check_value_while(payload, &mut || true)? {
            Some(proof) => Ok(proof),
            None => unreachable!("`go_on` never says no"),
        }
    }

    /// As [`Self::check_value`], but calls `go_on` after every hashed MiB, and returns `None` as
    /// soon as `go_on` returns false.
    ///
    /// # Errors
    /// As [`Self::check_value`].
    pub fn check_value_while(&self, payload: &[u8], go_on: &mut dyn FnMut() -> bool) -> Result<Option<Proof>, FormatError> {
        let Some(walk) = self.check(&Limits::default(), |tensor, field| format!("{}: {field}", tensor.name))? else {
            return self.check_payload(payload).map(|()| Some(Proof::Attested));
        };
        self.check_length(payload)?;
        match gather(self.canonical(), walk, payload, go_on)? {
            Some(found) => self.check_value_hash(found).map(|()| Some(Proof::Computed)),
            None => Ok(None),
        }
    }

    /// Bytes of the logical value. With strides of 0 they may be many more than the payload has.
    #[must_use]
    pub fn value_bytes(&self) -> u64 {
        let elements = self.shape.iter().fold(1_u64, |product, dimension| product.saturating_mul(*dimension));
        elements.saturating_mul(self.logical_dtype.bytes() as u64)
    }

    /// Compares a value hash that was computed elsewhere.
    ///
    /// # Errors
    /// [`FormatError::ValueHashMismatch`].
    pub fn check_value_hash(&self, found: ValueHash) -> Result<(), FormatError> {
        if found == self.value_hash {
            return Ok(());
        }
        let (expected, found) = (self.value_hash.to_string(), found.to_string());
        Err(FormatError::ValueHashMismatch { tensor: self.short_name(), expected, found })
    }

    /// A hasher that takes the payload in pieces. `None` if the layout is opaque, or if the
    /// elements of the payload are not in logical order: such a payload has at most
    /// [`GATHER_BYTES`], and [`Self::check_value`] checks it.
    ///
    /// # Errors
    /// [`FormatError::Field`], [`FormatError::TooLarge`] for a tensor that was not parsed and
    /// contradicts itself.
    pub fn value_hasher(&self) -> Result<Option<ValueHasher>, FormatError> {
        let walk = self.check(&Limits::default(), |tensor, field| format!("{}: {field}", tensor.name))?;
        Ok(walk.filter(Walk::ascends).map(|walk| ValueHasher::new(self.canonical(), walk)))
    }

    /// Checks everything that can be checked without the payload. Returns the walk through the
    /// payload, or `None` if the layout is opaque.
    pub(super) fn check(&self, limits: &Limits, path: impl Fn(&Self, &str) -> String) -> Result<Option<Walk>, FormatError> {
        let wrong = |(field, expected, found): Wrong| FormatError::field(DOCUMENT, path(self, field), expected, found);
        check_text("name", &self.name).map_err(wrong)?;
        check_kind(&self.kind).map_err(wrong)?;
        if self.layout.tag.len() > MAX_NAME {
            return Err(wrong(("layout.tag", format!("at most {MAX_NAME} bytes"), self.layout.tag.len().to_string())));
        }
        if self.payload_bytes > limits.blob_bytes {
            return Err(FormatError::TooLarge { what: "a tensor payload in bytes", found: self.payload_bytes, limit: limits.blob_bytes });
        }
        check_rank(&self.shape).map_err(wrong)?;
        elements(&self.shape, self.logical_dtype, limits.blob_bytes)?;
        let walk = self.layout.check(&self.shape, self.payload_bytes / self.storage_dtype.bytes() as u64).map_err(wrong)?;
        if walk.as_ref().is_some_and(|walk| !walk.ascends()) && self.payload_bytes > GATHER_BYTES {
            let what = "the payload of a tensor whose elements do not lie in order, in bytes,";
            return Err(FormatError::TooLarge { what, found: self.payload_bytes, limit: GATHER_BYTES });
        }
        Ok(walk)
    }

    fn canonical(&self) -> Canonical {
        Canonical::new(&self.name, &self.kind, self.logical_dtype, &self.shape, self.storage_dtype)
    }

    pub(super) fn check_length(&self, payload: &[u8]) -> Result<(), FormatError> {
        let (expected, found) = (self.payload_bytes, payload.len() as u64);
        if found == expected {
            return Ok(());
        }
        Err(FormatError::LengthMismatch { digest: self.payload_hash.to_string(), expected, found })
    }

    fn short_name(&self) -> String {
        crate::error::shorten(self.name.clone())
    }
}

/// Text that may be printed and hashed: 1 to 200 bytes, no control characters.
fn check_text(field: &'static str, text: &str) -> Result<(), Wrong> {
    if (1..=MAX_NAME).contains(&text.len()) && !text.bytes().any(|b| b.is_ascii_control()) {
        return Ok(());
    }
    Err((field, format!("1 to {MAX_NAME} bytes without control characters"), format!("{text:?}")))
}

pub(super) fn check_kind(kind: &str) -> Result<(), Wrong> {
    const KINDS: [&str; 7] = ["recurrent", "conv", "ssm", "window", "mtp", "last-hidden", "rng"];
    if !KINDS.contains(&kind) && kind.strip_prefix("other:").is_none_or(str::is_empty) {
        return Err(("kind", "recurrent, conv, ssm, window, mtp, last-hidden, rng or other:<name>".into(), format!("{kind:?}")));
    }
    check_text("kind", kind)
}

pub(super) fn check_rank(shape: &[u64]) -> Result<(), Wrong> {
    if shape.len() <= MAX_RANK {
        return Ok(());
    }
    Err(("shape", format!("at most {MAX_RANK} dimensions"), shape.len().to_string()))
}
