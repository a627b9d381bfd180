//! Which parts of a stretch of memory are free: first fit, neighbours merged.

use std::collections::BTreeMap;

/// Free parts of `0..total`.
#[derive(Debug)]
pub(super) struct Extents {
    /// Length by beginning; no two touch.
    free: BTreeMap<u64, u64>,
}

impl Extents {
    /// All of it free.
    pub(super) fn new(total: u64) -> Self {
        Self { free: if total > 0 { BTreeMap::from([(0, total)]) } else { BTreeMap::new() } }
    }

    /// `bytes` at a multiple of `align`; `None` if no free part is large enough.
    pub(super) fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        if bytes == 0 {
            return Some(0);
        }
        let (begin, length, at) = self.free.iter().find_map(|(&begin, &length)| {
            let at = begin.next_multiple_of(align);
            (at - begin + bytes <= length).then_some((begin, length, at))
        })?;
        self.free.remove(&begin);
        if at > begin {
            self.free.insert(begin, at - begin);
        }
        let rest = begin + length - (at + bytes);
        if rest > 0 {
            self.free.insert(at + bytes, rest);
        }
        Some(at)
    }

    /// Gives `bytes` from `at` back.
    pub(super) fn give(&mut self, at: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let (mut begin, mut length) = (at, bytes);
        if let Some((&before, &its)) = self.free.range(..at).next_back()
            && before + its == at
        {
            self.free.remove(&before);
            (begin, length) = (before, its + length);
        }
        if let Some(its) = self.free.remove(&(at + bytes)) {
            length += its;
        }
        self.free.insert(begin, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a map of single bytes: what is taken was free and is aligned, a refusal is
        /// right, and all comes back as one part.
        #[test]
        fn it_agrees_with_a_map_of_bytes(steps in proptest::collection::vec((any::<bool>(), 0u64..200, 0usize..64), 1..200)) {
            let (total, align) = (1024u64, 16u64);
            let mut extents = Extents::new(total);
            let mut used = vec![false; total as usize];
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (take, bytes, which) in steps {
                if take {
                    let fits = |at: u64| at + bytes <= total && used[at as usize..(at + bytes) as usize].iter().all(|u| !u);
                    let possible = (0..total).step_by(align as usize).any(fits);
                    let got = extents.take(bytes, align);
                    prop_assert_eq!(got.is_some(), possible || bytes == 0);
                    if let Some(at) = got {
                        prop_assert!(at % align == 0 && (bytes == 0 || fits(at)));
                        used[at as usize..(at + bytes) as usize].fill(true);
                        held.push((at, bytes));
                    }
                } else if !held.is_empty() {
                    let (at, bytes) = held.swap_remove(which % held.len());
                    // Parts of a region come back one by one, as pages of a batch do.
                    let half = bytes / 2;
                    extents.give(at + half, bytes - half);
                    extents.give(at, half);
                    used[at as usize..(at + bytes) as usize].fill(false);
                }
            }
            for (at, bytes) in held {
                extents.give(at, bytes);
            }
            prop_assert_eq!(extents.take(total, align).unwrap(), 0);
        }
    }
}
