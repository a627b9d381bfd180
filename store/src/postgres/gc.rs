//! Collection: suspects and what hangs on them. docs/gc.md has the argument why it is safe.
//!
//! A call is a sequence of short transactions. Each takes suspects that no other collection has
//! taken, looks at them without a lock, and then locks every object that it will change with one
//! statement, in id order. Pushes and commits lock in the same order, so no circle of waiting
//! transactions can form. Containers that become free below the deleted ones go into the queue for
//! a later transaction.

use super::connection::{Database, Tx};
use super::error::{Fail, Outcome};
use super::index::lose;
use super::leases::{self, Leases, leased_by_a_session};
use super::uint;
use crate::error::{Error, Result};
use crate::metadata::arguments::at_most;
use crate::metadata::{Collected, Lease, ObjectId, PackId, Queued, Suspect, children};
use pfr_schema::Kind;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Objects that one call deletes, at most.
const BUDGET: usize = 2000;
/// Objects that one transaction deletes, about. A push that shares an object with it waits for its
/// end.
const STEP: usize = 250;

/// How long a container whose children are not known is left alone.
const PARKED_MS: i64 = 24 * 3600 * 1000;

/// An entry of the queue, as it lies there.
struct Entry {
    id: i64,
    queued: Queued,
}

/// Due entries: those of deleted snapshots alone if there are any. So what both they and an upload that was never committed reach is counted
/// the same way however the work is cut into steps.
async fn due(tx: &mut Tx, take: bool, limit: usize) -> Outcome<Vec<Entry>> {
    let now = tx.now().await?;
    let released = entries(tx, now, true, take, limit).await?;
    if released.is_empty() { entries(tx, now, false, take, limit).await } else { Ok(released) }
}

async fn entries(tx: &mut Tx, until: i64, released: bool, take: bool, limit: usize) -> Outcome<Vec<Entry>> {
    let statement = if take {
        "SELECT id, object, pack, due, session FROM suspects WHERE released = $1 AND due <= $2 ORDER BY due, id LIMIT $3 FOR UPDATE SKIP LOCKED"
    } else {
        "SELECT id, object, pack, due, session FROM suspects WHERE released = $1 AND due <= $2 ORDER BY due, id LIMIT $3"
    };
    type Row = (i64, Option<ObjectId>, Option<PackId>, i64, Option<i64>);
    let rows: Vec<Row> = sqlx::query_as(statement).bind(released).bind(until).bind(at_most(limit)).fetch_all(tx.on()).await?;
    let entry = |(id, object, pack, due, session): Row| {
        let suspect = object.map(Suspect::Object).or(pack.map(Suspect::Pack))?;
        Some(Entry { id, queued: Queued { suspect, released, due: uint(due), session } })
    };
    Ok(rows.into_iter().filter_map(entry).collect())
}

pub(super) async fn queue(tx: &mut Tx, due: bool, limit: usize) -> Outcome<Vec<Queued>> {
    let until = if due { tx.now().await? } else { i64::MAX };
    let mut all = entries(tx, until, true, false, limit).await?;
    all.extend(entries(tx, until, false, false, limit - all.len().min(limit)).await?);
    Ok(all.into_iter().map(|entry| entry.queued).collect())
}

pub(super) async fn unclaimed(tx: &mut Tx, pack: PackId, limit: usize) -> Outcome<Vec<ObjectId>> {
    let now = tx.now().await?;
    Ok(sqlx::query_scalar(concat!(
        "SELECT id FROM objects o WHERE pack = $1 AND refs = 0 AND keep_until <= $2 AND NOT ",
        leased_by_a_session!("$2"),
        " ORDER BY id LIMIT $3"
    ))
    .bind(pack)
    .bind(now)
    .bind(at_most(limit))
    .fetch_all(tx.on())
    .await?)
}

pub(super) async fn unheld(tx: &mut Tx, pack: PackId) -> Outcome<Vec<ObjectId>> {
    Ok(sqlx::query_scalar("SELECT id FROM objects WHERE pack = $1 AND refs = 0 ORDER BY id").bind(pack).fetch_all(tx.on()).await?)
}

fn broken(container: ObjectId, reason: &str) -> Fail {
    Error::Broken { container, reason: reason.into() }.into()
}

/// Collects until about `budget` objects are deleted or nothing is left to take.
pub(super) async fn collect(database: &Database, budget: usize) -> Result<Collected> {
    let budget = budget.min(BUDGET) as u64;
    let sessions = database.write((), |tx, ()| Box::pin(end_sessions(tx))).await?;
    let mut done = Collected { sessions, ..Collected::default() };
    let mut parked = HashSet::new();
    loop {
        let left = budget.saturating_sub(done.released + done.unclaimed);
        let room = usize::try_from(left).unwrap_or(STEP).min(STEP);
        let step = match database.write(room, |tx, room| Box::pin(step(tx, *room))).await {
            Ok(step) => step,
            // Its transaction was rolled back. The container is left alone, and the rest is
            // collected.
            Err(Error::Broken { container, .. }) if parked.insert(container) => {
                database.write(container, |tx, container| Box::pin(park(tx, *container))).await?;
                done.parked += 1;
                continue;
            }
            // What the transactions before it deleted must be counted. The next call meets the
            // error again, if it stays.
            Err(error) if done.examined > 0 => {
                tracing::debug!(%error, "a transaction of collection failed after others had succeeded");
                done.more = true;
                return Ok(done);
            }
            Err(error) => return Err(error),
        };
        done.examined += step.examined;
        done.released += step.released;
        done.unclaimed += step.unclaimed;
        done.frame_bytes += step.frame_bytes;
        done.more = step.more;
        if !done.more || step.examined == 0 || done.released + done.unclaimed >= budget {
            return Ok(done);
        }
    }
}

/// Forgets push sessions that ended. A transaction of its own: a push that ends renews its session
/// while it holds objects, so whoever holds a session must not wait for objects.
async fn end_sessions(tx: &mut Tx) -> Outcome<u64> {
    let now = tx.now().await?;
    let ended =
        "DELETE FROM pushes WHERE id = ANY(ARRAY(SELECT id FROM pushes WHERE expires < $1 FOR UPDATE SKIP LOCKED)) AND expires < $1";
    tx.execute(sqlx::query(ended).bind(now)).await
}

/// Leaves a container alone as if it were leased: it comes back into the queue when that ends.
async fn park(tx: &mut Tx, container: ObjectId) -> Outcome<()> {
    let until = tx.now().await?.saturating_add(PARKED_MS);
    tx.execute(sqlx::query("UPDATE objects SET keep_until = $1 WHERE id = $2").bind(until).bind(container)).await?;
    Ok(())
}

/// One transaction: suspects of one kind, and the blobs that only the deleted containers held.
async fn step(tx: &mut Tx, room: usize) -> Outcome<Collected> {
    let now = tx.now().await?;
    let entries = due(tx, true, room).await?;
    let Some(first) = entries.first() else { return Ok(Collected::default()) };
    let mut sweep = Sweep { now, released: first.queued.released, ..Sweep::default() };
    // Objects that follow each other in the queue are one set.
    let (objects, finished): (Vec<ObjectId>, Vec<i64>) = match first.queued.suspect {
        Suspect::Object(_) => {
            let object = |entry: &Entry| match entry.queued.suspect {
                Suspect::Object(object) => Some((object, entry.id)),
                Suspect::Pack(_) => None,
            };
            entries.iter().map_while(object).unzip()
        }
        Suspect::Pack(pack) => {
            let (found, whole) = sweep_pack(tx, first.id, pack, room).await?;
            // The entry of a pack in which more may be found stays, and finds again what is put
            // back now.
            sweep.found_again = !whole;
            (found, if whole { vec![first.id] } else { Vec::new() })
        }
    };
    let examined = if matches!(first.queued.suspect, Suspect::Pack(_)) { 1 } else { objects.len() as u64 };
    sweep.run(tx, &objects, room).await?;
    sweep.queue(tx).await?;
    tx.execute_any(&finished, || sqlx::query("DELETE FROM suspects WHERE id = ANY($1)").bind(finished.clone())).await?;
    lose(tx, std::mem::take(&mut sweep.lost)).await?;
    let (released, unclaimed) = if sweep.released { (sweep.deleted, 0) } else { (0, sweep.deleted) };
    let more = !due(tx, false, 1).await?.is_empty();
    Ok(Collected { examined, released, unclaimed, frame_bytes: sweep.frame_bytes, more, ..Collected::default() })
}

/// Finds at most `room` objects of a pack that nothing holds, and whether these are all. Those that
/// a lease covers are looked at again when it ends.
async fn sweep_pack(tx: &mut Tx, entry: i64, pack: PackId, room: usize) -> Outcome<(Vec<ObjectId>, bool)> {
    let now = tx.now().await?;
    let found = unclaimed(tx, pack, room).await?;
    let whole = found.len() < room;
    if whole {
        let select = "SELECT lessee, MAX(keep_until) FROM objects WHERE pack = $1 AND refs = 0 AND id <> ALL($2) GROUP BY lessee";
        let rest: Vec<(i64, i64)> = sqlx::query_as(select).bind(pack).bind(found.clone()).fetch_all(tx.on()).await?;
        let leases = Leases::load(tx, rest.iter().map(|row| row.0)).await?;
        // What lost its lease since the first look is due now.
        let again = |(lessee, until): (i64, i64)| leases.of(until, lessee).unwrap_or(Lease { until: uint(now), session: None });
        let again: BTreeSet<Lease> = rest.into_iter().map(again).collect();
        for lease in again {
            // One entry for each session: else every end of a session would double those of the others.
            let insert = sqlx::query(
                "INSERT INTO suspects (due, pack, session) SELECT $1::bigint, $2::bigint, $3::bigint
                 WHERE NOT EXISTS (SELECT 1 FROM suspects WHERE session = $3::bigint AND pack = $2::bigint AND id <> $4::bigint)",
            );
            tx.execute(insert.bind(leases::due(lease)).bind(pack).bind(lease.session).bind(entry)).await?;
        }
    }
    Ok((found, whole))
}

/// What a transaction deletes and puts back.
#[derive(Default)]
struct Sweep {
    now: i64,
    /// Whether the suspects are of deleted snapshots: what they leave to later transactions is too.
    released: bool,
    /// Objects for the queue, each with the lease at whose end it is due.
    queued: Vec<(ObjectId, Lease)>,
    /// Whether suspects that are not deleted now are found again without an entry of their own.
    found_again: bool,
    /// Frame bytes that packs lose.
    lost: BTreeMap<PackId, u64>,
    deleted: u64,
    frame_bytes: u64,
}

/// An object under lock.
struct Locked {
    refs: i64,
    lease: Option<Lease>,
    blob: bool,
}

/// Suspects that may be deleted, as they were before they were locked.
#[derive(Default)]
struct Free {
    blobs: Vec<ObjectId>,
    containers: BTreeMap<ObjectId, Vec<ObjectId>>,
}

impl Sweep {
    /// Deletes those suspects that are free, and the blobs that only they held.
    async fn run(&mut self, tx: &mut Tx, suspects: &[ObjectId], room: usize) -> Outcome<()> {
        let free = self.look(tx, suspects, room).await?;
        let all: BTreeSet<ObjectId> =
            free.blobs.iter().chain(free.containers.keys()).chain(free.containers.values().flatten()).copied().collect();
        if all.is_empty() {
            return Ok(());
        }
        // The only statement that waits for other transactions: everything at once, in id order.
        let rows: Vec<(ObjectId, i64, i64, i64, i16)> =
            sqlx::query_as("SELECT id, refs, keep_until, lessee, kind FROM objects WHERE id = ANY($1) ORDER BY id FOR UPDATE")
                .bind(all.into_iter().collect::<Vec<_>>())
                .fetch_all(tx.on())
                .await?;
        // A later statement: it sees every session that leased one of them.
        let leases = Leases::load(tx, rows.iter().map(|row| row.3)).await?;
        let lock = |(id, refs, keep_until, lessee, kind): (ObjectId, i64, i64, i64, i16)| {
            (id, Locked { refs, lease: leases.of(keep_until, lessee), blob: kind == Kind::Blob as i16 })
        };
        let locked: HashMap<ObjectId, Locked> = rows.into_iter().map(lock).collect();
        let (mut doomed, mut listed) = (Vec::new(), BTreeMap::<ObjectId, i64>::new());
        for id in &free.blobs {
            if self.still_free(*id, true, &locked) {
                doomed.push(*id);
            }
        }
        let mut opened = Vec::new();
        for (container, children) in &free.containers {
            if self.still_free(*container, false, &locked) {
                opened.push(*container);
                for child in children {
                    if !locked.contains_key(child) {
                        return Err(broken(*container, &format!("it holds object {child}, which is gone")));
                    }
                    *listed.entry(*child).or_default() += 1;
                }
            }
        }
        tx.execute_any(&opened, || sqlx::query("DELETE FROM containers WHERE object = ANY($1)").bind(opened.clone())).await?;
        doomed.append(&mut opened);
        self.delete(tx, "DELETE FROM objects WHERE id = ANY($1) AND refs = 0 RETURNING pack, frame_len", doomed).await?;
        self.release(tx, listed, &locked).await
    }

    /// Looks at suspects without a lock. Containers are taken only while about `room` objects are
    /// deleted, and one at least. Unknown children are never taken for none: then nothing below the
    /// container is deleted.
    async fn look(&mut self, tx: &mut Tx, suspects: &[ObjectId], room: usize) -> Outcome<Free> {
        type Row = (ObjectId, i64, i64, i64, i16, Option<i32>);
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT o.id, o.refs, o.keep_until, o.lessee, o.kind, octet_length(c.children) FROM objects o
             LEFT JOIN containers c ON c.object = o.id WHERE o.id = ANY($1) ORDER BY o.id",
        )
        .bind(suspects.to_vec())
        .fetch_all(tx.on())
        .await?;
        let leases = Leases::load(tx, rows.iter().map(|row| row.3)).await?;
        let (mut free, mut containers) = (Free::default(), Vec::new());
        for (id, refs, keep_until, lessee, kind, bytes) in rows {
            if refs > 0 {
                // Held again: the release that frees it puts it into the queue again.
                continue;
            }
            if let Some(lease) = leases.of(keep_until, lessee) {
                self.queued.push((id, lease));
            } else if kind == Kind::Blob as i16 {
                free.blobs.push(id);
            } else {
                let bytes = bytes.ok_or_else(|| broken(id, "its children are not recorded"))?;
                containers.push((id, usize::try_from(bytes).unwrap_or(0)));
            }
        }
        let (mut taken, mut sum) = (Vec::new(), free.blobs.len());
        for (id, bytes) in containers {
            if sum == 0 || sum < room {
                taken.push(id);
                // A child takes a byte at least: a bound that does not need the lists.
                sum += 1 + bytes;
            } else if !self.found_again {
                self.queued.push((id, self.at_once()));
            }
        }
        if taken.is_empty() {
            return Ok(free);
        }
        let lists: Vec<(ObjectId, Vec<u8>)> =
            sqlx::query_as("SELECT object, children FROM containers WHERE object = ANY($1)").bind(taken).fetch_all(tx.on()).await?;
        // One that another collection has deleted meanwhile is not among them.
        for (container, packed) in lists {
            let children = children::unpack(&packed).map_err(|_| broken(container, "its children cannot be read"))?;
            free.containers.insert(container, children);
        }
        Ok(free)
    }

    /// Whether a suspect is what it was before it was locked. If it is leased or has become a
    /// container, it goes back into the queue.
    fn still_free(&mut self, id: ObjectId, blob: bool, locked: &HashMap<ObjectId, Locked>) -> bool {
        let Some(now) = locked.get(&id).filter(|now| now.refs == 0) else { return false };
        if now.lease.is_some() || now.blob != blob {
            self.queued.push((id, now.lease.unwrap_or(self.at_once())));
            return false;
        }
        true
    }

    /// For what is due now.
    fn at_once(&self) -> Lease {
        Lease { until: uint(self.now), session: None }
    }

    /// Takes references away from locked children. Blobs that lose the last one are deleted: most
    /// children of garbage are such. Others go into the queue.
    async fn release(&mut self, tx: &mut Tx, listed: BTreeMap<ObjectId, i64>, locked: &HashMap<ObjectId, Locked>) -> Outcome<()> {
        let (mut only_here, mut fewer) = (Vec::new(), (Vec::new(), Vec::new()));
        for (id, times) in listed {
            let Some(child) = locked.get(&id) else { continue };
            if child.refs == times && child.lease.is_none() && child.blob {
                only_here.push(id);
                continue;
            }
            if child.refs == times {
                self.queued.push((id, child.lease.unwrap_or(self.at_once())));
            }
            fewer.0.push(id);
            fewer.1.push(times);
        }
        tx.execute_any(&fewer.0, || {
            sqlx::query(
                "UPDATE objects o SET refs = o.refs - u.listed FROM unnest($1::bigint[], $2::bigint[]) AS u(id, listed) WHERE o.id = u.id",
            )
            .bind(fewer.0.clone())
            .bind(fewer.1.clone())
        })
        .await?;
        // What listed them is gone, and they are locked.
        self.delete(tx, "DELETE FROM objects WHERE id = ANY($1) RETURNING pack, frame_len", only_here).await
    }

    async fn delete(&mut self, tx: &mut Tx, statement: &'static str, objects: Vec<ObjectId>) -> Outcome<()> {
        if objects.is_empty() {
            return Ok(());
        }
        let gone: Vec<(PackId, i64)> = sqlx::query_as(statement).bind(objects.clone()).fetch_all(tx.on()).await?;
        tx.wrote(gone.len());
        if gone.len() != objects.len() {
            // They are locked: nothing can have changed.
            return Err(Fail::internal("locked objects were not deleted"));
        }
        self.deleted += gone.len() as u64;
        for (pack, frame_len) in gone {
            *self.lost.entry(pack).or_default() += uint(frame_len);
            self.frame_bytes += uint(frame_len);
        }
        Ok(())
    }

    /// Writes what goes into the queue.
    async fn queue(&self, tx: &mut Tx) -> Outcome<()> {
        tx.execute_any(&self.queued, || {
            sqlx::query(
                "INSERT INTO suspects (due, object, session, released)
                 SELECT u.due, u.id, u.session, $4 FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS u(id, due, session)",
            )
            .bind(self.queued.iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .bind(self.queued.iter().map(|(_, lease)| leases::due(*lease)).collect::<Vec<_>>())
            .bind(self.queued.iter().map(|(_, lease)| lease.session).collect::<Vec<_>>())
            .bind(self.released)
        })
        .await?;
        Ok(())
    }
}
