//! Objects and containers: look-up.

use super::connection::Tx;
use super::error::{Fail, Outcome};
use super::leases::lessee_with;
use super::{DOMAIN, int, keys, uint};
use crate::error::Error;
use crate::metadata::{Health, Location, ObjectId, ObjectRow, PackId, PushId, children};
use pfr_schema::{Digest, Kind};
use std::collections::{HashMap, HashSet};

pub(super) fn kind_of(number: i16) -> Result<Kind, Error> {
    u8::try_from(number).ok().and_then(Kind::from_number).ok_or_else(|| Error::Internal(format!("object of unknown kind {number}")))
}

pub(super) fn health_of(number: i16) -> Health {
    match number {
        0 => Health::Whole,
        1 => Health::Incomplete,
        _ => Health::Damaged,
    }
}

/// Positions of what is missing; the rest is leased to the session, with a write where it is not yet.
pub(super) async fn missing(tx: &mut Tx, push: &PushId, wanted: &[(Digest, Kind)], lease: i64) -> Outcome<Vec<usize>> {
    let session = super::names::renew_push(tx, push, lease).await?.number;
    let digests: Vec<Vec<u8>> = wanted.iter().map(|(digest, _)| digest.to_key()).collect();
    let kinds: Vec<i16> = wanted.iter().map(|(_, kind)| *kind as i16).collect();
    // Only what needs a second look is answered: usually little.
    let rows: Vec<(i64, Option<ObjectId>, Option<i16>)> = sqlx::query_as(
        r#"SELECT u.n - 1, o.id, o.kind FROM unnest($1::bytea[], $2::smallint[]) WITH ORDINALITY AS u(digest, kind, n)
           LEFT JOIN objects o ON o.domain = $3 AND o.digest = u.digest AND (o.health = 0 OR (u.kind = 0 AND o.health = 1))
           WHERE o.id IS NULL OR (u.kind <> 0 AND o.kind <> u.kind) OR NOT (o.lessee = $4 OR o.lessee <= -$4)"#,
    )
    .bind(digests)
    .bind(kinds)
    .bind(DOMAIN)
    .bind(session)
    .fetch_all(tx.on())
    .await?;
    let (mut missing, mut to_lease) = (Vec::new(), Vec::new());
    for (position, id, kind) in rows {
        let position = position as usize;
        match (id, kind) {
            (Some(id), Some(kind)) if kind_of(kind)?.satisfies(wanted[position].1) => to_lease.push((position, id)),
            _ => missing.push(position),
        }
    }
    if !to_lease.is_empty() {
        let ids: HashSet<ObjectId> = to_lease.iter().map(|(_, id)| *id).collect();
        let there = lease_all(tx, ids.into_iter().collect(), session).await?;
        // What was collected since the look is missing after all.
        missing.extend(to_lease.into_iter().filter(|(_, id)| !there.contains(id)).map(|(position, _)| position));
    }
    missing.sort_unstable();
    Ok(missing)
}

/// Leases objects to a session; returns what was there to be leased.
async fn lease_all(tx: &mut Tx, ids: Vec<ObjectId>, session: i64) -> Outcome<HashSet<ObjectId>> {
    let now = tx.now().await?;
    let there: Vec<ObjectId> = sqlx::query_scalar(concat!(
        "WITH locked AS (SELECT id FROM objects WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE)
         UPDATE objects o SET lessee = ",
        lessee_with!("$2", "$3"),
        " FROM locked WHERE o.id = locked.id RETURNING o.id"
    ))
    .bind(ids)
    .bind(session)
    .bind(now)
    .fetch_all(tx.on())
    .await?;
    tx.wrote(there.len());
    Ok(there.into_iter().collect())
}

/// Locks objects in id order, as everywhere; ids that do not exist are left out.
pub(super) async fn lock(tx: &mut Tx, ids: &[ObjectId]) -> Outcome<Vec<ObjectId>> {
    Ok(sqlx::query_scalar("SELECT id FROM objects WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE")
        .bind(ids.to_vec())
        .fetch_all(tx.on())
        .await?)
}

pub(super) async fn locate(tx: &mut Tx, digests: &[Digest]) -> Outcome<Vec<Option<Location>>> {
    let rows: Vec<(i64, String, i64, i64, i64, i16)> = sqlx::query_as(
        r#"SELECT u.n - 1, p.key, o."offset", o.frame_len, o.size, o.health FROM unnest($1::bytea[]) WITH ORDINALITY AS u(digest, n)
           JOIN objects o ON o.domain = $2 AND o.digest = u.digest JOIN packs p ON p.id = o.pack"#,
    )
    .bind(keys(digests))
    .bind(DOMAIN)
    .fetch_all(tx.on())
    .await?;
    let mut found = vec![None; digests.len()];
    for (position, pack, offset, frame_len, raw_len, health) in rows {
        let (offset, frame_len, raw_len) = (uint(offset), uint(frame_len), uint(raw_len));
        found[position as usize] = Some(Location { pack, offset, frame_len, raw_len, health: health_of(health) });
    }
    Ok(found)
}

type RawRow = (ObjectId, Vec<u8>, i16, i64, i64, i64, PackId, Option<Vec<u8>>);

fn object_row((id, digest, kind, size, frame_len, refs, pack, children): RawRow) -> Result<ObjectRow, Error> {
    let kind = kind_of(kind)?;
    let ids = match children {
        Some(packed) => children::unpack(&packed)?,
        None if kind.is_container() => return Err(Error::Internal(format!("the children of object {id} are not recorded"))),
        None => Vec::new(),
    };
    Ok(ObjectRow {
        id,
        digest: Digest::from_key(&digest)?,
        kind,
        size: uint(size),
        frame_len: uint(frame_len),
        refs: uint(refs),
        pack,
        children: ids,
    })
}

pub(super) async fn find(tx: &mut Tx, digests: &[Digest]) -> Outcome<Vec<Option<ObjectRow>>> {
    let rows: Vec<RawRow> = sqlx::query_as(
        "SELECT o.id, o.digest, o.kind, o.size, o.frame_len, o.refs, o.pack, c.children FROM objects o
         LEFT JOIN containers c ON c.object = o.id WHERE o.domain = $1 AND o.digest = ANY($2)",
    )
    .bind(DOMAIN)
    .bind(keys(digests))
    .fetch_all(tx.on())
    .await?;
    let mut found = HashMap::with_capacity(rows.len());
    for row in rows {
        let row = object_row(row)?;
        found.insert(row.digest, row);
    }
    Ok(digests.iter().map(|digest| found.get(digest).cloned()).collect())
}

/// Objects in the order of `ids`.
pub(super) async fn objects(tx: &mut Tx, ids: &[ObjectId]) -> Outcome<Vec<ObjectRow>> {
    let rows: Vec<RawRow> = sqlx::query_as(
        "SELECT o.id, o.digest, o.kind, o.size, o.frame_len, o.refs, o.pack, c.children
         FROM unnest($1::bigint[]) WITH ORDINALITY AS u(id, n) JOIN objects o ON o.id = u.id LEFT JOIN containers c ON c.object = o.id ORDER BY u.n",
    )
    .bind(ids.to_vec())
    .fetch_all(tx.on())
    .await?;
    rows.into_iter().map(|row| object_row(row).map_err(Fail::from)).collect()
}

pub(super) async fn disk_bytes(tx: &mut Tx) -> Outcome<u64> {
    let bytes: i64 = sqlx::query_scalar("SELECT COALESCE(SUM(bytes), 0)::bigint FROM packs").fetch_one(tx.on()).await?;
    Ok(uint(bytes))
}

/// Takes references away or adds them.
pub(super) async fn add_refs(tx: &mut Tx, object: ObjectId, by: i64) -> Outcome<()> {
    tx.execute(sqlx::query("UPDATE objects SET refs = refs + $1 WHERE id = $2").bind(by).bind(object)).await?;
    Ok(())
}

/// A number of bytes or milliseconds for SQL.
pub(super) fn ints(values: impl Iterator<Item = u64>) -> Vec<i64> {
    values.map(int).collect()
}
