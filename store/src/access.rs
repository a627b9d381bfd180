//! Access tokens: making, finding and revoking them.
//!
//! They are kept beside the catalogue of domains. The secret of a token is shown once, when the
//! token is made: only the hash of the secret is stored. Packs and journal hold nothing of tokens,
//! so a rebuilt database has none.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{AccessTokenRow, Page};
use pfr_schema::{AccessScope, AccessToken, AccessTokenId, DomainName};
use std::time::Duration;
use subtle::ConstantTimeEq as _;

/// How long a token is listed after it expired or was revoked.
const KEPT: Duration = Duration::from_secs(90 * 86_400);
/// How exact the time of the last use is.
const USE_RESOLUTION: Duration = Duration::from_secs(60);
/// The greatest number of characters in a label.
const LABEL: usize = 100;
/// How many ids are tried for a new token. An id is a time in milliseconds and 16 random bits, so
/// another token of the same millisecond may have it.
const TRIES: usize = 8;

/// A token to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewAccessToken {
    /// A description for people, 1 to 100 characters.
    pub label: String,
    /// The only domain that the token is for. `None`: every domain.
    pub domain: Option<DomainName>,
    /// What the token permits.
    pub scopes: Vec<AccessScope>,
    /// When the token expires, in milliseconds since 1970. `None`: never.
    pub expires_at: Option<u64>,
}

/// The access tokens of a registry. Cheap to clone: clones share the store.
#[derive(Clone, Debug)]
pub struct AccessTokens {
    /// The store of the default domain.
    store: Store,
}

impl AccessTokens {
    pub(crate) fn new(store: Store) -> Self {
        Self { store }
    }

    /// Makes a token. It is durable when this returns. Only the returned [`AccessToken`] has its
    /// secret.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the label or the number of scopes is out of bounds, or if the token
    /// would expire in the past or after the year 9999. [`Error::DomainUnknown`] if the domain does
    /// not exist or is being deleted.
    #[boxed]
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
            return Err(Error::Invalid(
                "a token expires in the year 9999 at the latest; leave the time out for a token that never expires".into(),
            ));
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
    /// [`Error::Invalid`] if `after` is not a cursor that an earlier page gave.
    #[boxed]
    pub async fn list(&self, after: Option<String>, limit: usize) -> Result<Page<AccessTokenRow>> {
        self.store.metadata.access_tokens(after, limit).await
    }

    /// Revokes a token. Revoking it again changes nothing.
    ///
    /// # Errors
    /// [`Error::TokenUnknown`] if no token has this id.
    #[boxed]
    pub async fn revoke(&self, id: &AccessTokenId) -> Result<AccessTokenRow> {
        self.store.metadata.revoke_access_token(id.clone(), self.store.audit_entry()).await
    }

    /// The row of this token, if the token is known and its secret is right. The token may have
    /// expired or have been revoked.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the database cannot be asked.
    #[boxed]
    pub async fn find(&self, token: &AccessToken) -> Result<Option<AccessTokenRow>> {
        let row = self.store.metadata.access_token(token.id()).await?;
        Ok(row.filter(|row| bool::from(row.hash.as_bytes().ct_eq(token.hash().as_bytes()))))
    }

    /// Notes that a token is used now. At most one note a minute is written.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the database cannot be asked.
    #[boxed]
    pub async fn note_use(&self, row: &AccessTokenRow) -> Result<()> {
        let now = self.store.options.clock.now();
        if row.used_at.is_some_and(|used| now < used.saturating_add(USE_RESOLUTION.as_millis() as u64)) {
            return Ok(());
        }
        self.store.metadata.access_token_used(row.id.clone(), USE_RESOLUTION).await
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
