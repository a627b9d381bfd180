//! Look-up of objects and nodes.

use super::sessions::{LivePush, live_push, renew_if_needed};
use super::sql::{Column, Sql, values};
use super::tx::{Backend, Fail, Mode, Outcome, Tx};
use super::{Health, Location, ObjectId, ObjectRow, PackId, PushId, children, leases};
use crate::error::{Error, Result};
use futures::future::try_join_all;
use pfr_schema::codec::Codec;
use pfr_schema::{Digest, Kind};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Digests of a request that are worth a connection of their own.
const LOOK_PART: usize = 4096;

/// The result of a request for missing blobs.
struct Look {
    session: LivePush,
    /// Positions of the missing blobs.
    missing: Vec<usize>,
    /// Positions of the stored blobs that are not leased to the session yet.
    to_lease: Vec<(usize, ObjectId)>,
}

/// Returns the positions of the missing blobs. Leases the others to the session, with a write only
/// for those that are not leased yet.
pub(super) async fn missing(backend: &dyn Backend, push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Result<Vec<usize>> {
    let Look { session, mut missing, to_lease } = look_at_once(backend, &push, wanted).await?;
    renew_if_needed(backend, push, &session, lease).await?;
    if !to_lease.is_empty() {
        let ids: HashSet<ObjectId> = to_lease.iter().map(|(_, id)| *id).collect();
        let mut ids: Vec<ObjectId> = ids.into_iter().collect();
        ids.sort_unstable();
        let job = (ids, session.number, session.now);
        let lease_all = backend.run(Mode::GROWING_STATEMENT.named("lease"), job, |tx, (ids, session, now)| {
            Box::pin(leases::lease_all(tx, ids, *session, *now))
        });
        let there = lease_all.await?;
        // Blobs that were collected since the look-up are missing too.
        missing.extend(to_lease.into_iter().filter(|(_, id)| !there.contains(id)).map(|(position, _)| position));
    }
    missing.sort_unstable();
    Ok(missing)
}

/// Positions in the order of the digests. The first eight bytes are enough for it: no answer
/// depends on the order, and whole digests take several times as long to sort.
fn in_order(wanted: &[(Digest, Kind)]) -> Vec<usize> {
    let beginning = |digest: &Digest| digest.as_bytes().first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    let mut order: Vec<(u64, usize)> = wanted.iter().enumerate().map(|(position, (digest, _))| (beginning(digest), position)).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, position)| position).collect()
}

/// Looks in the order of the digests, in which neighbours share pages of the index, and with as
/// many connections as the request is large.
async fn look_at_once(backend: &dyn Backend, push: &PushId, wanted: Vec<(Digest, Kind)>) -> Result<Look> {
    let order = in_order(&wanted);
    let parts = (wanted.len() / LOOK_PART).clamp(1, backend.looks());
    let mut parts: Vec<&[usize]> = order.chunks(order.len().div_ceil(parts).max(1)).collect();
    if parts.is_empty() {
        // The answer to an empty request still says whether the session lives.
        parts.push(&[]);
    }
    let looks = parts.iter().map(|part| {
        let asked: Vec<(Digest, Kind)> = part.iter().map(|&position| wanted[position]).collect();
        backend.run(Mode::READ.named("missing"), (push.clone(), asked), |tx, (push, wanted)| Box::pin(look(tx, push, wanted)))
    });
    let looks = try_join_all(looks).await?.into_iter().zip(parts).map(|(mut look, part)| {
        look.missing.iter_mut().for_each(|at| *at = part[*at]);
        look.to_lease.iter_mut().for_each(|(at, _)| *at = part[*at]);
        look
    });
    let together = looks.reduce(|mut all, look| {
        all.missing.extend(look.missing);
        all.to_lease.extend(look.to_lease);
        all
    });
    together.ok_or_else(|| Error::Internal("no part of the request was looked at".into()))
}

async fn look(tx: &mut dyn Tx, push: &PushId, wanted: &[(Digest, Kind)]) -> Outcome<Look> {
    let session = live_push(tx, push).await?;
    match tx.is_concurrent() {
        true => look_at_all(tx, session, wanted).await,
        false => look_in_order_of_rows(tx, session, wanted).await,
    }
}

/// One statement for all of it.
async fn look_at_all(tx: &mut dyn Tx, session: LivePush, wanted: &[(Digest, Kind)]) -> Outcome<Look> {
    // Returns only the rows that need a lease: usually few.
    const LOOK: Sql = Sql::only_postgres(
        "SELECT u.n - 1, o.id, o.kind FROM unnest($1::bytea[], $2::bigint[]) WITH ORDINALITY AS u(digest, kind, n)
         LEFT JOIN objects o ON o.digest = u.digest AND (o.health = 0 OR (u.kind = 0 AND o.health = 1))
         WHERE o.id IS NULL OR (u.kind <> 0 AND o.kind <> u.kind) OR NOT (o.lessee = $3 OR o.lessee <= -$3)",
    );
    let columns = vec![wanted.iter().map(|(digest, _)| *digest).collect(), wanted.iter().map(|(_, kind)| *kind).collect()];
    let rows: Vec<(i64, Option<ObjectId>, Option<Kind>)> = tx.rows(LOOK, columns, values![session.number], false).await?;
    let (mut missing, mut to_lease) = (Vec::new(), Vec::new());
    for (position, id, kind) in rows {
        let position = position as usize;
        match (id, kind) {
            (Some(id), Some(kind)) if kind.satisfies(wanted[position].1) => to_lease.push((position, id)),
            _ => missing.push(position),
        }
    }
    Ok(Look { session, missing, to_lease })
}

/// The index of digests first, which has the ids too, and then the rows in the order of their ids.
/// What was stored together lies together there, so a page of the table is found once for all of
/// its rows, and not once for each digest. Two statements for all of it: to begin and to end one
/// takes longer than to find a row.
async fn look_in_order_of_rows(tx: &mut dyn Tx, session: LivePush, wanted: &[(Digest, Kind)]) -> Outcome<Look> {
    // CROSS JOIN: SQLite goes through the array, and looks each element up.
    const FIND: Sql = Sql::at_once("", "SELECT a.rowid - 1, o.id FROM rarray($1) AS a CROSS JOIN objects AS o WHERE o.digest = a.value");
    // Returns only the rows that are worse than $2 or not leased: usually few.
    const CHECK: Sql = Sql::at_once(
        "",
        "SELECT a.rowid - 1, o.kind, o.health, o.lessee = $3 OR o.lessee <= -$3
         FROM rarray($1) AS a CROSS JOIN objects AS o
         WHERE o.id = a.value AND NOT (o.health <= $2 AND (o.lessee = $3 OR o.lessee <= -$3))",
    );
    /// No health is as good as this, so all rows are returned.
    const ALL: i64 = -1;
    let digests: Column = wanted.iter().map(|(digest, _)| *digest).collect();
    let mut found: Vec<(i64, ObjectId)> = tx.rows(FIND, vec![digests], &[], false).await?;
    let mut is_there = vec![false; wanted.len()];
    found.iter().for_each(|(position, _)| is_there[*position as usize] = true);
    let mut missing: Vec<usize> = (0..wanted.len()).filter(|&position| !is_there[position]).collect();
    let mut to_lease = Vec::new();
    found.sort_unstable_by_key(|(_, id)| *id);
    // Every kind can serve as a blob. Of nodes, which are few, the kind is to be compared.
    let (blobs, nodes): (Vec<_>, Vec<_>) = found.into_iter().partition(|(position, _)| wanted[*position as usize].1 == Kind::Blob);
    for (found, returned) in [(blobs, Health::enough_for(Kind::Blob) as i64), (nodes, ALL)] {
        let ids: Column = found.iter().map(|(_, id)| *id).collect();
        let rows: Vec<(i64, Kind, Health, bool)> = tx.rows(CHECK, vec![ids], values![returned, session.number], false).await?;
        for (at, kind, health, is_leased) in rows {
            let (position, id) = found[at as usize];
            let position = position as usize;
            let as_kind = wanted[position].1;
            let serves = kind.satisfies(as_kind) && health as i64 <= Health::enough_for(as_kind) as i64;
            match (serves, is_leased) {
                (false, _) => missing.push(position),
                (true, false) => to_lease.push((position, id)),
                (true, true) => {}
            }
        }
    }
    Ok(Look { session, missing, to_lease })
}

pub(super) async fn locate(tx: &mut dyn Tx, digests: &[Digest]) -> Outcome<Vec<Option<Location>>> {
    type Row = (Digest, Kind, String, u64, u64, u64, Codec, Health);
    let find = r#"SELECT o.digest, o.kind, p.key, o."offset", o.frame_len, o.size, o.codec, o.health FROM objects o
                  JOIN packs p ON p.id = o.pack WHERE o.digest = ANY($1)"#;
    let rows: Vec<Row> = tx.query(find, values![digests]).await?;
    let location = |(digest, kind, pack, offset, frame_len, raw_len, codec, health): Row| {
        (digest, Location { kind, pack, offset, frame_len, raw_len, codec, health })
    };
    let found: HashMap<Digest, Location> = rows.into_iter().map(location).collect();
    Ok(digests.iter().map(|digest| found.get(digest).cloned()).collect())
}

macro_rules! rows {
    ($condition:literal) => {
        concat!(
            "SELECT o.id, o.digest, o.kind, o.size, o.frame_len, o.refs, o.pack, c.children FROM objects o
             LEFT JOIN containers c ON c.object = o.id WHERE ",
            $condition
        )
    };
}

type RawObject = (ObjectId, Digest, Kind, u64, u64, u64, PackId, Option<Vec<u8>>);

fn object_row((id, digest, kind, size, frame_len, refs, pack, packed): RawObject) -> Outcome<ObjectRow> {
    let children = match packed {
        Some(packed) => children::unpack(&packed)?,
        None if kind.is_container() => return Err(Fail::internal(format!("the children of object {id} are not recorded"))),
        None => Vec::new(),
    };
    Ok(ObjectRow { id, digest, kind, size, frame_len, refs, pack, children })
}

pub(super) async fn find(tx: &mut dyn Tx, digests: &[Digest]) -> Outcome<Vec<Option<ObjectRow>>> {
    let rows = tx.query(rows!("o.digest = ANY($1)"), values![digests]).await?;
    let rows = rows.into_iter().map(|row| object_row(row).map(|row| (row.digest, row)));
    let found: HashMap<Digest, ObjectRow> = rows.collect::<Outcome<_>>()?;
    Ok(digests.iter().map(|digest| found.get(digest).cloned()).collect())
}

/// Objects in the order of `ids`.
pub(super) async fn objects(tx: &mut dyn Tx, ids: &[ObjectId]) -> Outcome<Vec<ObjectRow>> {
    let rows = tx.query(rows!("o.id = ANY($1)"), values![ids]).await?;
    let rows = rows.into_iter().map(|row| object_row(row).map(|row| (row.id, row)));
    let found: HashMap<ObjectId, ObjectRow> = rows.collect::<Outcome<_>>()?;
    Ok(ids.iter().filter_map(|id| found.get(id).cloned()).collect())
}

/// Locks objects in id order, as everywhere; ids that do not exist are left out.
pub(super) async fn lock(tx: &mut dyn Tx, ids: &[ObjectId]) -> Outcome<()> {
    const LOCK: Sql = Sql::only_postgres("SELECT id FROM objects WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE");
    tx.query::<ObjectId>(LOCK, values![ids]).await?;
    Ok(())
}

/// Waits for all transactions that change objects, nodes, live bytes of packs, which snapshots
/// there are or where tags point, and keeps others out until this one ends. Each of them locks
/// objects before it changes any of that. Call it before anything is locked.
///
/// Whatever comes later waits behind this lock, also while it is not granted. So it gives up after
/// five seconds behind a slow transaction: [`Error::Overloaded`](crate::error::Error::Overloaded).
pub(super) async fn lock_all(tx: &mut dyn Tx) -> Outcome<()> {
    // A weaker lock lets others lock rows. They would then wait for this transaction before they
    // change them, and this one for their rows.
    const LOCK: Sql = Sql::only_postgres("LOCK TABLE objects IN EXCLUSIVE MODE");
    const LIMIT: Sql = Sql::only_postgres("SET LOCAL lock_timeout = '5s'");
    const NO_LIMIT: Sql = Sql::only_postgres("SET LOCAL lock_timeout = DEFAULT");
    tx.execute(LIMIT, &[]).await?;
    tx.execute(LOCK, &[]).await?;
    tx.execute(NO_LIMIT, &[]).await.map(drop)
}

/// Adds references, or takes them away.
pub(super) async fn add_refs(tx: &mut dyn Tx, object: ObjectId, by: i64) -> Outcome<()> {
    tx.execute("UPDATE objects SET refs = refs + $1 WHERE id = $2", values![by, object]).await?;
    Ok(())
}

/// Takes references away and leaves the rest to collection: nothing cascades inside a request.
pub(super) async fn release(tx: &mut dyn Tx, object: ObjectId, by: i64) -> Outcome<()> {
    let now = tx.now().await?;
    add_refs(tx, object, -by).await?;
    tx.execute("INSERT INTO suspects (due, object, released) VALUES ($1, $2, true)", values![now, object]).await?;
    Ok(())
}
