//! What is damaged, and what an audit finds.

use pfr_schema::{Digest, Kind, RepositoryName};

/// Whether an object can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Health {
    /// No damage is known.
    Complete = 0,
    /// A node that reaches something damaged: it counts as missing until it and what is
    /// damaged are pushed again.
    Incomplete = 1,
    /// Its bytes are not what its digest says: quarantined. It is not given out, and a push is told
    /// that it is missing.
    Damaged = 2,
}

impl Health {
    /// The worst health with which an object can serve as `kind`: as a blob only its bytes count,
    /// not what it reaches as a node.
    pub(crate) fn enough_for(kind: Kind) -> Self {
        if kind.is_container() { Self::Complete } else { Self::Incomplete }
    }
}

/// A frame that scrub or a reader found bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The blob.
    pub digest: Digest,
    /// Key of the pack in which it was found bad: a copy elsewhere is not touched.
    pub pack: String,
    /// What was found.
    pub reason: String,
}

/// A quarantined blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedRow {
    /// The blob.
    pub digest: Digest,
    /// Kind.
    pub kind: Kind,
    /// What was found.
    pub reason: String,
    /// Milliseconds since 1970.
    pub found_at: u64,
    /// Snapshots that reach it, at most a hundred.
    pub snapshots: Vec<(RepositoryName, Digest)>,
}

/// A difference between tables and what they should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discrepancy {
    /// What it is about, for example `object 17 sha256:…` or `pack 3`.
    pub what: String,
    /// What follows from the nodes, manifests and tags.
    pub expected: String,
    /// What the tables say.
    pub found: String,
}

/// What an audit of the tables found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Objects looked at.
    pub objects: u64,
    /// Nodes looked at.
    pub containers: u64,
    /// Packs looked at.
    pub packs: u64,
    /// Differences, at most a thousand.
    pub discrepancies: Vec<Discrepancy>,
    /// All differences.
    pub wrong: u64,
    /// Whether they were corrected.
    pub repaired: bool,
}
