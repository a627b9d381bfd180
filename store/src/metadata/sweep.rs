//! One set of collection: GC candidates, and the blobs that only the deleted nodes held.
//!
//! Candidates are read without a lock. Then every object that will change is locked with one
//! statement, in id order. Pushes and commits lock in the same order, so they cannot deadlock.
//! Nodes that become free below the deleted ones go into the queue for a later set.

use super::leases::Leases;
use super::queue::{Entry, due, unclaimed};
use super::quota::Growth;
use super::sql::{int, values};
use super::tx::{Fail, Outcome, Tx};
use super::{Candidate, Collected, Lease, ObjectId, PackId, children, index, quota};
use crate::error::Error;
use pfr_schema::Kind;
use std::collections::{BTreeMap, BTreeSet, HashMap};

fn broken(container: ObjectId, reason: &str) -> Fail {
    Error::Broken { container, reason: reason.into() }.into()
}

/// Takes candidates of one kind that no other collection has taken, and deletes about `room`
/// objects.
pub(super) async fn set(tx: &mut dyn Tx, room: usize) -> Outcome<Collected> {
    let now = tx.now().await?;
    let entries = due(tx, true, room).await?;
    let Some(first) = entries.first() else { return Ok(Collected::default()) };
    let mut sweep = Sweep { now, released: first.queued.released, ..Sweep::default() };
    // Objects that follow each other in the queue are one set.
    let (objects, finished): (Vec<ObjectId>, Vec<i64>) = match first.queued.candidate {
        Candidate::Object(_) => {
            let object = |entry: &Entry| match entry.queued.candidate {
                Candidate::Object(object) => Some((object, entry.id)),
                Candidate::Pack(_) => None,
            };
            entries.iter().map_while(object).unzip()
        }
        Candidate::Pack(pack) => {
            let (found, complete) = sweep_pack(tx, first.id, pack, room).await?;
            // If a pack may have more such objects, its entry stays and finds again what is put
            // back now.
            sweep.found_again = !complete;
            (found, if complete { vec![first.id] } else { Vec::new() })
        }
    };
    let examined = if matches!(first.queued.candidate, Candidate::Pack(_)) { 1 } else { objects.len() as u64 };
    sweep.run(tx, &objects, room).await?;
    sweep.queue(tx).await?;
    if !finished.is_empty() {
        tx.execute("DELETE FROM suspects WHERE id = ANY($1)", values![finished]).await?;
    }
    index::lose(tx, std::mem::take(&mut sweep.lost)).await?;
    if sweep.deleted > 0 {
        quota::add(tx, Growth { bytes: -int(sweep.frame_bytes), objects: -int(sweep.deleted), snapshots: 0 }).await?;
    }
    let (released, unclaimed) = if sweep.released { (sweep.deleted, 0) } else { (0, sweep.deleted) };
    let more = !due(tx, false, 1).await?.is_empty();
    Ok(Collected { examined, released, unclaimed, frame_bytes: sweep.frame_bytes, more, ..Collected::default() })
}

/// Finds at most `room` objects of a pack that nothing holds, and whether these are all. Those that
/// a lease covers are looked at again when it ends.
async fn sweep_pack(tx: &mut dyn Tx, entry: i64, pack: PackId, room: usize) -> Outcome<(Vec<ObjectId>, bool)> {
    let now = tx.now().await?;
    let found = unclaimed(tx, pack, room).await?;
    let complete = found.len() < room;
    if complete {
        let find = "SELECT lessee, MAX(keep_until) FROM objects WHERE pack = $1 AND refs = 0 AND id <> ALL($2) GROUP BY lessee";
        let rest: Vec<(i64, u64)> = tx.query(find, values![pack, &found]).await?;
        let leases = Leases::load(tx, rest.iter().map(|row| row.0).collect()).await?;
        // Objects whose lease ended since the first look are due now.
        let again = |(lessee, until): (i64, u64)| leases.of(until, lessee).unwrap_or(Lease { until: now, session: None });
        let again: BTreeSet<Lease> = rest.into_iter().map(again).collect();
        for lease in again {
            // One entry for each session. Otherwise every end of a session would double the entries
            // of the others.
            let insert = "INSERT INTO suspects (due, pack, session) SELECT $1::bigint, $2::bigint, $3::bigint
                WHERE NOT EXISTS (SELECT 1 FROM suspects WHERE session = $3::bigint AND pack = $2::bigint AND id <> $4::bigint)";
            tx.execute(insert, values![lease.until, pack, lease.session, entry]).await?;
        }
    }
    Ok((found, complete))
}

/// What a set deletes and puts back.
#[derive(Default)]
struct Sweep {
    now: u64,
    /// Whether the candidates come from deleted snapshots. Then the candidates that they leave to
    /// later sets do too.
    released: bool,
    /// Objects for the queue, each with the lease at whose end it is due.
    queued: Vec<(ObjectId, Lease)>,
    /// Whether candidates that are not deleted now are found again without an entry of their own.
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

/// Candidates that may be deleted, as they were before they were locked.
#[derive(Default)]
struct Free {
    blobs: Vec<ObjectId>,
    containers: BTreeMap<ObjectId, Vec<ObjectId>>,
}

/// Id, references, `keep_until`, `lessee`, kind, bytes of the list of children.
type RawCandidate = (ObjectId, i64, u64, i64, Kind, Option<u64>);

/// Id, references, `keep_until`, `lessee`, kind.
type RawLocked = (ObjectId, i64, u64, i64, Kind);

impl Sweep {
    /// Deletes those candidates that are free, and the blobs that only they held.
    async fn run(&mut self, tx: &mut dyn Tx, candidates: &[ObjectId], room: usize) -> Outcome<()> {
        let free = self.look(tx, candidates, room).await?;
        let all: BTreeSet<ObjectId> =
            free.blobs.iter().chain(free.containers.keys()).chain(free.containers.values().flatten()).copied().collect();
        if all.is_empty() {
            return Ok(());
        }
        // The only statement that waits for other transactions: everything at once, in id order.
        let lock = "SELECT id, refs, keep_until, lessee, kind FROM objects WHERE id = ANY($1) ORDER BY id FOR UPDATE";
        let all: Vec<ObjectId> = all.into_iter().collect();
        let rows: Vec<RawLocked> = tx.query(lock, values![all]).await?;
        // A later statement: it sees every session that leased one of them.
        let leases = Leases::load(tx, rows.iter().map(|row| row.3).collect()).await?;
        let locked = |(id, refs, keep_until, lessee, kind): RawLocked| {
            (id, Locked { refs, lease: leases.of(keep_until, lessee), blob: kind == Kind::Blob })
        };
        let locked: HashMap<ObjectId, Locked> = rows.into_iter().map(locked).collect();
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
        if !opened.is_empty() {
            tx.execute("DELETE FROM containers WHERE object = ANY($1)", values![&opened]).await?;
        }
        doomed.append(&mut opened);
        self.delete(tx, "DELETE FROM objects WHERE id = ANY($1) AND refs = 0 RETURNING pack, frame_len", doomed).await?;
        self.release(tx, listed, &locked).await
    }

    /// Looks at candidates without a lock. Nodes are taken only while about `room` objects are
    /// deleted, and one at least. Unknown children are never taken for none: then nothing below the
    /// node is deleted.
    async fn look(&mut self, tx: &mut dyn Tx, candidates: &[ObjectId], room: usize) -> Outcome<Free> {
        let find = "SELECT o.id, o.refs, o.keep_until, o.lessee, o.kind, octet_length(c.children) FROM objects o
                    LEFT JOIN containers c ON c.object = o.id WHERE o.id = ANY($1) ORDER BY o.id";
        let rows: Vec<RawCandidate> = tx.query(find, values![candidates]).await?;
        let leases = Leases::load(tx, rows.iter().map(|row| row.3).collect()).await?;
        let (mut free, mut containers) = (Free::default(), Vec::new());
        for (id, refs, keep_until, lessee, kind, bytes) in rows {
            if refs > 0 {
                // Held again: the release that frees it puts it into the queue again.
                continue;
            }
            if let Some(lease) = leases.of(keep_until, lessee) {
                self.queued.push((id, lease));
            } else if kind == Kind::Blob {
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
                // Each child takes at least a byte in the list, so this bound needs no list.
                sum += 1 + bytes;
            } else if !self.found_again {
                self.queued.push((id, self.at_once()));
            }
        }
        if taken.is_empty() {
            return Ok(free);
        }
        let lists: Vec<(ObjectId, Vec<u8>)> =
            tx.query("SELECT object, children FROM containers WHERE object = ANY($1)", values![taken]).await?;
        // One that another collection has deleted meanwhile is not among them.
        for (container, packed) in lists {
            let children = children::unpack(&packed).map_err(|_| broken(container, "its children cannot be read"))?;
            free.containers.insert(container, children);
        }
        Ok(free)
    }

    /// Whether a candidate is what it was before it was locked. If it is leased or has become a
    /// node, it goes back into the queue.
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
        Lease { until: self.now, session: None }
    }

    /// Takes references away from locked children. Blobs that lose the last one are deleted: most
    /// children of garbage are such. Others go into the queue.
    async fn release(&mut self, tx: &mut dyn Tx, listed: BTreeMap<ObjectId, i64>, locked: &HashMap<ObjectId, Locked>) -> Outcome<()> {
        let (mut only_here, mut fewer) = (Vec::new(), BTreeMap::new());
        for (id, times) in listed {
            let Some(child) = locked.get(&id) else { continue };
            if child.refs == times && child.lease.is_none() && child.blob {
                only_here.push(id);
                continue;
            }
            if child.refs == times {
                self.queued.push((id, child.lease.unwrap_or(self.at_once())));
            }
            fewer.insert(id, times);
        }
        let lower =
            "UPDATE objects AS o SET refs = o.refs - u.listed FROM unnest($1::bigint[], $2::bigint[]) AS u(id, listed) WHERE o.id = u.id";
        tx.execute_each(lower, vec![fewer.keys().copied().collect(), fewer.values().copied().collect()], &[]).await?;
        // The node that listed them is deleted, and they are locked.
        self.delete(tx, "DELETE FROM objects WHERE id = ANY($1) RETURNING pack, frame_len", only_here).await
    }

    async fn delete(&mut self, tx: &mut dyn Tx, statement: &'static str, objects: Vec<ObjectId>) -> Outcome<()> {
        if objects.is_empty() {
            return Ok(());
        }
        let gone: Vec<(PackId, u64)> = tx.returning(statement, values![&objects]).await?;
        if gone.len() != objects.len() {
            // They are locked: nothing can have changed.
            return Err(Fail::internal("locked objects were not deleted"));
        }
        self.deleted += gone.len() as u64;
        for (pack, frame_len) in gone {
            *self.lost.entry(pack).or_default() += frame_len;
            self.frame_bytes += frame_len;
        }
        Ok(())
    }

    /// Writes what goes into the queue.
    async fn queue(&self, tx: &mut dyn Tx) -> Outcome<()> {
        let insert = "INSERT INTO suspects (due, object, session, released)
                      SELECT u.due, u.id, u.session, $4 FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS u(id, due, session)";
        let columns = vec![
            self.queued.iter().map(|(id, _)| *id).collect(),
            self.queued.iter().map(|(_, lease)| lease.until).collect(),
            self.queued.iter().map(|(_, lease)| lease.session).collect(),
        ];
        tx.execute_each(insert, columns, values![self.released]).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
