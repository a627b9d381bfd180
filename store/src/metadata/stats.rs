//! The costs of snapshots: the bytes that each is the first to reach, and those that only it holds.
//!
//! A transaction takes some snapshots, the oldest first, and the set of what was reached before. It
//! reads nodes, and no rows of pages: a page has the length that its page chunk says. A deletion of
//! a snapshot can free only what the snapshot is the first to reach. So references are read for
//! those objects alone, by ranges of row ids: of the pages of a chunk that would be freed, the
//! database returns those that another node lists as well.
//!
//! What several snapshots hold together is counted down from their references, in steps: each asks
//! about what some nodes list, and the caller has the sums.

mod loaded;

use super::lists::{snapshot, snapshot_rows};
use super::names::visible;
use super::sql::{Column, Sql, values};
use super::tx::{Outcome, Tx};
use super::{Costs, CostsPage, Held, ObjectId, ObjectSet, SharedObject, SnapshotRow, children, images, snapshots};
use loaded::Group;
use pfr_schema::{Digest, RepositoryName};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Snapshots of one transaction, at most.
const SNAPSHOTS: u64 = 64;

/// First and last of row ids that follow each other.
type Range = (ObjectId, ObjectId);

/// The costs of the snapshots of a repository whose row ids are larger than `after`: some of them,
/// the oldest first. `reached` is what counts as reached before. With `only`, those of them that it
/// names.
pub(super) async fn costs(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    after: i64,
    only: Option<&[Digest]>,
    reached: &ObjectSet,
) -> Outcome<CostsPage> {
    let id = visible(tx, repository).await?;
    let mut manifests: Vec<i64> = match only {
        None => {
            let find = "SELECT id FROM manifests WHERE repository = $1 AND id > $2 AND NOT is_image ORDER BY id LIMIT $3";
            tx.query(find, values![id, after, SNAPSHOTS]).await?
        }
        Some(digests) => {
            let find = "SELECT m.id FROM objects o /* CROSS */ JOIN manifests m ON m.repository = $1 AND m.id > $2 AND m.object = o.id
                          AND NOT m.is_image WHERE o.digest = ANY($3)";
            tx.query(find, values![id, after, digests]).await?
        }
    };
    manifests.sort_unstable();
    let mut snapshots = snapshot_rows(tx, &manifests).await?;
    let roots: Vec<ObjectId> = snapshots.iter().map(|row| row.object).collect();
    let (group, taken) = Group::load(tx, reached, &roots).await?;
    let all = manifests.len();
    let more = taken < all || (only.is_none() && all as u64 == SNAPSHOTS);
    manifests.truncate(taken);
    snapshots.truncate(taken);
    let mut walk = Walk { group, fresh: ObjectSet::new() };
    let walked: Vec<Walked> = snapshots.iter().map(|row| walk.snapshot(row, reached)).collect();
    let freed = merged(walked.iter().flat_map(|walked| &walked.chunks).flat_map(|chunk| chunk.own.iter().copied()).collect());
    let shared = shared(tx, freed).await?;
    let exclusive = |walked: &Walked| walk.exclusive(walked, &shared);
    let exclusive: Vec<u64> = walked.iter().map(exclusive).collect();
    let costs = snapshots.into_iter().zip(&walked).zip(exclusive);
    let costs = costs.map(|((snapshot, walked), exclusive)| Costs { snapshot, new: walked.new, exclusive }).collect();
    let stored = frame_bytes(tx, ranges(walk.fresh.iter().map(u64::cast_signed))).await?;
    Ok(CostsPage { costs, reached: walk.fresh, stored, next: manifests.last().copied().filter(|_| more) })
}

/// The costs of one snapshot, as if it were the first: its new bytes are all that it reaches.
pub(super) async fn cost(tx: &mut dyn Tx, repository: &RepositoryName, digest: &Digest) -> Outcome<Costs> {
    let snapshot = snapshot(tx, repository, digest).await?;
    let nothing = ObjectSet::new();
    let (group, _) = Group::load(tx, &nothing, &[snapshot.object]).await?;
    let mut walk = Walk { group, fresh: ObjectSet::new() };
    let walked = walk.snapshot(&snapshot, &nothing);
    let freed = merged(walked.chunks.iter().flat_map(|chunk| chunk.own.iter().copied()).collect());
    let exclusive = walk.exclusive(&walked, &shared(tx, freed).await?);
    Ok(Costs { snapshot, new: walked.new, exclusive })
}

/// The references that a deletion of snapshots takes, as `snapshots::delete_snapshot` does: of
/// their manifests and tags, and of those of their signatures. Also how many snapshots there are.
pub(super) async fn deletion(tx: &mut dyn Tx, repository: &RepositoryName, digests: &[Digest]) -> Outcome<(u64, Vec<(ObjectId, u64)>)> {
    let id: Option<i64> = tx.first("SELECT id FROM repositories WHERE name = $1", values![repository]).await?;
    let Some(id) = id else { return Ok((0, Vec::new())) };
    let find =
        "SELECT m.id, o.digest FROM objects o /* CROSS */ JOIN manifests m ON m.repository = $1 AND m.object = o.id AND NOT m.is_image
                WHERE o.digest = ANY($2)";
    let found: Vec<(i64, Digest)> = tx.query(find, values![id, digests]).await?;
    let mut manifests: BTreeSet<i64> = found.iter().map(|(manifest, _)| *manifest).collect();
    let subjects: Vec<Digest> = found.iter().map(|(_, digest)| *digest).collect();
    let signatures = images::signatures_of(tx, id, &subjects, true, snapshots::SIGNATURES).await?;
    manifests.extend(signatures.into_iter().map(|row| row.manifest));
    let manifests: Vec<i64> = manifests.into_iter().collect();
    let find = "SELECT m.object, 1 + (SELECT COUNT(*) FROM tags t WHERE t.manifest = m.id) FROM manifests m WHERE m.id = ANY($1)";
    let references = tx.query(find, values![&manifests]).await?;
    Ok((found.len() as u64, references))
}

/// What some nodes list, and the objects of `further` references. Looks at one node at least, and
/// at no more than have `list_bytes` bytes of packed lists together.
pub(super) async fn held(tx: &mut dyn Tx, nodes: &[ObjectId], further: &[(ObjectId, u64)], list_bytes: u64) -> Outcome<Held> {
    const SINGLE: Sql = Sql::of_each(
        "SELECT s.bytes, s.stored FROM unnest($1::bigint[], $2::bigint[]) AS u(first, last)
         JOIN LATERAL (SELECT COALESCE(SUM(size), 0)::bigint AS bytes, COALESCE(SUM(frame_len), 0)::bigint AS stored
                       FROM objects WHERE id BETWEEN u.first AND u.last AND refs <= 1) s ON true",
        "SELECT COALESCE(SUM(size), 0), COALESCE(SUM(frame_len), 0) FROM objects WHERE id BETWEEN $1 AND $2 AND refs <= 1",
    );
    const SHARED: Sql = Sql::of_each(
        "SELECT o.id, o.size, o.frame_len, o.refs FROM unnest($1::bigint[], $2::bigint[]) AS u(first, last)
         JOIN LATERAL (SELECT id, size, frame_len, refs FROM objects WHERE id BETWEEN u.first AND u.last AND refs > 1) o ON true",
        "SELECT id, size, frame_len, refs FROM objects WHERE id BETWEEN $1 AND $2 AND refs > 1",
    );
    let mut lengths: Vec<(ObjectId, u64)> =
        tx.query("SELECT object, octet_length(children) FROM containers WHERE object = ANY($1)", values![nodes]).await?;
    let left = lengths.split_off(within(lengths.iter().map(|(_, length)| *length), list_bytes));
    let nodes: Vec<ObjectId> = lengths.into_iter().map(|(id, _)| id).collect();
    let lists: Vec<(ObjectId, Vec<u8>)> =
        tx.query("SELECT object, children FROM containers WHERE object = ANY($1)", values![&nodes]).await?;
    let mut seen: BTreeMap<ObjectId, u64> = BTreeMap::new();
    for (id, references) in further {
        *seen.entry(*id).or_default() += references;
    }
    for (_, packed) in lists {
        for id in children::unpack(&packed)? {
            *seen.entry(id).or_default() += 1;
        }
    }
    let ranges = ranges(seen.keys().copied());
    let sums: Vec<(u64, u64)> = tx.rows(SINGLE, columns(&ranges), &[], false).await?;
    let rows: Vec<(ObjectId, u64, u64, u64)> = tx.rows(SHARED, columns(&ranges), &[], false).await?;
    let mut nodes: HashSet<ObjectId> = nodes_in(tx, &ranges).await?.into_iter().collect();
    let shared = rows.into_iter().map(|(id, size, frame_len, refs)| {
        let seen = seen.get(&id).copied().unwrap_or_default();
        SharedObject { id, size, frame_len, refs, seen, is_node: nodes.remove(&id) }
    });
    let shared: Vec<SharedObject> = shared.collect();
    let (bytes, stored) = sums.into_iter().fold((0_u64, 0_u64), |sum, add| (sum.0 + add.0, sum.1 + add.1));
    Ok(Held { bytes, stored, nodes: nodes.into_iter().collect(), shared, left: left.into_iter().map(|(id, _)| id).collect() })
}

/// How many of the first of these lengths add up to `most` at most: one, if even that is longer.
fn within(lengths: impl Iterator<Item = u64>, most: u64) -> usize {
    let mut sum = 0_u64;
    let fits = |(at, length): &(usize, u64)| {
        sum = sum.saturating_add(*length);
        *at == 0 || sum <= most
    };
    lengths.enumerate().take_while(fits).count()
}

/// Snapshots in their order, over what was loaded of them.
struct Walk {
    group: Group,
    /// What they reach that was not reached before.
    fresh: ObjectSet,
}

/// The costs of a snapshot without the references of pages.
struct Walked {
    /// Bytes that it is the first to reach.
    new: u64,
    /// Nodes that its deletion frees.
    freed: Vec<ObjectId>,
    /// Page chunks among them.
    chunks: Vec<Chunk>,
}

/// A page chunk.
struct Chunk {
    /// Bytes of a page.
    each: u64,
    /// The pages that were reached here first.
    own: Vec<Range>,
}

impl Walk {
    fn snapshot(&mut self, row: &SnapshotRow, reached: &ObjectSet) -> Walked {
        let (mut new, mut chunks) = (0_u64, HashMap::new());
        let mut next = vec![row.object];
        while let Some(id) = next.pop() {
            if reached.contains(id.unsigned_abs()) || !self.fresh.insert(id.unsigned_abs()) {
                continue;
            }
            let Some(node) = self.group.nodes.get(&id) else {
                new += self.group.leaves.get(&id).map_or(0, |leaf| leaf.size);
                continue;
            };
            new += node.size;
            let Some(each) = node.each else {
                next.extend(&node.open);
                continue;
            };
            let (nodes, pages): (Vec<ObjectId>, Vec<ObjectId>) = node.open.iter().partition(|id| self.group.node_pages.contains(*id));
            next.extend(nodes);
            let mut own: Vec<Range> = Vec::new();
            // Pages of a push have row ids one after the other: one step for all of them.
            for part in pages.chunk_by(follows) {
                let (Some(first), Some(last)) = (part.first(), part.last()) else { continue };
                let range = first.unsigned_abs()..=last.unsigned_abs();
                if self.fresh.range_cardinality(range.clone()) == 0 {
                    self.fresh.insert_range(range);
                    own.push((*first, *last));
                } else {
                    own.extend(part.iter().filter(|id| self.fresh.insert(id.unsigned_abs())).map(|id| (*id, *id)));
                }
            }
            let own = merged(own);
            new += each * own.iter().map(|(first, last)| first.abs_diff(*last) + 1).sum::<u64>();
            chunks.insert(id, Chunk { each, own });
        }
        let freed = self.freed(row);
        let chunks = freed.iter().filter_map(|id| chunks.remove(id)).collect();
        Walked { new, freed, chunks }
    }

    /// The nodes that a deletion of a snapshot and its tags frees.
    fn freed(&self, row: &SnapshotRow) -> Vec<ObjectId> {
        let mut taken: HashMap<ObjectId, u64> = HashMap::new();
        let (mut freed, mut next) = (Vec::new(), vec![(row.object, 1 + row.tags.len() as u64)]);
        while let Some((id, references)) = next.pop() {
            let Some(node) = self.group.nodes.get(&id) else { continue };
            let taken = taken.entry(id).or_default();
            *taken += references;
            if *taken == node.refs {
                next.extend(node.open.iter().map(|child| (*child, 1)));
                freed.push(id);
            }
        }
        freed
    }

    /// Bytes that a deletion of a snapshot frees; `shared` has the pages with several references.
    fn exclusive(&self, walked: &Walked, shared: &HashMap<ObjectId, u64>) -> u64 {
        let freed = || walked.freed.iter().filter_map(|id| self.group.nodes.get(id));
        let mut bytes: u64 = freed().map(|node| node.size).sum();
        // Leaves that more than one node lists, and their bytes and references.
        let mut listed_often: HashMap<ObjectId, (u64, u64)> = HashMap::new();
        for chunk in &walked.chunks {
            for id in chunk.own.iter().flat_map(|(first, last)| *first..=*last) {
                match shared.get(&id) {
                    Some(refs) => drop(listed_often.insert(id, (chunk.each, *refs))),
                    None => bytes += chunk.each,
                }
            }
        }
        for id in freed().filter(|node| node.each.is_none()).flat_map(|node| &node.open) {
            match self.group.leaves.get(id) {
                Some(leaf) if leaf.refs == 1 => bytes += leaf.size,
                Some(leaf) => drop(listed_often.insert(*id, (leaf.size, leaf.refs))),
                None => {}
            }
        }
        if listed_often.is_empty() {
            return bytes;
        }
        for id in freed().flat_map(|node| &node.open) {
            if let Some((size, refs)) = listed_often.get_mut(id) {
                *refs = refs.saturating_sub(1);
                if *refs == 0 {
                    bytes += *size;
                }
            }
        }
        bytes
    }
}

/// Of the objects in these ranges, those with more than one reference.
async fn shared(tx: &mut dyn Tx, ranges: Vec<Range>) -> Outcome<HashMap<ObjectId, u64>> {
    const FIND: Sql = Sql::of_each(
        "SELECT o.id, o.refs FROM unnest($1::bigint[], $2::bigint[]) AS u(first, last)
         JOIN LATERAL (SELECT id, refs FROM objects WHERE id BETWEEN u.first AND u.last AND refs > 1) o ON true",
        "SELECT id, refs FROM objects WHERE id BETWEEN $1 AND $2 AND refs > 1",
    );
    let rows: Vec<(ObjectId, u64)> = tx.rows(FIND, columns(&ranges), &[], false).await?;
    Ok(rows.into_iter().collect())
}

/// The nodes in these ranges.
async fn nodes_in(tx: &mut dyn Tx, ranges: &[Range]) -> Outcome<Vec<ObjectId>> {
    const FIND: Sql = Sql::of_each(
        "SELECT c.object FROM unnest($1::bigint[], $2::bigint[]) AS u(first, last)
         JOIN LATERAL (SELECT object FROM containers WHERE object BETWEEN u.first AND u.last) c ON true",
        "SELECT object FROM containers WHERE object BETWEEN $1 AND $2",
    );
    tx.rows(FIND, columns(ranges), &[], false).await
}

/// Frame bytes of the objects in these ranges.
async fn frame_bytes(tx: &mut dyn Tx, ranges: Vec<Range>) -> Outcome<u64> {
    const SUM: Sql = Sql::of_each(
        "SELECT s.bytes FROM unnest($1::bigint[], $2::bigint[]) AS u(first, last)
         JOIN LATERAL (SELECT COALESCE(SUM(frame_len), 0)::bigint AS bytes FROM objects WHERE id BETWEEN u.first AND u.last) s ON true",
        "SELECT COALESCE(SUM(frame_len), 0) FROM objects WHERE id BETWEEN $1 AND $2",
    );
    let sums: Vec<u64> = tx.rows(SUM, columns(&ranges), &[], false).await?;
    Ok(sums.into_iter().sum())
}

fn columns(ranges: &[Range]) -> Vec<Column> {
    vec![ranges.iter().map(|range| range.0).collect(), ranges.iter().map(|range| range.1).collect()]
}

/// Whether a row id is the next one.
fn follows(id: &ObjectId, next: &ObjectId) -> bool {
    id + 1 == *next
}

/// Ascending ids as ranges.
fn ranges(ids: impl Iterator<Item = ObjectId>) -> Vec<Range> {
    merged(ids.map(|id| (id, id)).collect())
}

/// Ranges that do not overlap, with those that follow each other as one.
fn merged(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    ranges.dedup_by(|next, range| {
        let follows = range.1 + 1 == next.0;
        if follows {
            range.1 = next.1;
        }
        follows
    });
    ranges
}
