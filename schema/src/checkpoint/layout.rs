//! The positions of a tensor's elements in its payload: checks the bounds of a strided layout, and
//! walks over it in logical order.

use super::{Dtype, Layout};
use crate::error::FormatError;
use std::ops::Range;

/// Maximum number of dimensions of a tensor.
pub const MAX_RANK: usize = 32;
/// Limit on the payload of a tensor whose elements do not lie in logical order: 256 MiB, because
/// the whole payload must be in memory. Other payloads are hashed as they stream by. A conversion
/// has the same limit for payload and mirror.
pub const GATHER_BYTES: u64 = 256 << 20;

/// An error in a tensor: field, expected value, found value.
pub(super) type Wrong = (&'static str, String, String);

/// The number of elements of a shape.
///
/// # Errors
/// [`FormatError::TooLarge`] if they have more than `limit` bytes.
pub(super) fn elements(shape: &[u64], dtype: Dtype, limit: u64) -> Result<u64, FormatError> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let count = shape.iter().try_fold(1_u64, |product, dimension| product.checked_mul(*dimension));
    let bytes = count.and_then(|count| count.checked_mul(dtype.bytes() as u64)).unwrap_or(u64::MAX);
    match count {
        Some(count) if bytes <= limit => Ok(count),
        _ => Err(FormatError::TooLarge { what: "a tensor's logical value in bytes", found: bytes, limit }),
    }
}

/// Iterates over spans of payload elements in logical (row-major) order.
#[derive(Clone, Debug)]
pub(super) struct Walk {
    /// Count, stride and current index of the outer dimensions, outermost first.
    outer: Vec<(u64, i64, u64)>,
    /// Number of contiguous elements in each span.
    span: u64,
    next: i64,
    done: bool,
}

impl Layout {
    /// Whether the layout has no strides, so that only its writer can find an element.
    #[must_use]
    pub fn is_opaque(&self) -> bool {
        self.strides.is_none()
    }

    /// The layout of a tensor whose elements are contiguous in logical order.
    #[must_use]
    pub fn row_major(shape: &[u64]) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut next = 1_i64;
        for (stride, dimension) in strides.iter_mut().zip(shape).rev() {
            *stride = next;
            next = next.saturating_mul(i64::try_from(*dimension).unwrap_or(i64::MAX).max(1));
        }
        Self { tag: "row-major".into(), strides: Some(strides), offset: Some(0) }
    }

    /// Checks that every element is within a payload of `payload_elements`. Returns the walk over
    /// them, or `None` for an opaque layout.
    pub(super) fn check(&self, shape: &[u64], payload_elements: u64) -> Result<Option<Walk>, Wrong> {
        let (strides, offset) = match (&self.strides, self.offset) {
            (None, None) => return Ok(None),
            (Some(strides), Some(offset)) => (strides, offset),
            (Some(_), None) => return Err(("layout.offset", "an offset, since there are strides".into(), "none".into())),
            (None, Some(offset)) => return Err(("layout.offset", "no offset, since there are no strides".into(), offset.to_string())),
        };
        if strides.len() != shape.len() {
            return Err(("layout.strides", "one stride for each dimension".into(), format!("{strides:?}")));
        }
        if shape.contains(&0) {
            return Ok(Some(Walk { outer: vec![], span: 0, next: 0, done: true }));
        }
        let (mut lowest, mut highest) = (Some(i128::from(offset)), Some(i128::from(offset)));
        for (dimension, stride) in shape.iter().zip(strides) {
            let reach = i128::from(dimension - 1).checked_mul(i128::from(*stride));
            let end = if *stride < 0 { &mut lowest } else { &mut highest };
            *end = end.zip(reach).and_then(|(end, reach)| end.checked_add(reach));
        }
        let (Some(lowest), Some(highest)) = (lowest, highest) else {
            return Err(("layout.strides", "elements within the payload".into(), "strides that overflow".into()));
        };
        if lowest < 0 || highest >= i128::from(payload_elements) {
            let expected = format!("elements within the payload's {payload_elements}");
            return Err(("layout", expected, format!("elements {lowest} to {highest}")));
        }
        Ok(Some(Walk::new(shape, strides, offset.cast_signed())))
    }
}

impl Walk {
    /// The caller has checked the bounds, and that no dimension is zero.
    fn new(shape: &[u64], strides: &[i64], offset: i64) -> Self {
        let mut merged: Vec<(u64, i64, u64)> = Vec::with_capacity(shape.len());
        for (&count, &stride) in shape.iter().zip(strides).filter(|(count, _)| **count > 1) {
            match merged.last_mut() {
                // One step of the outer dimension is as long as the whole inner one, so both can be
                // walked as one dimension.
                Some((outer, far, _)) if i128::from(*far) == i128::from(stride) * i128::from(count) => {
                    (*outer, *far) = (*outer * count, stride)
                }
                _ => merged.push((count, stride, 0)),
            }
        }
        let span = merged.pop_if(|(_, stride, _)| *stride == 1).map_or(1, |(count, ..)| count);
        Self { outer: merged, span, next: offset, done: false }
    }

    /// Whether spans ascend without overlap. A payload can then be hashed as a stream.
    pub(super) fn ascends(&self) -> bool {
        let mut extent = i128::from(self.span);
        self.outer.iter().rev().all(|(count, stride, _)| {
            let fits = i128::from(*stride) >= extent;
            extent += i128::from(count - 1) * i128::from(*stride);
            fits
        })
    }

    /// Whether strides nest: sorted by length, each is at least as long as all that the shorter
    /// ones span. Then no two elements share a place. Other strides may be free of overlap too, but
    /// finding out takes a look at every element.
    pub(super) fn nests(&self) -> bool {
        let mut dimensions: Vec<(u64, u64)> = self.outer.iter().map(|(count, stride, _)| (stride.unsigned_abs(), *count)).collect();
        dimensions.sort_unstable();
        let mut extent = u128::from(self.span);
        dimensions.iter().all(|(stride, count)| {
            let fits = u128::from(*stride) >= extent;
            extent += u128::from(count - 1) * u128::from(*stride);
            fits
        })
    }
}

impl Iterator for Walk {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        if self.done {
            return None;
        }
        let start = self.next.cast_unsigned();
        self.done = true;
        for (count, stride, at) in self.outer.iter_mut().rev() {
            if *at + 1 < *count {
                *at += 1;
                self.next += *stride;
                self.done = false;
                break;
            }
            self.next -= *stride * at.cast_signed();
            *at = 0;
        }
        Some(start..start + self.span)
    }
}
