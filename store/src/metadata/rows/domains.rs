//! The catalogue of domains.

use pfr_schema::DomainName;

/// What is next for a domain that is being deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainStep {
    /// Delete what there is of it.
    Empty,
    /// The same for the last time: no upload to it is under way any more.
    EmptyLast,
    /// Nothing: another process may still be deleting.
    Wait,
    /// Delete its row.
    Forget,
}

/// A domain other than the default one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainRow {
    /// Name.
    pub name: DomainName,
    /// Milliseconds since 1970 of its creation. A domain that is made again under the same name has
    /// another time.
    pub created_at: u64,
    /// When its deletion began, if it did: requests find no such domain since.
    pub deleting_since: Option<u64>,
    /// Whether it has a wrapped key: what it writes to storage is encrypted.
    pub encrypted: bool,
}
