//! The audit log.

use pfr_schema::RepositoryName;
use pfr_schema::api::AuditRecord;

/// What the audit log will say of a request. It is prepared before the request is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// The record. Its number and its time are set when it is written, and what a change is about
    /// by the transaction of the change.
    pub record: AuditRecord,
    /// Status of the answer if nothing had to be made: it was there already.
    pub status_if_there: Option<u16>,
    /// It is about the registry, and not about the domain in whose tables it is.
    pub of_registry: bool,
    /// An administrator makes the change, which may move and delete immutable tags.
    pub overrides: bool,
}

/// Which records a list of the audit log has, and in which order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Only those about this repository.
    pub repository: Option<RepositoryName>,
    /// Only those of requests with this token.
    pub token: Option<String>,
    /// Only those of this time and later, in milliseconds since 1970.
    pub since: Option<u64>,
    /// Only those before this time.
    pub until: Option<u64>,
    /// Also those about the registry.
    pub with_registry: bool,
    /// Oldest first: then no record with a smaller number appears after a page was read. Newest
    /// first otherwise.
    pub oldest_first: bool,
}
