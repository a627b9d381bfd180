//! A mirror: the value of a tensor in another layout and storage type, as a live slot holds it.
//!
//! The payload is the authority. A mirror is derived from it, proves the same value hash, and can
//! be dropped and made again at any time; no snapshot refers to one. Elements travel in logical
//! order, the order of the value hash, so any affine layout can become any other whose elements do
//! not overlap.

use super::layout::{GATHER_BYTES, Walk};
use super::number::translate;
use super::value::inexact;
use super::{DOCUMENT, Dtype, Layout, Tensor};
use crate::error::FormatError;
use crate::limits::Limits;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How bytes hold the elements of a tensor, be they a payload, a mirror or a live slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Form {
    /// Element type of the bytes.
    pub storage_dtype: Dtype,
    /// Where each element lies in the bytes.
    pub layout: Layout,
    /// How many bytes there are.
    pub bytes: u64,
}

/// A tensor in another form, with its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The tensor in the mirror's form. Name, kind, shape, logical type and value hash are those of
    /// the mirrored tensor; the payload hash is that of the mirror's bytes.
    pub tensor: Tensor,
    /// The bytes. Those that belong to no element are 0, so that equal values have equal mirrors.
    pub bytes: Vec<u8>,
}

impl Form {
    /// Whether any bytes have the same value in both forms. The tag is only a name, except for an
    /// opaque layout.
    #[must_use]
    pub fn reads_as(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.layout, &other.layout);
        (self.storage_dtype, &ours.strides, ours.offset, self.bytes) == (other.storage_dtype, &theirs.strides, theirs.offset, other.bytes)
            && (!ours.is_opaque() || ours.tag == theirs.tag)
    }
}

/// For people: `row-major f32 (strides [4, 1], offset 0, 64 bytes)`.
impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { storage_dtype, layout: Layout { tag, strides, offset }, bytes } = self;
        match strides {
            Some(strides) => write!(f, "{tag} {storage_dtype} (strides {strides:?}, offset {}, {bytes} bytes)", offset.unwrap_or(0)),
            None => write!(f, "{tag} {storage_dtype} (opaque, {bytes} bytes)"),
        }
    }
}

impl Tensor {
    /// The form of its payload.
    #[must_use]
    pub fn form(&self) -> Form {
        Form { storage_dtype: self.storage_dtype, layout: self.layout.clone(), bytes: self.payload_bytes }
    }

    /// Whether it can be mirrored in a form, as far as this can be said without the payload. Only
    /// the elements decide whether another storage type holds them.
    ///
    /// # Errors
    /// [`FormatError::Field`] if one of the two layouts is opaque or does not fit into its bytes,
    /// or if elements of the form may overlap: sorted by length, each stride must be at least as
    /// long as all that the shorter ones span. [`FormatError::TooLarge`] if payload or mirror have
    /// more than [`GATHER_BYTES`], as both must be in memory.
    pub fn check_form(&self, form: &Form) -> Result<(), FormatError> {
        self.walks(form).map(drop)
    }

    /// Writes the payload's value in another form, and proves that its value hash is the tensor's.
    ///
    /// Between equal storage types the bits are copied, those of NaNs too. Otherwise each element
    /// becomes the same number in the other type, and every NaN the canonical one.
    ///
    /// # Errors
    /// Those of [`Self::check_form`]; [`FormatError::LengthMismatch`] for another payload;
    /// [`FormatError::InexactStorage`] for an element that the form's type does not hold exactly;
    /// [`FormatError::ValueHashMismatch`] if the payload does not have the tensor's value.
    pub fn mirror(&self, payload: &[u8], form: &Form) -> Result<Mirror, FormatError> {
        let (from, to) = self.walks(form)?;
        self.check_length(payload)?;
        let mut bytes = vec![0_u8; form.bytes as usize];
        let (storage, other) = (self.storage_dtype, form.storage_dtype);
        relay((from, storage, payload), (to, other, &mut bytes))
            .map_err(|Unsaid { linear, bits }| inexact(&self.name, &self.shape, linear, bits, storage, other))?;
        let (name, kind, shape, layout) = (self.name.clone(), self.kind.clone(), self.shape.clone(), form.layout.clone());
        let limits = Limits::default();
        let tensor = Self::describe(name, kind, self.layer, shape, self.logical_dtype, other, layout, &bytes, &limits)?;
        self.check_value_hash(tensor.value_hash)?;
        Ok(Mirror { tensor, bytes })
    }

    /// The ways through the payload and through the form's bytes, in logical order.
    fn walks(&self, form: &Form) -> Result<(Walk, Walk), FormatError> {
        // Bounds the number of elements, which the form's layout could not be checked without.
        let from = self.check(&Limits::default(), |_, field| format!("{}: {field}", self.name))?;
        let from = from.ok_or_else(|| opaque(&self.name, &self.layout))?;
        check_bytes([self.payload_bytes, form.bytes])?;
        Ok((from, target(&self.name, &self.shape, form)?))
    }
}

/// Checks that payload and mirror can be in memory.
pub(super) fn check_bytes(sizes: [u64; 2]) -> Result<(), FormatError> {
    match sizes.into_iter().find(|bytes| *bytes > GATHER_BYTES) {
        Some(found) => Err(FormatError::TooLarge { what: "a tensor to be converted, in bytes,", found, limit: GATHER_BYTES }),
        None => Ok(()),
    }
}

/// The way through the bytes of a form that are to be written. The number of elements of the shape
/// is bounded.
pub(super) fn target(name: &str, shape: &[u64], form: &Form) -> Result<Walk, FormatError> {
    let wrong = |field: &str, expected: String, found: String| FormatError::field(DOCUMENT, format!("{name}: {field}"), expected, found);
    let elements = form.bytes / form.storage_dtype.bytes() as u64;
    let walk = form.layout.check(shape, elements).map_err(|(field, expected, found)| wrong(field, expected, found))?;
    let walk = walk.ok_or_else(|| opaque(name, &form.layout))?;
    if !walk.nests() {
        let found = format!("strides {:?} of shape {shape:?}", form.layout.strides.as_deref().unwrap_or_default());
        return Err(wrong("layout.strides", "elements that do not overlap".into(), found));
    }
    Ok(walk)
}

fn opaque(name: &str, layout: &Layout) -> FormatError {
    let found = format!("{:?}, which is opaque", layout.tag);
    FormatError::field(DOCUMENT, format!("{name}: layout"), "strides and an offset", found)
}

/// An element that the other type does not hold: its number in logical order, and its bits.
pub(super) struct Unsaid {
    pub(super) linear: u64,
    pub(super) bits: u64,
}

/// Copies all elements in logical order. Both walks have the same number of them, within the bytes.
pub(super) fn relay((from, storage, payload): (Walk, Dtype, &[u8]), (mut to, other, out): (Walk, Dtype, &mut [u8])) -> Result<(), Unsaid> {
    let (size, other_size) = (storage.bytes(), other.bytes());
    let (mut linear, mut room) = (0, 0..0);
    for mut span in from {
        while span.start < span.end {
            if room.start == room.end {
                let Some(next) = to.next() else { return Ok(()) };
                room = next;
            }
            let count = (span.end - span.start).min(room.end - room.start);
            let source = &payload[span.start as usize * size..][..count as usize * size];
            let target = &mut out[room.start as usize * other_size..][..count as usize * other_size];
            if storage == other {
                target.copy_from_slice(source);
            } else {
                let elements = source.chunks_exact(size).zip(target.chunks_exact_mut(other_size));
                for (linear, (source, target)) in (linear..).zip(elements) {
                    let bits = storage.load(source);
                    let said = translate(storage, other, bits).ok_or(Unsaid { linear, bits })?;
                    target.copy_from_slice(&said.to_le_bytes()[..other_size]);
                }
            }
            span.start += count;
            room.start += count;
            linear += count;
        }
    }
    Ok(())
}
