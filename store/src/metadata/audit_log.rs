//! The audit log: records in the transactions that they are about, lists, and what is kept.

use super::arguments::{at_most, can_be_kept, numbered, one_more, paged};
use super::sessions::millis;
use super::sql::{Sql, values};
use super::tx::{Fail, Outcome, Tx};
use super::{AuditEntry, AuditFilter, NameChange, Page};
use pfr_schema::api::AuditRecord;
use pfr_schema::{Digest, RepositoryName, Tag};
use std::time::Duration;

/// Writes the record of a change, if it is to have one: in the transaction of the change, and as
/// its last statement. A reader that wants no gaps waits for all transactions that have written a
/// record, and others wait behind it.
pub(super) async fn note(tx: &mut dyn Tx, entry: Option<&AuditEntry>, is_new: bool, about: impl FnOnce(&mut AuditRecord)) -> Outcome<()> {
    let Some(entry) = entry else { return Ok(()) };
    let mut record = entry.record.clone();
    if !is_new {
        record.status = entry.status_if_there.or(record.status);
    }
    about(&mut record);
    insert(tx, &record, entry.of_registry).await
}

pub(super) async fn add(tx: &mut dyn Tx, entry: &AuditEntry) -> Outcome<()> {
    insert(tx, &entry.record, entry.of_registry).await
}

async fn insert(tx: &mut dyn Tx, record: &AuditRecord, of_registry: bool) -> Outcome<()> {
    let now = tx.now().await?;
    let text = serde_json::to_string(record).map_err(|e| Fail::internal(e.to_string()))?;
    let insert = "INSERT INTO audit_log (noted_at, token, repository, of_registry, record) VALUES ($1, $2, $3, $4, $5)";
    let token = record.token.as_deref().filter(|token| can_be_kept(token));
    let repository = record.repository.as_ref().map(RepositoryName::as_str);
    tx.execute(insert, values![now, token, repository, of_registry, text]).await.map(drop)
}

/// Says in a record which tags and which snapshot a commit or another change is about.
pub(super) fn about_names(record: &mut AuditRecord, repository: &RepositoryName, digest: Option<Digest>, tags: &[&Tag]) {
    record.repository = Some(repository.clone());
    record.digest = digest;
    record.tag = tags.first().map(|tag| (*tag).clone());
    record.tags = Some(tags.len() as u64).filter(|tags| *tags > 1);
}

/// The same for a change that is no commit.
pub(super) fn about_change(record: &mut AuditRecord, repository: &RepositoryName, change: &NameChange) {
    match change {
        NameChange::PutTags { snapshot, moves } => {
            let tags: Vec<&Tag> = moves.iter().map(|m| &m.tag).collect();
            about_names(record, repository, Some(*snapshot), &tags);
        }
        NameChange::DeleteTag { tag, .. } => about_names(record, repository, None, &[tag]),
        NameChange::DeleteSnapshot { snapshot, .. } => about_names(record, repository, Some(*snapshot), &[]),
    }
}

macro_rules! select {
    ($past:literal, $order:literal) => {
        [
            select!($past, $order, "($2 IS NULL OR repository = $2) AND ($3 IS NULL OR token = $3)"),
            select!($past, $order, "repository = $2 AND ($3 IS NULL OR token = $3)"),
            select!($past, $order, "token = $3 AND ($2 IS NULL OR repository = $2)"),
        ]
    };
    ($past:literal, $order:literal, $about:literal) => {
        concat!(
            "SELECT number, noted_at, record FROM audit_log WHERE ",
            $past,
            " AND ",
            $about,
            " AND noted_at >= $4 AND noted_at < $5 AND ($6 = true OR of_registry = false) ORDER BY ",
            $order,
            " LIMIT $7"
        )
    };
}

/// Lists of all records, of those of a repository, and of those of a token, each by its index.
type Lists = [&'static str; 3];

pub(super) async fn records(tx: &mut dyn Tx, filter: &AuditFilter, after: Option<&str>, limit: usize) -> Outcome<Page<AuditRecord>> {
    // PostgreSQL hands numbers out before they become visible: see `journal::settle`.
    const SETTLE: Sql = Sql::only_postgres("LOCK TABLE audit_log IN SHARE MODE");
    let (lists, first): (Lists, i64) = match filter.oldest_first {
        true => (select!("number > $1", "number"), 0),
        false => (select!("number < $1", "number DESC"), i64::MAX),
    };
    let find = match (&filter.repository, &filter.token) {
        (None, None) => lists[0],
        // Of both, a token has fewer records as a rule.
        (Some(_), None) => lists[1],
        (_, Some(_)) => lists[2],
    };
    if filter.oldest_first {
        tx.execute(SETTLE, &[]).await?;
    }
    let token = filter.token.as_deref();
    if token.is_some_and(|token| !can_be_kept(token)) {
        return Ok(Page { rows: Vec::new(), next: None });
    }
    let (since, until) = (filter.since.unwrap_or(0), filter.until.unwrap_or(u64::MAX));
    let repository = filter.repository.as_ref().map(RepositoryName::as_str);
    let values = values![numbered(after, first)?, repository, token, since, until, filter.with_registry, one_more(limit)];
    let rows: Vec<(u64, u64, String)> = tx.query(find, values).await?;
    let record = |(number, at, text): (u64, u64, String)| {
        let record: AuditRecord =
            serde_json::from_str(&text).map_err(|e| Fail::internal(format!("audit record {number} cannot be read: {e}")))?;
        Ok(AuditRecord { number, at, ..record })
    };
    Ok(paged(rows.into_iter().map(record).collect::<Outcome<_>>()?, limit, |record| record.number.to_string()))
}

/// The number of the newest record; 0 without any.
pub(super) async fn last(tx: &mut dyn Tx) -> Outcome<u64> {
    tx.one("SELECT COALESCE(MAX(number), 0) FROM audit_log", &[]).await
}

pub(super) async fn trim(tx: &mut dyn Tx, kept: Duration, rows: u64, limit: usize) -> Outcome<u64> {
    let old = tx.now().await?.saturating_sub(millis(kept));
    let by_time =
        "DELETE FROM audit_log WHERE number = ANY(ARRAY(SELECT number FROM audit_log WHERE noted_at < $1 ORDER BY noted_at LIMIT $2))";
    let trimmed = tx.execute(by_time, values![old, at_most(limit)]).await?;
    let last_to_go = last(tx).await?.saturating_sub(rows);
    let by_number =
        "DELETE FROM audit_log WHERE number = ANY(ARRAY(SELECT number FROM audit_log WHERE number <= $1 ORDER BY number LIMIT $2))";
    Ok(trimmed + tx.execute(by_number, values![last_to_go, at_most(limit)]).await?)
}
