//! Access tokens.

use pfr_schema::api::AccessTokenInfo;
use pfr_schema::{AccessScope, AccessTokenId, Digest, DomainName};

/// An access token as it is stored: without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessTokenRow {
    /// Its public part.
    pub id: AccessTokenId,
    /// SHA-256 of the token.
    pub hash: Digest,
    /// For people.
    pub label: String,
    /// The only domain that it is for; none for every domain.
    pub domain: Option<DomainName>,
    /// What it permits, at least one.
    pub scopes: Vec<AccessScope>,
    /// Milliseconds since 1970 of its creation.
    pub created_at: u64,
    /// When it stops to be valid.
    pub expires_at: Option<u64>,
    /// When it was last used, about.
    pub used_at: Option<u64>,
    /// When it was revoked.
    pub revoked_at: Option<u64>,
}

impl AccessTokenRow {
    /// Whether it is valid at this time.
    #[must_use]
    pub fn is_valid(&self, now: u64) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|end| now < end)
    }
}

impl From<AccessTokenRow> for AccessTokenInfo {
    fn from(row: AccessTokenRow) -> Self {
        let AccessTokenRow { id, hash: _, label, domain, scopes, created_at, expires_at, used_at, revoked_at } = row;
        Self { id, label, domain, scopes, created_at, expires_at, used_at, revoked_at }
    }
}
