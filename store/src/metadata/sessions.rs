//! Push sessions: opened, renewed, ended.

use super::arguments::{at_most, can_be_kept};
use super::sql::{Sql, values};
use super::tx::{Backend, Fail, Mode, Outcome, Tx};
use super::{Ended, PushId, Session, Unfinished, leases};
use crate::error::{Error, Result};
use pfr_schema::RepositoryName;
use std::time::Duration;

/// A lease in milliseconds.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The row of a repository, made if it is new.
pub(super) async fn make_repository(tx: &mut dyn Tx, repository: &RepositoryName) -> Outcome<i64> {
    let find = "SELECT id FROM repositories WHERE name = $1";
    if let Some(id) = tx.first(find, values![repository]).await? {
        return Ok(id);
    }
    let insert = "INSERT INTO repositories (name) VALUES ($1) ON CONFLICT (name) DO NOTHING";
    tx.execute(insert, values![repository]).await?;
    tx.first(find, values![repository]).await?.ok_or(Fail::Again)
}

pub(super) async fn open_push(tx: &mut dyn Tx, push: &PushId, repository: &RepositoryName, lease: Duration) -> Outcome<()> {
    // Sessions become visible in the order of their numbers: a session that asks about leases sees
    // every older one.
    const ONE_AFTER_THE_OTHER: Sql =
        Sql::only_postgres("SELECT 1 FROM pg_advisory_xact_lock(hashtextextended('sessions ' || current_schema()::text, 0))");
    let expires = tx.now().await?.saturating_add(millis(lease));
    let id = make_repository(tx, repository).await?;
    tx.query::<i64>(ONE_AFTER_THE_OTHER, &[]).await?;
    tx.execute("INSERT INTO pushes (id, repository, expires) VALUES ($1, $2, $3)", values![&push.0, id, expires]).await?;
    Ok(())
}

/// A session that is neither ended nor expired.
pub(super) struct LivePush {
    pub number: i64,
    pub repository: i64,
    pub name: RepositoryName,
    expires: u64,
    /// When this was true.
    pub now: u64,
}

impl LivePush {
    /// Whether less than half of the lease is left. A renewal in each request would cost more than
    /// the request.
    pub(super) fn needs_renewal(&self, lease: Duration) -> bool {
        self.expires < self.now.saturating_add(millis(lease) / 2)
    }
}

pub(super) async fn live_push(tx: &mut dyn Tx, push: &PushId) -> Outcome<LivePush> {
    let now = tx.now().await?;
    let unknown = || Error::PushUnknown(push.0.clone());
    if !can_be_kept(&push.0) {
        return Err(unknown().into());
    }
    let find = "SELECT p.number, r.id, r.name, p.expires FROM pushes p JOIN repositories r ON r.id = p.repository
                WHERE p.id = $1 AND p.expires >= $2 AND p.committed IS NULL";
    let row: Option<(i64, i64, RepositoryName, u64)> = tx.first(find, values![&push.0, now]).await?;
    let (number, repository, name, expires) = row.ok_or_else(unknown)?;
    Ok(LivePush { number, repository, name, expires, now })
}

/// Renews the lease of a session that lives at `now`.
pub(super) async fn extend_push(tx: &mut dyn Tx, push: &PushId, lease: Duration, now: u64) -> Outcome<()> {
    let update = "UPDATE pushes SET expires = GREATEST(expires, $1) WHERE id = $2 AND expires >= $3 AND committed IS NULL";
    let updated = tx.execute(update, values![now.saturating_add(millis(lease)), &push.0, now]).await?;
    if updated == 0 { Err(Error::PushUnknown(push.0.clone()).into()) } else { Ok(()) }
}

/// Renews the lease of a session that was found, if it is time for that.
pub(super) async fn renew_if_needed(backend: &dyn Backend, push: PushId, live: &LivePush, lease: Duration) -> Result<()> {
    if !live.needs_renewal(lease) {
        return Ok(());
    }
    let job = (push, lease, live.now);
    backend.run(Mode::STATEMENT.named("extend_push"), job, |tx, (push, lease, now)| Box::pin(extend_push(tx, push, *lease, *now))).await
}

pub(super) async fn renew_push(backend: &dyn Backend, push: PushId, lease: Duration) -> Result<RepositoryName> {
    let live = backend.run(Mode::READ.named("renew_push"), push.clone(), |tx, push| Box::pin(live_push(tx, push))).await?;
    renew_if_needed(backend, push, &live, lease).await?;
    Ok(live.name)
}

pub(super) async fn close_push(tx: &mut dyn Tx, push: &PushId) -> Outcome<()> {
    if !can_be_kept(&push.0) {
        return Ok(());
    }
    let numbers: Vec<i64> = tx.returning("DELETE FROM pushes WHERE id = $1 RETURNING number", values![&push.0]).await?;
    leases::ended(tx, &numbers).await
}

/// A session whose lease has not run out, open or ended.
pub(super) async fn find_session(tx: &mut dyn Tx, session: &PushId) -> Outcome<Option<Session>> {
    let now = tx.now().await?;
    if !can_be_kept(&session.0) {
        return Ok(None);
    }
    let find = "SELECT r.name, p.committed FROM pushes p JOIN repositories r ON r.id = p.repository WHERE p.id = $1 AND p.expires >= $2";
    let row: Option<(RepositoryName, Option<Vec<u8>>)> = tx.first(find, values![&session.0, now]).await?;
    Ok(row.map(|(repository, ended)| Session { repository, ended: ended.as_deref().and_then(Ended::from_column) }))
}

pub(super) async fn session(tx: &mut dyn Tx, session: &PushId) -> Outcome<Session> {
    find_session(tx, session).await?.ok_or_else(|| Error::PushUnknown(session.0.clone()).into())
}

/// Sessions that live, oldest first.
pub(super) async fn unfinished(tx: &mut dyn Tx, limit: usize) -> Outcome<Vec<Unfinished>> {
    let now = tx.now().await?;
    let find = "SELECT p.number, r.name, p.expires FROM pushes p JOIN repositories r ON r.id = p.repository
                WHERE p.committed IS NULL AND p.expires >= $1 ORDER BY p.number LIMIT $2";
    let rows: Vec<(i64, RepositoryName, u64)> = tx.query(find, values![now, at_most(limit)]).await?;
    Ok(rows.into_iter().map(|(session, repository, until)| Unfinished { session, repository, until }).collect())
}

/// Ends every session and gives up every pack that is being written.
pub(super) async fn end_all(tx: &mut dyn Tx) -> Outcome<u64> {
    let now = tx.now().await?;
    let give_up = "UPDATE packs SET keep_until = $1 WHERE id = ANY(ARRAY(
                     SELECT id FROM packs WHERE state = 'writing' AND keep_until > $1 ORDER BY id FOR UPDATE)) AND state = 'writing'";
    tx.execute(give_up, values![now]).await?;
    let delete =
        "DELETE FROM pushes WHERE id = ANY(ARRAY(SELECT id FROM pushes WHERE committed IS NULL ORDER BY id FOR UPDATE)) RETURNING number";
    let sessions: Vec<i64> = tx.returning(delete, &[]).await?;
    leases::ended(tx, &sessions).await?;
    Ok(sessions.len() as u64)
}

/// Ends every session whose id says that it is for a capture ([`PushId::of_capture`]).
pub(super) async fn end_captures(tx: &mut dyn Tx) -> Outcome<u64> {
    let delete = "DELETE FROM pushes WHERE id = ANY(ARRAY(
                    SELECT id FROM pushes WHERE committed IS NULL AND id LIKE 'capture-%' ORDER BY id FOR UPDATE)) RETURNING number";
    let sessions: Vec<i64> = tx.returning(delete, &[]).await?;
    leases::ended(tx, &sessions).await?;
    Ok(sessions.len() as u64)
}

/// Sessions that [`forget_expired`] forgets.
pub(super) async fn expired(tx: &mut dyn Tx) -> Outcome<u64> {
    let now = tx.now().await?;
    tx.one("SELECT count(*) FROM pushes WHERE expires < $1", values![now]).await
}

/// Forgets sessions that expired. A transaction of its own: a push that ends renews its session
/// while it holds objects, so a transaction that holds a session must not wait for objects.
pub(super) async fn forget_expired(tx: &mut dyn Tx) -> Outcome<u64> {
    let now = tx.now().await?;
    let expired =
        "DELETE FROM pushes WHERE id = ANY(ARRAY(SELECT id FROM pushes WHERE expires < $1 FOR UPDATE SKIP LOCKED)) AND expires < $1";
    tx.execute(expired, values![now]).await
}
