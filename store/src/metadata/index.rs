//! The transactions of a pack, from its first row until it is indexed and live.

use super::accept::{self, Known, Plan};
use super::leases::lessee_with;
use super::quota::Growth;
use super::sessions::{extend_push, live_push, millis};
use super::sql::{Column, Sql, int, json_rows, values};
use super::tx::{Fail, Outcome, Tx};
use super::{Health, NewContainer, NewFrame, ObjectId, PackId, PackSizes, PackStored, PushId, children, integrity, packs, quota};
use crate::error::Error;
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

/// A plan gives new objects temporary ids from here on. No row has such an id.
const PLANNED: ObjectId = 1 << 62;

pub(super) async fn begin_pack(tx: &mut dyn Tx, key: &str, lease: Duration) -> Outcome<PackId> {
    let until = tx.now().await?.saturating_add(millis(lease));
    let insert = "INSERT INTO packs (key, state, keep_until) VALUES ($1, 'writing', $2) RETURNING id";
    let id = tx.returning(insert, values![key, until]).await?.pop();
    id.ok_or_else(|| Fail::internal("a pack was inserted and has no row"))
}

pub(super) async fn renew_pack(tx: &mut dyn Tx, push: Option<&PushId>, pack: PackId, lease: Duration) -> Outcome<()> {
    let now = tx.now().await?;
    let update = "UPDATE packs SET keep_until = GREATEST(keep_until, $1) WHERE id = $2 AND state = 'writing'";
    if tx.execute(update, values![now.saturating_add(millis(lease)), pack]).await? == 0 {
        return Err(Error::PackLost(pack.to_string()).into());
    }
    match push {
        Some(push) => extend_push(tx, push, lease, now).await,
        None => Ok(()),
    }
}

pub(super) async fn finish_pack(
    tx: &mut dyn Tx,
    push: &PushId,
    pack: PackId,
    sizes: PackSizes,
    frames: &[NewFrame],
    lease: Duration,
) -> Outcome<PackStored> {
    // Check the pack first: if both pack and session are gone, report the lost pack, so that the
    // writer deletes its bytes. Do not lock the pack yet: transactions lock objects before packs.
    let writing: bool = tx.one("SELECT EXISTS (SELECT 1 FROM packs WHERE id = $1 AND state = 'writing')", values![pack]).await?;
    if !writing {
        return Err(Error::PackLost(pack.to_string()).into());
    }
    let live = live_push(tx, push).await?;
    let lessee = Lessee::Session { number: live.number, until: live.now.saturating_add(millis(lease)) };
    let (stored, growth) = index(tx, pack, sizes, frames, lessee).await?;
    // Extend the session late, so that packs of one session do not wait for each other.
    extend_push(tx, push, lease, live.now).await?;
    quota::grow(tx, growth).await?;
    Ok(stored)
}

/// The lease on the objects of a pack that is indexed.
#[derive(Clone, Copy)]
enum Lessee {
    /// A push session, by its number, until it expires.
    Session { number: i64, until: u64 },
    /// Until a time, without a session.
    NoSession { until: u64 },
}

async fn index(tx: &mut dyn Tx, pack: PackId, sizes: PackSizes, frames: &[NewFrame], lessee: Lessee) -> Outcome<(PackStored, Growth)> {
    let known = load(tx, &accept::digests(frames)).await?;
    let plan = Plan::new(frames, known, pack, PLANNED)?;
    packs::hold(tx, pack).await?;
    write(tx, &plan, pack, lessee).await?;
    let (until, session) = match lessee {
        Lessee::Session { number, until } => (until, Some(number)),
        Lessee::NoSession { until } => (until, None),
    };
    packs::go_live(tx, pack, sizes, plan.live_bytes, until, session).await?;
    let (added, lost) = (int(plan.live_bytes), plan.lost.iter().map(|(_, bytes)| int(*bytes)).sum::<i64>());
    let new = plan.insert.len() as u64;
    Ok((PackStored { new }, Growth { bytes: added - lost, objects: int(new), snapshots: 0 }))
}

pub(super) async fn adopt_pack(tx: &mut dyn Tx, key: &str, sizes: PackSizes, frames: &[NewFrame], lease: Duration) -> Outcome<PackStored> {
    if tx.one("SELECT EXISTS (SELECT 1 FROM packs WHERE key = $1)", values![key]).await? {
        return Ok(PackStored { new: 0 });
    }
    let until = tx.now().await?.saturating_add(millis(lease));
    let insert = "INSERT INTO packs (key, state, keep_until) VALUES ($1, 'writing', $2) ON CONFLICT (key) DO NOTHING RETURNING id";
    let pack: Option<PackId> = tx.returning(insert, values![key, until]).await?.pop();
    let frames: Vec<NewFrame> = frames.iter().map(|f| NewFrame { container: None, ..f.clone() }).collect();
    let (stored, growth) = index(tx, pack.ok_or(Fail::Again)?, sizes, &frames, Lessee::NoSession { until }).await?;
    // A rebuild takes in what was stored before.
    quota::add(tx, growth).await?;
    Ok(stored)
}

pub(super) async fn adopt_containers(tx: &mut dyn Tx, containers: &[(Digest, Kind, NewContainer)]) -> Outcome<Vec<Digest>> {
    let all = containers.iter().flat_map(|(digest, _, c)| c.children.iter().map(|child| child.digest).chain([*digest]));
    let digests: Vec<Digest> = all.collect::<HashSet<_>>().into_iter().collect();
    let (plan, refused) = Plan::adopt(containers, load(tx, &digests).await?)?;
    write(tx, &plan, 0, Lessee::NoSession { until: 0 }).await?;
    Ok(refused)
}

/// The columns of a known row of `objects`.
type RawKnown = (Digest, ObjectId, u64, Kind, u64, Health, PackId, u64);
/// A node's shape and sizes.
type RawSizes = (ObjectId, Option<i64>, Option<i64>, Option<u64>, u64, u64);

/// Loads and locks the stored objects of `digests`: no other transaction counts or collects them
/// until this one ends.
async fn load(tx: &mut dyn Tx, digests: &[Digest]) -> Outcome<HashMap<Digest, Known>> {
    let find = "SELECT digest, id, size, kind, refs, health, pack, frame_len FROM objects
                WHERE digest = ANY($1) ORDER BY id FOR NO KEY UPDATE";
    let rows: Vec<RawKnown> = tx.query(find, values![digests]).await?;
    let mut known = HashMap::with_capacity(rows.len());
    let mut containers: HashMap<ObjectId, Digest> = HashMap::new();
    for (digest, id, size, kind, refs, health, pack, frame_len) in rows {
        if kind.is_container() {
            containers.insert(id, digest);
        }
        let row = Known { id, size, kind, health, refs, shape: None, logical_bytes: 0, new_bytes: 0, pack, frame_len };
        known.insert(digest, row);
    }
    if containers.is_empty() {
        return Ok(known);
    }
    // Use a second statement: the first one waited for the locks, and does not see the changes of
    // the transactions that held them.
    let find = "SELECT object, pages, components, page_bytes, logical_bytes, new_bytes FROM containers WHERE object = ANY($1)";
    let ids: Vec<ObjectId> = containers.keys().copied().collect();
    let rows: Vec<RawSizes> = tx.query(find, values![ids]).await?;
    for (id, pages, components, page_bytes, logical_bytes, new_bytes) in rows {
        let Some(row) = containers.get(&id).and_then(|digest| known.get_mut(digest)) else { continue };
        row.shape = match (pages.and_then(|p| p.try_into().ok()), components.and_then(|c| c.try_into().ok()), page_bytes) {
            (Some(pages), Some(components), Some(page_bytes)) => Some(Shape { pages, components, page_bytes }),
            _ => None,
        };
        (row.logical_bytes, row.new_bytes) = (logical_bytes, new_bytes);
    }
    Ok(known)
}

/// Writes the changes of a plan to the tables.
async fn write(tx: &mut dyn Tx, plan: &Plan, pack: PackId, lessee: Lessee) -> Outcome<()> {
    let (until, session) = match lessee {
        Lessee::Session { number, .. } => (0, number),
        Lessee::NoSession { until } => (until, 0),
    };
    let ids = insert(tx, plan, pack, until, session).await?;
    relocate(tx, plan, pack).await?;
    touch(tx, plan, until, session).await?;
    tx.execute_each(
        "UPDATE objects AS o SET kind = u.kind FROM unnest($1::bigint[], $2::bigint[]) AS u(id, kind) WHERE o.id = u.id",
        vec![plan.promote.iter().map(|(id, _)| *id).collect(), plan.promote.iter().map(|(_, kind)| *kind).collect()],
        &[],
    )
    .await?;
    contain(tx, plan, &ids).await?;
    if !plan.recover.is_empty() {
        tx.execute("UPDATE objects SET health = 0 WHERE id = ANY($1)", values![&plan.recover]).await?;
    }
    if plan.healed {
        integrity::note_healed(tx).await?;
    }
    lose(tx, plan.lost.iter().copied()).await
}

/// Inserts the new objects. Returns their row ids, by position in the plan.
async fn insert(tx: &mut dyn Tx, plan: &Plan, pack: PackId, until: u64, session: i64) -> Outcome<Vec<ObjectId>> {
    if plan.insert.is_empty() {
        return Ok(Vec::new());
    }
    let ids = tx.new_objects(plan.insert.len()).await?;
    let mut rows: Vec<(&accept::Insert, ObjectId)> = plan.insert.iter().zip(ids.iter().copied()).collect();
    if tx.is_concurrent() {
        // In order of digests, so that two pushes of the same blobs do not deadlock.
        rows.sort_by_cached_key(|(row, _)| row.header.digest.to_key());
    }
    let insert = r#"INSERT INTO objects (id, digest, size, kind, refs, keep_until, pack, "offset", frame_len, codec, lessee)
        SELECT u.id, u.digest, u.size, u.kind, u.refs, $9, $10, u.at, u.len, u.codec, $11
        FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[])
        AS u(id, digest, size, kind, refs, at, len, codec) ON CONFLICT (digest) DO NOTHING"#;
    let of = |field: fn(&accept::Insert) -> u64| rows.iter().map(|(row, _)| field(row)).collect();
    let columns = vec![
        rows.iter().map(|(_, id)| *id).collect(),
        rows.iter().map(|(row, _)| row.header.digest).collect(),
        of(|row| row.header.raw_len),
        of(|row| row.kind as u64),
        of(|row| row.refs),
        of(|row| row.offset),
        of(|row| row.header.frame_len()),
        of(|row| row.header.codec as u64),
    ];
    let inserted = tx.execute_each(insert, columns, values![until, pack, session]).await?;
    // If a row is missing, another push stored its blob meanwhile, and the plan is out of date.
    if inserted == ids.len() as u64 { Ok(ids) } else { Err(Fail::Again) }
}

/// Points stored objects to their frames in this pack.
async fn relocate(tx: &mut dyn Tx, plan: &Plan, pack: PackId) -> Outcome<()> {
    if plan.relocate.is_empty() {
        return Ok(());
    }
    let ids: Vec<ObjectId> = plan.relocate.iter().map(|r| r.id).collect();
    if tx.is_concurrent() {
        let columns = vec![
            ids.iter().copied().collect(),
            plan.relocate.iter().map(|r| r.offset).collect(),
            plan.relocate.iter().map(|r| r.header.frame_len()).collect(),
            plan.relocate.iter().map(|r| r.header.codec as i64).collect(),
            plan.relocate.iter().map(|r| r.health).collect(),
        ];
        let relocate = r#"UPDATE objects AS o SET pack = $6, "offset" = u.at, frame_len = u.len, codec = u.codec, health = u.health
            FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[]) AS u(id, at, len, codec, health)
            WHERE o.id = u.id"#;
        tx.execute_each(relocate, columns, values![pack]).await?;
    } else {
        let row = |r: &accept::Relocate| (r.id, int(r.offset), int(r.header.frame_len()), r.header.codec as i64, r.health as i64);
        let rows: Vec<(ObjectId, i64, i64, i64, i64)> = plan.relocate.iter().map(row).collect();
        let relocate = r#"UPDATE objects AS o SET pack = $2, "offset" = m.value->>1, frame_len = m.value->>2, codec = m.value->>3,
            health = m.value->>4 FROM json_each($1) AS m WHERE o.id = m.value->>0"#;
        tx.execute(relocate, values![json_rows(&rows)?, pack]).await?;
    }
    tx.execute("DELETE FROM damage WHERE object = ANY($1)", values![ids]).await?;
    Ok(())
}

/// Adds references and leases to stored objects. One update for each row.
async fn touch(tx: &mut dyn Tx, plan: &Plan, until: u64, session: i64) -> Outcome<()> {
    let now = tx.now().await?;
    let mut touched: BTreeMap<ObjectId, (i64, bool)> = plan.count.iter().map(|(id, added)| (*id, (int(*added), false))).collect();
    for id in &plan.renew {
        touched.entry(*id).or_default().1 = true;
    }
    let columns = vec![
        touched.keys().copied().collect(),
        touched.values().map(|(added, _)| *added).collect(),
        touched.values().map(|(_, kept)| *kept).collect(),
    ];
    let touch = concat!(
        "UPDATE objects AS o SET refs = o.refs + u.added,
                keep_until = CASE WHEN u.kept THEN GREATEST(o.keep_until, $4) ELSE o.keep_until END,
                lessee = CASE WHEN u.kept AND $5 > 0 THEN ",
        lessee_with!("$5", "$6"),
        " ELSE o.lessee END
         FROM unnest($1::bigint[], $2::bigint[], $3::boolean[]) AS u(id, added, kept)
         WHERE o.id = u.id
           AND (u.added > 0 OR u.kept AND (o.keep_until < $4 OR $5 > 0 AND NOT (o.lessee = $5 OR o.lessee <= -$5)))"
    );
    tx.execute_each(touch, columns, values![until, session, now]).await?;
    Ok(())
}

/// Writes the rows of nodes.
async fn contain(tx: &mut dyn Tx, plan: &Plan, ids: &[ObjectId]) -> Outcome<()> {
    let real = |id: &ObjectId| ids.get(usize::try_from(id - PLANNED).unwrap_or(usize::MAX)).copied().unwrap_or(*id);
    let shapes = |field: fn(Shape) -> i64| -> Column { plan.contain.iter().map(|c| c.shape.map(field)).collect() };
    let columns = vec![
        plan.contain.iter().map(|c| real(&c.object)).collect(),
        plan.contain.iter().map(|c| children::pack(c.children.iter().map(real).collect())).collect(),
        shapes(|s| i64::from(s.pages)),
        shapes(|s| i64::from(s.components)),
        shapes(|s| int(s.page_bytes)),
        plan.contain.iter().map(|c| c.logical_bytes).collect(),
        plan.contain.iter().map(|c| c.new_bytes).collect(),
    ];
    let insert = "INSERT INTO containers (object, children, pages, components, page_bytes, logical_bytes, new_bytes)
        SELECT u.object, u.children, u.pages, u.components, u.page_bytes, u.logical_bytes, u.new_bytes
        FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
        AS u(object, children, pages, components, page_bytes, logical_bytes, new_bytes)";
    tx.execute_each(insert, columns, &[]).await?;
    Ok(())
}

/// Subtracts frame bytes from packs. Locks the packs in the order of their ids, after objects.
pub(super) async fn lose(tx: &mut dyn Tx, lost: impl IntoIterator<Item = (PackId, u64)>) -> Outcome<()> {
    const LOSE: Sql = Sql::of_each(
        "WITH locked AS (SELECT id FROM packs WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE)
         UPDATE packs p SET live_bytes = p.live_bytes - u.lost FROM locked, unnest($1::bigint[], $2::bigint[]) AS u(id, lost)
         WHERE p.id = locked.id AND u.id = p.id",
        "UPDATE packs SET live_bytes = live_bytes - $2 WHERE id = $1",
    );
    let mut sums: BTreeMap<PackId, i64> = BTreeMap::new();
    for (pack, bytes) in lost {
        *sums.entry(pack).or_default() += int(bytes);
    }
    tx.execute_each(LOSE, vec![sums.keys().copied().collect(), sums.values().copied().collect()], &[]).await?;
    Ok(())
}
