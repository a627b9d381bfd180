//! The prefix index: the rows that a snapshot writes, and the positions that a search looks at.
//!
//! Every snapshot has a row at the positions of its chain of prefix keys that the digits of its
//! length name, in blocks and base 16: one of 0x5a3 blocks at 0x500, 0x5a0 and 0x5a3. So a search
//! goes digit by digit: the largest digit at which any snapshot has a row comes first, and where no
//! snapshot has one, all longer prefixes are excluded. It makes a few dozen look-ups, whatever the
//! number of snapshots and the length of the request.
//!
//! A snapshot that may be resumed before its end has waypoints too: rows at positions that are the
//! same for all snapshots, eight for each doubling of the length. The deepest waypoint that a
//! request shares with any snapshot leads to those that share most with it: they part from the
//! request before the next waypoint, an eighth further.

use pfr_schema::checkpoint::Key;
use pfr_schema::{Digest, api, prefix};

/// Bits of a digit.
const DIGIT: u32 = 4;
/// `tokens` of a row of a snapshot that goes on.
pub(crate) const PASSES: i64 = -1;
/// `tokens` of a waypoint.
pub(crate) const WAYPOINT: i64 = -2;
/// Bits of the number of waypoints for each doubling.
const DENSITY: u32 = 3;

/// A row of a snapshot in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PrefixMark {
    /// 64 bits of the key at the end of a block.
    pub key: i64,
    /// Tokens of the snapshot if it ends in the block that follows, else -1; -2 for a waypoint.
    pub tokens: i64,
    /// 64 bits of the key of all its tokens; 0 if it does not end there.
    pub proof: i64,
}

/// A snapshot, and what the index has of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefixed {
    /// Row id of its manifest.
    pub manifest: i64,
    /// The snapshot.
    pub digest: Digest,
    /// Whether its rows were written.
    pub is_indexed: bool,
    /// Its rows, in any order.
    pub marks: Vec<PrefixMark>,
    /// Rows of it that name another repository than its own.
    pub elsewhere: usize,
}

/// A snapshot that a search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// The snapshot.
    pub digest: Digest,
    /// Its tokens.
    pub tokens: u64,
    /// Row id of its manifest: a newer snapshot has a larger one.
    pub(crate) manifest: i64,
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHits {
    /// Snapshots of the most tokens, newest first. All have the same number of tokens.
    pub deepest: Vec<PrefixHit>,
    /// Snapshots that share most with the request, whether they end on its way or not.
    pub near: Vec<Digest>,
    /// Look-ups that were made.
    pub look_ups: usize,
    /// Whether the search ended at its limit: there may be longer ones.
    pub truncated: bool,
}

/// Snapshots with the deepest waypoint that a request has too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixPassing {
    /// The waypoint, in tokens.
    pub tokens: u64,
    /// The next one: no indexed snapshot shares so many tokens with the request.
    pub next: u64,
    /// Some of the snapshots, the newest first.
    pub snapshots: Vec<Digest>,
}

/// The prefix keys of a list of tokens under one identity.
#[derive(Clone, Debug)]
pub struct PrefixPath {
    tokens: Vec<u32>,
    /// The key of no tokens.
    root: Digest,
    /// The key at the end of each block.
    blocks: Vec<Digest>,
}

impl PrefixPath {
    /// Hashes all tokens: some milliseconds for a million.
    #[must_use]
    pub fn new(tokens: Vec<u32>, fingerprint: &Digest, salt: &str, adapter: Option<&str>) -> Self {
        let whole = tokens.len() / prefix::BLOCK * prefix::BLOCK;
        let blocks = prefix::keys(fingerprint, salt, adapter, &tokens[..whole]);
        Self { root: prefix::key(fingerprint, salt, adapter, &[]), blocks, tokens }
    }

    pub(crate) fn of_request(request: api::MatchRequest) -> Self {
        let api::MatchRequest { tokens, fingerprint, salt, adapter } = request;
        Self::new(tokens, &fingerprint, &salt, adapter.as_deref())
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The key after so many blocks.
    fn at(&self, blocks: u64) -> Option<&Digest> {
        match usize::try_from(blocks).ok()?.checked_sub(1) {
            Some(last) => self.blocks.get(last),
            None => Some(&self.root),
        }
    }

    /// The key after so many blocks as the index has it; 0 beyond the end.
    pub(crate) fn mark(&self, blocks: u64) -> i64 {
        self.at(blocks).map_or(0, short)
    }

    /// The key of the first `tokens` tokens; none if there are fewer.
    #[must_use]
    pub fn key(&self, tokens: u64) -> Option<Digest> {
        let first = self.tokens.get(..usize::try_from(tokens).ok()?)?;
        let blocks = first.len() / prefix::BLOCK;
        let (link, rest) = (self.at(blocks as u64)?, &first[blocks * prefix::BLOCK..]);
        Some(if rest.is_empty() { *link } else { prefix::next(link, rest) })
    }
}

impl PrefixMark {
    /// The rows of a snapshot with this key. `path` is that of its tokens, or none if they are not
    /// known: then it has one row at the beginning of its identity, and is found there by its
    /// length.
    #[must_use]
    pub fn of(key: &Key, path: Option<&PrefixPath>, fingerprint: &Digest) -> Vec<Self> {
        let end = |key: &Digest, proof: &Key| Self { key: short(key), tokens: tokens_of(proof), proof: short(&proof.prefix) };
        let Some(path) = path.filter(|path| path.key(key.tokens) == Some(key.prefix)) else {
            return vec![end(&prefix::key(fingerprint, &key.salt, key.adapter.as_deref(), &[]), key)];
        };
        let blocks = key.tokens / prefix::BLOCK as u64;
        let passed = positions(blocks).filter(|at| *at < blocks).map(|at| Self { key: path.mark(at), tokens: PASSES, proof: 0 });
        passed.chain(path.at(blocks).map(|last| end(last, key))).collect()
    }

    /// The waypoints of a snapshot with these tokens, which may be resumed before its end.
    pub fn waypoints(path: &PrefixPath) -> impl Iterator<Item = Self> + '_ {
        waypoints(path.blocks.len() as u64).map(|at| Self { key: path.mark(at), tokens: WAYPOINT, proof: 0 })
    }
}

/// The waypoints of a length, ascending: each block at first, then eight for each doubling.
pub(crate) fn waypoints(blocks: u64) -> impl Iterator<Item = u64> {
    let next = |at: &u64| {
        let digits = u64::BITS - at.leading_zeros();
        at.checked_add(1 << digits.saturating_sub(DENSITY + 1))
    };
    std::iter::successors(Some(1), next).take_while(move |at| *at <= blocks)
}

/// The positions of a length: those that have its first digits and zeros behind, without 0.
fn positions(blocks: u64) -> impl Iterator<Item = u64> {
    let first = (0..levels(blocks)).rev().map(move |level| blocks >> (level * DIGIT) << (level * DIGIT));
    let mut before = 0;
    first.filter(move |at| std::mem::replace(&mut before, *at) != *at)
}

/// Digits of a number of blocks.
pub(crate) fn levels(blocks: u64) -> u32 {
    (u64::BITS - blocks.leading_zeros()).div_ceil(DIGIT)
}

/// The positions that a search looks at from `at`, a position whose last `level` digits are zeros:
/// one more digit each, with the number of digits behind it.
pub(crate) fn steps(at: u64, level: u32, blocks: u64) -> impl Iterator<Item = (u64, u32)> {
    let digits = (0..level).flat_map(|level| (1..1_u64 << DIGIT).map(move |digit| (digit << (level * DIGIT), level)));
    digits.map(move |(step, level)| (at + step, level)).filter(move |(at, _)| *at <= blocks)
}

fn tokens_of(key: &Key) -> i64 {
    i64::try_from(key.tokens).unwrap_or(i64::MAX)
}

/// What the index keeps of a key.
pub(crate) fn short(key: &Digest) -> i64 {
    key.as_bytes().first_chunk().map_or(0, |first| i64::from_be_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_has_a_position_for_each_digit_that_is_not_zero() {
        let of = |blocks| positions(blocks).collect::<Vec<_>>();
        assert_eq!(of(0), Vec::<u64>::new());
        assert_eq!(of(0x5a3), [0x500, 0x5a0, 0x5a3]);
        assert_eq!(of(0x5003), [0x5000, 0x5003]);
        assert_eq!(of(16), [16]);
    }

    #[test]
    fn waypoints_are_those_of_every_longer_prefix_too_and_an_eighth_apart() {
        let of = |blocks| waypoints(blocks).collect::<Vec<_>>();
        assert_eq!(of(0), Vec::<u64>::new());
        assert_eq!(of(20), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20]);
        let long = of(1 << 20);
        assert!(long.windows(2).all(|pair| pair[0] < pair[1] && (pair[1] - pair[0] - 1) * 8 <= pair[0]), "{long:?}");
        assert!(long.len() < 8 * 20, "{}", long.len());
        for blocks in 0..3000 {
            assert!(long.starts_with(&of(blocks)));
        }
    }

    #[test]
    fn every_position_of_a_length_is_a_step_from_the_one_before() {
        for blocks in (0..5000).chain([1 << 20, (1 << 20) + 17]) {
            let (mut at, mut level) = (0, levels(blocks));
            for next in positions(blocks) {
                let step = steps(at, level, blocks).find(|step| step.0 == next);
                (at, level) = step.unwrap_or_else(|| panic!("{next} of {blocks} is no step from {at}"));
            }
            assert_eq!(at, blocks);
        }
    }
}
