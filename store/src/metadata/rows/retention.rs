//! Retention policies, and what they delete.

use pfr_schema::api::RetentionPolicies;
use pfr_schema::{Digest, RepositoryName};

/// The retention policies of a domain as they are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// How often they were set; 0 if never.
    pub version: u64,
    /// The policies.
    pub policies: RetentionPolicies,
    /// The time of the database, in milliseconds since 1970: ages count from it.
    pub now: u64,
}

/// A snapshot that a policy says is to be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expiring {
    /// Its repository.
    pub repository: RepositoryName,
    /// The snapshot.
    pub digest: Digest,
    /// Its entity tag when it was chosen ([`pfr_schema::api::snapshot_etag`]).
    pub etag: Digest,
    /// When it was pushed, in milliseconds since 1970: one that was deleted and pushed again is
    /// another.
    pub pushed_at: u64,
    /// [`Retention::version`] of the policies that chose it.
    pub version: u64,
}

/// What became of an [`Expiring`] snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// It was deleted, with its tags.
    Deleted,
    /// It was gone already.
    Gone,
    /// It stays: its tags, or the policies, were changed since it was chosen, or it was pinned, or
    /// deleted and pushed again, or an image of its repository lists it.
    Kept,
}
