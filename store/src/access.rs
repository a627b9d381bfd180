//! Access tokens: making, finding and revoking them.
//!
//! They are kept beside the catalogue of domains. The secret is shown once, when a token is made:
//! only its hash is stored, and neither packs nor journal have it, so a rebuilt database has no
//! tokens.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{AccessTokenRow, Page};
use pfr_schema::{AccessScope, AccessToken, AccessTokenId, DomainName};
use std::time::Duration;
use subtle::ConstantTimeEq as _;

/// How long a token that is not valid any more is listed.
const KEPT: Duration = Duration::from_secs(90 * 86_400);
/// How exact the time of the last use is.
const COARSE: Duration = Duration::from_secs(60);
/// Most characters of a label.
const LABEL: usize = 100;
/// Ids that may be taken before making a token fails: each has 16 random bits for its millisecond.
const TRIES: usize = 8;

/// A token to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewAccessToken {
    /// For people, 1 to 100 characters.
    pub label: String,
    /// The only domain that it is for; none for every domain.
    pub domain: Option<DomainName>,
    /// What it permits.
    pub scopes: Vec<AccessScope>,
    /// When it stops to be valid, in milliseconds since 1970.
    pub expires_at: Option<u64>,
}

/// The access tokens of a registry. Cheap to clone; clones are one.
#[derive(Clone, Debug)]
pub struct AccessTokens {
    /// The default domain's.
    store: Store,
}

impl AccessTokens {
    pub(crate) fn new(store: Store) -> Self {
        Self { store }
    }

    /// Makes a token. It is durable when this returns, and its secret is nowhere but in the answer.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a label, a number of scopes or a time that cannot be.
    /// [`Error::DomainUnknown`].
    pub async fn create(&self, new: NewAccessToken) -> Result<(AccessToken, AccessTokenRow)> {
        let NewAccessToken { label, domain, scopes, expires_at } = new;
        let label = label.trim().to_owned();
        if !(1..=LABEL).contains(&label.chars().count()) || label.chars().any(char::is_control) {
            return Err(Error::Invalid(format!("the label of a token has 1 to {LABEL} characters, on one line")));
        }
        if !(1..=AccessScope::MOST).contains(&scopes.len()) {
            return Err(Error::Invalid(format!("a token has 1 to {} scopes, found {}", AccessScope::MOST, scopes.len())));
        }
        if expires_at.is_some_and(|end| end > AccessToken::LATEST_END) {
            return Err(Error::Invalid("a token expires in the year 9999 at the latest; leave the time out for one that does not".into()));
        }
        for _ in 0..TRIES {
            let token = self.random()?;
            let (id, hash) = (token.id(), token.hash());
            let (label, domain, scopes) = (label.clone(), domain.clone(), scopes.clone());
            let row = AccessTokenRow { id, hash, label, domain, scopes, created_at: 0, expires_at, used_at: None, revoked_at: None };
            if let Some(row) = self.store.metadata.create_access_token(row, KEPT, self.store.audit_entry()).await? {
                return Ok((token, row));
            }
        }
        Err(Error::Internal(format!("{TRIES} token ids in a row were taken")))
    }

    /// Tokens in the order in which they were made, without those that have been invalid for 90
    /// days.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a cursor that is none.
    pub async fn list(&self, after: Option<String>, limit: usize) -> Result<Page<AccessTokenRow>> {
        self.store.metadata.access_tokens(after, limit).await
    }

    /// Revokes a token; once more changes nothing.
    ///
    /// # Errors
    /// [`Error::TokenUnknown`].
    pub async fn revoke(&self, id: &AccessTokenId) -> Result<AccessTokenRow> {
        self.store.metadata.revoke_access_token(id.clone(), self.store.audit_entry()).await
    }

    /// The row of this token, if there is one and the secret is right. It may be invalid by now.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the database cannot be asked.
    pub async fn find(&self, token: &AccessToken) -> Result<Option<AccessTokenRow>> {
        let row = self.store.metadata.access_token(token.id()).await?;
        Ok(row.filter(|row| bool::from(row.hash.as_bytes().ct_eq(token.hash().as_bytes()))))
    }

    /// Notes that a token is used now. At most one note a minute is written.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the database cannot be asked.
    pub async fn note_use(&self, row: &AccessTokenRow) -> Result<()> {
        let now = self.store.options.clock.now();
        if row.used_at.is_some_and(|used| now < used.saturating_add(COARSE.as_millis() as u64)) {
            return Ok(());
        }
        self.store.metadata.access_token_used(row.id.clone(), COARSE).await
    }

    /// A new token. Its id begins with the time, so that later tokens are listed later.
    fn random(&self) -> Result<AccessToken> {
        let (mut id, mut secret) = ([0; 8], [0; 32]);
        let no_randomness = |error: getrandom::Error| Error::Internal(format!("the system gives no random bytes: {error}"));
        getrandom::fill(&mut id).map_err(no_randomness)?;
        getrandom::fill(&mut secret).map_err(no_randomness)?;
        id[..6].copy_from_slice(&self.store.options.clock.now().to_be_bytes()[2..]);
        Ok(AccessToken::new(id, secret))
    }
}
