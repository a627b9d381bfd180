//! Parents before children.

use pfr_schema::Digest;
use std::collections::HashMap;

/// Positions of `nodes` (digest, parents), each after those of its parents; otherwise in the order
/// given.
///
/// Parents that are not among the nodes do not count. True digests form no circle, but false
/// documents may: a circle is cut where it closes. Takes memory on the heap only, however long the
/// lineage.
#[must_use]
pub fn order(nodes: &[(Digest, Vec<Digest>)]) -> Vec<usize> {
    let positions: HashMap<Digest, usize> = nodes.iter().enumerate().rev().map(|(i, (digest, _))| (*digest, i)).collect();
    let mut begun = vec![false; nodes.len()];
    let mut ordered = Vec::with_capacity(nodes.len());
    for start in 0..nodes.len() {
        let mut stack = vec![(start, 0)];
        while let Some((node, next)) = stack.pop() {
            if next == 0 && std::mem::replace(&mut begun[node], true) {
                continue;
            }
            match nodes[node].1.get(next) {
                None => ordered.push(node),
                Some(parent) => {
                    stack.push((node, next + 1));
                    stack.extend(positions.get(parent).filter(|parent| !begun[**parent]).map(|parent| (*parent, 0)));
                }
            }
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(n: usize) -> Digest {
        Digest::sha256(&n.to_le_bytes())
    }

    #[test]
    fn a_long_lineage_and_a_circle_end() {
        let chain: Vec<_> = (0..200_000).map(|n| (digest(n), vec![digest(n + 1)])).collect();
        assert!(order(&chain).into_iter().eq((0..200_000).rev()));
        let circle = [(digest(0), vec![digest(1)]), (digest(1), vec![digest(2)]), (digest(2), vec![digest(0), digest(2)])];
        assert_eq!(order(&circle), [2, 1, 0]);
        let twice = [(digest(0), vec![]), (digest(0), vec![])];
        assert_eq!(order(&twice), [0, 1]);
    }

    proptest! {
        #[test]
        fn every_node_once_and_parents_first(links in prop::collection::vec(prop::collection::vec(0_usize..40, 0..3), 0..40), acyclic in any::<bool>()) {
            let parents = |i: usize| links[i].iter().filter(move |p| !acyclic || **p > i).map(|p| digest(*p)).collect();
            let nodes: Vec<_> = (0..links.len()).map(|i| (digest(i), parents(i))).collect();
            let ordered = order(&nodes);
            let mut all = ordered.clone();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..nodes.len()));
            if acyclic {
                let place: HashMap<Digest, usize> = ordered.iter().enumerate().map(|(place, i)| (nodes[*i].0, place)).collect();
                for (digest, parents) in &nodes {
                    for parent in parents.iter().filter_map(|p| place.get(p)) {
                        prop_assert!(parent < &place[digest]);
                    }
                }
            }
        }
    }
}
