//! Packs after they are live: retirement, compaction, and the runs that did it.

use super::connection::Tx;
use super::error::Outcome;
use super::index::{go_live, hold};
use super::lists::paged;
use super::objects::{health_of, ints, kind_of, lock};
use super::{int, uint};
use crate::metadata::arguments::{at_most, cursor, one_more};
use crate::metadata::{GC_RUNS, GcRun, GcTrigger, Moved, ObjectId, PackId, PackRow, PackSizes, PackState, Packed, Page, Retired};
use pfr_schema::Digest;
use std::collections::BTreeMap;

type RawPack = (PackId, String, String, i64, i64, i64, i64, Option<i64>, i64);

macro_rules! columns {
    () => {
        "id, key, state, bytes, frame_bytes, live_bytes, keep_until, draining_since, claimed_until"
    };
}

fn pack_row((id, key, state, bytes, frame_bytes, live_bytes, keep_until, draining_since, claimed_until): RawPack) -> PackRow {
    let state = match state.as_str() {
        "writing" => PackState::Writing,
        "live" => PackState::Live,
        _ => PackState::Draining,
    };
    PackRow {
        id,
        key,
        state,
        bytes: uint(bytes),
        frame_bytes: uint(frame_bytes),
        live_bytes: uint(live_bytes),
        keep_until: uint(keep_until),
        draining_since: draining_since.map(uint),
        claimed_until: uint(claimed_until),
    }
}

pub(super) async fn packs(tx: &mut Tx, after: Option<PackId>, limit: usize) -> Outcome<Vec<PackRow>> {
    let rows: Vec<RawPack> = sqlx::query_as(concat!("SELECT ", columns!(), " FROM packs WHERE id > $1 ORDER BY id LIMIT $2"))
        .bind(after.unwrap_or(0))
        .bind(at_most(limit))
        .fetch_all(tx.on())
        .await?;
    Ok(rows.into_iter().map(pack_row).collect())
}

pub(super) async fn retire_packs(tx: &mut Tx, limit: usize) -> Outcome<Retired> {
    let now = tx.now().await?;
    // That no object points to it is asked of the objects too: a wrong count must never cost bytes.
    let empty = "UPDATE packs SET state = 'draining', draining_since = $1 WHERE id = ANY(ARRAY(
                   SELECT id FROM packs p WHERE state = 'live' AND live_bytes = 0 AND NOT EXISTS (SELECT 1 FROM objects o WHERE o.pack = p.id)
                   ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED)) AND state = 'live' AND live_bytes = 0";
    let empty = tx.execute(sqlx::query(empty).bind(now).bind(at_most(limit))).await?;
    // An upload that outlived its lease can no longer finish: finish_pack asks for the state. Its bytes go after the horizon, not now.
    let abandoned = "UPDATE packs SET state = 'draining', draining_since = $1 WHERE id = ANY(ARRAY(
                       SELECT id FROM packs WHERE state = 'writing' AND keep_until <= $1 ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED))
                     AND state = 'writing'";
    let abandoned = tx.execute(sqlx::query(abandoned).bind(now).bind(at_most(limit))).await?;
    Ok(Retired { empty, abandoned })
}

pub(super) async fn drained_packs(tx: &mut Tx, horizon: i64, limit: usize) -> Outcome<Vec<PackRow>> {
    let before = tx.now().await?.saturating_sub(horizon);
    let rows: Vec<RawPack> = sqlx::query_as(concat!(
        "SELECT ",
        columns!(),
        " FROM packs WHERE state = 'draining' AND draining_since <= $1 ORDER BY draining_since, id LIMIT $2"
    ))
    .bind(before)
    .bind(at_most(limit))
    .fetch_all(tx.on())
    .await?;
    Ok(rows.into_iter().map(pack_row).collect())
}

pub(super) async fn forget_packs(tx: &mut Tx, packs: &[PackId]) -> Outcome<()> {
    let delete =
        "DELETE FROM packs WHERE id = ANY(ARRAY(SELECT id FROM packs WHERE id = ANY($1) ORDER BY id FOR UPDATE)) AND state = 'draining'";
    tx.execute_any(packs, || sqlx::query(delete).bind(packs.to_vec())).await?;
    Ok(())
}

pub(super) async fn claim_sparse_packs(tx: &mut Tx, limit: usize, claim: i64) -> Outcome<Vec<PackRow>> {
    let now = tx.now().await?;
    let rows: Vec<RawPack> = sqlx::query_as(concat!(
        "UPDATE packs SET claimed_until = $1 WHERE id = ANY(ARRAY(
           SELECT id FROM packs WHERE state = 'live' AND live_bytes > 0 AND live_bytes * 2 < frame_bytes AND claimed_until <= $2
           ORDER BY live_bytes, id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED)) AND claimed_until <= $2
         RETURNING ",
        columns!()
    ))
    .bind(now.saturating_add(claim))
    .bind(now)
    .bind(at_most(limit))
    .fetch_all(tx.on())
    .await?;
    tx.wrote(rows.len());
    let mut packs: Vec<PackRow> = rows.into_iter().map(pack_row).collect();
    packs.sort_by_key(|pack| (pack.live_bytes, pack.id));
    Ok(packs)
}

pub(super) async fn pack_contents(tx: &mut Tx, pack: PackId) -> Outcome<Vec<Packed>> {
    let rows: Vec<(ObjectId, Vec<u8>, i16, i64, i64, i16)> =
        sqlx::query_as(r#"SELECT id, digest, kind, "offset", frame_len, health FROM objects WHERE pack = $1 ORDER BY "offset""#)
            .bind(pack)
            .fetch_all(tx.on())
            .await?;
    rows.into_iter()
        .map(|(object, key, kind, offset, len, health)| {
            let (digest, kind) = (Digest::from_key(&key)?, kind_of(kind)?);
            Ok(Packed { object, digest, kind, offset: uint(offset), frame_len: uint(len), health: health_of(health) })
        })
        .collect()
}

pub(super) async fn finish_compaction(tx: &mut Tx, pack: PackId, sizes: PackSizes, moved: &[Moved]) -> Outcome<()> {
    let now = tx.now().await?;
    let objects: Vec<ObjectId> = moved.iter().map(|m| m.object).collect();
    lock(tx, &objects).await?;
    hold(tx, pack).await?;
    let rows: Vec<(PackId, i64)> = sqlx::query_as(
        r#"UPDATE objects o SET pack = $1, "offset" = u.at FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS u(id, source, at)
           WHERE o.id = u.id AND o.pack = u.source RETURNING u.source, o.frame_len"#,
    )
    .bind(pack)
    .bind(objects)
    .bind(moved.iter().map(|m| m.from).collect::<Vec<_>>())
    .bind(ints(moved.iter().map(|m| m.offset)))
    .fetch_all(tx.on())
    .await?;
    tx.wrote(rows.len());
    let mut lost: BTreeMap<PackId, i64> = moved.iter().map(|m| (m.from, 0)).collect();
    for (from, frame_len) in rows {
        *lost.entry(from).or_default() += frame_len;
    }
    // Due at once: what a session leases in it is then queued for the end of that session.
    go_live(tx, pack, sizes, lost.values().copied().map(uint).sum(), now, None).await?;
    let sources = lost.len();
    tx.execute(
        sqlx::query(
            "WITH locked AS (SELECT id FROM packs WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE)
             UPDATE packs p SET live_bytes = p.live_bytes - u.lost, claimed_until = 0
             FROM locked, unnest($1::bigint[], $2::bigint[]) AS u(id, lost) WHERE p.id = locked.id AND u.id = p.id",
        )
        .bind(lost.keys().copied().collect::<Vec<_>>())
        .bind(lost.into_values().collect::<Vec<_>>()),
    )
    .await?;
    retire_packs(tx, sources).await?;
    Ok(())
}

// ---- runs

fn trigger_word(trigger: GcTrigger) -> &'static str {
    match trigger {
        GcTrigger::Schedule => "schedule",
        GcTrigger::Command => "command",
        GcTrigger::Request => "request",
    }
}

pub(super) async fn record_gc_run(tx: &mut Tx, run: &GcRun) -> Outcome<()> {
    tx.execute(
        sqlx::query(
            "INSERT INTO gc_runs (id, cause, started_at, finished_at, report) VALUES ($1, $2, $3, $4, $5)
             ON CONFLICT (id) DO UPDATE SET finished_at = excluded.finished_at, report = excluded.report",
        )
        .bind(run.id.clone())
        .bind(trigger_word(run.trigger))
        .bind(int(run.started_at))
        .bind(run.finished_at.map(int))
        .bind(run.report.clone()),
    )
    .await?;
    let forget = "DELETE FROM gc_runs WHERE id <= (SELECT id FROM gc_runs ORDER BY id DESC LIMIT 1 OFFSET $1)";
    tx.execute(sqlx::query(forget).bind(GC_RUNS as i64)).await?;
    Ok(())
}

pub(super) async fn gc_runs(tx: &mut Tx, after: Option<&str>, limit: usize) -> Outcome<Page<GcRun>> {
    // Ids are UUIDv7: in order of time.
    let rows: Vec<(String, String, i64, Option<i64>, String)> =
        sqlx::query_as("SELECT id, cause, started_at, finished_at, report FROM gc_runs WHERE id < $1 ORDER BY id DESC LIMIT $2")
            .bind(cursor(after, "~")?)
            .bind(one_more(limit))
            .fetch_all(tx.on())
            .await?;
    let run = |(id, cause, started_at, finished_at, report): (String, String, i64, Option<i64>, String)| {
        let trigger = match cause.as_str() {
            "schedule" => GcTrigger::Schedule,
            "command" => GcTrigger::Command,
            _ => GcTrigger::Request,
        };
        GcRun { id, trigger, started_at: uint(started_at), finished_at: finished_at.map(uint), report }
    };
    Ok(paged(rows.into_iter().map(run).collect(), limit, |run: &GcRun| run.id.clone()))
}
