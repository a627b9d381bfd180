//! The nodes of some snapshots that no earlier snapshot reached.

use super::{follows, merged, nodes_in, ranges};
use crate::metadata::children::unpack;
use crate::metadata::sql::values;
use crate::metadata::tx::{Outcome, Tx};
use crate::metadata::{ObjectId, ObjectSet};
use std::collections::{HashMap, HashSet};

/// Bytes of packed lists of page chunks that are loaded for one transaction: a million pages.
const LISTS: u64 = 1 << 20;

/// A node: an object that lists others.
pub(super) struct Node {
    pub size: u64,
    pub refs: u64,
    /// Bytes of each page, if it is a page chunk.
    pub each: Option<u64>,
    /// Its children that no earlier snapshot reached. Those of a page chunk are loaded later.
    pub open: Vec<ObjectId>,
    /// Bytes of its packed list.
    bytes: u64,
}

/// An object that lists nothing, and is no page.
pub(super) struct Leaf {
    pub size: u64,
    pub refs: u64,
}

/// What was loaded.
#[derive(Default)]
pub(super) struct Group {
    pub nodes: HashMap<ObjectId, Node>,
    pub leaves: HashMap<ObjectId, Leaf>,
    /// Pages that are nodes too: hardly ever any, so that the set is asked and not the map.
    pub node_pages: HashSet<ObjectId>,
    /// Page chunks whose lists are there.
    chunks: HashSet<ObjectId>,
}

/// Row of a node: id, bytes, references, bytes of a page, bytes of its list, its list if it is no
/// page chunk.
type RawNode = (ObjectId, u64, u64, Option<u64>, u64, Option<Vec<u8>>);

impl Group {
    /// Loads what some manifests reach and `reached` lacks. Returns how many manifests it loaded:
    /// at least one, and no more than memory is bounded to.
    pub(super) async fn load(tx: &mut dyn Tx, reached: &ObjectSet, manifests: &[ObjectId]) -> Outcome<(Self, usize)> {
        let mut group = Self::default();
        group.load_nodes(tx, reached, manifests.iter().copied().filter(|id| is_open(reached, *id)).collect()).await?;
        let (mut chunks, taken) = group.chunks_below(manifests, LISTS);
        while !chunks.is_empty() {
            // A page may be stored as a node, if another node lists the same bytes as one.
            let nodes = group.load_chunks(tx, reached, &chunks).await?;
            group.node_pages.extend(&nodes);
            group.load_nodes(tx, reached, nodes.clone()).await?;
            chunks = group.chunks_below(&nodes, u64::MAX).0;
        }
        Ok((group, taken))
    }

    /// Loads nodes and what they list, down to page chunks.
    async fn load_nodes(&mut self, tx: &mut dyn Tx, reached: &ObjectSet, mut level: Vec<ObjectId>) -> Outcome<()> {
        let find =
            "SELECT c.object, o.size, o.refs, c.page_bytes, octet_length(c.children), CASE WHEN c.page_bytes IS NULL THEN c.children END
                    FROM containers c JOIN objects o ON o.id = c.object WHERE c.object = ANY($1)";
        loop {
            level.retain(|id| !self.nodes.contains_key(id) && !self.leaves.contains_key(id));
            if level.is_empty() {
                return Ok(());
            }
            let nodes: Vec<RawNode> = tx.query(find, values![&level]).await?;
            let mut below = Vec::new();
            for (id, size, refs, each, bytes, packed) in nodes {
                let open = packed.as_deref().map_or(Ok(Vec::new()), |packed| opened(reached, packed))?;
                below.extend(&open);
                self.nodes.insert(id, Node { size, refs, each, open, bytes });
            }
            level.retain(|id| !self.nodes.contains_key(id));
            let leaves: Vec<(ObjectId, u64, u64)> = match level.is_empty() {
                true => Vec::new(),
                false => tx.query("SELECT id, size, refs FROM objects WHERE id = ANY($1)", values![&level]).await?,
            };
            self.leaves.extend(leaves.into_iter().map(|(id, size, refs)| (id, Leaf { size, refs })));
            below.sort_unstable();
            below.dedup();
            level = below;
        }
    }

    /// The page chunks below some nodes that are not loaded, and below how many nodes: as many as
    /// have `most` bytes of lists, but one at least.
    fn chunks_below(&self, roots: &[ObjectId], most: u64) -> (Vec<ObjectId>, usize) {
        let (mut seen, mut chunks, mut bytes) = (HashSet::new(), Vec::new(), 0);
        for (taken, root) in roots.iter().enumerate() {
            let (before, mut next) = (chunks.len(), vec![*root]);
            while let Some(id) = next.pop() {
                match self.nodes.get(&id).filter(|_| seen.insert(id)) {
                    Some(node) if node.each.is_none() => next.extend(&node.open),
                    Some(node) if !self.chunks.contains(&id) => {
                        chunks.push(id);
                        bytes += node.bytes;
                    }
                    _ => {}
                }
            }
            if bytes > most && taken > 0 {
                chunks.truncate(before);
                return (chunks, taken);
            }
        }
        (chunks, roots.len())
    }

    /// Loads the lists of page chunks; returns the pages among them that are nodes.
    async fn load_chunks(&mut self, tx: &mut dyn Tx, reached: &ObjectSet, chunks: &[ObjectId]) -> Outcome<Vec<ObjectId>> {
        let find = "SELECT object, children FROM containers WHERE object = ANY($1)";
        let lists: Vec<(ObjectId, Vec<u8>)> = tx.query(find, values![chunks]).await?;
        let mut pages = Vec::new();
        for (id, packed) in lists {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.open = opened(reached, &packed)?;
            pages.extend(ranges(node.open.iter().copied()));
            self.chunks.insert(id);
        }
        nodes_in(tx, &merged(pages)).await
    }
}

fn is_open(reached: &ObjectSet, id: ObjectId) -> bool {
    !reached.contains(id.unsigned_abs())
}

/// The upper and the lower 32 bits of an id.
fn halves(id: ObjectId) -> (u32, u32) {
    let id = id.unsigned_abs();
    ((id >> 32) as u32, id as u32)
}

/// The ids of a packed list that `reached` lacks.
fn opened(reached: &ObjectSet, packed: &[u8]) -> Outcome<Vec<ObjectId>> {
    let mut open = Vec::new();
    // A set has one bitmap for each 2³² ids. Most lists need only one of them, so it is looked up
    // once.
    let (mut high_of, mut bitmap) = (None, None);
    for part in unpack(packed)?.chunk_by(follows) {
        // A chunk of a fork lists many pages of its parent one after the other: one look-up.
        if let [first, .., last] = part
            && reached.contains_range(first.unsigned_abs()..=last.unsigned_abs())
        {
            continue;
        }
        for id in part {
            let (high, low) = halves(*id);
            if high_of != Some(high) {
                (high_of, bitmap) = (Some(high), reached.bitmaps().find(|(of, _)| *of == high).map(|(_, bitmap)| bitmap));
            }
            if bitmap.is_none_or(|bitmap| !bitmap.contains(low)) {
                open.push(*id);
            }
        }
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::children::pack;

    #[test]
    fn a_list_is_opened_to_exactly_what_was_not_reached() {
        let reached: ObjectSet = (10_u64..20).chain([30, 33]).collect();
        let of = |ids: &[ObjectId]| opened(&reached, &pack(ids.to_vec())).expect("just packed");
        assert_eq!(of(&[12, 13, 14, 40, 41, 42]), [40, 41, 42]);
        assert_eq!(of(&[8, 9, 10, 11, 19, 20, 21]), [8, 9, 20, 21]);
        assert_eq!(of(&[29, 30, 31, 33, 35]), [29, 31, 35]);
        assert_eq!(of(&[10, 30, 33]), [0; 0]);
        let high = 1 << 32;
        let reached: ObjectSet = [10_u64, (1 << 32) + 20, 3 << 32].into_iter().collect();
        let of = |ids: &[ObjectId]| opened(&reached, &pack(ids.to_vec())).expect("just packed");
        assert_eq!(
            of(&[10, 20, high + 10, high + 20, 2 * high + 10, 3 * high, 3 * high + 1]),
            [20, high + 10, 2 * high + 10, 3 * high + 1]
        );
        let across = [high - 2, high - 1, high, high + 1];
        let of = |reached: &[i64]| opened(&reached.iter().map(|id| id.unsigned_abs()).collect(), &pack(across.to_vec())).expect("packed");
        assert_eq!(of(&across), [0; 0]);
        assert_eq!(of(&[high - 1]), [high - 2, high, high + 1]);
    }
}
