//! Collection: suspects, retired packs, compaction, runs. docs/gc.md has the argument why it is safe.

use super::leases::{self, leased};
use super::objects::{go_live, health_of, hold, kind_of};
use super::{int, uint};
use crate::error::{Error, Result};
use crate::metadata::arguments::{at_most, cursor, one_more};
use crate::metadata::{
    Collected, GC_RUNS, GcRun, GcTrigger, Lease, Moved, ObjectId, PackId, PackRow, PackSizes, PackState, Packed, Page, Queued, Retired,
    Suspect, children,
};
use pfr_schema::{Digest, Kind};
use rusqlite::{Connection, OptionalExtension as _, Row, params};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Objects deleted by one statement. Inside a transaction's savepoint SQLite goes through the whole statement journal at the end of every
/// statement that may touch more than one row (each DELETE of an object may, for its foreign keys): a statement an object is quadratic.
const TOGETHER: usize = 1024;

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

/// An entry of the queue, as it lies there.
struct Entry {
    id: i64,
    queued: Queued,
}

/// Due entries: those of deleted snapshots alone if there are any. So what both they and an upload that was never committed reach is counted
/// the same way however the work is cut into steps.
fn due(tx: &Connection, now: u64, limit: usize) -> Result<Vec<Entry>> {
    let released = entries(tx, now, true, limit)?;
    if released.is_empty() { entries(tx, now, false, limit) } else { Ok(released) }
}

fn entries(tx: &Connection, now: u64, released: bool, limit: usize) -> Result<Vec<Entry>> {
    tx.prepare_cached("SELECT id, object, pack, due, session FROM suspects WHERE released = ?1 AND due <= ?2 ORDER BY due, id LIMIT ?3")
        .and_then(|mut s| {
            s.query_map(params![released, int(now), at_most(limit)], |r| {
                let suspect = match r.get::<_, Option<ObjectId>>(1)? {
                    Some(object) => Suspect::Object(object),
                    None => Suspect::Pack(r.get(2)?),
                };
                let queued = Queued { suspect, released, due: uint(r.get(3)?), session: r.get(4)? };
                Ok(Entry { id: r.get(0)?, queued })
            })?
            .collect()
        })
        .map_err(sql)
}

pub(super) fn queue(tx: &Connection, now: u64, limit: usize) -> Result<Vec<Queued>> {
    let mut all = entries(tx, now, true, limit)?;
    all.extend(entries(tx, now, false, limit - all.len().min(limit))?);
    Ok(all.into_iter().map(|entry| entry.queued).collect())
}

pub(super) fn unclaimed(tx: &Connection, pack: PackId, now: u64, limit: usize) -> Result<Vec<ObjectId>> {
    let select = concat!("SELECT id FROM objects WHERE pack = ?1 AND refs = 0 AND NOT ", leased!("?2"), " ORDER BY id LIMIT ?3");
    tx.prepare_cached(select).and_then(|mut s| s.query_map(params![pack, int(now), at_most(limit)], |r| r.get(0))?.collect()).map_err(sql)
}

pub(super) fn unheld(tx: &Connection, pack: PackId) -> Result<Vec<ObjectId>> {
    tx.prepare_cached("SELECT id FROM objects WHERE pack = ?1 AND refs = 0 ORDER BY id")
        .and_then(|mut s| s.query_map([pack], |r| r.get(0))?.collect())
        .map_err(sql)
}

/// One step of collection, within one transaction.
struct Sweep<'a> {
    tx: &'a Connection,
    now: u64,
    /// Objects without references, to be deleted if no lease covers them.
    free: Vec<ObjectId>,
    /// Those of them that will be found again without an entry of their own: that of their pack stays.
    found_again: HashSet<ObjectId>,
    /// Frame bytes that packs lose. In id order, as everywhere.
    lost: BTreeMap<PackId, u64>,
    deleted: u64,
    frame_bytes: u64,
    /// Whether the entry that is worked on is of a deleted snapshot: what it leaves to later steps is too.
    released: bool,
    /// Whether others wait for the writer: then this step ends with the container it is at.
    others_wait: &'a dyn Fn() -> bool,
}

/// How long a container whose children are not known is left alone.
const PARKED_MS: u64 = 24 * 3600 * 1000;

pub(super) fn collect(tx: &Connection, budget: usize, now: u64, broken: &[ObjectId], others_wait: &dyn Fn() -> bool) -> Result<Collected> {
    // As if they were leased: they come back into the queue when that ends.
    let mut park = tx.prepare_cached("UPDATE objects SET keep_until = ?1 WHERE id = ?2").map_err(sql)?;
    broken.iter().try_for_each(|object| park.execute(params![int(now + PARKED_MS), object]).map(|_| ()).map_err(sql))?;
    let sessions = tx.prepare_cached("DELETE FROM pushes WHERE expires < ?1").and_then(|mut s| s.execute([int(now)])).map_err(sql)?;
    let mut done = Collected { sessions: sessions as u64, parked: broken.len() as u64, ..Collected::default() };
    let mut sweep = Sweep {
        tx,
        now,
        free: Vec::new(),
        found_again: HashSet::new(),
        lost: BTreeMap::new(),
        deleted: 0,
        frame_bytes: 0,
        released: false,
        others_wait,
    };
    let mut forget = tx.prepare_cached("DELETE FROM suspects WHERE id = ?1").map_err(sql)?;
    for entry in due(tx, now, budget)? {
        let left = budget.saturating_sub(sweep.deleted as usize);
        if left == 0 || (done.examined > 0 && others_wait()) {
            break;
        }
        done.examined += 1;
        let before = sweep.deleted;
        sweep.released = entry.queued.released;
        let finished = match entry.queued.suspect {
            Suspect::Object(object) => {
                sweep.free.push(object);
                true
            }
            // The rest of a large one comes with a later step: blobs are deleted without asking who waits.
            Suspect::Pack(pack) => sweep.pack(entry.id, pack, left.min(2 * TOGETHER))?,
        };
        sweep.run(left)?;
        let deleted = sweep.deleted - before;
        match entry.queued.released {
            true => done.released += deleted,
            false => done.unclaimed += deleted,
        }
        if finished {
            forget.execute([entry.id]).map_err(sql)?;
        }
    }
    done.frame_bytes = sweep.frame_bytes;
    let mut lose = tx.prepare_cached("UPDATE packs SET live_bytes = live_bytes - ?1 WHERE id = ?2").map_err(sql)?;
    for (pack, bytes) in &sweep.lost {
        lose.execute(params![int(*bytes), pack]).map_err(sql)?;
    }
    done.more = !due(tx, now, 1)?.is_empty();
    Ok(done)
}

impl Sweep<'_> {
    /// Finds what nothing holds in a pack; false if there is more of it than `left`. What a lease still covers is looked at again when it ends.
    fn pack(&mut self, entry: i64, pack: PackId, left: usize) -> Result<bool> {
        let found = unclaimed(self.tx, pack, self.now, left)?;
        let finished = found.len() < left;
        if !finished {
            self.found_again.extend(&found);
        }
        self.free.extend(found);
        if finished {
            for lease in self.leases(pack)? {
                self.tx
                    // One entry for each session: else every end of a session would double those of the others.
                    .prepare_cached(
                        "INSERT INTO suspects (due, pack, session) SELECT ?1, ?2, ?3
                         WHERE NOT EXISTS (SELECT 1 FROM suspects WHERE session = ?3 AND pack = ?2 AND id <> ?4)",
                    )
                    .and_then(|mut s| s.execute(params![int(lease.until), pack, lease.session, entry]))
                    .map_err(sql)?;
            }
        }
        Ok(finished)
    }

    /// The leases on what nothing holds in a pack, each once.
    fn leases(&self, pack: PackId) -> Result<BTreeSet<Lease>> {
        let rows: Vec<(i64, i64)> = self
            .tx
            .prepare_cached("SELECT lessee, MAX(keep_until) FROM objects WHERE pack = ?1 AND refs = 0 GROUP BY lessee")
            .and_then(|mut s| s.query_map([pack], |r| Ok((r.get(0)?, r.get(1)?)))?.collect())
            .map_err(sql)?;
        rows.into_iter().filter_map(|(lessee, until)| leases::lease_of(self.tx, until, lessee, self.now).transpose()).collect()
    }

    /// Deletes what is free and what becomes free below it; what is over `limit` goes back into the queue.
    fn run(&mut self, limit: usize) -> Result<()> {
        let end = self.deleted + limit as u64;
        while !self.free.is_empty() {
            let left = usize::try_from(end.saturating_sub(self.deleted)).unwrap_or(usize::MAX);
            let some = self.free.split_off(self.free.len().saturating_sub(left.clamp(1, TOGETHER)));
            let blobs = concat!(
                "DELETE FROM objects WHERE id IN (SELECT value FROM json_each(?1)) AND refs = 0 AND kind = 0 AND NOT ",
                leased!("?2"),
                " RETURNING id, pack, frame_len"
            );
            let others = if left > 0 { self.delete(blobs, some)? } else { some };
            for object in others {
                // A container may bring a thousand others along.
                if self.deleted < end && !(self.deleted > 0 && (self.others_wait)()) {
                    self.object(object)?
                } else if !self.found_again.contains(&object) {
                    self.suspect(object, Lease { session: None, until: self.now })?
                }
            }
        }
        Ok(())
    }

    /// Looks at an object again when a lease ends.
    fn suspect(&self, object: ObjectId, lease: Lease) -> Result<()> {
        self.tx
            .prepare_cached("INSERT INTO suspects (due, object, session, released) VALUES (?1, ?2, ?3, ?4)")
            .and_then(|mut s| s.execute(params![int(lease.until), object, lease.session, self.released]))
            .map_err(sql)?;
        Ok(())
    }

    fn object(&mut self, object: ObjectId) -> Result<()> {
        let row = self
            .tx
            .prepare_cached("SELECT refs, keep_until, lessee, kind FROM objects WHERE id = ?1")
            .and_then(|mut s| {
                let columns = |r: &Row<'_>| Ok((r.get::<_, i64>(0)?, r.get(1)?, r.get(2)?, r.get::<_, i64>(3)?));
                s.query_row([object], columns).optional()
            })
            .map_err(sql)?;
        // Gone: another suspect was the same object.
        let Some((refs, keep_until, lessee, kind)) = row else { return Ok(()) };
        // Held again.
        if refs > 0 {
            return Ok(());
        }
        if let Some(lease) = leases::lease_of(self.tx, keep_until, lessee, self.now)? {
            return self.suspect(object, lease);
        }
        if kind != Kind::Blob as i64 {
            self.release_children(object)?;
        }
        let free = concat!(
            "DELETE FROM objects WHERE id IN (SELECT value FROM json_each(?1)) AND refs = 0 AND NOT ",
            leased!("?2"),
            " RETURNING id, pack, frame_len"
        );
        self.delete(free, vec![object]).map(drop)
    }

    /// Deletes those of the objects that `statement` still finds free; the others, in their order.
    fn delete(&mut self, statement: &str, mut objects: Vec<ObjectId>) -> Result<Vec<ObjectId>> {
        let gone: Vec<(ObjectId, PackId, u64)> = self
            .tx
            .prepare_cached(statement)
            .and_then(|mut s| {
                s.query_map(params![json(&objects), int(self.now)], |r| Ok((r.get(0)?, r.get(1)?, uint(r.get(2)?))))?.collect()
            })
            .map_err(sql)?;
        self.deleted += gone.len() as u64;
        for (_, pack, frame_len) in &gone {
            *self.lost.entry(*pack).or_default() += frame_len;
            self.frame_bytes += frame_len;
        }
        let gone: HashSet<ObjectId> = gone.into_iter().map(|(object, ..)| object).collect();
        objects.retain(|object| !gone.contains(object));
        Ok(objects)
    }

    /// Takes a container's references away. Unknown children are never taken for none: then nothing below it is deleted.
    fn release_children(&mut self, container: ObjectId) -> Result<()> {
        let broken = |reason: String| Error::Broken { container, reason };
        let packed: Vec<u8> = self
            .tx
            .prepare_cached("DELETE FROM containers WHERE object = ?1 RETURNING children")
            .and_then(|mut s| s.query_row([container], |r| r.get(0)).optional())
            .map_err(sql)?
            .ok_or_else(|| broken("its children are not recorded".into()))?;
        // Most children of garbage are blobs that only it held: one statement for them.
        let only_here = concat!(
            "DELETE FROM objects WHERE id IN (SELECT value FROM json_each(?1)) AND refs = 1 AND kind = 0 AND NOT ",
            leased!("?2"),
            " RETURNING id, pack, frame_len"
        );
        let listed = children::unpack(&packed).map_err(|_| broken("its children cannot be read".into()))?;
        let held = self.delete(only_here, listed)?;
        if held.is_empty() {
            return Ok(());
        }
        let lowered: HashMap<ObjectId, i64> = self
            .tx
            .prepare_cached("UPDATE objects SET refs = refs - 1 WHERE id IN (SELECT value FROM json_each(?1)) RETURNING id, refs")
            .and_then(|mut s| s.query_map([json(&held)], |r| Ok((r.get(0)?, r.get(1)?)))?.collect())
            .map_err(sql)?;
        for child in held {
            match lowered.get(&child) {
                Some(0) => self.free.push(child),
                Some(_) => {}
                None => return Err(broken(format!("it holds object {child}, which is gone"))),
            }
        }
        Ok(())
    }
}

/// Ids as a JSON array: a list in one parameter.
fn json(ids: &[ObjectId]) -> String {
    serde_json::to_string(ids).unwrap_or_default()
}

// ---- packs

const PACK: &str = "id, key, state, bytes, frame_bytes, live_bytes, keep_until, draining_since, claimed_until";

fn pack_row(r: &Row<'_>) -> rusqlite::Result<PackRow> {
    let state = match r.get::<_, String>(2)?.as_str() {
        "writing" => PackState::Writing,
        "live" => PackState::Live,
        _ => PackState::Draining,
    };
    Ok(PackRow {
        id: r.get(0)?,
        key: r.get(1)?,
        state,
        bytes: uint(r.get(3)?),
        frame_bytes: uint(r.get(4)?),
        live_bytes: uint(r.get(5)?),
        keep_until: uint(r.get(6)?),
        draining_since: r.get::<_, Option<i64>>(7)?.map(uint),
        claimed_until: uint(r.get(8)?),
    })
}

fn pack_rows(tx: &Connection, rest: &str, parameters: impl rusqlite::Params) -> Result<Vec<PackRow>> {
    tx.prepare_cached(&format!("SELECT {PACK} FROM packs {rest}"))
        .and_then(|mut s| s.query_map(parameters, pack_row)?.collect())
        .map_err(sql)
}

pub(super) fn packs(tx: &Connection, after: Option<PackId>, limit: usize) -> Result<Vec<PackRow>> {
    pack_rows(tx, "WHERE id > ?1 ORDER BY id LIMIT ?2", params![after.unwrap_or(0), at_most(limit)])
}

pub(super) fn retire_packs(tx: &Connection, now: u64, limit: usize) -> Result<Retired> {
    // That no object points to it is asked of the objects too: a wrong count must never cost bytes.
    let empty = tx
        .prepare_cached(
            "UPDATE packs SET state = 'draining', draining_since = ?1 WHERE id IN
             (SELECT id FROM packs p WHERE state = 'live' AND live_bytes = 0 AND NOT EXISTS (SELECT 1 FROM objects o WHERE o.pack = p.id)
              ORDER BY id LIMIT ?2)",
        )
        .and_then(|mut s| s.execute(params![int(now), at_most(limit)]))
        .map_err(sql)?;
    // An upload that outlived its lease can no longer finish: finish_pack asks for the state. Its bytes go after the horizon, not now.
    let abandoned = tx
        .prepare_cached(
            "UPDATE packs SET state = 'draining', draining_since = ?1 WHERE id IN
             (SELECT id FROM packs WHERE state = 'writing' AND keep_until <= ?1 ORDER BY id LIMIT ?2)",
        )
        .and_then(|mut s| s.execute(params![int(now), at_most(limit)]))
        .map_err(sql)?;
    Ok(Retired { empty: empty as u64, abandoned: abandoned as u64 })
}

pub(super) fn drained_packs(tx: &Connection, before: u64, limit: usize) -> Result<Vec<PackRow>> {
    pack_rows(
        tx,
        "WHERE state = 'draining' AND draining_since <= ?1 ORDER BY draining_since, id LIMIT ?2",
        params![int(before), at_most(limit)],
    )
}

pub(super) fn forget_packs(tx: &Connection, packs: &[PackId]) -> Result<()> {
    let mut forget = tx.prepare_cached("DELETE FROM packs WHERE id = ?1 AND state = 'draining'").map_err(sql)?;
    packs.iter().try_for_each(|pack| forget.execute([pack]).map(|_| ()).map_err(sql))
}

pub(super) fn claim_sparse_packs(tx: &Connection, limit: usize, now: u64, until: u64) -> Result<Vec<PackRow>> {
    let found = pack_rows(
        tx,
        "WHERE state = 'live' AND live_bytes > 0 AND live_bytes * 2 < frame_bytes AND claimed_until <= ?1 ORDER BY live_bytes, id LIMIT ?2",
        params![int(now), at_most(limit)],
    )?;
    let mut claim = tx.prepare_cached("UPDATE packs SET claimed_until = ?1 WHERE id = ?2").map_err(sql)?;
    for pack in &found {
        claim.execute(params![int(until), pack.id]).map_err(sql)?;
    }
    Ok(found)
}

pub(super) fn pack_contents(tx: &Connection, pack: PackId) -> Result<Vec<Packed>> {
    let rows: Vec<(ObjectId, Vec<u8>, i64, i64, i64, i64)> = tx
        .prepare_cached("SELECT id, digest, kind, offset, frame_len, health FROM objects WHERE pack = ?1 ORDER BY offset")
        .and_then(|mut s| s.query_map([pack], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?)))?.collect())
        .map_err(sql)?;
    rows.into_iter()
        .map(|(object, key, kind, offset, len, health)| {
            let (digest, kind) = (Digest::from_key(&key)?, kind_of(kind)?);
            Ok(Packed { object, digest, kind, offset: uint(offset), frame_len: uint(len), health: health_of(health) })
        })
        .collect()
}

pub(super) fn finish_compaction(tx: &Connection, pack: PackId, sizes: PackSizes, moved: &[Moved], now: u64) -> Result<()> {
    hold(tx, pack)?;
    let mut repoint =
        tx.prepare_cached("UPDATE objects SET pack = ?1, offset = ?2 WHERE id = ?3 AND pack = ?4 RETURNING frame_len").map_err(sql)?;
    let mut lost: BTreeMap<PackId, u64> = BTreeMap::new();
    for Moved { object, from, offset } in moved {
        let frame_len = repoint.query_row(params![pack, int(*offset), object, from], |r| r.get::<_, i64>(0)).optional().map_err(sql)?;
        *lost.entry(*from).or_default() += frame_len.map_or(0, uint);
    }
    // Due at once: what a session leases in it is then queued for the end of that session.
    go_live(tx, pack, sizes, lost.values().sum(), now, None)?;
    let mut lose = tx.prepare_cached("UPDATE packs SET live_bytes = live_bytes - ?1, claimed_until = 0 WHERE id = ?2").map_err(sql)?;
    for (from, bytes) in &lost {
        lose.execute(params![int(*bytes), from]).map_err(sql)?;
    }
    retire_packs(tx, now, lost.len()).map(|_| ())
}

// ---- runs

fn trigger_word(trigger: GcTrigger) -> &'static str {
    match trigger {
        GcTrigger::Schedule => "schedule",
        GcTrigger::Command => "command",
        GcTrigger::Request => "request",
    }
}

pub(super) fn record_gc_run(tx: &Connection, run: &GcRun) -> Result<()> {
    tx.prepare_cached(
        "INSERT INTO gc_runs (id, cause, started_at, finished_at, report) VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (id) DO UPDATE SET finished_at = excluded.finished_at, report = excluded.report",
    )
    .and_then(|mut s| s.execute(params![run.id, trigger_word(run.trigger), int(run.started_at), run.finished_at.map(int), run.report]))
    .map_err(sql)?;
    tx.prepare_cached("DELETE FROM gc_runs WHERE id <= (SELECT id FROM gc_runs ORDER BY id DESC LIMIT 1 OFFSET ?1)")
        .and_then(|mut s| s.execute([GC_RUNS as i64]))
        .map_err(sql)?;
    Ok(())
}

pub(super) fn gc_runs(tx: &Connection, after: Option<&str>, limit: usize) -> Result<Page<GcRun>> {
    // Ids are UUIDv7: in order of time.
    let before = cursor(after, "~")?;
    let rows: Vec<GcRun> = tx
        .prepare_cached("SELECT id, cause, started_at, finished_at, report FROM gc_runs WHERE id < ?1 ORDER BY id DESC LIMIT ?2")
        .and_then(|mut s| {
            s.query_map(params![before, one_more(limit)], |r| {
                let trigger = match r.get::<_, String>(1)?.as_str() {
                    "schedule" => GcTrigger::Schedule,
                    "command" => GcTrigger::Command,
                    _ => GcTrigger::Request,
                };
                let finished_at = r.get::<_, Option<i64>>(3)?.map(uint);
                Ok(GcRun { id: r.get(0)?, trigger, started_at: uint(r.get(2)?), finished_at, report: r.get(4)? })
            })?
            .collect()
        })
        .map_err(sql)?;
    Ok(super::names::paged(rows, limit, |run| run.id.clone()))
}

#[cfg(test)]
mod tests {
    use super::super::connection::Database;
    use super::*;

    /// Containers without children in one pack, and the pack in the queue.
    fn fill(tx: &Connection, containers: i64) -> Result<()> {
        let pack = "INSERT INTO packs (id, key, state, bytes, frame_bytes, live_bytes, keep_until) VALUES (1, 'p', 'live', ?1, ?1, ?1, 0)";
        tx.execute(pack, [containers]).map_err(sql)?;
        let object = "INSERT INTO objects (id, domain, digest, size, kind, keep_until, pack, offset, frame_len, codec)
                      VALUES (?1, 1, ?2, 1, 1, 0, 1, ?1, 1, 0)";
        for id in 1..=containers {
            tx.execute(object, params![id, Digest::sha256(&id.to_le_bytes()).to_key()]).map_err(sql)?;
            let container = "INSERT INTO containers (object, children, logical_bytes, new_bytes) VALUES (?1, ?2, 0, 0)";
            tx.execute(container, params![id, children::pack(Vec::new())]).map_err(sql)?;
        }
        tx.execute("INSERT INTO suspects (due, pack) VALUES (0, 1)", []).map(drop).map_err(sql)
    }

    #[tokio::test]
    async fn giving_way_in_a_large_pack_does_not_fill_the_queue() {
        const CONTAINERS: i64 = 3 * TOGETHER as i64;
        let database = Database::open(None, None).await.expect("in memory");
        database.write(|tx| fill(tx, CONTAINERS)).await.expect("rows");
        let (mut steps, mut longest) = (0, 0);
        loop {
            let (done, queue) = database
                .write(|tx| {
                    let done = collect(tx, 8000, 1, &[], &|| true)?;
                    let queue: i64 = tx.query_row("SELECT count(*) FROM suspects", [], |row| row.get(0)).map_err(sql)?;
                    Ok((done, queue))
                })
                .await
                .expect("a step");
            steps += 1;
            longest = longest.max(queue);
            if !done.more {
                break;
            }
        }
        assert!(steps > CONTAINERS / TOGETHER as i64, "it gave way {steps} times: never within a batch, so this tests nothing");
        assert!(longest <= 2 * TOGETHER as i64, "{longest} entries for {CONTAINERS} objects");
        let left: i64 =
            database.read(|tx| tx.query_row("SELECT count(*) FROM objects", [], |row| row.get(0)).map_err(sql)).await.expect("a count");
        assert_eq!(left, 0);
    }
}
