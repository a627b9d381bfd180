//! The audit log.

use super::QuotaLimits;
use crate::access::AccessScope;
use crate::digest::Digest;
use crate::name::{DomainName, RepositoryName, Tag};
use serde::{Deserialize, Serialize};

api! {
    /// A request that changed something, or that was refused. It holds no secret.
    #[derive(Eq, Hash, Default)]
    pub struct AuditRecord {
        /// Its number in the log of its domain: later records have greater numbers.
        pub number: u64,
        /// Milliseconds since 1970, UTC.
        pub at: u64,
        /// The operation, by its `operationId`; of a page, its method and path.
        pub operation: String,
        /// The action that the caller must be permitted.
        pub action: String,
        /// How it ended.
        pub outcome: AuditOutcome,
        /// Status of the answer. Absent for work that was begun.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub status: Option<u16>,
        /// Error code of the answer, if it is an error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub code: Option<String>,
        /// How many equal requests this record is for, if it is for more than one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub times: Option<u64>,
        /// Id of the access token, or subject and issuer of the token of an issuer; absent for a
        /// caller without a valid token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token: Option<String>,
        /// Label of the access token, or `command line` for a command on the registry's machine.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub label: Option<String>,
        /// The only domain that the access token is for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token_domain: Option<DomainName>,
        /// Source address of the request.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
        /// Id of the request, as in the registry's log.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub request_id: Option<String>,
        /// The domain; absent if the request was about the registry itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub domain: Option<DomainName>,
        /// The repository.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub repository: Option<RepositoryName>,
        /// The tag, or the first one of several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tag: Option<Tag>,
        /// How many tags, if several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tags: Option<u64>,
        /// The snapshot.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub digest: Option<Digest>,
        /// What else it was about: a domain, an access token, a background task.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub subject: Option<String>,
        /// What the access token that was made is for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub new_token: Option<AuditToken>,
        /// The limits that the domain has from then on. One that is left out is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub new_quota: Option<QuotaLimits>,
    }

    /// What an access token is for. Its id is the subject of the record; its secret is nowhere.
    #[derive(Eq, Hash)]
    pub struct AuditToken {
        /// For people.
        pub label: String,
        /// The domain that it is for; absent: every domain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub domain: Option<DomainName>,
        /// What it permits.
        pub scopes: Vec<AccessScope>,
        /// When it stops to be valid, in milliseconds since 1970, UTC, if it does.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<u64>,
    }

    /// Records of an audit log.
    pub struct AuditList {
        /// One page of them.
        pub records: Vec<AuditRecord>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum AuditOutcome {
    /// The change was made, in one transaction with this record.
    #[default]
    Done,
    /// It was permitted, and this record was durable before the work began.
    Begun,
    /// The caller lacked the permission, or asked for changes more often than it may.
    Refused,
    /// It was permitted, and was answered with an error.
    Failed,
}
