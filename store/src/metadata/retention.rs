//! The retention policies of a domain: one document, read by the transactions that they bind.

use super::sql::values;
use super::tx::{Fail, Outcome, Tx};
use super::{AuditEntry, Retention, audit_log};
use crate::error::Error;
use pfr_schema::api::RetentionPolicies;
use pfr_schema::{RepositoryName, Tag};

pub(super) async fn retention<T: Tx>(tx: &mut T) -> Outcome<Retention> {
    let now = tx.now().await?;
    let (version, policies) = policies(tx).await?;
    Ok(Retention { version, policies, now })
}

async fn policies<T: Tx>(tx: &mut T) -> Outcome<(u64, RetentionPolicies)> {
    let row: Option<(u64, String)> = tx.first("SELECT version, document FROM retention WHERE id = 1", &[]).await?;
    let Some((version, document)) = row else { return Ok((0, RetentionPolicies::default())) };
    let policies = serde_json::from_str(&document).map_err(|e| Fail::internal(format!("the retention policies cannot be read: {e}")))?;
    Ok((version, policies))
}

pub(super) async fn set<T: Tx>(tx: &mut T, policies: &RetentionPolicies, audit: Option<&AuditEntry>) -> Outcome<()> {
    let document = serde_json::to_string(policies).map_err(|e| Fail::internal(e.to_string()))?;
    let set = "INSERT INTO retention (id, version, document) VALUES (1, 1, $1)
               ON CONFLICT (id) DO UPDATE SET version = retention.version + 1, document = excluded.document";
    tx.execute(set, values![document]).await?;
    audit_log::note(tx, audit, true, |_| ()).await
}

/// Whether the policies are those of this version, and stay so until the transaction ends: setting
/// others waits for it. To be asked first, since it locks.
pub(super) async fn is_current<T: Tx>(tx: &mut T, version: u64) -> Outcome<bool> {
    let found: Option<u64> = tx.first("SELECT version FROM retention WHERE id = 1 FOR UPDATE", &[]).await?;
    Ok(found.unwrap_or(0) == version)
}

/// Refuses to move or delete tags of which one is immutable.
pub(super) async fn must_be_mutable<T: Tx>(tx: &mut T, repository: &RepositoryName, tags: &[&Tag]) -> Outcome<()> {
    if tags.is_empty() {
        return Ok(());
    }
    let (_, policies) = policies(tx).await?;
    match tags.iter().find(|tag| policies.is_immutable(repository, tag)) {
        Some(tag) => Err(Error::TagImmutable { repository: repository.clone(), tag: (*tag).clone() }.into()),
        None => Ok(()),
    }
}
