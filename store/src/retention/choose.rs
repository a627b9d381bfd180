//! The choice of snapshots to delete, for `pf prune` and for retention policies.

use pfr_schema::api::SnapshotSummary;
use pfr_schema::{Digest, Pattern};
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

/// Which snapshots of a repository are to be deleted: those that meet every criterion.
#[derive(Clone, Debug, Default)]
pub struct Criteria {
    /// Only those whose tags all match one of these. Empty: whatever their tags are.
    pub tags: Vec<Pattern>,
    /// Only those without a tag; together with `tags`, these as well.
    pub untagged: bool,
    /// Only those that descend from this one, as complete branches: one stays while one that
    /// descends from it stays.
    pub below: Option<Digest>,
    /// All but the last ones that the criteria above select.
    pub keep_last: Option<KeepLast>,
    /// Only those pushed longer ago than this.
    pub older_than: Option<Duration>,
}

/// Which of the selected snapshots stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepLast {
    /// The newest so many.
    OfRepository(usize),
    /// Those with fewer than so many selected ones between them and a snapshot without children,
    /// that one included.
    OfLineage(usize),
}

impl Criteria {
    /// Chooses from all snapshots of a repository, given newest first, at a time in milliseconds
    /// since 1970. Those for which `stays` holds are not chosen.
    ///
    /// They are to be deleted in this order and, if [`Self::is_ordered`], only up to the first that
    /// cannot be. Then the same criteria choose the rest of them later, wherever a run is cut off.
    /// With `below` descendants come before their ancestors: no branch loses its root. With
    /// [`KeepLast::OfLineage`] ancestors come before their descendants: none is left without
    /// children, as an end from which the last ones would be counted anew.
    pub fn choose<'a>(
        &self,
        snapshots: &'a [SnapshotSummary],
        now: u64,
        stays: impl Fn(&SnapshotSummary) -> bool,
    ) -> Vec<&'a SnapshotSummary> {
        let lineage = Lineage::of(snapshots);
        let below = self.below.map(|root| lineage.below(root));
        let is_below = |at: &usize| below.as_ref().is_none_or(|below| below.contains(at));
        let selected: Vec<usize> = (0..snapshots.len()).filter(|at| self.is_meant(&snapshots[*at])).filter(is_below).collect();
        let superfluous = match self.keep_last {
            None => selected,
            Some(KeepLast::OfRepository(last)) => selected.into_iter().skip(last).collect(),
            Some(KeepLast::OfLineage(last)) => lineage.behind(last, &selected),
        };
        let chosen = superfluous.into_iter().filter(|at| self.is_old(&snapshots[*at], now) && !stays(&snapshots[*at]));
        let chosen = match self.keep_last {
            _ if below.is_some() => lineage.branches(chosen.collect()),
            Some(KeepLast::OfLineage(_)) => lineage.ancestors_first(&chosen.collect::<HashSet<usize>>()),
            _ => chosen.collect(),
        };
        chosen.into_iter().map(|at| &snapshots[at]).collect()
    }

    /// Whether no chosen snapshot may be deleted while one that was chosen before it is there.
    #[must_use]
    pub fn is_ordered(&self) -> bool {
        self.below.is_some() || matches!(self.keep_last, Some(KeepLast::OfLineage(_)))
    }

    /// Whether its tags are those that are meant.
    fn is_meant(&self, snapshot: &SnapshotSummary) -> bool {
        match snapshot.tags.as_slice() {
            _ if !self.untagged && self.tags.is_empty() => true,
            [] => self.untagged,
            tags => !self.tags.is_empty() && tags.iter().all(|tag| self.tags.iter().any(|pattern| pattern.matches(tag.as_str()))),
        }
    }

    fn is_old(&self, snapshot: &SnapshotSummary, now: u64) -> bool {
        let age = u128::from(now.saturating_sub(snapshot.pushed_at));
        self.older_than.is_none_or(|least| age > least.as_millis())
    }
}

/// A snapshot and those that descend from it, of all snapshots of a repository. It need not be one
/// of them.
pub(crate) fn with_descendants(snapshots: &[SnapshotSummary], root: Digest) -> HashSet<Digest> {
    let below = Lineage::of(snapshots).below(root);
    below.into_iter().map(|at| snapshots[at].digest).chain([root]).collect()
}

/// How the snapshots of a list descend from each other. They are named by their positions in it.
struct Lineage<'a> {
    snapshots: &'a [SnapshotSummary],
    by_digest: HashMap<Digest, usize>,
    /// Of each digest that is a parent, also of one that is not in the list.
    children: HashMap<Digest, Vec<usize>>,
}

impl<'a> Lineage<'a> {
    fn of(snapshots: &'a [SnapshotSummary]) -> Self {
        let by_digest = snapshots.iter().enumerate().map(|(at, snapshot)| (snapshot.digest, at)).collect();
        let mut children: HashMap<Digest, Vec<usize>> = HashMap::new();
        for (at, snapshot) in snapshots.iter().enumerate() {
            for parent in &snapshot.parents {
                children.entry(*parent).or_default().push(at);
            }
        }
        Self { snapshots, by_digest, children }
    }

    fn parents(&self, at: usize) -> impl Iterator<Item = usize> {
        self.snapshots[at].parents.iter().filter_map(|parent| self.by_digest.get(parent).copied())
    }

    fn children(&self, of: &Digest) -> &[usize] {
        self.children.get(of).map_or(&[], Vec::as_slice)
    }

    /// Everything that descends from a snapshot.
    fn below(&self, root: Digest) -> HashSet<usize> {
        let (mut found, mut queue) = (HashSet::new(), vec![root]);
        while let Some(parent) = queue.pop() {
            for child in self.children(&parent) {
                if found.insert(*child) {
                    queue.push(self.snapshots[*child].digest);
                }
            }
        }
        found
    }

    /// Those of the selected that have `last` or more selected ones between them and the nearest
    /// snapshot without children, that one included.
    fn behind(&self, last: usize, selected: &[usize]) -> Vec<usize> {
        let mut counts = vec![false; self.snapshots.len()];
        selected.iter().for_each(|at| counts[*at] = true);
        let mut between = vec![usize::MAX; self.snapshots.len()];
        let mut queue: VecDeque<usize> =
            (0..self.snapshots.len()).filter(|at| self.children(&self.snapshots[*at].digest).is_empty()).collect();
        queue.iter().for_each(|at| between[*at] = 0);
        // Nearest first: what does not count is passed before what does.
        while let Some(at) = queue.pop_front() {
            let distance = between[at] + usize::from(counts[at]);
            for parent in self.parents(at) {
                if distance < between[parent] {
                    between[parent] = distance;
                    if counts[at] { queue.push_back(parent) } else { queue.push_front(parent) }
                }
            }
        }
        selected.iter().copied().filter(|at| between[*at] >= last).collect()
    }

    /// The chosen ones, each after all its ancestors.
    fn ancestors_first(&self, chosen: &HashSet<usize>) -> Vec<usize> {
        let mut left: Vec<usize> = (0..self.snapshots.len()).map(|at| self.parents(at).count()).collect();
        let mut ready: VecDeque<usize> = (0..left.len()).rev().filter(|at| left[*at] == 0).collect();
        let mut order = Vec::with_capacity(chosen.len());
        while let Some(at) = ready.pop_front() {
            if chosen.contains(&at) {
                order.push(at);
            }
            for child in self.children(&self.snapshots[at].digest) {
                left[*child] -= 1;
                if left[*child] == 0 {
                    ready.push_back(*child);
                }
            }
        }
        order
    }

    /// Those of the chosen below which everything is chosen, descendants first.
    fn branches(&self, chosen: Vec<usize>) -> Vec<usize> {
        let mut left: Vec<usize> = self.snapshots.iter().map(|snapshot| self.children(&snapshot.digest).len()).collect();
        let mut is_chosen = vec![false; self.snapshots.len()];
        chosen.iter().for_each(|at| is_chosen[*at] = true);
        let (mut ready, mut order) = (chosen, Vec::new());
        ready.retain(|at| left[*at] == 0);
        while let Some(at) = ready.pop() {
            order.push(at);
            for parent in self.parents(at) {
                left[parent] -= 1;
                if left[parent] == 0 && is_chosen[parent] {
                    ready.push(parent);
                }
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::Index;

    const HOUR: u64 = 3_600_000;

    fn digest(name: &str) -> Digest {
        Digest::sha256(name.as_bytes())
    }

    /// A snapshot that was pushed so many hours ago, named by that.
    fn snapshot(hours: u64, tags: &[&str], parents: &[u64]) -> SnapshotSummary {
        SnapshotSummary {
            digest: digest(&hours.to_string()),
            tags: tags.iter().map(|tag| tag.parse().unwrap()).collect(),
            parents: parents.iter().map(|parent| digest(&parent.to_string())).collect(),
            pushed_at: 1000 * HOUR - hours * HOUR,
            logical_bytes: 0,
            new_bytes: 0,
        }
    }

    /// The ages in hours of the snapshots that are chosen.
    fn chosen(all: &[SnapshotSummary], criteria: &Criteria) -> Vec<u64> {
        let stays = |snapshot: &SnapshotSummary| snapshot.tags.iter().any(|tag| tag.as_str() == "keep");
        criteria.choose(all, 1000 * HOUR, stays).into_iter().map(|s| 1000 - s.pushed_at / HOUR).collect()
    }

    fn patterns(patterns: &[&str]) -> Vec<Pattern> {
        patterns.iter().map(|pattern| pattern.parse().unwrap()).collect()
    }

    #[test]
    fn a_snapshot_is_deleted_if_it_meets_every_criterion() {
        let all = [
            snapshot(1, &["main"], &[]),
            snapshot(2, &[], &[]),
            snapshot(3, &["try-1"], &[]),
            snapshot(4, &["try-2", "main-2"], &[]),
            snapshot(5, &[], &[]),
            snapshot(6, &["try-3", "try-4"], &[]),
        ];
        let last = |last| Some(KeepLast::OfRepository(last));
        let older_than = |hours: u64| Some(Duration::from_secs(hours * 3600));
        let none = Criteria::default();
        let untagged = Criteria { untagged: true, ..none.clone() };
        let tries = Criteria { tags: patterns(&["try-*"]), ..none.clone() };
        let both = Criteria { tags: patterns(&["try-*", "main-*"]), ..none.clone() };
        assert_eq!(chosen(&all, &none), [1, 2, 3, 4, 5, 6]);
        assert_eq!(chosen(&all, &Criteria { keep_last: last(2), ..none.clone() }), [3, 4, 5, 6]);
        assert_eq!(chosen(&all, &Criteria { older_than: older_than(4), ..none.clone() }), [5, 6]);
        assert_eq!(chosen(&all, &untagged), [2, 5]);
        assert_eq!(chosen(&all, &Criteria { keep_last: last(1), ..untagged }), [5]);
        assert_eq!(chosen(&all, &tries), [3, 6], "one that has another tag stays");
        assert_eq!(chosen(&all, &Criteria { older_than: older_than(3), ..both }), [4, 6]);
        assert_eq!(chosen(&all, &Criteria { untagged: true, keep_last: last(2), ..tries }), [5, 6]);
        assert_eq!(chosen(&all, &Criteria { keep_last: last(99), ..none }), [0_u64; 0]);
    }

    /// Two branches of a chain: 9 ◀ 8 ◀ 5 ◀ 3 ◀ 1, and 8 ◀ 7 ◀ 2. Beside them 6, whose parent is
    /// not here.
    fn family() -> [SnapshotSummary; 8] {
        [
            snapshot(1, &["a"], &[3]),
            snapshot(2, &["b"], &[7]),
            snapshot(3, &[], &[5]),
            snapshot(5, &[], &[8]),
            snapshot(6, &["c"], &[77]),
            snapshot(7, &[], &[8]),
            snapshot(8, &[], &[9]),
            snapshot(9, &["base"], &[]),
        ]
    }

    #[test]
    fn the_last_of_each_lineage_are_counted_from_its_ends() {
        let of = |last, untagged| Criteria { keep_last: Some(KeepLast::OfLineage(last)), untagged, ..Criteria::default() };
        assert_eq!(chosen(&family(), &of(1, false)), [9, 8, 5, 7, 3], "ancestors first");
        assert_eq!(chosen(&family(), &of(2, false)), [9, 8, 5], "8 is third of its nearest end");
        assert_eq!(chosen(&family(), &of(3, false)), [9]);
        assert_eq!(chosen(&family(), &of(1, true)), [8, 5], "tagged ones do not count: 3 and 7 are the last ones");
        assert_eq!(chosen(&family(), &of(0, true)), [8, 5, 7, 3]);
        // What is left after a run stays.
        let left: Vec<SnapshotSummary> = family().into_iter().filter(|s| ![5, 8, 9].contains(&(1000 - s.pushed_at / HOUR))).collect();
        assert_eq!(chosen(&left, &of(2, false)), [0_u64; 0]);
    }

    #[test]
    fn branches_go_as_a_whole_from_their_ends() {
        let below = |base: &str, hours: u64| Criteria {
            below: Some(digest(base)),
            older_than: Some(Duration::from_secs(hours * 3600)),
            ..Criteria::default()
        };
        let found = chosen(&family(), &below("9", 0));
        let position = |hours: u64| found.iter().position(|found| *found == hours).unwrap();
        assert_eq!(found.len(), 6, "neither the base nor what is beside it: {found:?}");
        for (child, parent) in [(1, 3), (3, 5), (5, 8), (2, 7), (7, 8)] {
            assert!(position(child) < position(parent), "{child} before {parent}: {found:?}");
        }
        assert_eq!(chosen(&family(), &below("9", 1)), [2, 7], "the other branch and what both have stay for 1");
        assert_eq!(chosen(&family(), &below("77", 0)), [6], "the base need not be there");
        assert_eq!(chosen(&family(), &below("1", 0)), [0_u64; 0]);
        let newest = Criteria { below: Some(digest("9")), keep_last: Some(KeepLast::OfRepository(1)), ..Criteria::default() };
        assert_eq!(chosen(&family(), &newest), [2, 7]);
        let mut kept = family();
        kept[5] = snapshot(7, &["keep"], &[8]);
        assert_eq!(chosen(&kept, &below("9", 0)), [2, 1, 3, 5], "what leads to one that stays stays");
    }

    #[test]
    fn what_stays_is_counted_and_not_chosen() {
        let all = [snapshot(1, &[], &[]), snapshot(2, &["keep"], &[]), snapshot(3, &[], &[]), snapshot(4, &["keep"], &[])];
        let last = Criteria { keep_last: Some(KeepLast::OfRepository(2)), ..Criteria::default() };
        assert_eq!(chosen(&all, &last), [3]);
    }

    /// For each snapshot: its parents among those before it, its tag if it has one, and how many
    /// hours ago it was pushed. A parent may have been pushed after its child.
    fn graph() -> impl Strategy<Value = Vec<SnapshotSummary>> {
        let tag = prop_oneof![3 => Just(None), 1 => Just(Some("a")), 1 => Just(Some("keep"))];
        let one = (proptest::collection::vec(any::<Index>(), 0..3), tag, 0_u64..20);
        proptest::collection::vec(one, 1..25).prop_map(|rows| {
            let made = rows.into_iter().enumerate().map(|(at, (parents, tag, hours))| SnapshotSummary {
                digest: digest(&at.to_string()),
                parents: parents.iter().filter(|_| at > 0).map(|parent| digest(&parent.index(at).to_string())).collect(),
                ..snapshot(hours, tag.as_slice(), &[])
            });
            let mut all: Vec<SnapshotSummary> = made.collect();
            all.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.pushed_at));
            all
        })
    }

    fn any_criteria() -> impl Strategy<Value = Criteria> {
        let keep_last = prop_oneof![
            1 => Just(None),
            1 => (0_usize..5).prop_map(|last| Some(KeepLast::OfRepository(last))),
            4 => (0_usize..5).prop_map(|last| Some(KeepLast::OfLineage(last))),
        ];
        (keep_last, any::<bool>(), any::<bool>(), proptest::option::of(0_u64..20)).prop_map(|(keep_last, untagged, below, hours)| {
            let below = below && !matches!(keep_last, Some(KeepLast::OfLineage(_)));
            Criteria {
                untagged,
                below: below.then(|| digest("0")),
                keep_last,
                older_than: hours.map(|hours| Duration::from_secs(hours * 3600)),
                ..Criteria::default()
            }
        })
    }

    proptest! {
        #[test]
        fn a_run_that_is_cut_off_anywhere_leaves_the_rest_to_the_next(all in graph(), criteria in any_criteria()) {
            let stays = |snapshot: &SnapshotSummary| snapshot.tags.iter().any(|tag| tag.as_str() == "keep");
            let choose = |of: &[SnapshotSummary]| -> Vec<Digest> {
                criteria.choose(of, 1000 * HOUR, stays).into_iter().map(|snapshot| snapshot.digest).collect()
            };
            let whole = choose(&all);
            for cut in 0..=whole.len() {
                let (gone, rest) = whole.split_at(cut);
                let left: Vec<SnapshotSummary> = all.iter().filter(|snapshot| !gone.contains(&snapshot.digest)).cloned().collect();
                let again: HashSet<Digest> = choose(&left).into_iter().collect();
                prop_assert_eq!(&again, &rest.iter().copied().collect::<HashSet<_>>(), "cut after {} of {:?}", cut, &whole);
            }
        }
    }
}
