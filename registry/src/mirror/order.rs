//! The order of snapshots: what is copied first, and which tags lag behind.

use super::names::Names;
use pfr_schema::Digest;
use pfr_schema::api::SnapshotSummary;
use std::collections::{HashMap, HashSet};

/// Tells a tag of the target that lags behind the source from one that diverged.
pub(super) struct Lineage<'a> {
    at_source: HashSet<Digest>,
    parents: HashMap<Digest, &'a [Digest]>,
}

impl<'a> Lineage<'a> {
    pub(super) fn new(here: &'a Names, there: &'a Names) -> Self {
        let all = here.snapshots.iter().chain(&there.snapshots);
        Self {
            at_source: here.snapshots.iter().map(|snapshot| snapshot.digest).collect(),
            parents: all.map(|snapshot| (snapshot.digest, &*snapshot.parents)).collect(),
        }
    }

    /// Whether `seen` is known at the source or, if it was deleted there since, is an ancestor of
    /// the snapshot that the tag moves to.
    pub(super) fn leads(&self, seen: Digest, to: Digest) -> bool {
        let (mut queue, mut met) = (vec![to], HashSet::from([to]));
        while let Some(next) = queue.pop().filter(|next| *next != seen && !self.at_source.contains(&seen)) {
            let parents = self.parents.get(&next).copied().unwrap_or_default();
            queue.extend(parents.iter().copied().filter(|parent| met.insert(*parent)));
        }
        met.contains(&seen) || self.at_source.contains(&seen)
    }
}

/// The snapshots (newest first) that are not held: oldest first, but parents before their children
/// whatever their times are.
pub(super) fn parents_first(snapshots: &[SnapshotSummary], held: &HashSet<Digest>) -> Vec<Digest> {
    let lacking: HashMap<Digest, &SnapshotSummary> =
        snapshots.iter().filter(|snapshot| !held.contains(&snapshot.digest)).map(|snapshot| (snapshot.digest, snapshot)).collect();
    let (mut order, mut entered) = (Vec::with_capacity(lacking.len()), HashSet::new());
    for snapshot in snapshots.iter().rev().filter(|snapshot| lacking.contains_key(&snapshot.digest)) {
        // Each entry is visited twice: before its parents are placed, and after.
        let mut stack = vec![(snapshot.digest, false)];
        while let Some((next, ready)) = stack.pop() {
            if ready {
                order.push(next);
            // An entered snapshot is placed already, or will be. The list is foreign and may name a
            // snapshot as its own ancestor.
            } else if let Some(found) = lacking.get(&next).filter(|_| entered.insert(next)) {
                stack.push((next, true));
                stack.extend(found.parents.iter().map(|parent| (*parent, false)));
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn digest(name: &str) -> Digest {
        Digest::sha256(name.as_bytes())
    }

    fn snapshot(name: &str, parents: &[&str]) -> SnapshotSummary {
        let parents = parents.iter().map(|parent| digest(parent)).collect();
        SnapshotSummary { digest: digest(name), tags: vec![], parents, pushed_at: 0, logical_bytes: 0, new_bytes: 0 }
    }

    #[test]
    fn parents_come_first_whatever_the_order_of_the_list() {
        // Newest first: "a" claims to be newer than its children.
        let list = [snapshot("a", &["gone"]), snapshot("c", &["b", "a"]), snapshot("b", &["a"]), snapshot("held", &[])];
        let order = parents_first(&list, &HashSet::from([digest("held")]));
        assert_eq!(order, ["a", "b", "c"].map(digest));
    }

    #[test]
    fn a_tag_lags_if_the_source_knows_where_it_is_or_it_is_an_ancestor() {
        let here = Names { snapshots: vec![snapshot("c", &["b"]), snapshot("x", &[])], tags: BTreeMap::new() };
        let there = Names { snapshots: vec![snapshot("b", &["a"]), snapshot("a", &[]), snapshot("own", &["a"])], tags: BTreeMap::new() };
        let lineage = Lineage::new(&here, &there);
        for (seen, leads) in [("c", true), ("x", true), ("b", true), ("a", true), ("own", false)] {
            assert_eq!(lineage.leads(digest(seen), digest("c")), leads, "{seen}");
        }
    }

    #[test]
    fn a_list_in_which_snapshots_are_their_own_ancestors_has_an_end() {
        let list = [snapshot("self", &["self", "self"]), snapshot("c", &["b"]), snapshot("b", &["a"]), snapshot("a", &["c", "a"])];
        let order = parents_first(&list, &HashSet::new());
        assert_eq!(order.len(), 4, "{order:?}");
        assert_eq!(order.iter().collect::<HashSet<_>>().len(), 4);
    }
}
