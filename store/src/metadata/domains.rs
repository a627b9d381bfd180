//! The catalogue of domains, in the tables of the default domain.

use super::arguments::{cursor, one_more, paged};
use super::sessions::millis;
use super::sql::values;
use super::tx::{Fail, Outcome, Tx};
use super::{AuditEntry, DomainRow, DomainStep, Page, audit_log};
use crate::error::Error;
use pfr_schema::api::AuditRecord;
use pfr_schema::{AccessTokenId, DomainName};
use std::time::Duration;

type Row = (DomainName, u64, Option<u64>, bool);

fn row((name, created_at, deleting_since, encrypted): Row) -> DomainRow {
    DomainRow { name, created_at, deleting_since, encrypted }
}

pub(super) async fn domain(tx: &mut dyn Tx, name: &DomainName) -> Outcome<Option<DomainRow>> {
    let find = "SELECT name, created_at, deleting_since, (SELECT count(*) FROM domain_keys WHERE domain = name)
                FROM domains WHERE name = $1";
    Ok(tx.first(find, values![name]).await?.map(row))
}

pub(super) async fn domains(tx: &mut dyn Tx, after: Option<&str>, limit: usize) -> Outcome<Page<DomainRow>> {
    let find = "SELECT name, created_at, deleting_since, (SELECT count(*) FROM domain_keys WHERE domain = name)
                FROM domains WHERE name > $1 ORDER BY name LIMIT $2";
    let rows: Vec<Row> = tx.query(find, values![cursor(after, "")?, one_more(limit)]).await?;
    Ok(paged(rows.into_iter().map(row).collect(), limit, |row| row.name.to_string()))
}

pub(super) async fn create_domain(
    tx: &mut dyn Tx,
    name: &DomainName,
    key: Option<&str>,
    audit: Option<&AuditEntry>,
) -> Outcome<(DomainRow, bool)> {
    let now = tx.now().await?;
    let insert = "INSERT INTO domains (name, created_at) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING";
    let is_new = tx.execute(insert, values![name, now]).await? > 0;
    if let Some(key) = key.filter(|_| is_new) {
        tx.execute("INSERT INTO domain_keys (domain, wrapped) VALUES ($1, $2)", values![name, key]).await?;
    }
    match domain(tx, name).await? {
        Some(row) if row.deleting_since.is_none() => {
            audit_log::note(tx, audit, is_new, |record| record.subject = Some(name.to_string())).await?;
            Ok((row, is_new))
        }
        Some(_) => Err(Error::DomainBusy(name.clone()).into()),
        None => Err(Fail::Again),
    }
}

pub(super) async fn delete_domain(tx: &mut dyn Tx, name: &DomainName, is_left: bool, audit: Option<&AuditEntry>) -> Outcome<DomainRow> {
    let now = tx.now().await?;
    if is_left {
        // Never live, not even for a moment: nothing says whether it was encrypted.
        let insert = "INSERT INTO domains (name, created_at, deleting_since) VALUES ($1, $2, $2) ON CONFLICT (name) DO NOTHING";
        tx.execute(insert, values![name, now]).await?;
    }
    // Waits for a process that makes the tables right now: it has locked the row.
    tx.execute("UPDATE domains SET deleting_since = $2 WHERE name = $1 AND deleting_since IS NULL", values![name, now]).await?;
    // Nothing can read its bytes any more, wherever copies of them are.
    tx.execute("DELETE FROM domain_keys WHERE domain = $1", values![name]).await?;
    // A new domain of this name must not open to the tokens of this one. Each has its record, as if
    // it had been revoked alone.
    let revoke = "UPDATE access_tokens SET revoked_at = $2 WHERE domain = $1 AND revoked_at IS NULL RETURNING id";
    let mut revoked: Vec<AccessTokenId> = tx.returning(revoke, values![name, now]).await?;
    revoked.sort_unstable();
    let row = domain(tx, name).await?.ok_or_else(|| Error::DomainUnknown(name.clone()))?;
    for id in &revoked {
        let about = |record: &mut AuditRecord| {
            record.operation = "revoke_token".to_owned();
            record.subject = Some(id.to_string());
        };
        audit_log::note(tx, audit, true, about).await?;
    }
    audit_log::note(tx, audit, true, |record| record.subject = Some(name.to_string())).await?;
    Ok(row)
}

pub(super) async fn deleted_domains(tx: &mut dyn Tx, grace: Duration) -> Outcome<Vec<(DomainName, DomainStep)>> {
    let overdue = tx.now().await?.saturating_sub(millis(grace));
    let find = "SELECT name, emptied_at, swept_at FROM domains WHERE deleting_since IS NOT NULL ORDER BY name";
    let rows: Vec<(DomainName, Option<u64>, Option<u64>)> = tx.query(find, &[]).await?;
    let step = |emptied: Option<u64>, swept: Option<u64>| match (emptied, swept) {
        (_, Some(at)) if at <= overdue => DomainStep::Forget,
        (_, Some(_)) => DomainStep::Wait,
        (Some(at), None) if at <= overdue => DomainStep::EmptyLast,
        (_, None) => DomainStep::Empty,
    };
    Ok(rows.into_iter().map(|(name, emptied, swept)| (name, step(emptied, swept))).collect())
}

pub(super) async fn may_empty_domain(tx: &mut dyn Tx, name: &DomainName) -> Outcome<bool> {
    let find = "SELECT 1 FROM domains WHERE name = $1 AND deleting_since IS NOT NULL AND swept_at IS NULL";
    Ok(tx.first::<i64>(find, values![name]).await?.is_some())
}

pub(super) async fn domain_emptied(tx: &mut dyn Tx, name: &DomainName, is_last: bool) -> Outcome<()> {
    let now = tx.now().await?;
    let note = match is_last {
        false => "UPDATE domains SET emptied_at = $2 WHERE name = $1 AND deleting_since IS NOT NULL AND emptied_at IS NULL",
        true => "UPDATE domains SET swept_at = $2 WHERE name = $1 AND emptied_at IS NOT NULL AND swept_at IS NULL",
    };
    tx.execute(note, values![name, now]).await.map(drop)
}

pub(super) async fn forget_domain(tx: &mut dyn Tx, name: &DomainName) -> Outcome<()> {
    tx.execute("DELETE FROM domains WHERE name = $1 AND swept_at IS NOT NULL", values![name]).await.map(drop)
}

pub(super) async fn key(tx: &mut dyn Tx, name: &DomainName) -> Outcome<Option<String>> {
    tx.first("SELECT wrapped FROM domain_keys WHERE domain = $1", values![name]).await
}

pub(super) async fn enter_key(tx: &mut dyn Tx, name: &DomainName, wrapped: &str) -> Outcome<String> {
    let insert = "INSERT INTO domain_keys (domain, wrapped) VALUES ($1, $2) ON CONFLICT (domain) DO NOTHING";
    tx.execute(insert, values![name, wrapped]).await?;
    key(tx, name).await?.ok_or(Fail::Again)
}

pub(super) async fn rewrap_key(tx: &mut dyn Tx, name: &DomainName, (from, to): (&str, &str), audit: Option<&AuditEntry>) -> Outcome<bool> {
    let update = "UPDATE domain_keys SET wrapped = $3 WHERE domain = $1 AND wrapped = $2";
    let done = tx.execute(update, values![name, from, to]).await? > 0;
    if done {
        audit_log::note(tx, audit, true, |record| record.subject = Some(name.to_string())).await?;
    }
    Ok(done)
}
