//! The audit of the tables: what they say against what follows from containers, manifests and tags.

use super::integrity::nests;
use super::objects::kind_of;
use super::{int, uint};
use crate::error::{Error, Result};
use crate::metadata::arguments::countable;
use crate::metadata::{Audit, Discrepancy, ObjectId, PackId, children};
use pfr_schema::{Digest, Kind};
use rusqlite::{Connection, params};
use std::collections::{HashMap, HashSet};

/// Discrepancies named.
const NAMED: usize = 1000;
/// Objects counted in one pass over the containers: what bounds memory, to about 50 MiB.
const WINDOW: i64 = 4 << 20;

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

pub(super) fn audit(tx: &Connection, repair: bool) -> Result<Audit> {
    let mut auditor = Auditor::new(tx)?;
    auditor.containers()?;
    auditor.references()?;
    auditor.sizes()?;
    auditor.packs()?;
    if repair {
        auditor.correct()?;
    }
    Ok(auditor.audit)
}

/// A container's row, without its children.
struct Row {
    kind: Kind,
    logical_bytes: u64,
    /// Raw bytes of its children.
    children_bytes: u64,
}

struct Auditor<'a> {
    tx: &'a Connection,
    audit: Audit,
    rows: HashMap<ObjectId, Row>,
    /// Children of some container are not known: references cannot be counted, so none is corrected.
    unknown: bool,
    /// Differences that no correction makes good.
    hopeless: bool,
    refs: Vec<(ObjectId, u64)>,
    logical_bytes: Vec<(ObjectId, u64)>,
    snapshot_bytes: Vec<(i64, u64)>,
    live_bytes: Vec<(PackId, u64)>,
    /// Packs that drain though something lies in them.
    revive: Vec<PackId>,
    /// Objects that nothing holds and that collection does not know of.
    forgotten: Vec<ObjectId>,
    suspect_objects: HashSet<ObjectId>,
    suspect_packs: HashSet<PackId>,
}

impl<'a> Auditor<'a> {
    fn new(tx: &'a Connection) -> Result<Self> {
        let ids = |statement: &str| -> Result<HashSet<i64>> {
            tx.prepare_cached(statement).and_then(|mut s| s.query_map([], |r| r.get(0))?.collect()).map_err(sql)
        };
        Ok(Self {
            tx,
            audit: Audit::default(),
            rows: HashMap::new(),
            unknown: false,
            hopeless: false,
            refs: Vec::new(),
            logical_bytes: Vec::new(),
            snapshot_bytes: Vec::new(),
            live_bytes: Vec::new(),
            revive: Vec::new(),
            forgotten: Vec::new(),
            suspect_objects: ids("SELECT object FROM suspects WHERE object IS NOT NULL")?,
            suspect_packs: ids("SELECT pack FROM suspects WHERE pack IS NOT NULL")?,
        })
    }

    fn differs(&mut self, what: String, expected: impl ToString, found: impl ToString) {
        self.audit.wrong += 1;
        if self.audit.discrepancies.len() < NAMED {
            self.audit.discrepancies.push(Discrepancy { what, expected: expected.to_string(), found: found.to_string() });
        }
    }

    /// That every container has its row, every row its container, and that children can be read.
    fn containers(&mut self) -> Result<()> {
        let mut select = self
            .tx
            .prepare_cached(
                "SELECT o.id, o.kind, c.children, COALESCE(c.logical_bytes, 0) FROM objects o LEFT JOIN containers c ON c.object = o.id
                 WHERE o.kind <> 0 OR c.object IS NOT NULL ORDER BY o.id",
            )
            .map_err(sql)?;
        let mut rows = select.query([]).map_err(sql)?;
        while let Some(row) = rows.next().map_err(sql)? {
            let (id, kind): (ObjectId, i64) = (row.get(0).map_err(sql)?, row.get(1).map_err(sql)?);
            let packed: Option<Vec<u8>> = row.get(2).map_err(sql)?;
            self.audit.containers += 1;
            let what = format!("object {id}");
            match (kind_of(kind), packed.as_deref().map(children::unpack)) {
                (Ok(kind), Some(Ok(_))) if kind.is_container() => {
                    let logical_bytes = uint(row.get(3).map_err(sql)?);
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
        Ok(())
    }

    /// Calls `each` with every container and its children.
    fn each_container(&self, mut each: impl FnMut(ObjectId, &[ObjectId])) -> Result<()> {
        let mut select = self.tx.prepare_cached("SELECT object, children FROM containers ORDER BY object").map_err(sql)?;
        let mut rows = select.query([]).map_err(sql)?;
        while let Some(row) = rows.next().map_err(sql)? {
            let (id, packed): (ObjectId, Vec<u8>) = (row.get(0).map_err(sql)?, row.get(1).map_err(sql)?);
            if self.rows.contains_key(&id)
                && let Ok(children) = children::unpack(&packed)
            {
                each(id, &children);
            }
        }
        Ok(())
    }

    /// References, window by window of object ids.
    fn references(&mut self) -> Result<()> {
        let last =
            |statement: &str| self.tx.query_row(statement, [], |r| r.get::<_, Option<i64>>(0)).map(|id| id.unwrap_or(0)).map_err(sql);
        let mut end = last("SELECT MAX(id) FROM objects")?;
        self.each_container(|_, children| end = children.last().copied().unwrap_or(0).max(end))?;
        let mut from = 1;
        while from <= end {
            let to = (from + WINDOW).min(end + 1);
            self.window(from, to)?;
            from = to;
        }
        Ok(())
    }

    fn window(&mut self, from: ObjectId, to: ObjectId) -> Result<()> {
        let place = |id: ObjectId| usize::try_from(id - from).ok().filter(|_| id < to);
        let len = place(to - 1).map_or(0, |at| at + 1);
        let (mut counts, mut sizes) = (vec![0_u32; len], vec![0_u64; len]);
        let holders = "SELECT object FROM manifests UNION ALL SELECT m.object FROM tags t JOIN manifests m ON m.id = t.manifest";
        let mut select = self.tx.prepare_cached(holders).map_err(sql)?;
        let mut rows = select.query([]).map_err(sql)?;
        while let Some(row) = rows.next().map_err(sql)? {
            if let Some(at) = place(row.get(0).map_err(sql)?) {
                counts[at] += 1;
            }
        }
        self.each_container(|_, children| children.iter().filter_map(|child| place(*child)).for_each(|at| counts[at] += 1))?;
        let mut select = self
            .tx
            .prepare_cached("SELECT id, digest, size, refs, pack FROM objects WHERE id >= ?1 AND id < ?2 ORDER BY id")
            .map_err(sql)?;
        let mut rows = select.query([from, to]).map_err(sql)?;
        while let Some(row) = rows.next().map_err(sql)? {
            let id: ObjectId = row.get(0).map_err(sql)?;
            let Some(at) = place(id) else { continue };
            self.audit.objects += 1;
            sizes[at] = uint(row.get(2).map_err(sql)?);
            let (expected, found) = (u64::from(std::mem::take(&mut counts[at])), uint(row.get(3).map_err(sql)?));
            let name = || -> Result<String> { Ok(format!("object {id} {}", Digest::from_key(&row.get::<_, Vec<u8>>(1).map_err(sql)?)?)) };
            if expected != found {
                self.differs(name()?, format!("{expected} references"), format!("{found} references"));
                self.refs.push((id, expected));
            } else if found == 0 && !self.suspect_objects.contains(&id) && !self.suspect_packs.contains(&row.get(4).map_err(sql)?) {
                self.differs(name()?, "in the queue of collection: nothing holds it", "not in the queue");
                self.forgotten.push(id);
            }
        }
        for (at, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            self.hopeless = true;
            self.differs(format!("object {}", from + at as i64), format!("an object: {count} hold it"), "none");
        }
        let mut sums: Vec<(ObjectId, u64)> = Vec::new();
        self.each_container(|id, children| {
            sums.push((id, children.iter().filter_map(|child| place(*child)).map(|at| sizes[at]).sum()));
        })?;
        for (id, sum) in sums {
            if let Some(row) = self.rows.get_mut(&id) {
                row.children_bytes = countable(row.children_bytes.saturating_add(sum));
            }
        }
        Ok(())
    }

    /// What containers and snapshots reach.
    fn sizes(&mut self) -> Result<()> {
        let mut reach: HashMap<ObjectId, u64> = HashMap::new();
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_container()) {
            loop {
                let mut changed = false;
                self.each_container(|id, children| {
                    if let Some(row) = self.rows.get(&id).filter(|row| row.kind == kind) {
                        let below = children
                            .iter()
                            .filter_map(|child| reach.get(child))
                            .fold(row.children_bytes, |sum, bytes| countable(sum.saturating_add(*bytes)));
                        changed |= reach.insert(id, below) != Some(below);
                    }
                })?;
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
            // What it lists as blobs may have become containers since, whose own are not counted then.
            if !(at_least..=expected).contains(&found) {
                self.differs(format!("container {id}"), format!("reaches {expected} bytes"), format!("{found} bytes"));
                self.logical_bytes.push((id, expected));
            }
        }
        let snapshots: Vec<(i64, ObjectId, i64, i64)> = self
            .tx
            .prepare_cached(
                "SELECT m.id, m.object, m.logical_bytes, o.size FROM manifests m JOIN objects o ON o.id = m.object ORDER BY m.id",
            )
            .and_then(|mut s| s.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))?.collect())
            .map_err(sql)?;
        for (id, object, found, size) in snapshots {
            let Some(below) = reach.get(&object) else { continue };
            let with_own = |bytes: u64| countable(uint(size).saturating_add(bytes));
            let at_least = with_own(self.rows.get(&object).map_or(0, |row| row.children_bytes));
            let (expected, found) = (with_own(*below), uint(found));
            if !(at_least..=expected).contains(&found) {
                self.differs(format!("snapshot {id} (object {object})"), format!("reaches {expected} bytes"), format!("{found} bytes"));
                self.snapshot_bytes.push((id, expected));
            }
        }
        Ok(())
    }

    fn packs(&mut self) -> Result<()> {
        let packs: Vec<(PackId, String, i64, i64, i64)> = self
            .tx
            .prepare_cached(
                "SELECT p.id, p.state, p.live_bytes, COALESCE(SUM(o.frame_len), 0), COUNT(o.id) FROM packs p
                 LEFT JOIN objects o ON o.pack = p.id GROUP BY p.id ORDER BY p.id",
            )
            .and_then(|mut s| s.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?)))?.collect())
            .map_err(sql)?;
        for (id, state, found, expected, objects) in packs {
            self.audit.packs += 1;
            if expected != found {
                self.differs(format!("pack {id}"), format!("{expected} live bytes"), format!("{found} live bytes"));
                self.live_bytes.push((id, uint(expected)));
            }
            if objects > 0 && state != "live" {
                self.differs(format!("pack {id}"), format!("live: {objects} objects lie in it"), &state);
                self.revive.push(id);
            }
        }
        Ok(())
    }

    fn correct(&mut self) -> Result<()> {
        let pairs = |statement: &str, pairs: &[(i64, u64)]| -> Result<()> {
            let mut update = self.tx.prepare_cached(statement).map_err(sql)?;
            pairs.iter().try_for_each(|(id, value)| update.execute(params![int(*value), id]).map(|_| ()).map_err(sql))
        };
        let ids = |statement: &str, ids: &mut dyn Iterator<Item = i64>| -> Result<()> {
            let mut execute = self.tx.prepare_cached(statement).map_err(sql)?;
            for id in ids {
                execute.execute([id]).map_err(sql)?;
            }
            Ok(())
        };
        pairs("UPDATE packs SET live_bytes = ?1 WHERE id = ?2", &self.live_bytes)?;
        ids("UPDATE packs SET state = 'live', draining_since = NULL WHERE id = ?1", &mut self.revive.iter().copied())?;
        if !self.unknown {
            pairs("UPDATE objects SET refs = ?1 WHERE id = ?2", &self.refs)?;
            pairs("UPDATE containers SET logical_bytes = ?1 WHERE object = ?2", &self.logical_bytes)?;
            pairs("UPDATE manifests SET logical_bytes = ?1 WHERE id = ?2", &self.snapshot_bytes)?;
            let free = self.refs.iter().filter(|(_, refs)| *refs == 0).map(|(id, _)| *id);
            ids(
                "INSERT INTO suspects (due, object) SELECT keep_until, id FROM objects WHERE id = ?1",
                &mut free.chain(self.forgotten.iter().copied()),
            )?;
        }
        self.audit.repaired = self.audit.wrong > 0 && !self.unknown && !self.hopeless;
        Ok(())
    }
}
