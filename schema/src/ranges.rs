//! Lists of page indices as ranges: `[[start, count], …]`, in order.

use crate::error::FormatError;
use serde::{Deserialize, Serialize};

/// A list of `u32` indices, run-length encoded where each is its predecessor plus one. Order is
/// kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ranges(Vec<(u32, u32)>);

impl Ranges {
    /// How many indices it stands for; saturates.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.iter().fold(0, |sum, (_, count)| sum.saturating_add(u64::from(*count)))
    }

    /// Whether it stands for none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The indices. Only for lists whose document was parsed and checked: a short one may stand for
    /// billions.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(|(start, count)| (0..*count).map(move |i| start.wrapping_add(i)))
    }

    /// The ranges as start and end (exclusive).
    pub(crate) fn bounds(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|(start, count)| (u64::from(*start), u64::from(*start) + u64::from(*count)))
    }

    /// Refuses empty or overflowing ranges, ranges that should have been one, and more than `limit`
    /// indices.
    pub(crate) fn check(&self, document: &'static str, path: &str, limit: u64) -> Result<(), FormatError> {
        let mut next = None;
        for (i, (start, count)) in self.0.iter().enumerate() {
            let end = u64::from(*start) + u64::from(*count);
            if *count == 0 || end > 1 << 32 {
                return Err(FormatError::field(
                    document,
                    format!("{path}[{i}]"),
                    "a non-empty range of 32-bit indices",
                    format!("[{start},{count}]"),
                ));
            }
            // One list has one spelling, otherwise one state would have two digests.
            if next == Some(u64::from(*start)) {
                return Err(FormatError::field(
                    document,
                    format!("{path}[{i}]"),
                    "adjoining ranges to be merged",
                    format!("[{start},{count}]"),
                ));
            }
            next = Some(end);
        }
        if self.len() > limit {
            return Err(FormatError::TooLarge { what: "list of page indices", found: self.len(), limit });
        }
        Ok(())
    }
}

impl FromIterator<u32> for Ranges {
    fn from_iter<I: IntoIterator<Item = u32>>(indices: I) -> Self {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for index in indices {
            match ranges.last_mut() {
                Some((start, count)) if u64::from(*start) + u64::from(*count) == u64::from(index) => *count += 1,
                _ => ranges.push((index, 1)),
            }
        }
        Self(ranges)
    }
}
