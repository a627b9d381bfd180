//! Leases: which sessions keep an object, and until when.
//!
//! `objects.lessee` names them (0: none; N: session N alone; -N: several, none newer than N) and the row of a session says whether it
//! lives. So the end of a session ends its leases without a write to any object. `objects.keep_until` is a lease of its own that belongs
//! to no session.

use super::{int, uint};
use crate::error::{Error, Result};
use crate::metadata::{Lease, ObjectId, Unfinished};
use rusqlite::{Connection, OptionalExtension as _, params};

fn sql(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

/// Whether a live session leases the object of the row. `$now` is the parameter with the time.
macro_rules! leased_by_a_session {
    ($now:literal) => {
        concat!(
            "((lessee > 0 AND EXISTS (SELECT 1 FROM pushes WHERE number = lessee AND committed IS NULL AND expires >= ",
            $now,
            ")) OR (lessee < 0 AND EXISTS (SELECT 1 FROM pushes INDEXED BY pushes_open WHERE number <= -lessee AND committed IS NULL
                                           AND expires >= ",
            $now,
            ")))"
        )
    };
}

/// Whether a lease covers the object of the row.
macro_rules! leased {
    ($now:literal) => {
        concat!("(keep_until > ", $now, " OR ", $crate::sqlite::leases::leased_by_a_session!($now), ")")
    };
}

pub(super) use {leased, leased_by_a_session};

/// The lease of an object with these columns. Of several sessions the oldest that lives is named: the object is looked at again when it ends.
pub(super) fn lease_of(tx: &Connection, keep_until: i64, lessee: i64, now: u64) -> Result<Option<Lease>> {
    let find = match lessee {
        0 => None,
        1.. => Some("SELECT number, expires FROM pushes WHERE number = ?1 AND committed IS NULL AND expires >= ?2"),
        _ => Some(
            "SELECT number, expires FROM pushes INDEXED BY pushes_open WHERE number <= ?1 AND committed IS NULL AND expires >= ?2
             ORDER BY number LIMIT 1",
        ),
    };
    if let Some(find) = find {
        let session = tx
            .prepare_cached(find)
            .and_then(|mut s| s.query_row(params![lessee.saturating_abs(), int(now)], |r| Ok((r.get(0)?, r.get::<_, i64>(1)?))).optional())
            .map_err(sql)?;
        if let Some((number, expires)) = session {
            return Ok(Some(Lease { session: Some(number), until: uint(expires) }));
        }
    }
    Ok((uint(keep_until) > now).then(|| Lease { session: None, until: uint(keep_until) }))
}

/// Of these objects, those that a lease covers.
pub(super) fn of(tx: &Connection, ids: &[ObjectId], now: u64) -> Result<Vec<(ObjectId, Lease)>> {
    let mut select = tx.prepare_cached("SELECT keep_until, lessee FROM objects WHERE id = ?1").map_err(sql)?;
    let mut leases = Vec::new();
    for id in ids {
        let row = select.query_row([id], |r| Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)?))).optional().map_err(sql)?;
        if let Some((keep_until, lessee)) = row
            && let Some(lease) = lease_of(tx, keep_until, lessee, now)?
        {
            leases.push((*id, lease));
        }
    }
    Ok(leases)
}

/// Leases an object to a session; false if there is no such object. A session newer than this one counts as alive: PostgreSQL cannot tell
/// whether it ended.
pub(super) fn lease_to(tx: &Connection, session: i64, object: ObjectId, now: u64) -> Result<bool> {
    let update = concat!(
        "UPDATE objects SET lessee = CASE WHEN lessee = ?1 OR lessee <= -?1 THEN lessee WHEN ABS(lessee) > ?1 OR ",
        leased_by_a_session!("?2"),
        " THEN -MAX(ABS(lessee), ?1) ELSE ?1 END WHERE id = ?3"
    );
    let updated = tx.prepare_cached(update).and_then(|mut s| s.execute(params![session, int(now), object])).map_err(sql)?;
    Ok(updated > 0)
}

/// Whether the lease of a session needs no write.
pub(super) fn covers(lessee: i64, session: i64) -> bool {
    lessee == session || lessee <= -session
}

/// A session ended: what only it kept is looked at by the next collection.
pub(super) fn ended(tx: &Connection, session: i64, now: u64) -> Result<()> {
    tx.prepare_cached("UPDATE suspects SET due = ?1 WHERE session = ?2 AND due > ?1")
        .and_then(|mut s| s.execute(params![int(now), session]))
        .map_err(sql)?;
    Ok(())
}

/// Sessions that live, oldest first.
pub(super) fn unfinished(tx: &Connection, now: u64, limit: usize) -> Result<Vec<Unfinished>> {
    let rows: Vec<(i64, String, i64)> = tx
        .prepare_cached(
            "SELECT p.number, r.name, p.expires FROM pushes p JOIN repositories r ON r.id = p.repository
             WHERE p.committed IS NULL AND p.expires >= ?1 ORDER BY p.number LIMIT ?2",
        )
        .and_then(|mut s| {
            s.query_map(params![int(now), crate::metadata::arguments::at_most(limit)], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))?.collect()
        })
        .map_err(sql)?;
    rows.into_iter()
        .map(|(session, repository, until)| Ok(Unfinished { session, repository: repository.parse()?, until: uint(until) }))
        .collect()
}

/// Ends every session and gives up every pack that is being written.
pub(super) fn end_all(tx: &Connection, now: u64) -> Result<u64> {
    let ended: Vec<i64> = tx
        .prepare_cached("DELETE FROM pushes WHERE committed IS NULL RETURNING number")
        .and_then(|mut s| s.query_map([], |r| r.get(0))?.collect())
        .map_err(sql)?;
    for session in &ended {
        self::ended(tx, *session, now)?;
    }
    tx.prepare_cached("UPDATE packs SET keep_until = ?1 WHERE state = 'writing' AND keep_until > ?1")
        .and_then(|mut s| s.execute([int(now)]))
        .map_err(sql)?;
    Ok(ended.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::super::connection::Database;
    use super::*;

    #[tokio::test]
    async fn a_database_of_the_first_version_keeps_its_leases_and_sessions() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("metadata.sqlite");
        let old = Connection::open(&path).expect("a file");
        old.execute_batch(include_str!("../../../migrations/sqlite/0001_init.sql")).expect("the first version");
        old.execute_batch(
            "PRAGMA user_version = 1;
             INSERT INTO repositories (id, domain, name) VALUES (1, 1, 'a');
             INSERT INTO pushes (id, repository, expires) VALUES ('later', 1, 200), ('sooner', 1, 100);
             INSERT INTO packs (id, key, state, keep_until) VALUES (1, 'p', 'live', 0);
             INSERT INTO objects (id, domain, digest, size, kind, keep_until, pack, offset, frame_len, codec) VALUES (7, 1, x'00', 1, 0, 150, 1, 8, 1, 0);
             INSERT INTO suspects (due, pack) VALUES (150, 1);
             INSERT INTO suspects (due, object) VALUES (150, 7);",
        )
        .expect("rows");
        drop(old);
        let database = Database::open(Some(path), None).await.expect("the new version");
        let (open, lease, released) = database
            .read(|tx| {
                let released: Vec<bool> = tx
                    .prepare("SELECT released FROM suspects ORDER BY id")
                    .and_then(|mut s| s.query_map([], |r| r.get(0))?.collect())
                    .map_err(sql)?;
                Ok((unfinished(tx, 90, 10)?, of(tx, &[7], 90)?, released))
            })
            .await
            .expect("reads");
        assert_eq!(open.iter().map(|session| (session.session, session.until)).collect::<Vec<_>>(), [(1, 100), (2, 200)]);
        assert_eq!(lease, [(7, Lease { until: 150, session: None })]);
        assert_eq!(released, [false, true]);
    }
}
