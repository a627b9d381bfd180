//! The audit of the tables: compares counts and sizes with those that follow from nodes, manifests
//! and tags.

use super::arguments::countable;
use super::integrity::nests;
use super::quota::Growth;
use super::sql::{int, kind_of, values};
use super::tx::{Backend, Mode, Outcome, Tx};
use super::{Audit, Discrepancy, ObjectId, PackId, children, objects, quota};
use crate::error::Result;
use pfr_schema::{Digest, Kind};
use std::collections::{HashMap, HashSet};

/// Maximum number of discrepancies in the report.
const NAMED: usize = 1000;
/// Objects counted in one pass over the nodes: what bounds memory, to about 50 MiB.
const WINDOW: i64 = 4 << 20;
/// Rows read at a time.
const READ: i64 = 5000;

/// Objects, nodes, packs and references as one state of the tables has them.
pub(super) async fn audit(backend: &dyn Backend, repair: bool) -> Result<Audit> {
    let mode = if repair { Mode::LONG_WRITE } else { Mode::LONG_SNAPSHOT };
    let mode = mode.named("audit");
    backend.run(mode, repair, |tx, repair| Box::pin(audit_all(tx, *repair))).await
}

async fn audit_all(tx: &mut dyn Tx, repair: bool) -> Outcome<Audit> {
    if repair {
        // Nothing changes while differences are found and corrected. Only collections still work
        // through their queue, and drop no entry of an object without references.
        objects::lock_all(tx).await?;
    }
    let candidate_objects: Vec<ObjectId> = tx.query("SELECT DISTINCT object FROM suspects WHERE object IS NOT NULL", &[]).await?;
    let candidate_packs: Vec<PackId> = tx.query("SELECT DISTINCT pack FROM suspects WHERE pack IS NOT NULL", &[]).await?;
    let mut auditor = Auditor {
        candidate_objects: candidate_objects.into_iter().collect(),
        candidate_packs: candidate_packs.into_iter().collect(),
        ..Auditor::default()
    };
    auditor.containers(tx).await?;
    auditor.references(tx).await?;
    auditor.sizes(tx).await?;
    auditor.packs(tx).await?;
    auditor.quota(tx).await?;
    if repair {
        auditor.correct(tx).await?;
    }
    Ok(auditor.audit)
}

/// A node's row, without its children.
struct Row {
    kind: Kind,
    logical_bytes: u64,
    /// Raw bytes of its children.
    children_bytes: u64,
}

#[derive(Default)]
struct Auditor {
    audit: Audit,
    rows: HashMap<ObjectId, Row>,
    /// Children of some node are not known: references cannot be counted, so none is
    /// corrected.
    unknown: bool,
    /// Whether there are differences that cannot be corrected.
    hopeless: bool,
    refs: Vec<(ObjectId, u64)>,
    logical_bytes: Vec<(ObjectId, u64)>,
    snapshot_bytes: Vec<(i64, u64)>,
    live_bytes: Vec<(PackId, u64)>,
    /// Packs that are marked as emptied although blobs use them.
    revive: Vec<PackId>,
    /// What the tables hold.
    held: Growth,
    /// Whether the quota says something else.
    wrong_quota: bool,
    /// Objects that nothing holds and that collection does not know of.
    forgotten: Vec<ObjectId>,
    candidate_objects: HashSet<ObjectId>,
    candidate_packs: HashSet<PackId>,
}

impl Auditor {
    fn differs(&mut self, what: String, expected: impl ToString, found: impl ToString) {
        self.audit.wrong += 1;
        if self.audit.discrepancies.len() < NAMED {
            self.audit.discrepancies.push(Discrepancy { what, expected: expected.to_string(), found: found.to_string() });
        }
    }

    /// Checks that every node has its row, every row its node, and that children can be read.
    async fn containers(&mut self, tx: &mut dyn Tx) -> Outcome<()> {
        let mut after = 0;
        loop {
            let find =
                "SELECT o.id, o.kind, c.children, COALESCE(c.logical_bytes, 0) FROM objects o LEFT JOIN containers c ON c.object = o.id
                        WHERE o.id > $1 AND (o.kind <> 0 OR c.object IS NOT NULL) ORDER BY o.id LIMIT $2";
            let rows: Vec<(ObjectId, i64, Option<Vec<u8>>, u64)> = tx.query(find, values![after, READ]).await?;
            let Some(last) = rows.last() else { return Ok(()) };
            after = last.0;
            for (id, kind, packed, logical_bytes) in rows {
                self.audit.containers += 1;
                let what = format!("object {id}");
                match (kind_of(kind), packed.as_deref().map(children::unpack)) {
                    (Ok(kind), Some(Ok(_))) if kind.is_container() => {
                        self.rows.insert(id, Row { kind, logical_bytes, children_bytes: 0 });
                        continue;
                    }
                    (Ok(kind), Some(Ok(_))) => self.differs(what, "no children", format!("children of a {kind:?}")),
                    (Ok(_), Some(Err(_))) => self.differs(what, "children", "children that cannot be read"),
                    (Ok(kind), None) => self.differs(what, "children", format!("a {kind:?} whose children are not recorded")),
                    (Err(_), _) => self.differs(what, "a kind", format!("kind {kind}")),
                }
                self.unknown = true;
            }
        }
    }

    /// Calls `each` with every node and its children.
    async fn each_container(&self, tx: &mut dyn Tx, mut each: impl FnMut(ObjectId, &[ObjectId]) + Send) -> Outcome<()> {
        let mut after = 0;
        loop {
            let find = "SELECT object, children FROM containers WHERE object > $1 ORDER BY object LIMIT $2";
            let rows: Vec<(ObjectId, Vec<u8>)> = tx.query(find, values![after, READ]).await?;
            let Some(last) = rows.last() else { return Ok(()) };
            after = last.0;
            for (id, packed) in rows {
                if self.rows.contains_key(&id)
                    && let Ok(children) = children::unpack(&packed)
                {
                    each(id, &children);
                }
            }
        }
    }

    /// References, window by window of object ids.
    async fn references(&mut self, tx: &mut dyn Tx) -> Outcome<()> {
        let last: Option<ObjectId> = tx.one("SELECT MAX(id) FROM objects", &[]).await?;
        let mut end = last.unwrap_or(0);
        self.each_container(tx, |_, children| end = children.last().copied().unwrap_or(0).max(end)).await?;
        let mut from = 1;
        while from <= end {
            let to = from.saturating_add(WINDOW).min(end + 1);
            self.window(tx, from, to).await?;
            from = to;
        }
        Ok(())
    }

    async fn window(&mut self, tx: &mut dyn Tx, from: ObjectId, to: ObjectId) -> Outcome<()> {
        let place = |id: ObjectId| usize::try_from(id - from).ok().filter(|_| id < to);
        let len = place(to - 1).map_or(0, |at| at + 1);
        let (mut counts, mut sizes) = (vec![0_u32; len], vec![0_u64; len]);
        let holders = "SELECT object FROM manifests UNION ALL SELECT m.object FROM tags t JOIN manifests m ON m.id = t.manifest";
        let held: Vec<ObjectId> = tx.query(holders, &[]).await?;
        held.into_iter().filter_map(place).for_each(|at| counts[at] += 1);
        self.each_container(tx, |_, children| children.iter().filter_map(|child| place(*child)).for_each(|at| counts[at] += 1)).await?;
        let mut after = from - 1;
        loop {
            let find = "SELECT id, digest, size, refs, pack FROM objects WHERE id > $1 AND id < $2 ORDER BY id LIMIT $3";
            let rows: Vec<(ObjectId, Digest, u64, u64, PackId)> = tx.query(find, values![after, to, READ]).await?;
            let Some(last) = rows.last() else { break };
            after = last.0;
            for (id, digest, size, found, pack) in rows {
                let Some(at) = place(id) else { continue };
                self.audit.objects += 1;
                sizes[at] = size;
                let expected = u64::from(std::mem::take(&mut counts[at]));
                let name = || format!("object {id} {digest}");
                if expected != found {
                    self.differs(name(), format!("{expected} references"), format!("{found} references"));
                    self.refs.push((id, expected));
                } else if found == 0 && !self.candidate_objects.contains(&id) && !self.candidate_packs.contains(&pack) {
                    self.differs(name(), "in the queue of collection: nothing holds it", "not in the queue");
                    self.forgotten.push(id);
                }
            }
        }
        for (at, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            self.hopeless = true;
            self.differs(format!("object {}", from + at as i64), format!("an object: {count} hold it"), "none");
        }
        let mut sums: Vec<(ObjectId, u64)> = Vec::new();
        self.each_container(tx, |id, children| {
            sums.push((id, children.iter().filter_map(|child| place(*child)).map(|at| sizes[at]).sum()));
        })
        .await?;
        for (id, sum) in sums {
            if let Some(row) = self.rows.get_mut(&id) {
                row.children_bytes = countable(row.children_bytes.saturating_add(sum));
            }
        }
        Ok(())
    }

    /// What nodes and snapshots reach.
    async fn sizes(&mut self, tx: &mut dyn Tx) -> Outcome<()> {
        let mut reach: HashMap<ObjectId, u64> = HashMap::new();
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_container()) {
            loop {
                let mut changed = false;
                self.each_container(tx, |id, children| {
                    if let Some(row) = self.rows.get(&id).filter(|row| row.kind == kind) {
                        let below = children
                            .iter()
                            .filter_map(|child| reach.get(child))
                            .fold(row.children_bytes, |sum, bytes| countable(sum.saturating_add(*bytes)));
                        changed |= reach.insert(id, below) != Some(below);
                    }
                })
                .await?;
                if !changed || !nests(kind) {
                    break;
                }
            }
        }
        let mut ids: Vec<ObjectId> = self.rows.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let (expected, row) = (reach.get(&id).copied().unwrap_or(0), &self.rows[&id]);
            let (at_least, found) = (row.children_bytes, row.logical_bytes);
            // Blobs that it lists may have become nodes since; their children are not counted then.
            if !(at_least..=expected).contains(&found) {
                self.differs(format!("node {id}"), format!("reaches {expected} bytes"), format!("{found} bytes"));
                self.logical_bytes.push((id, expected));
            }
        }
        let find = "SELECT m.id, m.object, m.logical_bytes, o.size FROM manifests m JOIN objects o ON o.id = m.object ORDER BY m.id";
        let snapshots: Vec<(i64, ObjectId, u64, u64)> = tx.query(find, &[]).await?;
        for (id, object, found, size) in snapshots {
            let Some(below) = reach.get(&object) else { continue };
            let with_own = |bytes: u64| countable(size.saturating_add(bytes));
            let at_least = with_own(self.rows.get(&object).map_or(0, |row| row.children_bytes));
            let expected = with_own(*below);
            if !(at_least..=expected).contains(&found) {
                self.differs(format!("snapshot {id} (object {object})"), format!("reaches {expected} bytes"), format!("{found} bytes"));
                self.snapshot_bytes.push((id, expected));
            }
        }
        Ok(())
    }

    async fn packs(&mut self, tx: &mut dyn Tx) -> Outcome<()> {
        // One pass over the objects, not one look-up for each pack.
        let find = "SELECT pack, SUM(frame_len)::bigint, COUNT(*) FROM objects GROUP BY pack";
        let rows: Vec<(PackId, u64, u64)> = tx.query(find, &[]).await?;
        let in_packs: HashMap<PackId, (u64, u64)> = rows.into_iter().map(|(pack, bytes, objects)| (pack, (bytes, objects))).collect();
        for (bytes, objects) in in_packs.values() {
            self.held.bytes += int(*bytes);
            self.held.objects += int(*objects);
        }
        let packs: Vec<(PackId, String, u64)> = tx.query("SELECT id, state, live_bytes FROM packs ORDER BY id", &[]).await?;
        for (id, state, found) in packs {
            self.audit.packs += 1;
            let (expected, objects) = in_packs.get(&id).copied().unwrap_or_default();
            if expected != found {
                self.differs(format!("pack {id}"), format!("{expected} live bytes"), format!("{found} live bytes"));
                self.live_bytes.push((id, expected));
            }
            if objects > 0 && state != "live" {
                self.differs(format!("pack {id}"), format!("live: {objects} objects lie in it"), &state);
                self.revive.push(id);
            }
        }
        Ok(())
    }

    /// What the quota says is used.
    async fn quota(&mut self, tx: &mut dyn Tx) -> Outcome<()> {
        let Some(used) = quota::used(tx).await? else { return Ok(()) };
        self.held.snapshots = tx.one("SELECT COUNT(*) FROM manifests", &[]).await?;
        let Growth { bytes, objects, snapshots } = self.held;
        for (what, expected, found) in
            [("bytes", bytes, used.bytes), ("blobs", objects, used.objects), ("snapshots", snapshots, used.snapshots)]
        {
            if expected != found {
                self.differs("quota".to_owned(), format!("{expected} {what}"), format!("{found} {what}"));
                self.wrong_quota = true;
            }
        }
        Ok(())
    }

    async fn correct(&mut self, tx: &mut dyn Tx) -> Outcome<()> {
        macro_rules! set {
            ($table:literal, $column:literal, $id:literal) => {
                concat!(
                    "UPDATE ",
                    $table,
                    " AS t SET ",
                    $column,
                    " = u.value FROM unnest($1::bigint[], $2::bigint[]) AS u(id, value) WHERE t.",
                    $id,
                    " = u.id"
                )
            };
        }
        set(tx, set!("packs", "live_bytes", "id"), &self.live_bytes).await?;
        if self.wrong_quota {
            let Growth { bytes, objects, snapshots } = self.held;
            let used = "UPDATE quota SET used_bytes = $1, used_objects = $2, used_snapshots = $3";
            tx.execute(used, values![bytes, objects, snapshots]).await?;
        }
        if !self.revive.is_empty() {
            let revive = "UPDATE packs SET state = 'live', draining_since = NULL WHERE id = ANY($1)";
            tx.execute(revive, values![&self.revive]).await?;
        }
        if !self.unknown {
            set(tx, set!("objects", "refs", "id"), &self.refs).await?;
            set(tx, set!("containers", "logical_bytes", "object"), &self.logical_bytes).await?;
            set(tx, set!("manifests", "logical_bytes", "id"), &self.snapshot_bytes).await?;
            let free = self.refs.iter().filter(|(_, refs)| *refs == 0).map(|(id, _)| *id);
            let free: Vec<ObjectId> = free.chain(self.forgotten.iter().copied()).collect();
            if !free.is_empty() {
                let insert = "INSERT INTO suspects (due, object) SELECT keep_until, id FROM objects WHERE id = ANY($1)";
                tx.execute(insert, values![free]).await?;
            }
        }
        self.audit.repaired = self.audit.wrong > 0 && !self.unknown && !self.hopeless;
        Ok(())
    }
}

async fn set(tx: &mut dyn Tx, statement: &'static str, pairs: &[(i64, u64)]) -> Outcome<()> {
    let columns = vec![pairs.iter().map(|(id, _)| *id).collect(), pairs.iter().map(|(_, value)| *value).collect()];
    tx.execute_each(statement, columns, &[]).await?;
    Ok(())
}
