//! The catalogue of domains.

use pfr_schema::DomainName;

/// A domain other than the default one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainRow {
    /// Name.
    pub name: DomainName,
    /// Milliseconds since 1970 of its creation. A domain that is made again under the same name has another time.
    pub created_at: u64,
    /// When its deletion began, if it did: nobody may use it since.
    pub deleting_since: Option<u64>,
}
