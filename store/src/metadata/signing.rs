//! The signing policies of a domain: one document, read by the transactions that they bind.

use super::sql::values;
use super::tx::{Fail, Outcome, Tx};
use super::{AuditEntry, Signed, Signing, audit_log};
use crate::error::Error;
use pfr_schema::api::SigningPolicies;
use pfr_schema::signature::signed_by;
use pfr_schema::{Digest, RepositoryName, Tag};

pub(super) async fn signing(tx: &mut dyn Tx) -> Outcome<Signing> {
    let row: Option<(u64, String)> = tx.first("SELECT version, document FROM signing WHERE id = 1", &[]).await?;
    let Some((version, document)) = row else { return Ok(Signing::default()) };
    let policies = serde_json::from_str(&document).map_err(|e| Fail::internal(format!("the signing policies cannot be read: {e}")))?;
    Ok(Signing { version, policies })
}

pub(super) async fn set(tx: &mut dyn Tx, policies: &SigningPolicies, audit: Option<&AuditEntry>) -> Outcome<()> {
    let document = serde_json::to_string(policies).map_err(|e| Fail::internal(e.to_string()))?;
    let set = "INSERT INTO signing (id, version, document) VALUES (1, 1, $1)
               ON CONFLICT (id) DO UPDATE SET version = signing.version + 1, document = excluded.document";
    tx.execute(set, values![document]).await?;
    audit_log::note(tx, audit, true, |_| ()).await
}

/// Refuses to put tags of which one needs a signature that the manifest is not known to have. Each
/// comes with the manifest that it points at.
///
/// A tag of signatures needs none. But where a policy holds, whatever is there is replaced only by
/// what is known to lose no signature that counts: the right to push must not hide them.
pub(super) async fn must_be_signed(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    digest: &Digest,
    tags: &[(&Tag, Option<Digest>)],
    signed: Option<&Signed>,
) -> Outcome<()> {
    if tags.is_empty() {
        return Ok(());
    }
    let Signing { version, policies } = signing(tx).await?;
    // A result by other policies says nothing of these.
    let signed = signed.filter(|signed| signed.version == version);
    let satisfied = signed.map(|signed| &signed.policies[..]).unwrap_or_default();
    let replaced = signed.map(|signed| &signed.replaced[..]).unwrap_or_default();
    for (tag, found) in tags {
        let policy = match found.filter(|found| signed_by(tag).is_some() && !replaced.contains(found)) {
            Some(_) => policies.policies.iter().find(|policy| policy.repositories.matches(repository.as_str())),
            None => policies.of(repository, tag).find(|policy| !satisfied.contains(&policy.name)),
        };
        if let Some(policy) = policy {
            let (repository, tag, policy) = (repository.clone(), (*tag).clone(), policy.name.clone());
            return Err(Error::SignatureRequired { repository, tag, digest: *digest, policy }.into());
        }
    }
    Ok(())
}
