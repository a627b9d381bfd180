//! Quarantine, and who reaches what is damaged.

use super::{DOMAIN, int, uint};
use crate::error::{Error, Result};
use crate::metadata::arguments::one_more;
use crate::metadata::{Damage, DamagedRow, Health, ObjectId, Page, children};
use pfr_schema::{Digest, Kind, RepositoryName};
use rusqlite::{Connection, OptionalExtension as _, params};
use std::collections::{BTreeSet, HashMap};

/// Snapshots named for each damaged blob.
const SNAPSHOTS: usize = 100;

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

/// What each object reaches, as numbers that the caller gave out.
type Marks = HashMap<ObjectId, BTreeSet<usize>>;

/// Which containers are looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Among {
    All,
    /// Those that are marked already: all that reached, as it was quarantined, something that was quarantined before.
    Unwell,
}

/// Calls `each` with the containers of a kind and their children.
fn containers(tx: &Connection, kind: Kind, among: Among, mut each: impl FnMut(ObjectId, Vec<ObjectId>) -> Result<()>) -> Result<()> {
    let statement = match among {
        Among::All => "SELECT c.object, c.children FROM containers c JOIN objects o ON o.id = c.object WHERE o.kind = ?1 ORDER BY c.object",
        Among::Unwell => {
            "SELECT c.object, c.children FROM objects o INDEXED BY objects_unwell JOIN containers c ON c.object = o.id
             WHERE o.health > 0 AND o.kind = ?1 ORDER BY o.id"
        }
    };
    let mut select = tx.prepare_cached(statement).map_err(sql)?;
    let mut rows = select.query([kind as i64]).map_err(sql)?;
    while let Some(row) = rows.next().map_err(sql)? {
        let (object, packed): (ObjectId, Vec<u8>) = (row.get(0).map_err(sql)?, row.get(1).map_err(sql)?);
        each(object, children::unpack(&packed)?)?;
    }
    Ok(())
}

/// Whether containers of a kind may list others of the same kind.
pub(super) fn nests(kind: Kind) -> bool {
    !matches!(kind, Kind::Blob | Kind::Run | Kind::Tree | Kind::Checkpoint)
}

/// Carries marks up to every container that reaches a marked object.
fn climb(tx: &Connection, marks: &mut Marks, among: Among) -> Result<()> {
    // Children come before what may list them, so one look at each kind is enough unless it lists its own.
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_container()) {
        loop {
            let mut found: Vec<(ObjectId, BTreeSet<usize>)> = Vec::new();
            containers(tx, kind, among, |object, children| {
                let below: BTreeSet<usize> = children.iter().filter_map(|child| marks.get(child)).flatten().copied().collect();
                if !below.is_empty() && !marks.get(&object).is_some_and(|known| below.is_subset(known)) {
                    found.push((object, below));
                }
                Ok(())
            })?;
            let done = found.is_empty() || !nests(kind);
            for (object, below) in found {
                marks.entry(object).or_default().extend(below);
            }
            if done {
                break;
            }
        }
    }
    Ok(())
}

pub(super) fn quarantine(tx: &Connection, damage: &[Damage], now: u64) -> Result<Vec<Digest>> {
    let (mut quarantined, mut marks) = (Vec::new(), Marks::new());
    for Damage { digest, pack, reason } in damage {
        // A copy that collection or a push has put elsewhere is not what was found bad.
        let object: Option<ObjectId> = tx
            .prepare_cached(
                "UPDATE objects SET health = ?1 WHERE domain = ?2 AND digest = ?3 AND health <> ?1
                 AND pack = (SELECT id FROM packs WHERE key = ?4) RETURNING id",
            )
            .and_then(|mut s| s.query_row(params![Health::Damaged as i64, DOMAIN, digest.to_key(), pack], |r| r.get(0)).optional())
            .map_err(sql)?;
        let Some(object) = object else { continue };
        tx.prepare_cached("INSERT OR REPLACE INTO damage (object, reason, found_at) VALUES (?1, ?2, ?3)")
            .and_then(|mut s| s.execute(params![object, reason, int(now)]))
            .map_err(sql)?;
        marks.insert(object, BTreeSet::from([0]));
        quarantined.push(*digest);
    }
    if marks.is_empty() {
        return Ok(quarantined);
    }
    climb(tx, &mut marks, Among::All)?;
    let mut mark = tx.prepare_cached("UPDATE objects SET health = ?1 WHERE id = ?2 AND health = ?3").map_err(sql)?;
    let ordered: BTreeSet<ObjectId> = marks.into_keys().collect();
    for object in ordered {
        mark.execute(params![Health::Incomplete as i64, object, Health::Whole as i64]).map_err(sql)?;
    }
    Ok(quarantined)
}

/// A quarantined object on its way into a row.
type RawDamaged = (ObjectId, Vec<u8>, i64, Option<String>, Option<i64>);

pub(super) fn damaged(tx: &Connection, after: Option<&str>, limit: usize) -> Result<Page<DamagedRow>> {
    let after: ObjectId = match after {
        None => 0,
        Some(cursor) => cursor.parse().map_err(|_| Error::Invalid(format!("{cursor:?} is no cursor of this list")))?,
    };
    let found: Vec<RawDamaged> = tx
        .prepare_cached(
            "SELECT o.id, o.digest, o.kind, d.reason, d.found_at FROM objects o LEFT JOIN damage d ON d.object = o.id
             WHERE o.health > 0 AND o.health = ?1 AND o.id > ?2 ORDER BY o.id LIMIT ?3",
        )
        .and_then(|mut s| {
            s.query_map(params![Health::Damaged as i64, after, one_more(limit)], |r| {
                Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?))
            })?
            .collect()
        })
        .map_err(sql)?;
    let page = super::names::paged(found, limit, |row| row.0.to_string());
    if page.rows.is_empty() {
        return Ok(Page { rows: Vec::new(), next: None });
    }
    let mut marks: Marks = page.rows.iter().enumerate().map(|(number, row)| (row.0, BTreeSet::from([number]))).collect();
    climb(tx, &mut marks, Among::Unwell)?;
    let mut snapshots: Vec<Vec<(RepositoryName, Digest)>> = vec![Vec::new(); page.rows.len()];
    let mut select = tx
        .prepare_cached(
            "SELECT m.object, r.name, o.digest FROM manifests m JOIN repositories r ON r.id = m.repository
             JOIN objects o ON o.id = m.object WHERE o.health > 0 ORDER BY m.id",
        )
        .map_err(sql)?;
    let mut rows = select.query([]).map_err(sql)?;
    while let Some(row) = rows.next().map_err(sql)? {
        let Some(reached) = marks.get(&row.get::<_, ObjectId>(0).map_err(sql)?) else { continue };
        let (name, key): (String, Vec<u8>) = (row.get(1).map_err(sql)?, row.get(2).map_err(sql)?);
        let snapshot: (RepositoryName, Digest) = (name.parse()?, Digest::from_key(&key)?);
        for number in reached {
            if let Some(list) = snapshots.get_mut(*number).filter(|list| list.len() < SNAPSHOTS) {
                list.push(snapshot.clone());
            }
        }
    }
    let rows = page
        .rows
        .into_iter()
        .zip(snapshots)
        .map(|((_, key, kind, reason, found_at), snapshots)| {
            Ok(DamagedRow {
                digest: Digest::from_key(&key)?,
                kind: super::objects::kind_of(kind)?,
                reason: reason.unwrap_or_default(),
                found_at: found_at.map_or(0, uint),
                snapshots,
            })
        })
        .collect::<Result<_>>()?;
    Ok(Page { rows, next: page.next })
}

pub(super) fn lift_quarantine(tx: &Connection, good: &[(Digest, String)]) -> Result<u64> {
    let mut lifted = 0;
    for (digest, pack) in good {
        // A container's children may be damaged: whether they are is for the reassessment.
        let object: Option<ObjectId> = tx
            .prepare_cached(
                "UPDATE objects SET health = CASE kind WHEN 0 THEN 0 ELSE ?1 END WHERE domain = ?2 AND digest = ?3 AND health = ?4
                 AND pack = (SELECT id FROM packs WHERE key = ?5) RETURNING id",
            )
            .and_then(|mut s| {
                let (incomplete, damaged) = (Health::Incomplete as i64, Health::Damaged as i64);
                s.query_row(params![incomplete, DOMAIN, digest.to_key(), damaged, pack], |r| r.get(0)).optional()
            })
            .map_err(sql)?;
        if let Some(object) = object {
            tx.prepare_cached("DELETE FROM damage WHERE object = ?1").and_then(|mut s| s.execute([object])).map_err(sql)?;
            lifted += 1;
        }
    }
    if lifted > 0 {
        note_healed(tx)?;
    }
    Ok(lifted)
}

/// Notes that something became well, for the next reassessment.
pub(super) fn note_healed(tx: &Connection) -> Result<()> {
    tx.prepare_cached("INSERT INTO healed DEFAULT VALUES").and_then(|mut s| s.execute([])).map(|_| ()).map_err(sql)
}

pub(super) fn reassess(tx: &Connection) -> Result<u64> {
    // Deleting all of nothing would write a page.
    let healed: bool = tx.query_row("SELECT EXISTS (SELECT 1 FROM healed)", [], |r| r.get(0)).map_err(sql)?;
    if !healed {
        return Ok(0);
    }
    tx.execute("DELETE FROM healed", []).map_err(sql)?;
    let unwell: Vec<(ObjectId, i64)> = tx
        .prepare_cached("SELECT id, health FROM objects WHERE health > 0 ORDER BY id")
        .and_then(|mut s| s.query_map([], |r| Ok((r.get(0)?, r.get(1)?)))?.collect())
        .map_err(sql)?;
    let (damaged, marked): (Vec<_>, Vec<_>) = unwell.into_iter().partition(|(_, health)| *health == Health::Damaged as i64);
    if marked.is_empty() {
        return Ok(0);
    }
    let mut marks: Marks = damaged.into_iter().map(|(object, _)| (object, BTreeSet::from([0]))).collect();
    if !marks.is_empty() {
        climb(tx, &mut marks, Among::Unwell)?;
    }
    let mut clear = tx.prepare_cached("UPDATE objects SET health = 0 WHERE id = ?1").map_err(sql)?;
    let mut cleared = 0;
    for (object, _) in marked.iter().filter(|(object, _)| !marks.contains_key(object)) {
        cleared += clear.execute([object]).map_err(sql)? as u64;
    }
    Ok(cleared)
}
