//! Packs from their first row to the moment they are live: what indexing a pack writes.

use super::connection::Tx;
use super::error::{Fail, Outcome};
use super::leases::lessee_with;
use super::objects::{health_of, ints, kind_of};
use super::{DOMAIN, int, keys, uint};
use crate::error::Error;
use crate::metadata::accept::{self, Known, Plan};
use crate::metadata::{NewContainer, NewFrame, ObjectId, PackId, PackSizes, PackStored, PushId, children};
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Ids of objects that are planned and not inserted yet start here: no row has one like it.
const PLANNED: ObjectId = 1 << 62;

pub(super) async fn begin_pack(tx: &mut Tx, key: &str, lease: i64) -> Outcome<PackId> {
    let until = tx.now().await?.saturating_add(lease);
    let id = sqlx::query_scalar("INSERT INTO packs (key, state, keep_until) VALUES ($1, 'writing', $2) RETURNING id")
        .bind(key)
        .bind(until)
        .fetch_one(tx.on())
        .await?;
    tx.wrote(1);
    Ok(id)
}

pub(super) async fn renew_pack(tx: &mut Tx, push: Option<&PushId>, pack: PackId, lease: i64) -> Outcome<()> {
    let until = tx.now().await?.saturating_add(lease);
    let update = "UPDATE packs SET keep_until = GREATEST(keep_until, $1) WHERE id = $2 AND state = 'writing'";
    if tx.execute(sqlx::query(update).bind(until).bind(pack)).await? == 0 {
        return Err(Error::PackLost(pack.to_string()).into());
    }
    match push {
        Some(push) => super::names::extend_push(tx, push, lease).await,
        None => Ok(()),
    }
}

pub(super) async fn finish_pack(
    tx: &mut Tx,
    push: &PushId,
    pack: PackId,
    sizes: PackSizes,
    frames: &[NewFrame],
    lease: i64,
) -> Outcome<PackStored> {
    let now = tx.now().await?;
    // The pack first: who lost it must learn so, although its session is over too. Not locked yet: packs come after objects.
    let writing: bool =
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM packs WHERE id = $1 AND state = 'writing')").bind(pack).fetch_one(tx.on()).await?;
    if !writing {
        return Err(Error::PackLost(pack.to_string()).into());
    }
    let session = super::names::live_push(tx, push).await?.number;
    let stored = index(tx, pack, sizes, frames, For::Session { number: session, until: now.saturating_add(lease) }).await?;
    // Last, so that packs of one session do not wait for each other.
    super::names::extend_push(tx, push, lease).await?;
    Ok(stored)
}

/// For whom a pack is indexed.
#[derive(Clone, Copy)]
enum For {
    /// A push session, by its number: what came is leased to it.
    Session {
        number: i64,
        /// When it expires.
        until: i64,
    },
    /// Nobody: what came is kept until then.
    Nobody { until: i64 },
}

async fn index(tx: &mut Tx, pack: PackId, sizes: PackSizes, frames: &[NewFrame], whose: For) -> Outcome<PackStored> {
    let known = load(tx, &accept::digests(frames)).await?;
    let plan = Plan::new(frames, known, pack, PLANNED)?;
    hold(tx, pack).await?;
    write(tx, &plan, pack, whose).await?;
    let (until, session) = match whose {
        For::Session { number, until } => (until, Some(number)),
        For::Nobody { until } => (until, None),
    };
    go_live(tx, pack, sizes, plan.live_bytes, until, session).await?;
    Ok(PackStored { new: plan.insert.len() as u64 })
}

pub(super) async fn adopt_pack(tx: &mut Tx, key: &str, sizes: PackSizes, frames: &[NewFrame], lease: i64) -> Outcome<PackStored> {
    let known: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM packs WHERE key = $1)").bind(key).fetch_one(tx.on()).await?;
    if known {
        return Ok(PackStored { new: 0 });
    }
    let until = tx.now().await?.saturating_add(lease);
    let pack: Option<PackId> = sqlx::query_scalar(
        "INSERT INTO packs (key, state, keep_until) VALUES ($1, 'writing', $2) ON CONFLICT (key) DO NOTHING RETURNING id",
    )
    .bind(key)
    .bind(until)
    .fetch_optional(tx.on())
    .await?;
    tx.wrote(1);
    let frames: Vec<NewFrame> = frames.iter().map(|f| NewFrame { container: None, ..f.clone() }).collect();
    index(tx, pack.ok_or(Fail::Again)?, sizes, &frames, For::Nobody { until }).await
}

pub(super) async fn adopt_containers(tx: &mut Tx, containers: &[(Digest, Kind, NewContainer)]) -> Outcome<Vec<Digest>> {
    let all = containers.iter().flat_map(|(digest, _, c)| c.children.iter().map(|child| child.digest).chain([*digest]));
    let digests: Vec<Digest> = all.collect::<HashSet<_>>().into_iter().collect();
    let (plan, refused) = Plan::adopt(containers, load(tx, &digests).await?)?;
    write(tx, &plan, 0, For::Nobody { until: 0 }).await?;
    Ok(refused)
}

/// What is stored of `digests`, locked: nobody counts or collects it until this transaction ends.
async fn load(tx: &mut Tx, digests: &[Digest]) -> Outcome<HashMap<Digest, Known>> {
    type Row = (Vec<u8>, ObjectId, i64, i16, i64, i16, PackId, i64);
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT digest, id, size, kind, refs, health, pack, frame_len FROM objects
         WHERE domain = $1 AND digest = ANY($2) ORDER BY id FOR NO KEY UPDATE",
    )
    .bind(DOMAIN)
    .bind(keys(digests))
    .fetch_all(tx.on())
    .await?;
    let mut known = HashMap::with_capacity(rows.len());
    let mut containers: HashMap<ObjectId, Digest> = HashMap::new();
    for (key, id, size, kind, refs, health, pack, frame_len) in rows {
        let (digest, kind) = (Digest::from_key(&key)?, kind_of(kind)?);
        if kind.is_container() {
            containers.insert(id, digest);
        }
        let row = Known {
            id,
            size: uint(size),
            kind,
            health: health_of(health),
            refs: uint(refs),
            shape: None,
            logical_bytes: 0,
            new_bytes: 0,
            pack,
            frame_len: uint(frame_len),
        };
        known.insert(digest, row);
    }
    if containers.is_empty() {
        return Ok(known);
    }
    // A second statement: it sees what those who held the locks before wrote.
    type Sizes = (ObjectId, Option<i64>, Option<i64>, Option<i64>, i64, i64);
    let rows: Vec<Sizes> =
        sqlx::query_as("SELECT object, pages, components, page_bytes, logical_bytes, new_bytes FROM containers WHERE object = ANY($1)")
            .bind(containers.keys().copied().collect::<Vec<_>>())
            .fetch_all(tx.on())
            .await?;
    for (id, pages, components, page_bytes, logical_bytes, new_bytes) in rows {
        let Some(row) = containers.get(&id).and_then(|digest| known.get_mut(digest)) else { continue };
        row.shape = match (pages.and_then(|p| p.try_into().ok()), components.and_then(|c| c.try_into().ok()), page_bytes) {
            (Some(pages), Some(components), Some(page_bytes)) => Some(Shape { pages, components, page_bytes: uint(page_bytes) }),
            _ => None,
        };
        (row.logical_bytes, row.new_bytes) = (uint(logical_bytes), uint(new_bytes));
    }
    Ok(known)
}

/// Writes a plan.
async fn write(tx: &mut Tx, plan: &Plan, pack: PackId, whose: For) -> Outcome<()> {
    let now = tx.now().await?;
    let (until, session) = match whose {
        For::Session { number, .. } => (0, number),
        For::Nobody { until } => (until, 0),
    };
    let ids = insert(tx, plan, pack, until, session).await?;
    relocate(tx, plan, pack).await?;
    // One update a row: what it gains, and whether it is kept.
    let mut touched: BTreeMap<ObjectId, (i64, bool)> = plan.count.iter().map(|(id, added)| (*id, (int(*added), false))).collect();
    for id in &plan.renew {
        touched.entry(*id).or_default().1 = true;
    }
    let (touched_ids, touched): (Vec<ObjectId>, Vec<(i64, bool)>) = touched.into_iter().unzip();
    tx.execute_any(&touched, || {
        sqlx::query(concat!(
            "UPDATE objects o SET refs = o.refs + u.added,
                    keep_until = CASE WHEN u.kept THEN GREATEST(o.keep_until, $4) ELSE o.keep_until END,
                    lessee = CASE WHEN u.kept AND $5 > 0 THEN ",
            lessee_with!("$5", "$6"),
            " ELSE o.lessee END
             FROM unnest($1::bigint[], $2::bigint[], $3::boolean[]) AS u(id, added, kept)
             WHERE o.id = u.id
               AND (u.added > 0 OR u.kept AND (o.keep_until < $4 OR $5 > 0 AND NOT (o.lessee = $5 OR o.lessee <= -$5)))"
        ))
        .bind(touched_ids)
        .bind(touched.iter().map(|(added, _)| *added).collect::<Vec<_>>())
        .bind(touched.iter().map(|(_, kept)| *kept).collect::<Vec<_>>())
        .bind(until)
        .bind(session)
        .bind(now)
    })
    .await?;
    tx.execute_any(&plan.promote, || {
        sqlx::query("UPDATE objects o SET kind = u.kind FROM unnest($1::bigint[], $2::smallint[]) AS u(id, kind) WHERE o.id = u.id")
            .bind(plan.promote.iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .bind(plan.promote.iter().map(|(_, kind)| *kind as i16).collect::<Vec<_>>())
    })
    .await?;
    let real = |id: &ObjectId| ids.get(usize::try_from(id - PLANNED).unwrap_or(usize::MAX)).copied().unwrap_or(*id);
    tx.execute_any(&plan.contain, || {
        let packed = |ids: &[ObjectId]| children::pack(ids.iter().map(real).collect());
        let shapes = |field: fn(Shape) -> i64| plan.contain.iter().map(|c| c.shape.map(field)).collect::<Vec<_>>();
        sqlx::query(
            "INSERT INTO containers (object, children, pages, components, page_bytes, logical_bytes, new_bytes)
             SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])",
        )
        .bind(plan.contain.iter().map(|c| real(&c.object)).collect::<Vec<_>>())
        .bind(plan.contain.iter().map(|c| packed(&c.children)).collect::<Vec<_>>())
        .bind(shapes(|s| i64::from(s.pages)))
        .bind(shapes(|s| i64::from(s.components)))
        .bind(shapes(|s| int(s.page_bytes)))
        .bind(ints(plan.contain.iter().map(|c| c.logical_bytes)))
        .bind(ints(plan.contain.iter().map(|c| c.new_bytes)))
    })
    .await?;
    tx.execute_any(&plan.recover, || sqlx::query("UPDATE objects SET health = 0 WHERE id = ANY($1)").bind(plan.recover.clone())).await?;
    if plan.healed {
        super::integrity::note_healed(tx).await?;
    }
    lose(tx, plan.lost.iter().copied()).await
}

/// Inserts what is new, in order of digests so that two who bring the same do not wait for each other in a circle.
/// Returns the row ids by position in the plan.
async fn insert(tx: &mut Tx, plan: &Plan, pack: PackId, until: i64, lessee: i64) -> Outcome<Vec<ObjectId>> {
    if plan.insert.is_empty() {
        return Ok(Vec::new());
    }
    let mut ids: Vec<ObjectId> = sqlx::query_scalar("SELECT nextval(pg_get_serial_sequence('objects', 'id')) FROM generate_series(1, $1)")
        .bind(plan.insert.len() as i64)
        .fetch_all(tx.on())
        .await?;
    ids.sort_unstable();
    let mut rows: Vec<(Vec<u8>, ObjectId, &accept::Insert)> =
        plan.insert.iter().zip(&ids).map(|(row, id)| (row.header.digest.to_key(), *id, row)).collect();
    rows.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let headers = |field: fn(&accept::Insert) -> u64| ints(rows.iter().map(|(_, _, row)| field(row)));
    let inserted = tx
        .execute(
            sqlx::query(
                r#"INSERT INTO objects (id, domain, digest, size, kind, refs, keep_until, pack, "offset", frame_len, codec, lessee)
                   SELECT u.id, $1, u.digest, u.size, u.kind, u.refs, $2, $3, u.at, u.len, u.codec, $12
                   FROM unnest($4::bigint[], $5::bytea[], $6::bigint[], $7::smallint[], $8::bigint[], $9::bigint[], $10::bigint[], $11::smallint[])
                   AS u(id, digest, size, kind, refs, at, len, codec) ON CONFLICT (domain, digest) DO NOTHING"#,
            )
            .bind(DOMAIN)
            .bind(until)
            .bind(pack)
            .bind(rows.iter().map(|(_, id, _)| *id).collect::<Vec<_>>())
            .bind(rows.iter().map(|(key, _, _)| key.clone()).collect::<Vec<_>>())
            .bind(headers(|row| row.header.raw_len))
            .bind(rows.iter().map(|(_, _, row)| row.kind as i16).collect::<Vec<_>>())
            .bind(headers(|row| row.refs))
            .bind(headers(|row| row.offset))
            .bind(headers(|row| row.header.frame_len()))
            .bind(rows.iter().map(|(_, _, row)| row.header.codec as i16).collect::<Vec<_>>())
            .bind(lessee),
        )
        .await?;
    // Somebody else stored one of them meanwhile: the plan no longer holds.
    if inserted == rows.len() as u64 { Ok(ids) } else { Err(Fail::Again) }
}

/// Points stored objects to their frames in this pack.
async fn relocate(tx: &mut Tx, plan: &Plan, pack: PackId) -> Outcome<()> {
    if plan.relocate.is_empty() {
        return Ok(());
    }
    let ids: Vec<ObjectId> = plan.relocate.iter().map(|r| r.id).collect();
    tx.execute(
        sqlx::query(
            r#"UPDATE objects o SET pack = $1, "offset" = u.at, frame_len = u.len, codec = u.codec, health = u.health
               FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::smallint[], $6::smallint[]) AS u(id, at, len, codec, health)
               WHERE o.id = u.id"#,
        )
        .bind(pack)
        .bind(ids.clone())
        .bind(ints(plan.relocate.iter().map(|r| r.offset)))
        .bind(ints(plan.relocate.iter().map(|r| r.header.frame_len())))
        .bind(plan.relocate.iter().map(|r| r.header.codec as i16).collect::<Vec<_>>())
        .bind(plan.relocate.iter().map(|r| r.health as i16).collect::<Vec<_>>()),
    )
    .await?;
    tx.execute(sqlx::query("DELETE FROM damage WHERE object = ANY($1)").bind(ids)).await?;
    Ok(())
}

/// Takes frame bytes from packs. Packs come after objects, in id order.
pub(super) async fn lose(tx: &mut Tx, lost: impl IntoIterator<Item = (PackId, u64)>) -> Outcome<()> {
    let mut sums: BTreeMap<PackId, i64> = BTreeMap::new();
    for (pack, bytes) in lost {
        *sums.entry(pack).or_default() += int(bytes);
    }
    if sums.is_empty() {
        return Ok(());
    }
    tx.execute(
        sqlx::query(
            "WITH locked AS (SELECT id FROM packs WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE)
             UPDATE packs p SET live_bytes = p.live_bytes - u.lost FROM locked, unnest($1::bigint[], $2::bigint[]) AS u(id, lost)
             WHERE p.id = locked.id AND u.id = p.id",
        )
        .bind(sums.keys().copied().collect::<Vec<_>>())
        .bind(sums.values().copied().collect::<Vec<_>>()),
    )
    .await?;
    Ok(())
}

/// Holds a pack that is being written: from here on collection cannot give it up.
pub(super) async fn hold(tx: &mut Tx, pack: PackId) -> Outcome<()> {
    let writing: Option<PackId> = sqlx::query_scalar("SELECT id FROM packs WHERE id = $1 AND state = 'writing' FOR KEY SHARE")
        .bind(pack)
        .fetch_optional(tx.on())
        .await?;
    if writing.is_some() { Ok(()) } else { Err(Error::PackLost(pack.to_string()).into()) }
}

/// Makes a complete pack live; its unclaimed objects are looked at when the session ends, and at `due` at the latest.
pub(super) async fn go_live(tx: &mut Tx, pack: PackId, sizes: PackSizes, live_bytes: u64, due: i64, session: Option<i64>) -> Outcome<()> {
    let updated = tx
        .execute(
            sqlx::query(
                "UPDATE packs SET state = 'live', bytes = $1, frame_bytes = $2, live_bytes = $3 WHERE id = $4 AND state = 'writing'",
            )
            .bind(int(sizes.bytes))
            .bind(int(sizes.frame_bytes))
            .bind(int(live_bytes))
            .bind(pack),
        )
        .await?;
    if updated != 1 {
        return Err(Error::PackLost(pack.to_string()).into());
    }
    let insert = sqlx::query("INSERT INTO suspects (due, pack, session) VALUES ($1, $2, $3)");
    tx.execute(insert.bind(due).bind(pack).bind(session)).await?;
    Ok(())
}
