//! Access tokens.

use crate::access::{AccessScope, AccessTokenId};
use crate::name::DomainName;
use serde::{Deserialize, Serialize};

api! {
    /// A new access token.
    #[serde(deny_unknown_fields)]
    pub struct AccessTokenRequest {
        /// For people: who or what has it. 1 to 100 characters.
        #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 100, example = "build machine"))]
        pub label: String,
        /// The domain that it is for; without one, every domain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub domain: Option<DomainName>,
        /// What it permits.
        #[cfg_attr(feature = "openapi", schema(min_items = 1, max_items = 32))]
        pub scopes: Vec<AccessScope>,
        /// When it stops to be valid, in milliseconds since 1970, UTC; without it, never.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 253_402_300_799_999_u64))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<u64>,
    }

    /// An access token, without its secret. Times are milliseconds since 1970, UTC.
    pub struct AccessTokenInfo {
        /// Its public part.
        pub id: AccessTokenId,
        /// For people.
        pub label: String,
        /// The domain that it is for; absent: every domain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub domain: Option<DomainName>,
        /// What it permits.
        pub scopes: Vec<AccessScope>,
        /// When it was made.
        pub created_at: u64,
        /// When it stops to be valid, if it does.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<u64>,
        /// When it was last used, exact to a minute or two.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub used_at: Option<u64>,
        /// When it was revoked, if it was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub revoked_at: Option<u64>,
    }

    /// A token that was just made. The registry does not know its secret any more.
    pub struct AccessTokenCreated {
        /// The token. It is shown this once.
        pub token: String,
        /// What it is.
        pub info: AccessTokenInfo,
    }

    /// Access tokens in the order in which they were made.
    pub struct AccessTokenList {
        /// One page of them.
        pub tokens: Vec<AccessTokenInfo>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }
}
