//! Transactions on access tokens, which are in the tables of the default domain. Two more tell the
//! registry whether a caller may learn of a digest: the repositories that have a snapshot, and
//! whether a push session leases a blob.

use super::arguments::{cursor, one_more, paged};
use super::sessions::millis;
use super::sql::values;
use super::tx::{Outcome, Tx};
use super::{AccessTokenRow, AuditEntry, Page, PushId, audit_log, domains};
use crate::error::Error;
use pfr_schema::api::{AuditRecord, AuditToken};
use pfr_schema::{AccessScope, AccessTokenId, Digest, DomainName, RepositoryName};
use std::time::Duration;

type Row = (AccessTokenId, Digest, String, Option<DomainName>, Vec<AccessScope>, u64, Option<u64>, Option<u64>, Option<u64>);

macro_rules! select {
    ($rest:literal) => {
        concat!("SELECT id, hash, label, domain, scopes, created_at, expires_at, used_at, revoked_at FROM access_tokens ", $rest)
    };
}

fn row((id, hash, label, domain, scopes, created_at, expires_at, used_at, revoked_at): Row) -> AccessTokenRow {
    AccessTokenRow { id, hash, label, domain, scopes, created_at, expires_at, used_at, revoked_at }
}

pub(super) async fn token(tx: &mut dyn Tx, id: &AccessTokenId) -> Outcome<Option<AccessTokenRow>> {
    Ok(tx.first(select!("WHERE id = $1"), values![id]).await?.map(row))
}

pub(super) async fn tokens(tx: &mut dyn Tx, after: Option<&str>, limit: usize) -> Outcome<Page<AccessTokenRow>> {
    let find = select!("WHERE id > $1 ORDER BY id LIMIT $2");
    let rows: Vec<Row> = tx.query(find, values![cursor(after, "")?, one_more(limit)]).await?;
    Ok(paged(rows.into_iter().map(row).collect(), limit, |row| row.id.to_string()))
}

pub(super) async fn create(
    tx: &mut dyn Tx,
    token: &AccessTokenRow,
    kept: Duration,
    audit: Option<&AuditEntry>,
) -> Outcome<Option<AccessTokenRow>> {
    let now = tx.now().await?;
    if token.expires_at.is_some_and(|end| end <= now) {
        return Err(Error::Invalid("the token would have expired already: give a time in the future".into()).into());
    }
    if let Some(name) = token.domain.as_ref().filter(|name| !name.is_default())
        && domains::domain(tx, name).await?.is_none_or(|domain| domain.deleting_since.is_some())
    {
        return Err(Error::DomainUnknown(name.clone()).into());
    }
    let old = now.saturating_sub(millis(kept));
    tx.execute("DELETE FROM access_tokens WHERE revoked_at < $1 OR expires_at < $1", values![old]).await?;
    let scopes: Vec<String> = token.scopes.iter().map(ToString::to_string).collect();
    let insert = "INSERT INTO access_tokens (id, hash, label, domain, scopes, created_at, expires_at)
                  VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (id) DO NOTHING";
    let AccessTokenRow { id, hash, label, domain, expires_at, .. } = token;
    let values = values![id, hash, label, domain.as_ref(), scopes.join(" "), now, *expires_at];
    let is_new = tx.execute(insert, values).await? > 0;
    let about = |record: &mut AuditRecord| {
        record.subject = Some(id.to_string());
        let (label, domain, scopes) = (label.clone(), domain.clone(), token.scopes.clone());
        record.new_token = Some(AuditToken { label, domain, scopes, expires_at: *expires_at });
    };
    audit_log::note(tx, audit.filter(|_| is_new), true, about).await?;
    Ok(is_new.then(|| AccessTokenRow { created_at: now, used_at: None, revoked_at: None, ..token.clone() }))
}

pub(super) async fn revoke(tx: &mut dyn Tx, id: &AccessTokenId, audit: Option<&AuditEntry>) -> Outcome<AccessTokenRow> {
    let now = tx.now().await?;
    tx.execute("UPDATE access_tokens SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL", values![id, now]).await?;
    let row = token(tx, id).await?.ok_or_else(|| Error::TokenUnknown(id.clone()))?;
    audit_log::note(tx, audit, true, |record| record.subject = Some(id.to_string())).await?;
    Ok(row)
}

pub(super) async fn used(tx: &mut dyn Tx, id: &AccessTokenId, resolution: Duration) -> Outcome<()> {
    let now = tx.now().await?;
    let note = "UPDATE access_tokens SET used_at = $2 WHERE id = $1 AND (used_at IS NULL OR used_at <= $3)";
    tx.execute(note, values![id, now, now.saturating_sub(millis(resolution))]).await.map(drop)
}

pub(super) async fn places(tx: &mut dyn Tx, digests: &[Digest]) -> Outcome<Vec<(Digest, RepositoryName)>> {
    let find = "SELECT o.digest, r.name FROM objects o JOIN manifests m ON m.object = o.id JOIN repositories r ON r.id = m.repository
                WHERE o.digest = ANY($1)";
    tx.query(find, values![digests]).await
}

pub(super) async fn has_leased(tx: &mut dyn Tx, push: &PushId, digest: &Digest) -> Outcome<bool> {
    // `leases.rs` says how `lessee` names one session or several.
    let find = "SELECT 1 FROM pushes s JOIN objects o ON o.lessee = s.number OR o.lessee <= -s.number WHERE s.id = $1 AND o.digest = $2";
    Ok(tx.first::<i64>(find, values![&push.0, digest]).await?.is_some())
}
