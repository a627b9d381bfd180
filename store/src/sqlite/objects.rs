//! Packs, objects and containers: upload and look-up.

use super::{DOMAIN, ids, int, uint};
use crate::error::{Error, Result};
use crate::metadata::{Location, NewFrame, ObjectId, ObjectRow, PackId, PackStored};
use pfr_schema::container::Child;
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind};
use rusqlite::{Connection, OptionalExtension as _, Row, params};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

/// Most missing children named in an error.
const MISSING_NAMED: usize = 256;

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

fn kind_of(number: i64) -> Result<Kind> {
    u8::try_from(number).ok().and_then(Kind::from_number).ok_or_else(|| Error::Internal(format!("object of unknown kind {number}")))
}

pub(super) fn begin_pack(tx: &Connection, key: &str, until: u64) -> Result<PackId> {
    tx.prepare_cached("INSERT INTO packs (key, state, keep_until) VALUES (?1, 'writing', ?2)")
        .and_then(|mut s| s.insert(params![key, int(until)]))
        .map_err(sql)
}

/// What is known of an object while a pack is being indexed.
struct Known {
    id: ObjectId,
    size: u64,
    kind: Kind,
    /// References before this pack, and those this pack has added so far.
    refs: u64,
    added: u64,
    shape: Option<Shape>,
    logical_bytes: u64,
    new_bytes: u64,
}

impl Known {
    /// A plain blob that nothing lists yet.
    fn new(id: ObjectId, size: u64) -> Self {
        Self { id, size, kind: Kind::Blob, refs: 0, added: 0, shape: None, logical_bytes: 0, new_bytes: 0 }
    }

    /// What a container that lists it reaches through it.
    fn reach(&self) -> u64 {
        self.size + self.logical_bytes
    }
}

pub(super) fn finish_pack(tx: &Connection, pack: PackId, bytes: u64, frames: &[NewFrame], until: u64) -> Result<PackStored> {
    let mut known: HashMap<Digest, Known> = HashMap::with_capacity(frames.len());
    let (mut new, mut live_bytes) = (0, 0);
    let mut insert = tx
        .prepare_cached(
            "INSERT INTO objects (domain, digest, size, kind, refs, keep_until, pack, offset, frame_len, codec)
             VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (domain, digest) DO NOTHING",
        )
        .map_err(sql)?;
    let mut renew = tx.prepare_cached("UPDATE objects SET keep_until = MAX(keep_until, ?1) WHERE id = ?2").map_err(sql)?;
    for frame in frames {
        let header = &frame.header;
        if let Entry::Vacant(entry) = known.entry(header.digest) {
            // It starts as a plain blob; only the acceptance of its references below makes it a container.
            let inserted = insert
                .execute(params![
                    DOMAIN,
                    header.digest.to_key(),
                    int(header.raw_len),
                    Kind::Blob as i64,
                    int(until),
                    pack,
                    int(frame.offset),
                    int(header.frame_len()),
                    header.codec as i64
                ])
                .map_err(sql)?;
            if inserted == 1 {
                new += 1;
                live_bytes += header.frame_len();
                entry.insert(Known::new(tx.last_insert_rowid(), header.raw_len));
            } else {
                let object =
                    load(tx, &header.digest)?.ok_or_else(|| Error::Internal("an object is neither there nor can be inserted".into()))?;
                renew.execute(params![int(until), object.id]).map_err(sql)?;
                entry.insert(object);
            }
        }
        if let Some(container) = &frame.container {
            accept(tx, &mut known, frame.header.digest, frame.header.kind, &container.children, container.shape)?;
        }
    }
    let mut count = tx.prepare_cached("UPDATE objects SET refs = refs + ?1 WHERE id = ?2").map_err(sql)?;
    // In id order, as everywhere: two writers then never wait for each other in a circle.
    let mut added: Vec<(ObjectId, u64)> = known.values().filter(|o| o.added > 0).map(|o| (o.id, o.added)).collect();
    added.sort_unstable();
    for (id, added) in added {
        count.execute(params![int(added), id]).map_err(sql)?;
    }
    let updated = tx
        .prepare_cached("UPDATE packs SET state = 'live', bytes = ?1, live_bytes = ?2 WHERE id = ?3 AND state = 'writing'")
        .and_then(|mut s| s.execute(params![int(bytes), int(live_bytes), pack]))
        .map_err(sql)?;
    if updated != 1 {
        return Err(Error::Internal(format!("pack {pack} is not being written")));
    }
    tx.prepare_cached("INSERT INTO suspects (due, pack) VALUES (?1, ?2)")
        .and_then(|mut s| s.execute(params![int(until), pack]))
        .map_err(sql)?;
    Ok(PackStored { new })
}

/// Makes a stored blob a container: its children must be there as it says, and are held from now on.
fn accept(
    tx: &Connection,
    known: &mut HashMap<Digest, Known>,
    digest: Digest,
    kind: Kind,
    children: &[Child],
    shape: Option<Shape>,
) -> Result<()> {
    match known.get(&digest) {
        Some(object) if object.kind == kind => return Ok(()),
        Some(object) if object.kind == Kind::Blob => {}
        other => return Err(Error::Internal(format!("{digest} cannot become a {kind:?}, it is {:?}", other.map(|o| o.kind)))),
    }
    let mut seen = HashSet::with_capacity(children.len());
    let mut ids = Vec::with_capacity(children.len());
    let (mut missing, mut logical_bytes, mut new_bytes) = (Vec::new(), 0_u64, 0_u64);
    for child in children {
        if !known.contains_key(&child.digest)
            && let Some(object) = load(tx, &child.digest)?
        {
            known.insert(child.digest, object);
        }
        let Some(object) = known.get_mut(&child.digest).filter(|o| o.kind.satisfies(child.kind)) else {
            if seen.insert(child.digest) {
                missing.push(child.digest);
            }
            continue;
        };
        check_shape(digest, child, object)?;
        if seen.insert(child.digest) {
            logical_bytes = logical_bytes.saturating_add(object.reach());
            if object.refs + object.added == 0 {
                new_bytes = new_bytes.saturating_add(object.size + object.new_bytes);
            }
            object.added += 1;
            ids.push(object.id);
        }
    }
    if !missing.is_empty() {
        missing.truncate(MISSING_NAMED);
        return Err(Error::Missing { container: digest, missing });
    }
    if let Some(object) = known.get_mut(&digest) {
        (object.kind, object.shape, object.logical_bytes, object.new_bytes) = (kind, shape, logical_bytes, new_bytes);
        tx.prepare_cached("UPDATE objects SET kind = ?1 WHERE id = ?2")
            .and_then(|mut s| s.execute(params![kind as i64, object.id]))
            .map_err(sql)?;
        tx.prepare_cached("INSERT INTO containers (object, children, pages, components, page_bytes, logical_bytes, new_bytes) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)")
            .and_then(|mut s| {
                s.execute(params![
                    object.id,
                    ids::pack(ids),
                    shape.map(|s| s.pages),
                    shape.map(|s| s.components),
                    shape.map(|s| int(s.page_bytes)),
                    int(logical_bytes),
                    int(new_bytes)
                ])
            })
            .map_err(sql)?;
    }
    Ok(())
}

/// A child must have the length and shape that its container gives it: so a page's length is checked once, when its run is stored.
fn check_shape(container: Digest, child: &Child, object: &Known) -> Result<()> {
    if let Some(size) = child.size
        && size != object.size
    {
        return Err(Error::WrongShape {
            container,
            child: child.digest,
            expected: format!("{size} bytes"),
            found: format!("{} bytes", object.size),
        });
    }
    if child.shape.is_some() && child.shape != object.shape {
        let words =
            |s: Option<Shape>| s.map_or("no shape".into(), |s| format!("{} pages of {} × {} bytes", s.pages, s.components, s.page_bytes));
        return Err(Error::WrongShape { container, child: child.digest, expected: words(child.shape), found: words(object.shape) });
    }
    Ok(())
}

fn load(tx: &Connection, digest: &Digest) -> Result<Option<Known>> {
    let row = tx
        .prepare_cached(
            "SELECT o.id, o.size, o.kind, o.refs, c.pages, c.components, c.page_bytes, COALESCE(c.logical_bytes, 0), COALESCE(c.new_bytes, 0)
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
                    refs: uint(r.get(3)?),
                    added: 0,
                    shape,
                    logical_bytes: uint(r.get(7)?),
                    new_bytes: uint(r.get(8)?),
                };
                Ok((known, r.get::<_, i64>(2)?))
            })
            .optional()
        })
        .map_err(sql)?;
    row.map(|(known, kind)| Ok(Known { kind: kind_of(kind)?, ..known })).transpose()
}

/// Positions of what is missing, and (position, id) of what is there with a lease shorter than `enough`.
pub(super) type Missing = (Vec<usize>, Vec<(usize, ObjectId)>);

pub(super) fn missing(tx: &Connection, wanted: &[(Digest, Kind)], enough: u64) -> Result<Missing> {
    let mut select = tx.prepare_cached("SELECT id, kind, keep_until FROM objects WHERE domain = ?1 AND digest = ?2").map_err(sql)?;
    let (mut missing, mut to_raise) = (Vec::new(), Vec::new());
    for (position, (digest, wanted_kind)) in wanted.iter().enumerate() {
        let row = select
            .query_row(params![DOMAIN, digest.to_key()], |r| Ok((r.get::<_, ObjectId>(0)?, r.get::<_, i64>(1)?, r.get::<_, i64>(2)?)))
            .optional()
            .map_err(sql)?;
        match row {
            Some((id, kind, keep_until)) if kind_of(kind)?.satisfies(*wanted_kind) => {
                if uint(keep_until) < enough {
                    to_raise.push((position, id));
                }
            }
            _ => missing.push(position),
        }
    }
    Ok((missing, to_raise))
}

/// Raises leases; positions of what is no longer there.
pub(super) fn raise_leases(tx: &Connection, objects: &[(usize, ObjectId)], until: u64) -> Result<Vec<usize>> {
    let mut raise = tx.prepare_cached("UPDATE objects SET keep_until = MAX(keep_until, ?1) WHERE id = ?2").map_err(sql)?;
    let mut gone = Vec::new();
    for (position, id) in objects {
        if raise.execute(params![int(until), id]).map_err(sql)? == 0 {
            gone.push(*position);
        }
    }
    Ok(gone)
}

pub(super) fn locate(tx: &Connection, digests: &[Digest]) -> Result<Vec<Option<Location>>> {
    let mut select = tx
        .prepare_cached("SELECT p.key, o.offset, o.frame_len, o.size FROM objects o JOIN packs p ON p.id = o.pack WHERE o.domain = ?1 AND o.digest = ?2")
        .map_err(sql)?;
    digests
        .iter()
        .map(|digest| {
            select
                .query_row(params![DOMAIN, digest.to_key()], |r| {
                    Ok(Location { pack: r.get(0)?, offset: uint(r.get(1)?), frame_len: uint(r.get(2)?), raw_len: uint(r.get(3)?) })
                })
                .optional()
                .map_err(sql)
        })
        .collect()
}

const COLUMNS: &str =
    "o.id, o.digest, o.kind, o.size, o.frame_len, o.refs, c.children FROM objects o LEFT JOIN containers c ON c.object = o.id";

type RawRow = (ObjectId, Vec<u8>, i64, i64, i64, i64, Option<Vec<u8>>);

fn raw_row(r: &Row<'_>) -> rusqlite::Result<RawRow> {
    Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?, r.get(6)?))
}

fn object_row((id, digest, kind, size, frame_len, refs, children): RawRow) -> Result<ObjectRow> {
    let kind = kind_of(kind)?;
    let children = match children {
        Some(packed) => ids::unpack(&packed)?,
        None if kind.is_container() => return Err(Error::Internal(format!("the children of object {id} are not recorded"))),
        None => Vec::new(),
    };
    Ok(ObjectRow { id, digest: Digest::from_key(&digest)?, kind, size: uint(size), frame_len: uint(frame_len), refs: uint(refs), children })
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
    tx.query_row("SELECT COALESCE(SUM(bytes), 0) FROM packs WHERE state IN ('live', 'draining')", [], |r| r.get(0)).map(uint).map_err(sql)
}
