//! At which token positions a snapshot may be resumed: the rule, for the store and the agent.
//!
//! A snapshot may always be resumed at its own end. In a page of a group in which nothing is ever
//! overwritten or dropped, the state of a token depends on the tokens before it only. So if all
//! groups are of that kind, the pages before any token position at which a page of every group ends
//! are the state at that position, whatever follows. A window has dropped pages that an earlier
//! position needs, and recurrent state has been overwritten: with such a group only the end is
//! legal. Earlier positions of a hybrid model are the ends of other snapshots, each with its own
//! checkpoint.
//!
//! A page that is filled further than the position is not used: its digest proves all of its bytes,
//! and those behind the position belong to other tokens.

use crate::tree::{GroupKind, PageTree};

/// The token positions at which one snapshot may be resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Legal {
    end: u64,
    /// Tokens between two positions before the end; none if only the end is legal.
    step: Option<u64>,
}

impl Legal {
    /// Of a snapshot of `end` tokens, by kind and page size of its groups. `has_states` says
    /// whether it has checkpoints.
    #[must_use]
    pub fn of(end: u64, groups: impl IntoIterator<Item = (GroupKind, u32)>, has_states: bool) -> Self {
        let mut step = None;
        for (kind, page_tokens) in groups {
            if has_states || !keeps_all(kind) || page_tokens == 0 {
                return Self { end, step: None };
            }
            let Some(common) = common_multiple(step.unwrap_or(1), u64::from(page_tokens)) else { return Self { end, step: None } };
            step = Some(common);
        }
        Self { end, step }
    }

    /// Of a snapshot of `end` tokens with these trees.
    #[must_use]
    pub fn of_trees<'a>(end: u64, trees: impl IntoIterator<Item = &'a PageTree>, has_states: bool) -> Self {
        Self::of(end, trees.into_iter().map(|tree| (tree.group.kind, tree.page_size_tokens)), has_states)
    }

    /// The snapshot's own position.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.end
    }

    /// The first position before the end, if there is one. All others are its multiples.
    #[must_use]
    pub fn first(&self) -> Option<u64> {
        self.step.filter(|step| *step < self.end)
    }

    /// Whether the snapshot may be resumed at this position.
    #[must_use]
    pub fn is_legal(&self, position: u64) -> bool {
        let before = |step: u64| position < self.end && position.is_multiple_of(step);
        position > 0 && (position == self.end || self.step.is_some_and(before))
    }

    /// The last legal position up to which `agree` tokens at the beginning reach.
    #[must_use]
    pub fn deepest(&self, agree: u64) -> Option<u64> {
        if agree >= self.end {
            return (self.end > 0).then_some(self.end);
        }
        self.step.map(|step| agree / step * step).filter(|position| *position > 0)
    }
}

/// Whether a group keeps the state of every token as it was computed.
const fn keeps_all(kind: GroupKind) -> bool {
    match kind {
        GroupKind::FullAttention | GroupKind::Mla => true,
        GroupKind::SlidingWindow | GroupKind::Recurrent => false,
    }
}

fn common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kind() -> impl Strategy<Value = GroupKind> {
        use GroupKind::{FullAttention, Mla, Recurrent, SlidingWindow};
        prop_oneof![6 => Just(FullAttention), 2 => Just(Mla), 1 => Just(SlidingWindow), 1 => Just(Recurrent)]
    }

    proptest! {
        /// A position is legal exactly if every group has its whole state there, in pages that hold
        /// nothing else.
        #[test]
        fn a_position_is_legal_if_each_page_before_it_is_full_and_none_is_missing(
            end in 0_u64..200,
            groups in proptest::collection::vec((kind(), 1_u32..40), 0..4),
            has_states: bool,
            agree in 0_u64..250,
        ) {
            let legal = Legal::of(end, groups.clone(), has_states);
            let kept = |(kind, page): &(GroupKind, u32), at: u64| {
                matches!(kind, GroupKind::FullAttention | GroupKind::Mla) && at.is_multiple_of(u64::from(*page))
            };
            let expected = |at: u64| {
                at > 0 && (at == end || (at < end && !has_states && !groups.is_empty() && groups.iter().all(|group| kept(group, at))))
            };
            for at in 0..250 {
                prop_assert_eq!(legal.is_legal(at), expected(at), "{} of {:?}", at, legal);
            }
            prop_assert_eq!(legal.deepest(agree), (0..=agree).rev().find(|at| expected(*at)));
            prop_assert_eq!(legal.first(), (1..end).find(|at| expected(*at)));
        }
    }

    #[test]
    fn page_sizes_without_a_common_multiple_leave_the_end() {
        let legal = Legal::of(u64::MAX, [(GroupKind::FullAttention, u32::MAX); 1], false);
        assert_eq!(legal.first(), Some(u64::from(u32::MAX)));
        let coprime = [u32::MAX, u32::MAX - 1, u32::MAX - 2].map(|page| (GroupKind::FullAttention, page));
        let legal = Legal::of(u64::MAX, coprime, false);
        assert_eq!((legal.first(), legal.deepest(u64::MAX - 1), legal.deepest(u64::MAX)), (None, None, Some(u64::MAX)));
    }
}
