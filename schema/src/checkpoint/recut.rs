//! A tensor that is put together from tensors of other ranks, unit by unit along one dimension.
//!
//! Elements travel as in a [mirror](super::mirror): in logical order, from any affine layout into
//! any other. The value hash of the result is computed from its bytes; that of each source proves
//! what went in.

use super::layout::{Walk, Wrong};
use super::mirror::{Unsaid, check_bytes, relay, target};
use super::value::inexact;
use super::{DOCUMENT, Dtype, Form, Layout, Mirror, Tensor};
use crate::error::FormatError;
use crate::limits::Limits;
use crate::shards::Piece;

/// A tensor that is put together from those of other ranks: what it is, and in which form its bytes
/// are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recut {
    /// As of the [`Tensor`].
    pub name: String,
    /// As of the [`Tensor`].
    pub kind: String,
    /// As of the [`Tensor`].
    pub layer: Option<u32>,
    /// Dimensions of this rank's tensor.
    pub shape: Vec<u64>,
    /// As of the [`Tensor`].
    pub logical_dtype: Dtype,
    /// The form of this rank's slot.
    pub form: Form,
    /// The dimension along which ranks share it.
    pub axis: usize,
}

impl Recut {
    /// Checks everything that can be said of a source without its payload.
    ///
    /// # Errors
    /// [`FormatError::Field`] if kind, layer, logical type or another dimension differ, if one of
    /// the layouts is opaque, or if elements of the slot may overlap. [`FormatError::TooLarge`] as
    /// [`Tensor::check_form`].
    pub fn check(&self, source: &Tensor) -> Result<(), FormatError> {
        let wrong = |field: &str, expected: String, found: String| Err(FormatError::field(DOCUMENT, self.path(field), expected, found));
        if self.axis >= self.shape.len() {
            return wrong("shape", format!("a dimension {}", self.axis), format!("{:?}", self.shape));
        }
        for (field, expected, found) in [
            ("kind", &self.kind, &source.kind),
            ("layer", &format!("{:?}", self.layer), &format!("{:?}", source.layer)),
            ("logical dtype", &self.logical_dtype.to_string(), &source.logical_dtype.to_string()),
            ("shape", &self.beside(&self.shape), &self.beside(&source.shape)),
        ] {
            if expected != found {
                return wrong(field, expected.clone(), found.clone());
            }
        }
        source.check(&Limits::default(), |_, field| self.path(field))?;
        for layout in [&source.layout, &self.form.layout] {
            if layout.is_opaque() {
                let found = format!("{:?}, which is opaque and cannot be cut", layout.tag);
                return wrong("layout", "strides and an offset".into(), found);
            }
        }
        check_bytes([source.payload_bytes, self.form.bytes])?;
        target(&self.name, &self.shape, &self.form).map(drop)
    }

    /// The bytes before the first source.
    #[must_use]
    pub fn begin(&self) -> Vec<u8> {
        vec![0; self.form.bytes as usize]
    }

    /// Copies units of a source, whose value is verified first.
    ///
    /// # Errors
    /// Those of [`Self::check`] and of [`Tensor::check_value`]; [`FormatError::Field`] for units
    /// that are not there; [`FormatError::InexactStorage`] for an element that the slot's type does
    /// not hold exactly.
    pub fn take(&self, source: &Tensor, payload: &[u8], pieces: &[Piece], out: &mut [u8]) -> Result<(), FormatError> {
        self.check(source)?;
        source.check_value(payload)?;
        let (storage, other) = (source.storage_dtype, self.form.storage_dtype);
        for Piece { from, to, count, .. } in pieces {
            let mut shape = self.shape.clone();
            shape[self.axis] = *count;
            let there = self.walk((&source.layout, &source.shape), *from, &shape, payload.len() / storage.bytes())?;
            let here = self.walk((&self.form.layout, &self.shape), *to, &shape, out.len() / other.bytes())?;
            relay((there, storage, payload), (here, other, &mut *out)).map_err(|Unsaid { linear, bits }| {
                let mut error = inexact(&self.name, &shape, linear, bits, storage, other);
                if let FormatError::InexactStorage { index, .. } = &mut error {
                    index[self.axis] += to;
                }
                error
            })?;
        }
        Ok(())
    }

    /// Describes the bytes when every unit is there.
    ///
    /// # Errors
    /// Those of [`Tensor::describe`].
    pub fn finish(&self, bytes: Vec<u8>) -> Result<Mirror, FormatError> {
        let (name, kind, shape, layout) = (self.name.clone(), self.kind.clone(), self.shape.clone(), self.form.layout.clone());
        let (logical, storage) = (self.logical_dtype, self.form.storage_dtype);
        let tensor = Tensor::describe(name, kind, self.layer, shape, logical, storage, layout, &bytes, &Limits::default())?;
        Ok(Mirror { tensor, bytes })
    }

    /// The way through `shape[axis]` units from `first` on of a tensor.
    fn walk(&self, (layout, whole): (&Layout, &[u64]), first: u64, shape: &[u64], elements: usize) -> Result<Walk, FormatError> {
        let end = first.checked_add(shape[self.axis]).filter(|end| *end <= whole[self.axis]);
        let stride = layout.strides.as_ref().and_then(|strides| strides.get(self.axis)).copied();
        let offset = stride.zip(layout.offset).and_then(|(stride, offset)| {
            let offset = i128::from(offset) + i128::from(first) * i128::from(stride);
            u64::try_from(offset).ok()
        });
        let (Some(_), Some(offset)) = (end, offset) else {
            let expected = format!("{} units from {first} on", shape[self.axis]);
            return Err(FormatError::field(DOCUMENT, self.path("shape"), expected, format!("{whole:?}")));
        };
        let layout = Layout { offset: Some(offset), ..layout.clone() };
        let wrong = |(field, expected, found): Wrong| FormatError::field(DOCUMENT, self.path(field), expected, found);
        let walk = layout.check(shape, elements as u64).map_err(wrong)?;
        walk.ok_or_else(|| wrong(("layout", "strides".into(), "none".into())))
    }

    /// A shape without the dimension that ranks share.
    fn beside(&self, shape: &[u64]) -> String {
        let mut words: Vec<String> = shape.iter().map(u64::to_string).collect();
        if let Some(word) = words.get_mut(self.axis) {
            "…".clone_into(word);
        }
        format!("[{}]", words.join(", "))
    }

    fn path(&self, field: &str) -> String {
        format!("{}: {field}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{ValueHash, value_hash};
    use crate::shards::Share;
    use proptest::prelude::*;

    /// A layout with the dimensions in this order, with `pad` elements between rows, backwards in
    /// the first dimension if asked for.
    fn form(shape: &[u64], order: &[usize], pad: i64, backwards: bool, dtype: Dtype) -> Form {
        let (mut strides, mut next) = (vec![0; shape.len()], 1);
        for dimension in order.iter().rev() {
            strides[*dimension] = next;
            next = next * shape[*dimension] as i64 + pad;
        }
        let mut offset = 0;
        if backwards {
            offset = (shape[0] as i64 - 1) * strides[0];
            strides[0] = -strides[0];
        }
        let layout = Layout { tag: "test".into(), strides: Some(strides), offset: Some(offset as u64) };
        Form { storage_dtype: dtype, layout, bytes: next as u64 * dtype.bytes() as u64 }
    }

    /// The bytes of a form whose elements are given by their index, by the definition.
    fn held(shape: &[u64], form: &Form, value: impl Fn(&[u64]) -> f32) -> Vec<u8> {
        let mut bytes = vec![0; form.bytes as usize];
        let count: u64 = shape.iter().product();
        for linear in 0..count {
            let (mut index, mut rest) = (vec![0; shape.len()], linear);
            for (at, dimension) in index.iter_mut().zip(shape).rev() {
                (*at, rest) = (rest % dimension, rest / dimension);
            }
            let strides = form.layout.strides.as_ref().unwrap();
            let place = form.layout.offset.unwrap() as i64 + index.iter().zip(strides).map(|(i, stride)| *i as i64 * stride).sum::<i64>();
            let bits = value(&index).to_bits();
            let element =
                if form.storage_dtype == Dtype::F32 { bits.to_le_bytes().to_vec() } else { ((bits >> 16) as u16).to_le_bytes().to_vec() };
            bytes[place as usize * element.len()..][..element.len()].copy_from_slice(&element);
        }
        bytes
    }

    fn tensor(shape: &[u64], form: &Form, payload: &[u8]) -> Tensor {
        let (shape, layout, limits) = (shape.to_vec(), form.layout.clone(), Limits::default());
        Tensor::describe("t".into(), "conv".into(), None, shape, Dtype::F32, form.storage_dtype, layout, payload, &limits).unwrap()
    }

    fn recut(shape: &[u64], form: &Form, axis: usize) -> Recut {
        let (name, kind, shape, form) = ("t".into(), "conv".into(), shape.to_vec(), form.clone());
        Recut { name, kind, layer: None, shape, logical_dtype: Dtype::F32, form, axis }
    }

    fn hash(shape: &[u64], form: &Form, bytes: &[u8]) -> ValueHash {
        value_hash("conv", Dtype::F32, shape, form.storage_dtype, &form.layout, bytes).unwrap()
    }

    proptest! {
        /// A tensor over some ranks, in any layouts, becomes the same tensor over others.
        #[test]
        fn a_value_is_the_same_over_other_ranks(
            rest in proptest::collection::vec(1_u64..5, 0..3),
            axis in 0_usize..3,
            (per, sections, from, to) in (1_u64..4, 1_u64..4, 1_u64..5, 1_u64..5),
            (pads, backwards, narrow) in ([0_i64..3, 0..3], [any::<bool>(), any::<bool>()], [any::<bool>(), any::<bool>()]),
            reversed in [any::<bool>(), any::<bool>()],
        ) {
            let axis = axis % (rest.len() + 1);
            let units = per * from * to;
            let shape_of = |units: u64| { let mut shape = rest.clone(); shape.insert(axis, units); shape };
            let spread = |world: u64, rank: u64| Share {
                of: units * sections,
                held: (0..sections).map(|s| [s * units + rank * units / world, s * units + (rank + 1) * units / world]).collect(),
            };
            let form_of = |side: usize, shape: &[u64]| {
                let mut order: Vec<usize> = (0..shape.len()).collect();
                if reversed[side] { order.reverse(); }
                form(shape, &order, pads[side], backwards[side], if narrow[side] { Dtype::Bf16 } else { Dtype::F32 })
            };
            // The value of an element of the whole tensor: bf16 holds it.
            let value = |index: &[u64]| index.iter().fold(1_u32, |sum, i| (sum * 31 + *i as u32) % 251) as f32;
            // A rank's bytes, by the definition.
            let rank_of = |side: usize, share: &Share| {
                let global: Vec<u64> = share.held.iter().flat_map(|[start, end]| *start..*end).collect();
                let shape = shape_of(global.len() as u64);
                let form = form_of(side, &shape);
                let bytes = held(&shape, &form, |index| { let mut index = index.to_vec(); index[axis] = global[index[axis] as usize]; value(&index) });
                (shape, form, bytes)
            };
            let old: Vec<Share> = (0..from).map(|rank| spread(from, rank)).collect();
            let sources: Vec<(Tensor, Vec<u8>)> =
                old.iter().map(|share| { let (shape, form, bytes) = rank_of(0, share); (tensor(&shape, &form, &bytes), bytes) }).collect();
            for rank in 0..to {
                let share = spread(to, rank);
                let (shape, form, expected) = rank_of(1, &share);
                let recut = recut(&shape, &form, axis);
                let pieces = share.pieces(&old.iter().collect::<Vec<_>>()).unwrap();
                let mut out = recut.begin();
                for (number, (source, payload)) in sources.iter().enumerate() {
                    let of: Vec<Piece> = pieces.iter().filter(|piece| piece.source == number).copied().collect();
                    recut.take(source, payload, &of, &mut out).unwrap();
                }
                prop_assert_eq!(&out, &expected);
                let mirror = recut.finish(out).unwrap();
                prop_assert_eq!(mirror.tensor.value_hash, hash(&shape, &form, &expected));
            }
        }
    }

    #[test]
    fn what_cannot_be_cut_is_refused_by_name() {
        let shape = [4, 3];
        let row = form(&shape, &[0, 1], 0, false, Dtype::F32);
        let payload = held(&shape, &row, |index| 1.0 + index[0] as f32 / 1024.0);
        let source = tensor(&shape, &row, &payload);
        let half = form(&[2, 3], &[0, 1], 0, false, Dtype::F32);
        let narrow = form(&[2, 3], &[0, 1], 0, false, Dtype::Bf16);
        let good = recut(&[2, 3], &half, 0);
        let opaque = |layout: &Layout| Layout { strides: None, offset: None, ..layout.clone() };
        let sightless = Tensor { layout: opaque(&source.layout), ..source.clone() };
        let blind = Recut { form: Form { layout: opaque(&half.layout), ..half.clone() }, ..good.clone() };
        let broadcast = Layout { strides: Some(vec![0, 1]), ..half.layout.clone() };
        for (recut, source, word) in [
            (good.clone(), &sightless, "opaque"),
            (blind, &source, "opaque"),
            (Recut { kind: "ssm".into(), ..good.clone() }, &source, "t: kind"),
            (Recut { layer: Some(1), ..good.clone() }, &source, "t: layer"),
            (Recut { logical_dtype: Dtype::Bf16, ..good.clone() }, &source, "t: logical dtype"),
            (Recut { shape: vec![2, 2], ..good.clone() }, &source, "[…, 2]"),
            (Recut { axis: 1, ..good.clone() }, &source, "[2, …]"),
            (Recut { axis: 7, ..good.clone() }, &source, "a dimension 7"),
            (Recut { form: Form { layout: broadcast, ..half.clone() }, ..good.clone() }, &source, "overlap"),
        ] {
            let error = recut.check(source).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let piece = |from, to, count| [Piece { source: 0, from, to, count }];
        let mut out = good.begin();
        for pieces in [piece(3, 0, 2), piece(0, 1, 2), piece(u64::MAX, 0, 1)] {
            assert!(good.take(&source, &payload, &pieces, &mut out).unwrap_err().to_string().contains("units from"));
        }
        let error = recut(&[2, 3], &narrow, 0).take(&source, &payload, &piece(2, 0, 2), &mut narrow_bytes(&narrow)).unwrap_err();
        assert!(matches!(&error, FormatError::InexactStorage { index, .. } if *index == [0, 0]), "{error}");
        // A payload that does not have the value of its document.
        let mut other = payload.clone();
        other[0] ^= 1;
        assert!(matches!(good.take(&source, &other, &piece(0, 0, 2), &mut out), Err(FormatError::ValueHashMismatch { .. })));
        good.take(&source, &payload, &piece(2, 0, 2), &mut out).unwrap();
        assert_eq!(out, payload[24..]);
    }

    fn narrow_bytes(form: &Form) -> Vec<u8> {
        vec![0; form.bytes as usize]
    }
}
