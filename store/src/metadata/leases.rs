//! Leases: which sessions keep an object, and until when.
//!
//! `objects.lessee` names the sessions (0: none; N: session N alone; -N: several, none newer than
//! N) and the row of a session says whether it lives. So the end of a session ends its leases
//! without a write to any object. `objects.keep_until` is a lease of its own that belongs to no
//! session.
//!
//! Whether a session lives is asked in a statement after the one that locked the objects: only then
//! is every session visible that leased one of them. Sessions become visible in the order of their
//! numbers (`sessions.rs`).

use super::sql::{Column, Sql, values};
use super::tx::{Outcome, Tx};
use super::{Lease, ObjectId};
use std::collections::{HashMap, HashSet};

/// Whether a live session leases the object of the row `o`. `$now` is the parameter with the time.
/// One range of numbers: of a condition with an OR, PostgreSQL makes a walk over all sessions.
macro_rules! leased_by_a_session {
    ($now:literal) => {
        concat!(
            "(o.lessee <> 0 AND EXISTS (SELECT 1 FROM pushes s /* INDEXED BY pushes_open */
                                        WHERE s.number BETWEEN GREATEST(o.lessee, 0) AND abs(o.lessee)
                                        AND s.committed IS NULL AND s.expires >= ",
            $now,
            "))"
        )
    };
}

/// The `lessee` of the row `o` once the session `$session` leases it too. A session newer than this
/// one may not be visible yet: it counts as alive.
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
            $crate::metadata::leases::leased_by_a_session!($now),
            " THEN -GREATEST(abs(o.lessee), ",
            $session,
            ") ELSE ",
            $session,
            " END"
        )
    };
}

pub(super) use {leased_by_a_session, lessee_with};

/// What `keep_until` and `lessee` of a set of rows come to.
pub(super) struct Leases {
    now: u64,
    /// The oldest live session of each `lessee`, and when it expires.
    sessions: HashMap<i64, (i64, u64)>,
}

impl Leases {
    pub(super) async fn load(tx: &mut dyn Tx, lessees: HashSet<i64>) -> Outcome<Self> {
        const OLDEST: Sql = Sql::of_each(
            "SELECT u.lessee, s.number, s.expires FROM unnest($1::bigint[]) AS u(lessee)
             JOIN LATERAL (SELECT number, expires FROM pushes p WHERE p.number BETWEEN GREATEST(u.lessee, 0) AND abs(u.lessee)
                           AND p.committed IS NULL AND p.expires >= $2 ORDER BY p.number LIMIT 1) s ON true",
            "SELECT $1, number, expires FROM pushes INDEXED BY pushes_open WHERE number BETWEEN MAX($1, 0) AND abs($1)
             AND committed IS NULL AND expires >= $2 ORDER BY number LIMIT 1",
        );
        let now = tx.now().await?;
        let lessees: Column = lessees.into_iter().filter(|lessee| *lessee != 0).collect();
        let rows: Vec<(i64, i64, u64)> = tx.rows(OLDEST, vec![lessees], values![now], false).await?;
        Ok(Self { now, sessions: rows.into_iter().map(|(lessee, number, expires)| (lessee, (number, expires))).collect() })
    }

    /// Of several sessions the oldest that lives is named: the object is looked at again when it
    /// ends. It lives through the millisecond in which it expires, so that is one later. A
    /// candidate due at once would be found again without end by a transaction, for which time
    /// stands still.
    pub(super) fn of(&self, keep_until: u64, lessee: i64) -> Option<Lease> {
        match self.sessions.get(&lessee) {
            Some((number, expires)) => Some(Lease { until: expires.saturating_add(1), session: Some(*number) }),
            None => (keep_until > self.now).then_some(Lease { until: keep_until, session: None }),
        }
    }
}

/// Of these objects, those that a lease covers.
pub(super) async fn of(tx: &mut dyn Tx, ids: &[ObjectId]) -> Outcome<Vec<(ObjectId, Lease)>> {
    let rows: Vec<(ObjectId, u64, i64)> = tx.query("SELECT id, keep_until, lessee FROM objects WHERE id = ANY($1)", values![ids]).await?;
    let leases = Leases::load(tx, rows.iter().map(|row| row.2).collect()).await?;
    Ok(rows.into_iter().filter_map(|(id, keep_until, lessee)| Some((id, leases.of(keep_until, lessee)?))).collect())
}

/// Leases objects to a session; returns those that were there to be leased.
pub(super) async fn lease_all(tx: &mut dyn Tx, ids: &[ObjectId], session: i64, now: u64) -> Outcome<HashSet<ObjectId>> {
    const LEASE: Sql = Sql::at_once(
        concat!(
            "WITH locked AS (SELECT id FROM objects WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE)
             UPDATE objects o SET lessee = ",
            lessee_with!("$2", "$3"),
            " FROM locked WHERE o.id = locked.id"
        ),
        concat!("UPDATE objects AS o SET lessee = ", lessee_with!("$2", "$3"), " WHERE o.id IN (SELECT value FROM rarray($1))"),
    );
    let leased = tx.execute_each(LEASE, vec![ids.iter().copied().collect()], values![session, now]).await?;
    if leased == ids.len() as u64 {
        return Ok(ids.iter().copied().collect());
    }
    // Deleted objects stay deleted; the others are leased.
    Ok(tx.query("SELECT id FROM objects WHERE id = ANY($1)", values![ids]).await?.into_iter().collect())
}

/// Sessions ended: the next collection looks at the objects that only they kept. An entry that a
/// collection holds is left to it.
pub(super) async fn ended(tx: &mut dyn Tx, sessions: &[i64]) -> Outcome<()> {
    if sessions.is_empty() {
        return Ok(());
    }
    let now = tx.now().await?;
    let due = "UPDATE suspects SET due = $1 WHERE id = ANY(ARRAY(
                 SELECT id FROM suspects WHERE session = ANY($2) AND due > $1 ORDER BY id FOR UPDATE SKIP LOCKED))";
    tx.execute(due, values![now, sessions]).await?;
    Ok(())
}
