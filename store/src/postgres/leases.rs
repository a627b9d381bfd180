//! Leases: which sessions keep an object, and until when. `sqlite/leases.rs` says what the columns mean.
//!
//! Whether a session lives is asked in a statement after the one that locked the objects: only then is every session visible that leased one.
//! Sessions become visible in the order of their numbers: they are opened one after the other, under a lock.

use super::connection::Tx;
use super::error::Outcome;
use super::{int, uint};
use crate::metadata::arguments::at_most;
use crate::metadata::{Lease, ObjectId, Unfinished};
use std::collections::{HashMap, HashSet};

/// Whether a live session leases the object of the row `o`. `$now` is the parameter with the time. By sign: of one condition with an OR the
/// planner makes a walk over all sessions.
macro_rules! leased_by_a_session {
    ($now:literal) => {
        concat!(
            "((o.lessee > 0 AND EXISTS (SELECT 1 FROM pushes s WHERE s.number = o.lessee AND s.committed IS NULL AND s.expires >= ",
            $now,
            ")) OR (o.lessee < 0 AND EXISTS (SELECT 1 FROM pushes s WHERE s.number <= -o.lessee AND s.committed IS NULL AND s.expires >= ",
            $now,
            ")))"
        )
    };
}

/// The `lessee` of the row `o` once the session `$session` leases it too. A session newer than this one may not be visible yet: it counts as alive.
macro_rules! lessee_with {
    ($session:literal, $now:literal) => {
        concat!(
            "CASE WHEN o.lessee = ",
            $session,
            " OR o.lessee <= -",
            $session,
            " THEN o.lessee WHEN abs(o.lessee) > ",
            $session,
            " OR ",
            $crate::postgres::leases::leased_by_a_session!($now),
            " THEN -GREATEST(abs(o.lessee), ",
            $session,
            ") ELSE ",
            $session,
            " END"
        )
    };
}

pub(super) use {leased_by_a_session, lessee_with};

/// What `keep_until` and `lessee` of objects come to. Made of all that a set of rows says.
pub(super) struct Leases {
    now: i64,
    /// The oldest live session of each `lessee`, and when it expires.
    sessions: HashMap<i64, (i64, i64)>,
}

impl Leases {
    pub(super) async fn load(tx: &mut Tx, lessees: impl Iterator<Item = i64>) -> Outcome<Self> {
        let now = tx.now().await?;
        let lessees: HashSet<i64> = lessees.filter(|lessee| *lessee != 0).collect();
        if lessees.is_empty() {
            return Ok(Self { now, sessions: HashMap::new() });
        }
        let rows: Vec<(i64, i64, i64)> = sqlx::query_as(
            "SELECT p.number, p.number, p.expires FROM pushes p
             WHERE p.number = ANY($1) AND p.committed IS NULL AND p.expires >= $2
             UNION ALL
             SELECT u.lessee, s.number, s.expires FROM unnest($1::bigint[]) AS u(lessee)
             JOIN LATERAL (SELECT number, expires FROM pushes p WHERE p.number <= -u.lessee AND p.committed IS NULL AND p.expires >= $2
                           ORDER BY p.number LIMIT 1) s ON true
             WHERE u.lessee < 0",
        )
        .bind(lessees.into_iter().collect::<Vec<_>>())
        .bind(now)
        .fetch_all(tx.on())
        .await?;
        Ok(Self { now, sessions: rows.into_iter().map(|(lessee, number, expires)| (lessee, (number, expires))).collect() })
    }

    pub(super) fn of(&self, keep_until: i64, lessee: i64) -> Option<Lease> {
        match self.sessions.get(&lessee) {
            Some((number, expires)) => Some(Lease { until: uint(*expires), session: Some(*number) }),
            None => (keep_until > self.now).then(|| Lease { until: uint(keep_until), session: None }),
        }
    }
}

/// Of these objects, those that a lease covers.
pub(super) async fn of(tx: &mut Tx, ids: &[ObjectId]) -> Outcome<Vec<(ObjectId, Lease)>> {
    let rows: Vec<(ObjectId, i64, i64)> =
        sqlx::query_as("SELECT id, keep_until, lessee FROM objects WHERE id = ANY($1)").bind(ids.to_vec()).fetch_all(tx.on()).await?;
    let leases = Leases::load(tx, rows.iter().map(|row| row.2)).await?;
    Ok(rows.into_iter().filter_map(|(id, keep_until, lessee)| Some((id, leases.of(keep_until, lessee)?))).collect())
}

/// A session ended: what only it kept is looked at by the next collection. An entry that a collection holds is left to it.
pub(super) async fn ended(tx: &mut Tx, sessions: &[i64]) -> Outcome<()> {
    let now = tx.now().await?;
    let update = "UPDATE suspects SET due = $1 WHERE id = ANY(ARRAY(
                    SELECT id FROM suspects WHERE session = ANY($2) AND due > $1 ORDER BY id FOR UPDATE SKIP LOCKED))";
    tx.execute_any(sessions, || sqlx::query(update).bind(now).bind(sessions.to_vec())).await?;
    Ok(())
}

/// Sessions that live, oldest first.
pub(super) async fn unfinished(tx: &mut Tx, limit: usize) -> Outcome<Vec<Unfinished>> {
    let now = tx.now().await?;
    let rows: Vec<(i64, String, i64)> = sqlx::query_as(
        "SELECT p.number, r.name, p.expires FROM pushes p JOIN repositories r ON r.id = p.repository
         WHERE p.committed IS NULL AND p.expires >= $1 ORDER BY p.number LIMIT $2",
    )
    .bind(now)
    .bind(at_most(limit))
    .fetch_all(tx.on())
    .await?;
    rows.into_iter()
        .map(|(session, repository, until)| Ok(Unfinished { session, repository: repository.parse()?, until: uint(until) }))
        .collect()
}

/// Ends every session and gives up every pack that is being written.
pub(super) async fn end_all(tx: &mut Tx) -> Outcome<u64> {
    let now = tx.now().await?;
    let give_up = "UPDATE packs SET keep_until = $1 WHERE id = ANY(ARRAY(
                     SELECT id FROM packs WHERE state = 'writing' AND keep_until > $1 ORDER BY id FOR UPDATE)) AND state = 'writing'";
    tx.execute(sqlx::query(give_up).bind(now)).await?;
    let delete =
        "DELETE FROM pushes WHERE id = ANY(ARRAY(SELECT id FROM pushes WHERE committed IS NULL ORDER BY id FOR UPDATE)) RETURNING number";
    let sessions: Vec<i64> = sqlx::query_scalar(delete).fetch_all(tx.on()).await?;
    tx.wrote(sessions.len());
    ended(tx, &sessions).await?;
    Ok(sessions.len() as u64)
}

/// When an entry of the queue is due, for SQL.
pub(super) fn due(lease: Lease) -> i64 {
    int(lease.until)
}
