//! Signing policies, and what is known to satisfy them.

use pfr_schema::Digest;
use pfr_schema::api::SigningPolicies;

/// The signing policies of a domain as they are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signing {
    /// How often they were set; 0 if never.
    pub version: u64,
    /// The policies.
    pub policies: SigningPolicies,
}

/// Policies for which a manifest has good signatures. Transactions cannot look for themselves: the
/// bytes of signatures are in packs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// The version of the policies.
    pub version: u64,
    /// The names of those that it satisfies.
    pub policies: Vec<String>,
    /// Manifests that it may replace at the tags of signatures: it has a signature by each key of a
    /// policy that signed there.
    pub replaced: Vec<Digest>,
}
