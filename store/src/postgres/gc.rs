//! Collection: suspects and what hangs on them. docs/gc.md has the argument why it is safe.
//!
//! Set by set: what is free is locked, looked at again, deleted; what only it held is the next set. Several instances may collect at
//! the same time: each takes suspects that no other has taken.

use super::connection::Tx;
use super::error::{Fail, Outcome};
use super::index::lose;
use super::leases::{self, Leases, leased_by_a_session};
use super::uint;
use crate::error::Error;
use crate::metadata::arguments::at_most;
use crate::metadata::{Collected, Lease, ObjectId, PackId, Queued, Suspect, children};
use pfr_schema::Kind;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Most objects that are locked and deleted by one statement.
const SET: usize = 10_000;

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

/// One step of collection, within one transaction.
struct Sweep {
    now: i64,
    /// Objects without references, to be deleted if no lease covers them.
    free: BTreeSet<ObjectId>,
    /// Frame bytes that packs lose.
    lost: BTreeMap<PackId, u64>,
    deleted: u64,
    frame_bytes: u64,
    /// Whether the entries that are worked on are of deleted snapshots: what they leave to later steps is too.
    released: bool,
}

pub(super) async fn collect(tx: &mut Tx, budget: usize, broken: &[ObjectId]) -> Outcome<Collected> {
    let now = tx.now().await?;
    // As if they were leased: they come back into the queue when that ends.
    tx.execute_any(broken, || {
        sqlx::query("UPDATE objects SET keep_until = $1 WHERE id = ANY($2)").bind(now.saturating_add(PARKED_MS)).bind(broken.to_vec())
    })
    .await?;
    let ended =
        "DELETE FROM pushes WHERE id = ANY(ARRAY(SELECT id FROM pushes WHERE expires < $1 FOR UPDATE SKIP LOCKED)) AND expires < $1";
    let sessions = tx.execute(sqlx::query(ended).bind(now)).await?;
    let mut done = Collected { sessions, parked: broken.len() as u64, ..Collected::default() };
    let mut sweep = Sweep { now, free: BTreeSet::new(), lost: BTreeMap::new(), deleted: 0, frame_bytes: 0, released: false };
    let entries = due(tx, true, budget).await?;
    let mut finished: Vec<i64> = Vec::new();
    let mut rest = entries.as_slice();
    while let Some(first) = rest.first() {
        let left = budget.saturating_sub(sweep.deleted as usize);
        if left == 0 {
            break;
        }
        let before = sweep.deleted;
        // Objects that follow each other in the queue are one set.
        let same = match first.queued.suspect {
            Suspect::Object(_) => rest.iter().take_while(|entry| matches!(entry.queued.suspect, Suspect::Object(_))).count(),
            Suspect::Pack(_) => 1,
        };
        let (set, behind) = rest.split_at(same);
        rest = behind;
        done.examined += set.len() as u64;
        sweep.released = first.queued.released;
        match first.queued.suspect {
            Suspect::Object(_) => {
                sweep
                    .free
                    .extend(set.iter().filter_map(|e| if let Suspect::Object(object) = e.queued.suspect { Some(object) } else { None }));
                finished.extend(set.iter().map(|entry| entry.id));
                sweep.run(tx, left).await?;
            }
            Suspect::Pack(pack) => {
                if sweep.pack(tx, pack, left).await? {
                    finished.push(first.id);
                }
                sweep.run(tx, left).await?;
            }
        }
        match first.queued.released {
            true => done.released += sweep.deleted - before,
            false => done.unclaimed += sweep.deleted - before,
        }
    }
    done.frame_bytes = sweep.frame_bytes;
    tx.execute_any(&finished, || sqlx::query("DELETE FROM suspects WHERE id = ANY($1)").bind(finished.clone())).await?;
    lose(tx, sweep.lost).await?;
    done.more = !due(tx, false, 1).await?.is_empty();
    Ok(done)
}

impl Sweep {
    /// Finds what nothing holds in a pack; false if there is more of it than `left`. What a lease still covers is looked at again when it ends.
    async fn pack(&mut self, tx: &mut Tx, pack: PackId, left: usize) -> Outcome<bool> {
        let found = unclaimed(tx, pack, left).await?;
        let finished = found.len() < left;
        if finished {
            let select = "SELECT lessee, MAX(keep_until) FROM objects WHERE pack = $1 AND refs = 0 AND id <> ALL($2) GROUP BY lessee";
            let rest: Vec<(i64, i64)> = sqlx::query_as(select).bind(pack).bind(found.clone()).fetch_all(tx.on()).await?;
            let leases = Leases::load(tx, rest.iter().map(|row| row.0)).await?;
            // What lost its lease since the first look is due now.
            let again = |(lessee, until): (i64, i64)| leases.of(until, lessee).unwrap_or(Lease { until: uint(self.now), session: None });
            let again: BTreeSet<Lease> = rest.into_iter().map(again).collect();
            for lease in again {
                let insert = sqlx::query("INSERT INTO suspects (due, pack, session) VALUES ($1, $2, $3)");
                tx.execute(insert.bind(leases::due(lease)).bind(pack).bind(lease.session)).await?;
            }
        }
        self.free.extend(found);
        Ok(finished)
    }

    /// Deletes what is free and what becomes free below it; what is over `limit` goes back into the queue.
    async fn run(&mut self, tx: &mut Tx, limit: usize) -> Outcome<()> {
        let end = self.deleted + limit as u64;
        while !self.free.is_empty() && self.deleted < end {
            let room = usize::try_from(end - self.deleted).unwrap_or(usize::MAX).min(SET);
            let set: Vec<ObjectId> = self.free.iter().copied().take(room).collect();
            self.set(tx, set, room).await?;
        }
        let over: Vec<ObjectId> = std::mem::take(&mut self.free).into_iter().collect();
        self.put_back(tx, over).await
    }

    async fn put_back(&self, tx: &mut Tx, objects: Vec<ObjectId>) -> Outcome<()> {
        let now = Lease { until: uint(self.now), session: None };
        self.again(tx, objects.into_iter().map(|object| (object, now)).collect()).await
    }

    /// Looks at objects again when their leases end.
    async fn again(&self, tx: &mut Tx, leased: Vec<(ObjectId, Lease)>) -> Outcome<()> {
        tx.execute_any(&leased, || {
            sqlx::query(
                "INSERT INTO suspects (due, object, session, released)
                 SELECT u.due, u.id, u.session, $4 FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS u(id, due, session)",
            )
            .bind(leased.iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .bind(leased.iter().map(|(_, lease)| leases::due(*lease)).collect::<Vec<_>>())
            .bind(leased.iter().map(|(_, lease)| lease.session).collect::<Vec<_>>())
            .bind(self.released)
        })
        .await?;
        Ok(())
    }

    /// Looks at a set of objects and deletes what is free; containers only while about `room` objects are deleted.
    async fn set(&mut self, tx: &mut Tx, set: Vec<ObjectId>, room: usize) -> Outcome<()> {
        let rows: Vec<(ObjectId, i64, i64, i64, i16)> =
            sqlx::query_as("SELECT id, refs, keep_until, lessee, kind FROM objects WHERE id = ANY($1) ORDER BY id FOR UPDATE")
                .bind(set.clone())
                .fetch_all(tx.on())
                .await?;
        let leases = Leases::load(tx, rows.iter().map(|row| row.3)).await?;
        let (mut doomed, mut containers, mut leased) = (Vec::new(), Vec::new(), Vec::new());
        for (id, refs, keep_until, lessee, kind) in rows {
            // Held again: not free.
            if refs > 0 {
                continue;
            }
            match leases.of(keep_until, lessee) {
                Some(lease) => leased.push((id, lease)),
                None if kind == Kind::Blob as i16 => doomed.push(id),
                None => containers.push(id),
            }
        }
        for id in &set {
            self.free.remove(id);
        }
        self.again(tx, leased).await?;
        let room = room.saturating_sub(doomed.len());
        let opened = self.open(tx, &mut containers, room).await?;
        doomed.append(&mut containers);
        self.delete(tx, "DELETE FROM objects WHERE id = ANY($1) AND refs = 0 RETURNING pack, frame_len", doomed).await?;
        self.release(tx, opened).await
    }

    /// Deletes the rows of containers and returns them. Containers for which there is no room go back to what is free. Unknown children are never
    /// taken for none: then nothing below them is deleted.
    async fn open(&mut self, tx: &mut Tx, containers: &mut Vec<ObjectId>, room: usize) -> Outcome<Vec<(ObjectId, Vec<u8>)>> {
        if containers.is_empty() {
            return Ok(Vec::new());
        }
        // A child takes a byte at least: a bound that does not need the lists.
        let sizes: Vec<(ObjectId, i32)> =
            sqlx::query_as("SELECT object, octet_length(children) FROM containers WHERE object = ANY($1) ORDER BY object")
                .bind(containers.clone())
                .fetch_all(tx.on())
                .await?;
        if sizes.len() != containers.len() {
            let known: HashSet<ObjectId> = sizes.iter().map(|(id, _)| *id).collect();
            let unknown = containers.iter().find(|id| !known.contains(id)).copied().unwrap_or_default();
            return Err(broken(unknown, "its children are not recorded"));
        }
        let (mut taken, mut sum) = (Vec::new(), 0_usize);
        for (id, bytes) in sizes {
            if taken.is_empty() || sum < room {
                taken.push(id);
                sum += 1 + usize::try_from(bytes).unwrap_or(0);
            } else {
                self.free.insert(id);
            }
        }
        let rows: Vec<(ObjectId, Vec<u8>)> = sqlx::query_as("DELETE FROM containers WHERE object = ANY($1) RETURNING object, children")
            .bind(taken.clone())
            .fetch_all(tx.on())
            .await?;
        tx.wrote(rows.len());
        *containers = taken;
        Ok(rows)
    }

    /// Takes references away from children: those that only these containers held go with them if they are blobs, or are free now.
    async fn release(&mut self, tx: &mut Tx, opened: Vec<(ObjectId, Vec<u8>)>) -> Outcome<()> {
        // How often each child was listed.
        let mut released: BTreeMap<ObjectId, i64> = BTreeMap::new();
        for (container, packed) in &opened {
            for child in children::unpack(packed).map_err(|_| broken(*container, "its children cannot be read"))? {
                *released.entry(child).or_default() += 1;
            }
        }
        let all: Vec<(ObjectId, i64)> = released.into_iter().collect();
        for part in all.chunks(SET) {
            let ids: Vec<ObjectId> = part.iter().map(|(id, _)| *id).collect();
            let rows: Vec<(ObjectId, i64, i64, i64, i16)> =
                sqlx::query_as("SELECT id, refs, keep_until, lessee, kind FROM objects WHERE id = ANY($1) ORDER BY id FOR UPDATE")
                    .bind(ids.clone())
                    .fetch_all(tx.on())
                    .await?;
            if rows.len() != part.len() {
                let known: HashSet<ObjectId> = rows.iter().map(|row| row.0).collect();
                let gone = ids.into_iter().find(|id| !known.contains(id)).unwrap_or_default();
                let holds = |packed: &[u8]| children::unpack(packed).is_ok_and(|listed| listed.contains(&gone));
                let holder = opened.iter().find(|(_, packed)| holds(packed)).map(|(id, _)| *id).unwrap_or_default();
                return Err(broken(holder, &format!("it holds object {gone}, which is gone")));
            }
            let leases = Leases::load(tx, rows.iter().map(|row| row.3)).await?;
            let (mut only_here, mut fewer) = (Vec::new(), (Vec::new(), Vec::new()));
            for ((id, refs, keep_until, lessee, kind), (_, listed)) in rows.into_iter().zip(part) {
                if refs == *listed && kind == Kind::Blob as i16 && leases.of(keep_until, lessee).is_none() {
                    // Most children of garbage are blobs that only it held: they need no second look.
                    only_here.push(id);
                    continue;
                }
                if refs == *listed {
                    self.free.insert(id);
                }
                fewer.0.push(id);
                fewer.1.push(*listed);
            }
            tx.execute_any(&fewer.0, || {
                sqlx::query("UPDATE objects o SET refs = o.refs - u.listed FROM unnest($1::bigint[], $2::bigint[]) AS u(id, listed) WHERE o.id = u.id")
                    .bind(fewer.0.clone())
                    .bind(fewer.1.clone())
            })
            .await?;
            // Locked and looked at: what lists them is gone.
            self.delete(tx, "DELETE FROM objects WHERE id = ANY($1) RETURNING pack, frame_len", only_here).await?;
        }
        Ok(())
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
}
