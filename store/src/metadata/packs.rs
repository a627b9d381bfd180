//! Packs after they are live: emptying, deletion, compaction.

use super::arguments::at_most;
use super::sessions::millis;
use super::sql::{Sql, int, json_rows, values};
use super::tx::{Fail, Outcome, Tx};
use super::{Emptied, Health, Moved, ObjectId, PackId, PackRow, PackSizes, PackState, Packed, objects};
use crate::error::Error;
use pfr_schema::{Digest, Kind};
use std::collections::BTreeMap;
use std::time::Duration;

macro_rules! columns {
    () => {
        "id, key, state, bytes, frame_bytes, live_bytes, keep_until, draining_since, claimed_until"
    };
}

pub(super) use columns;

pub(super) type RawPack = (PackId, String, String, u64, u64, u64, u64, Option<u64>, u64);

pub(super) fn pack_row((id, key, state, bytes, frame_bytes, live_bytes, keep_until, draining_since, claimed_until): RawPack) -> PackRow {
    let state = match state.as_str() {
        "writing" => PackState::Writing,
        "live" => PackState::Live,
        _ => PackState::Emptied,
    };
    PackRow { id, key, state, bytes, frame_bytes, live_bytes, keep_until, draining_since, claimed_until }
}

pub(super) async fn packs(tx: &mut dyn Tx, after: Option<PackId>, limit: usize) -> Outcome<Vec<PackRow>> {
    let find = concat!("SELECT ", columns!(), " FROM packs WHERE id > $1 ORDER BY id LIMIT $2");
    let rows = tx.query(find, values![after.unwrap_or(0), at_most(limit)]).await?;
    Ok(rows.into_iter().map(pack_row).collect())
}

pub(super) async fn disk_bytes(tx: &mut dyn Tx) -> Outcome<u64> {
    tx.one("SELECT COALESCE(SUM(bytes), 0)::bigint FROM packs", &[]).await
}

pub(super) async fn is_empty(tx: &mut dyn Tx) -> Outcome<bool> {
    tx.one("SELECT NOT EXISTS (SELECT 1 FROM packs) AND NOT EXISTS (SELECT 1 FROM repositories)", &[]).await
}

pub(super) async fn storage_id(tx: &mut dyn Tx) -> Outcome<Option<String>> {
    tx.first("SELECT id FROM marker", &[]).await
}

pub(super) async fn enter_storage_id(tx: &mut dyn Tx, id: &str) -> Outcome<String> {
    tx.execute("INSERT INTO marker (one, id) VALUES (1, $1) ON CONFLICT (one) DO NOTHING", values![id]).await?;
    storage_id(tx).await?.ok_or(Fail::Again)
}

pub(super) async fn forget_storage_id(tx: &mut dyn Tx) -> Outcome<()> {
    tx.execute("DELETE FROM marker", &[]).await.map(drop)
}

/// Objects that lie in a pack, in order of offset.
pub(super) async fn contents(tx: &mut dyn Tx, pack: PackId) -> Outcome<Vec<Packed>> {
    let find = r#"SELECT id, digest, kind, "offset", frame_len, health FROM objects WHERE pack = $1 ORDER BY "offset""#;
    let rows: Vec<(ObjectId, Digest, Kind, u64, u64, Health)> = tx.query(find, values![pack]).await?;
    let packed = |(object, digest, kind, offset, frame_len, health)| Packed { object, digest, kind, offset, frame_len, health };
    Ok(rows.into_iter().map(packed).collect())
}

/// Holds a pack that is being written: from here on collection cannot give it up.
pub(super) async fn hold(tx: &mut dyn Tx, pack: PackId) -> Outcome<()> {
    let writing: Option<PackId> = tx.first("SELECT id FROM packs WHERE id = $1 AND state = 'writing' FOR KEY SHARE", values![pack]).await?;
    if writing.is_some() { Ok(()) } else { Err(Error::PackLost(pack.to_string()).into()) }
}

/// Makes a complete pack live; its unclaimed objects are looked at when the session ends, and at
/// `due` at the latest.
pub(super) async fn go_live(
    tx: &mut dyn Tx,
    pack: PackId,
    sizes: PackSizes,
    live_bytes: u64,
    due: u64,
    session: Option<i64>,
) -> Outcome<()> {
    let live = "UPDATE packs SET state = 'live', bytes = $1, frame_bytes = $2, live_bytes = $3 WHERE id = $4 AND state = 'writing'";
    if tx.execute(live, values![sizes.bytes, sizes.frame_bytes, live_bytes, pack]).await? != 1 {
        return Err(Error::PackLost(pack.to_string()).into());
    }
    tx.execute("INSERT INTO suspects (due, pack, session) VALUES ($1, $2, $3)", values![due, pack, session]).await?;
    Ok(())
}

pub(super) async fn empty(tx: &mut dyn Tx, limit: usize) -> Outcome<Emptied> {
    let now = tx.now().await?;
    // The condition checks the objects too, and not only the count: a wrong count must never cost
    // bytes.
    let empty = "UPDATE packs SET state = 'draining', draining_since = $1 WHERE id = ANY(ARRAY(
                   SELECT id FROM packs p WHERE state = 'live' AND live_bytes = 0 AND NOT EXISTS (SELECT 1 FROM objects o WHERE o.pack = p.id)
                   ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED)) AND state = 'live' AND live_bytes = 0";
    let empty = tx.execute(empty, values![now, at_most(limit)]).await?;
    // An upload that outlived its lease can no longer finish: finish_pack asks for the state. Its
    // bytes go after the grace period, not now.
    let abandoned = "UPDATE packs SET state = 'draining', draining_since = $1 WHERE id = ANY(ARRAY(
                       SELECT id FROM packs WHERE state = 'writing' AND keep_until <= $1 ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED))
                     AND state = 'writing'";
    let abandoned = tx.execute(abandoned, values![now, at_most(limit)]).await?;
    Ok(Emptied { empty, abandoned })
}

pub(super) async fn emptied(tx: &mut dyn Tx, grace: Duration, limit: usize) -> Outcome<Vec<PackRow>> {
    let before = tx.now().await?.saturating_sub(millis(grace));
    let find = concat!(
        "SELECT ",
        columns!(),
        " FROM packs WHERE state = 'draining' AND draining_since <= $1 ORDER BY draining_since, id LIMIT $2"
    );
    let rows = tx.query(find, values![before, at_most(limit)]).await?;
    Ok(rows.into_iter().map(pack_row).collect())
}

pub(super) async fn writing(tx: &mut dyn Tx, limit: usize) -> Outcome<Vec<PackRow>> {
    let find = concat!("SELECT ", columns!(), " FROM packs WHERE state = 'writing' ORDER BY keep_until, id LIMIT $1");
    let rows = tx.query(find, values![at_most(limit)]).await?;
    Ok(rows.into_iter().map(pack_row).collect())
}

pub(super) async fn forget(tx: &mut dyn Tx, packs: &[PackId]) -> Outcome<()> {
    let delete =
        "DELETE FROM packs WHERE id = ANY(ARRAY(SELECT id FROM packs WHERE id = ANY($1) ORDER BY id FOR UPDATE)) AND state = 'draining'";
    if !packs.is_empty() {
        tx.execute(delete, values![packs]).await?;
    }
    Ok(())
}

pub(super) async fn forget_unfinished(tx: &mut dyn Tx, pack: PackId) -> Outcome<()> {
    tx.execute("DELETE FROM packs WHERE id = $1 AND state = 'writing'", values![pack]).await?;
    Ok(())
}

pub(super) async fn claim_sparse(tx: &mut dyn Tx, limit: usize, claim: Duration) -> Outcome<Vec<PackRow>> {
    let now = tx.now().await?;
    let update = concat!(
        "UPDATE packs SET claimed_until = $1 WHERE id = ANY(ARRAY(
           SELECT id FROM packs WHERE state = 'live' AND live_bytes > 0 AND live_bytes * 2 < frame_bytes AND claimed_until <= $2
           ORDER BY live_bytes, id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED)) AND claimed_until <= $2
         RETURNING ",
        columns!()
    );
    let rows = tx.returning(update, values![now.saturating_add(millis(claim)), now, at_most(limit)]).await?;
    let mut packs: Vec<PackRow> = rows.into_iter().map(pack_row).collect();
    packs.sort_by_key(|pack| (pack.live_bytes, pack.id));
    Ok(packs)
}

pub(super) async fn finish_compaction(tx: &mut dyn Tx, pack: PackId, sizes: PackSizes, moved: &[Moved]) -> Outcome<()> {
    const LOSE: Sql = Sql::of_each(
        "WITH locked AS (SELECT id FROM packs WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE)
         UPDATE packs p SET live_bytes = p.live_bytes - u.lost, claimed_until = 0
         FROM locked, unnest($1::bigint[], $2::bigint[]) AS u(id, lost) WHERE p.id = locked.id AND u.id = p.id",
        "UPDATE packs SET live_bytes = live_bytes - $2, claimed_until = 0 WHERE id = $1",
    );
    let now = tx.now().await?;
    let objects: Vec<ObjectId> = moved.iter().map(|m| m.object).collect();
    objects::lock(tx, &objects).await?;
    hold(tx, pack).await?;
    let rows = repoint(tx, pack, moved).await?;
    let mut lost: BTreeMap<PackId, u64> = moved.iter().map(|m| (m.from, 0)).collect();
    for (from, frame_len) in rows {
        *lost.entry(from).or_default() += frame_len;
    }
    // Due at once. Objects that a session leases are then queued for the end of that session.
    go_live(tx, pack, sizes, lost.values().sum(), now, None).await?;
    tx.execute_each(LOSE, vec![lost.keys().copied().collect(), lost.values().copied().collect()], &[]).await?;
    empty(tx, lost.len()).await?;
    Ok(())
}

/// What SQLite runs once for all copies in `$1`; a row is an object, the pack that it was copied
/// from, and its place in the new pack.
const COPIED: &str = "SELECT o.pack, o.frame_len FROM json_each($1) AS m
    CROSS JOIN objects AS o ON o.id = m.value->>0 AND o.pack = m.value->>1";
const REPOINT: &str = r#"UPDATE objects AS o SET pack = $2, "offset" = m.value->>2 FROM json_each($1) AS m
    WHERE o.id = m.value->>0 AND o.pack = m.value->>1"#;

/// Points objects to their copies in `pack`, if they still lie where they were copied from. Returns
/// where each of them lay, and the bytes of its frame.
async fn repoint(tx: &mut dyn Tx, pack: PackId, moved: &[Moved]) -> Outcome<Vec<(PackId, u64)>> {
    if tx.is_concurrent() {
        let repoint = r#"UPDATE objects AS o SET pack = $4, "offset" = u.at
                         FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS u(id, source, at)
                         WHERE o.id = u.id AND o.pack = u.source RETURNING u.source, frame_len"#;
        let columns = vec![
            moved.iter().map(|m| m.object).collect(),
            moved.iter().map(|m| m.from).collect(),
            moved.iter().map(|m| m.offset).collect(),
        ];
        return tx.rows(repoint.into(), columns, values![pack], true).await;
    }
    let copies: Vec<(ObjectId, PackId, i64)> = moved.iter().map(|m| (m.object, m.from, int(m.offset))).collect();
    let copies = json_rows(&copies)?;
    // First: what RETURNING gives of an UPDATE is the new pack.
    let lay = tx.query(Sql::from(COPIED), values![&copies]).await?;
    tx.execute(Sql::from(REPOINT), values![&copies, pack]).await?;
    Ok(lay)
}

#[cfg(test)]
mod tests;
