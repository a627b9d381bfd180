//! Packs, objects and containers: upload and look-up.

use super::{DOMAIN, int, leases, uint};
use crate::error::{Error, Result};
use crate::metadata::accept::{self, Contains, Insert, Known, Plan, Relocate};
use crate::metadata::{Health, Location, NewContainer, NewFrame, ObjectId, ObjectRow, PackId, PackSizes, PackStored, children};
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind};
use rusqlite::{Connection, OptionalExtension as _, Row, params};
use std::collections::{HashMap, HashSet};

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

pub(super) fn kind_of(number: i64) -> Result<Kind> {
    u8::try_from(number).ok().and_then(Kind::from_number).ok_or_else(|| Error::Internal(format!("object of unknown kind {number}")))
}

pub(super) fn begin_pack(tx: &Connection, key: &str, until: u64) -> Result<PackId> {
    tx.prepare_cached("INSERT INTO packs (key, state, keep_until) VALUES (?1, 'writing', ?2)")
        .and_then(|mut s| s.insert(params![key, int(until)]))
        .map_err(sql)
}

/// Renews the lease of a pack that is being written.
pub(super) fn renew_pack(tx: &Connection, pack: PackId, until: u64) -> Result<()> {
    let updated = tx
        .prepare_cached("UPDATE packs SET keep_until = MAX(keep_until, ?1) WHERE id = ?2 AND state = 'writing'")
        .and_then(|mut s| s.execute(params![int(until), pack]))
        .map_err(sql)?;
    if updated == 1 { Ok(()) } else { Err(Error::PackLost(pack.to_string())) }
}

/// Row ids of new objects: they are handed out before they are inserted, because containers name them.
fn next_id(tx: &Connection) -> Result<ObjectId> {
    let last: Option<ObjectId> = tx
        .prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = 'objects'")
        .and_then(|mut s| s.query_row([], |r| r.get(0)).optional())
        .map_err(sql)?;
    Ok(last.unwrap_or(0) + 1)
}

fn load_all(tx: &Connection, digests: &[Digest]) -> Result<HashMap<Digest, Known>> {
    digests.iter().filter_map(|digest| load(tx, digest).transpose().map(|known| Ok((*digest, known?)))).collect()
}

/// For whom a pack is indexed.
#[derive(Clone, Copy)]
pub(super) enum For {
    /// A push session, by its number: what came is leased to it.
    Session {
        number: i64,
        now: u64,
        /// When it expires.
        until: u64,
    },
    /// Nobody: what came is kept until then.
    Nobody { until: u64 },
}

pub(super) fn finish_pack(tx: &Connection, pack: PackId, sizes: PackSizes, frames: &[NewFrame], whose: For) -> Result<PackStored> {
    let plan = Plan::new(frames, load_all(tx, &accept::digests(frames))?, pack, next_id(tx)?)?;
    hold(tx, pack)?;
    write(tx, &plan, pack, whose)?;
    let (until, session) = match whose {
        For::Session { number, until, .. } => (until, Some(number)),
        For::Nobody { until } => (until, None),
    };
    go_live(tx, pack, sizes, plan.live_bytes, until, session)?;
    Ok(PackStored { new: plan.insert.len() as u64 })
}

pub(super) fn adopt_pack(tx: &Connection, key: &str, sizes: PackSizes, frames: &[NewFrame], until: u64) -> Result<PackStored> {
    let known: bool = tx
        .prepare_cached("SELECT EXISTS (SELECT 1 FROM packs WHERE key = ?1)")
        .and_then(|mut s| s.query_row([key], |r| r.get(0)))
        .map_err(sql)?;
    if known {
        return Ok(PackStored { new: 0 });
    }
    let pack = begin_pack(tx, key, until)?;
    let frames: Vec<NewFrame> = frames.iter().map(|f| NewFrame { container: None, ..f.clone() }).collect();
    finish_pack(tx, pack, sizes, &frames, For::Nobody { until })
}

pub(super) fn adopt_containers(tx: &Connection, containers: &[(Digest, Kind, NewContainer)]) -> Result<Vec<Digest>> {
    let all = containers.iter().flat_map(|(digest, _, c)| c.children.iter().map(|child| child.digest).chain([*digest]));
    let digests: Vec<Digest> = all.collect::<HashSet<_>>().into_iter().collect();
    let (plan, refused) = Plan::adopt(containers, load_all(tx, &digests)?)?;
    write(tx, &plan, 0, For::Nobody { until: 0 })?;
    Ok(refused)
}

/// Writes a plan.
fn write(tx: &Connection, plan: &Plan, pack: PackId, whose: For) -> Result<()> {
    let (until, lessee) = match whose {
        For::Session { number, .. } => (0, number),
        For::Nobody { until } => (until, 0),
    };
    let prepare = |statement: &str| tx.prepare_cached(statement).map_err(sql);
    let mut insert = prepare(
        "INSERT INTO objects (id, domain, digest, size, kind, refs, keep_until, pack, offset, frame_len, codec, lessee)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
    )?;
    for Insert { id, header, offset, kind, refs } in &plan.insert {
        insert
            .execute(params![
                id,
                DOMAIN,
                header.digest.to_key(),
                int(header.raw_len),
                *kind as i64,
                int(*refs),
                int(until),
                pack,
                int(*offset),
                int(header.frame_len()),
                header.codec as i64,
                lessee
            ])
            .map_err(sql)?;
    }
    let mut relocate = prepare("UPDATE objects SET pack = ?1, offset = ?2, frame_len = ?3, codec = ?4, health = ?5 WHERE id = ?6")?;
    let mut heal = prepare("DELETE FROM damage WHERE object = ?1")?;
    for Relocate { id, header, offset, health } in &plan.relocate {
        let frame_len = int(header.frame_len());
        relocate.execute(params![pack, int(*offset), frame_len, header.codec as i64, *health as i64, id]).map_err(sql)?;
        heal.execute([id]).map_err(sql)?;
    }
    let mut lose = prepare("UPDATE packs SET live_bytes = live_bytes - ?1 WHERE id = ?2")?;
    for (pack, bytes) in &plan.lost {
        lose.execute(params![int(*bytes), pack]).map_err(sql)?;
    }
    let mut renew = prepare("UPDATE objects SET keep_until = ?1 WHERE id = ?2 AND keep_until < ?1")?;
    for id in &plan.renew {
        match whose {
            For::Session { number, now, .. } => drop(leases::lease_to(tx, number, *id, now)?),
            For::Nobody { until } => drop(renew.execute(params![int(until), id]).map_err(sql)?),
        }
    }
    let mut count = prepare("UPDATE objects SET refs = refs + ?1 WHERE id = ?2")?;
    for (id, added) in &plan.count {
        count.execute(params![int(*added), id]).map_err(sql)?;
    }
    let mut promote = prepare("UPDATE objects SET kind = ?1 WHERE id = ?2")?;
    for (id, kind) in &plan.promote {
        promote.execute(params![*kind as i64, id]).map_err(sql)?;
    }
    let mut contain = prepare(
        "INSERT INTO containers (object, children, pages, components, page_bytes, logical_bytes, new_bytes) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?;
    for Contains { object, children: ids, shape, logical_bytes, new_bytes } in &plan.contain {
        contain
            .execute(params![
                object,
                children::pack(ids.clone()),
                shape.map(|s| s.pages),
                shape.map(|s| s.components),
                shape.map(|s| int(s.page_bytes)),
                int(*logical_bytes),
                int(*new_bytes)
            ])
            .map_err(sql)?;
    }
    let mut recover = prepare("UPDATE objects SET health = 0 WHERE id = ?1")?;
    for id in &plan.recover {
        recover.execute([id]).map_err(sql)?;
    }
    if plan.healed {
        super::integrity::note_healed(tx)?;
    }
    Ok(())
}

/// That a pack is still being written; collection may have given it up, and its row may be gone.
pub(super) fn hold(tx: &Connection, pack: PackId) -> Result<()> {
    let writing: bool = tx
        .prepare_cached("SELECT EXISTS (SELECT 1 FROM packs WHERE id = ?1 AND state = 'writing')")
        .and_then(|mut s| s.query_row([pack], |r| r.get(0)))
        .map_err(sql)?;
    if writing { Ok(()) } else { Err(Error::PackLost(pack.to_string())) }
}

/// Makes a complete pack live; its unclaimed objects are looked at when the session ends, and at `due` at the latest.
pub(super) fn go_live(tx: &Connection, pack: PackId, sizes: PackSizes, live_bytes: u64, due: u64, session: Option<i64>) -> Result<()> {
    let updated = tx
        .prepare_cached(
            "UPDATE packs SET state = 'live', bytes = ?1, frame_bytes = ?2, live_bytes = ?3 WHERE id = ?4 AND state = 'writing'",
        )
        .and_then(|mut s| s.execute(params![int(sizes.bytes), int(sizes.frame_bytes), int(live_bytes), pack]))
        .map_err(sql)?;
    if updated != 1 {
        return Err(Error::PackLost(pack.to_string()));
    }
    tx.prepare_cached("INSERT INTO suspects (due, pack, session) VALUES (?1, ?2, ?3)")
        .and_then(|mut s| s.execute(params![int(due), pack, session]))
        .map_err(sql)?;
    Ok(())
}

pub(super) fn health_of(number: i64) -> Health {
    match number {
        0 => Health::Whole,
        1 => Health::Incomplete,
        _ => Health::Damaged,
    }
}

fn load(tx: &Connection, digest: &Digest) -> Result<Option<Known>> {
    let row = tx
        .prepare_cached(
            "SELECT o.id, o.size, o.kind, o.refs, c.pages, c.components, c.page_bytes, COALESCE(c.logical_bytes, 0), COALESCE(c.new_bytes, 0),
                    o.health, o.pack, o.frame_len
             FROM objects o LEFT JOIN containers c ON c.object = o.id WHERE o.domain = ?1 AND o.digest = ?2",
        )
        .and_then(|mut s| {
            s.query_row(params![DOMAIN, digest.to_key()], |r| {
                let shape = match (r.get(4)?, r.get(5)?, r.get::<_, Option<i64>>(6)?) {
                    (Some(pages), Some(components), Some(page_bytes)) => Some(Shape { pages, components, page_bytes: uint(page_bytes) }),
                    _ => None,
                };
                let known = Known {
                    id: r.get(0)?,
                    size: uint(r.get(1)?),
                    kind: Kind::Blob,
                    health: health_of(r.get(9)?),
                    refs: uint(r.get(3)?),
                    shape,
                    logical_bytes: uint(r.get(7)?),
                    new_bytes: uint(r.get(8)?),
                    pack: r.get(10)?,
                    frame_len: uint(r.get(11)?),
                };
                Ok((known, r.get::<_, i64>(2)?))
            })
            .optional()
        })
        .map_err(sql)?;
    row.map(|(known, kind)| Ok(Known { kind: kind_of(kind)?, ..known })).transpose()
}

/// Positions of what is missing, and (position, id) of what is there and not leased to the session yet.
pub(super) type Missing = (Vec<usize>, Vec<(usize, ObjectId)>);

pub(super) fn missing(tx: &Connection, wanted: &[(Digest, Kind)], session: i64) -> Result<Missing> {
    let mut select =
        tx.prepare_cached("SELECT id, kind, lessee FROM objects WHERE domain = ?1 AND digest = ?2 AND health <= ?3").map_err(sql)?;
    let (mut missing, mut to_lease) = (Vec::new(), Vec::new());
    for (position, (digest, wanted_kind)) in wanted.iter().enumerate() {
        let row = select
            .query_row(params![DOMAIN, digest.to_key(), Health::enough_for(*wanted_kind) as i64], |r| {
                Ok((r.get::<_, ObjectId>(0)?, r.get::<_, i64>(1)?, r.get::<_, i64>(2)?))
            })
            .optional()
            .map_err(sql)?;
        match row {
            Some((id, kind, lessee)) if kind_of(kind)?.satisfies(*wanted_kind) => {
                if !leases::covers(lessee, session) {
                    to_lease.push((position, id));
                }
            }
            _ => missing.push(position),
        }
    }
    Ok((missing, to_lease))
}

/// Leases objects to a session; positions of what is no longer there.
pub(super) fn lease_all(tx: &Connection, objects: &[(usize, ObjectId)], session: i64, now: u64) -> Result<Vec<usize>> {
    let mut gone = Vec::new();
    for (position, id) in objects {
        if !leases::lease_to(tx, session, *id, now)? {
            gone.push(*position);
        }
    }
    Ok(gone)
}

pub(super) fn locate(tx: &Connection, digests: &[Digest]) -> Result<Vec<Option<Location>>> {
    let mut select = tx
        .prepare_cached("SELECT p.key, o.offset, o.frame_len, o.size, o.health FROM objects o JOIN packs p ON p.id = o.pack WHERE o.domain = ?1 AND o.digest = ?2")
        .map_err(sql)?;
    digests
        .iter()
        .map(|digest| {
            select
                .query_row(params![DOMAIN, digest.to_key()], |r| {
                    Ok(Location {
                        pack: r.get(0)?,
                        offset: uint(r.get(1)?),
                        frame_len: uint(r.get(2)?),
                        raw_len: uint(r.get(3)?),
                        health: health_of(r.get(4)?),
                    })
                })
                .optional()
                .map_err(sql)
        })
        .collect()
}

const COLUMNS: &str =
    "o.id, o.digest, o.kind, o.size, o.frame_len, o.refs, o.pack, c.children FROM objects o LEFT JOIN containers c ON c.object = o.id";

type RawRow = (ObjectId, Vec<u8>, i64, i64, i64, i64, PackId, Option<Vec<u8>>);

fn raw_row(r: &Row<'_>) -> rusqlite::Result<RawRow> {
    Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?, r.get(6)?, r.get(7)?))
}

fn object_row((id, digest, kind, size, frame_len, refs, pack, children): RawRow) -> Result<ObjectRow> {
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

pub(super) fn find(tx: &Connection, digests: &[Digest]) -> Result<Vec<Option<ObjectRow>>> {
    let mut select = tx.prepare_cached(&format!("SELECT {COLUMNS} WHERE o.domain = ?1 AND o.digest = ?2")).map_err(sql)?;
    digests
        .iter()
        .map(|digest| select.query_row(params![DOMAIN, digest.to_key()], raw_row).optional().map_err(sql)?.map(object_row).transpose())
        .collect()
}

pub(super) fn objects(tx: &Connection, ids: &[ObjectId]) -> Result<Vec<ObjectRow>> {
    let mut select = tx.prepare_cached(&format!("SELECT {COLUMNS} WHERE o.id = ?1")).map_err(sql)?;
    ids.iter().filter_map(|id| select.query_row([id], raw_row).optional().map_err(sql).transpose()).map(|row| object_row(row?)).collect()
}

pub(super) fn disk_bytes(tx: &Connection) -> Result<u64> {
    tx.query_row("SELECT COALESCE(SUM(bytes), 0) FROM packs ", [], |r| r.get(0)).map(uint).map_err(sql)
}
