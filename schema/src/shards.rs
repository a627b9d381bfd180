//! Shards: which heads or channels of each layer a rank of an engine holds. With them the agent can
//! restore a snapshot into an engine with other ranks.
//!
//! An engine sends its shares when it registers, for each part of a page ([`LayerShare`]) and each
//! state tensor ([`AxisShare`]). A snapshot keeps them in a layer of its own, the document
//! [`Shards`]: page trees and checkpoints do not depend on them.
//!
//! A unit (a head, a channel) is never divided. Ranks may hold the same units: replicated heads.

use crate::error::FormatError;
use crate::flat::too_many;
use crate::json;
use crate::limits::Limits;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};

const DOCUMENT: &str = "shards";
/// Value of the `schema` field.
pub const SCHEMA: &str = "pf.shards.v1";
/// Ranges of one share. A convolution window has three.
pub const MAX_RANGES: usize = 64;
/// Bytes of a name or a reason.
const MAX_NAME: usize = 200;

/// A rank's share of the units along one axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// Units over all ranks.
    pub of: u64,
    /// The units of this rank in the order of their bytes. Each range has the number of its first
    /// unit and the number behind its last one; numbers count the units of all ranks.
    pub held: Vec<[u64; 2]>,
}

/// The share of a layer's units in one part of a page. Its bytes are `[outer][units][cell]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShare {
    /// The layer's name, the same on every rank that has a part of it.
    pub layer: String,
    /// How often the units repeat: once if heads are the outermost dimension of a block, for each
    /// token of the block if tokens are.
    pub outer: u64,
    /// Bytes of one unit.
    pub cell: u64,
    /// The units.
    pub share: Share,
}

/// The share of a state tensor's units along one dimension.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AxisShare {
    /// The dimension of the tensor's shape.
    pub axis: u32,
    /// The units.
    pub share: Share,
}

/// Consecutive units that one rank takes from another rank. Positions count the units of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the other rank's share in `sources`.
    pub source: usize,
    /// Position of the first unit in the source.
    pub from: u64,
    /// Position of the first unit in this rank's share.
    pub to: u64,
    /// Number of units.
    pub count: u64,
}

impl Share {
    /// Units of this rank.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.held.iter().fold(0, |sum, [start, end]| sum.saturating_add(end.saturating_sub(*start)))
    }

    /// Checks that the ranges are within the axis, and that no unit is in two of them.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=MAX_RANGES).contains(&self.held.len()) {
            return Err(format!("1 to {MAX_RANGES} ranges of units, found {}", self.held.len()));
        }
        if let Some([start, end]) = self.held.iter().find(|[start, end]| start >= end || *end > self.of) {
            return Err(format!("units {start}..{end} of {}", self.of));
        }
        if union([self]) != self.units() {
            return Err(format!("units twice in {:?}", self.held));
        }
        Ok(())
    }

    /// Finds each unit of this rank in `sources`. If several sources have a unit, the piece is of
    /// the first one. Returns the pieces in the order of this rank's units.
    ///
    /// # Errors
    /// The number of a unit that no source has.
    pub fn pieces(&self, sources: &[&Self]) -> Result<Vec<Piece>, u64> {
        let (mut pieces, mut to) = (Vec::new(), 0);
        for [start, end] in &self.held {
            let mut unit = *start;
            while unit < *end {
                let found = sources.iter().enumerate().find_map(|(source, share)| Some((source, share.position(unit)?)));
                let (source, (from, left)) = found.ok_or(unit)?;
                let count = left.min(end - unit);
                pieces.push(Piece { source, from, to, count });
                unit += count;
                to += count;
            }
        }
        Ok(pieces)
    }

    /// The position of a unit, and the number of units from there to the end of its range.
    fn position(&self, unit: u64) -> Option<(u64, u64)> {
        let mut before = 0;
        for [start, end] in &self.held {
            if (*start..*end).contains(&unit) {
                return Some((before + unit - start, end - unit));
            }
            before += end - start;
        }
        None
    }
}

impl LayerShare {
    /// Checks the share, and returns the bytes of the part.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<u64, String> {
        if !(1..=MAX_NAME).contains(&self.layer.len()) {
            return Err(format!("a layer's name has 1 to {MAX_NAME} bytes, found {}", self.layer.len()));
        }
        self.share.check()?;
        let bytes = self.outer.checked_mul(self.share.units()).and_then(|cells| cells.checked_mul(self.cell));
        bytes.filter(|bytes| *bytes > 0).ok_or_else(|| format!("{} times {} units of {} bytes", self.outer, self.share.units(), self.cell))
    }
}

/// Number of different units in shares of one axis.
pub fn union<'a>(shares: impl IntoIterator<Item = &'a Share>) -> u64 {
    let mut ranges: Vec<[u64; 2]> = shares.into_iter().flat_map(|share| share.held.iter().copied()).collect();
    ranges.sort_unstable();
    let (mut count, mut behind) = (0, 0);
    for [start, end] in ranges {
        let start = start.max(behind);
        count += end.saturating_sub(start);
        behind = behind.max(end);
    }
    count
}

/// How the ranks of an engine shared the state of a snapshot. The order of the fields is the order
/// of the bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shards {
    /// [`SCHEMA`].
    pub schema: String,
    /// Keys of the engine configuration that say only how ranks share the state.
    pub parallel: Vec<String>,
    /// One entry for each group of each rank.
    pub groups: Vec<GroupShards>,
}

/// The shares of one rank in the layers and states of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupShards {
    /// The rank.
    pub rank: u32,
    /// The group's name.
    pub group: String,
    /// Why the group cannot be cut. Then it has neither components nor states here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncut: Option<String>,
    /// The parts of each component, in the order of their bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Vec<LayerShare>>,
    /// State tensors by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub states: BTreeMap<String, AxisShare>,
}

impl Shards {
    /// Parses and checks a document.
    ///
    /// # Errors
    /// [`FormatError`] with JSON path, expected and found.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let shards: Self = json::parse(DOCUMENT, bytes, limits.document_bytes)?;
        if shards.schema != SCHEMA {
            return Err(FormatError::field(DOCUMENT, "$.schema", format!("{SCHEMA:?}"), format!("{:?}", shards.schema)));
        }
        let mut seen = HashSet::new();
        for (i, group) in shards.groups.iter().enumerate() {
            let wrong = |expected: &str, found: String| FormatError::field(DOCUMENT, format!("$.groups[{i}]"), expected, found);
            if !seen.insert((group.rank, &group.group)) {
                return Err(wrong("every group of a rank once", format!("{:?} of rank {} again", group.group, group.rank)));
            }
            if group.uncut.as_ref().is_some_and(|reason| reason.len() > MAX_NAME) {
                return Err(wrong("a reason of 200 bytes at most", "a longer one".into()));
            }
            let parts: usize = group.components.iter().map(Vec::len).sum();
            too_many("shares of a group", (parts + group.states.len()) as u64, limits.tensors)?;
            for layers in &group.components {
                let mut names = HashSet::new();
                if let Some(part) = layers.iter().find(|part| !names.insert(&part.layer)) {
                    return Err(wrong("a layer once in a component", format!("{:?} again", part.layer)));
                }
            }
            for part in group.components.iter().flatten() {
                let bytes = part.check().map_err(|reason| wrong("a share of a layer", reason))?;
                too_many("a page in bytes", bytes, limits.page_bytes)?;
            }
            for state in group.states.values() {
                state.share.check().map_err(|reason| wrong("a share of a state tensor", reason))?;
            }
        }
        Ok(shards)
    }

    /// Compact JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        json::bytes(self)
    }

    /// The entry of a group of a rank.
    #[must_use]
    pub fn of(&self, rank: u32, group: &str) -> Option<&GroupShards> {
        self.groups.iter().find(|found| found.rank == rank && found.group == group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn share(of: u64, held: &[[u64; 2]]) -> Share {
        Share { of, held: held.to_vec() }
    }

    #[test]
    fn every_unit_comes_from_a_rank_that_has_it() {
        // The sections x, B and C of a convolution, held by two ranks, for an engine with one rank.
        let (one, two) = (share(12, &[[0, 4], [8, 9], [10, 11]]), share(12, &[[4, 8], [9, 10], [11, 12]]));
        let piece = |source, from, to, count| Piece { source, from, to, count };
        let whole = share(12, &[[0, 12]]);
        let expected = [piece(0, 0, 0, 4), piece(1, 0, 4, 4), piece(0, 4, 8, 1), piece(1, 4, 9, 1), piece(0, 5, 10, 1), piece(1, 5, 11, 1)];
        assert_eq!(whole.pieces(&[&one, &two]).unwrap(), expected);
        assert_eq!(two.pieces(&[&whole]).unwrap(), [piece(0, 4, 0, 4), piece(0, 9, 4, 1), piece(0, 11, 5, 1)]);
        assert_eq!(whole.pieces(&[&one]), Err(4));
        // Of ranks with replicated heads, the first one is the source.
        let head = share(1, &[[0, 1]]);
        assert_eq!(head.pieces(&[&head, &head]).unwrap()[0].source, 0);
        assert_eq!((union([&one, &two]), union([&head, &head])), (12, 1));
    }

    #[test]
    fn shares_that_make_no_sense_are_refused() {
        for (wrong, word) in [
            (share(4, &[]), "ranges"),
            (share(4, &[[2, 2]]), "units 2..2"),
            (share(4, &[[3, 2]]), "units 3..2"),
            (share(4, &[[2, 5]]), "units 2..5"),
            (share(4, &[[0, 3], [2, 4]]), "twice"),
            (share(u64::MAX, &[[0, 1]; 65]), "ranges"),
        ] {
            let reason = wrong.check().unwrap_err();
            assert!(reason.contains(word), "{reason}");
        }
        let layer = |outer, cell| LayerShare { layer: "l".into(), outer, cell, share: share(u64::MAX, &[[0, u64::MAX]]) };
        assert!(layer(2, 1).check().is_err() && layer(0, 1).check().is_err() && layer(1, 0).check().is_err());
    }

    #[test]
    fn documents_that_make_no_sense_are_refused() {
        let part = LayerShare { layer: "l".into(), outer: 1, cell: 4, share: share(2, &[[0, 1]]) };
        let group = GroupShards { group: "g".into(), components: vec![vec![part.clone()]], ..GroupShards::default() };
        let good = Shards { schema: SCHEMA.into(), parallel: vec!["tp".into()], groups: vec![group.clone()] };
        assert_eq!(Shards::parse(&good.to_bytes(), &Limits::default()).as_ref(), Ok(&good));
        let with = |group: GroupShards| Shards { groups: vec![group], ..good.clone() };
        let wrong = LayerShare { cell: 0, ..part.clone() };
        let axis = AxisShare { axis: 0, share: share(2, &[[1, 3]]) };
        for (shards, word) in [
            (Shards { schema: "pf.shards.v2".into(), ..good.clone() }, "$.schema"),
            (Shards { groups: vec![group.clone(), group.clone()], ..good.clone() }, "every group of a rank once"),
            (with(GroupShards { components: vec![vec![part.clone(), part.clone()]], ..group.clone() }), "a layer once"),
            (with(GroupShards { components: vec![vec![wrong]], ..group.clone() }), "units of 0 bytes"),
            (with(GroupShards { states: BTreeMap::from([("s".into(), axis)]), ..group.clone() }), "units 1..3 of 2"),
            (with(GroupShards { uncut: Some("x".repeat(201)), ..group }), "200 bytes"),
        ] {
            let error = Shards::parse(&shards.to_bytes(), &Limits::default()).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Shards::parse(&bytes, &Limits::default()).is_err());
        }

        #[test]
        fn documents_come_back(
            of in 1_u64..100, cut in 0_u64..100, outer in 1_u64..9, cell in 1_u64..9, rank: u32, layer in ".{1,20}", axis: u32,
        ) {
            let cut = cut % of;
            let held = if cut == 0 { vec![[0, of]] } else { vec![[cut, of], [0, cut]] };
            let share = Share { of, held };
            let part = LayerShare { layer: layer.clone(), outer, cell, share: share.clone() };
            let states = BTreeMap::from([(layer, AxisShare { axis, share })]);
            let group = GroupShards { rank, group: "g".into(), uncut: None, components: vec![vec![part]], states };
            let none = GroupShards { rank, group: "none".into(), uncut: Some("quantised".into()), ..GroupShards::default() };
            let shards = Shards { schema: SCHEMA.into(), parallel: vec!["tp".into()], groups: vec![group, none] };
            let again = Shards::parse(&shards.to_bytes(), &Limits::default()).unwrap();
            prop_assert_eq!(again.to_bytes(), shards.to_bytes());
            prop_assert_eq!(again, shards);
        }

        /// Moves units from one number of ranks to another one, spread as engines spread them. The
        /// content of a unit is its number.
        #[test]
        fn units_find_their_place_at_any_number_of_ranks(
            heads in 1_u64..13, sections in 1_u64..4, from in 1_u64..7, to in 1_u64..7,
        ) {
            // Each rank holds a range of each section, or the sections are replicated.
            let spread = |world: u64| -> Vec<Share> {
                let range = |rank: u64| [rank * heads / world, ((rank + 1) * heads).div_ceil(world)];
                let held = |rank: u64| (0..sections).map(|section| range(rank).map(|unit| section * heads + unit)).collect();
                (0..world).map(|rank| Share { of: heads * sections, held: held(rank) }).collect()
            };
            let (old, new) = (spread(from), spread(to));
            let content = |share: &Share| share.held.iter().flat_map(|[start, end]| *start..*end).collect::<Vec<u64>>();
            let sources: Vec<&Share> = old.iter().collect();
            for share in &new {
                share.check().unwrap();
                let mut found = vec![u64::MAX; share.units() as usize];
                for Piece { source, from, to, count } in share.pieces(&sources).unwrap() {
                    let there = content(sources[source]);
                    for i in 0..count {
                        found[(to + i) as usize] = there[(from + i) as usize];
                    }
                }
                prop_assert_eq!(found, content(share));
            }
            prop_assert_eq!(union(&new), heads * sections);
        }
    }
}
