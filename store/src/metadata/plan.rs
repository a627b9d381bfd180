//! What indexing a pack reads and writes, as values.

use super::{Health, ObjectId, PackId};
use pfr_schema::Kind;
use pfr_schema::frame::Header;
use pfr_schema::run::Shape;

/// The fields of a stored object that indexing needs.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub id: ObjectId,
    pub size: u64,
    pub kind: Kind,
    pub health: Health,
    /// References before this pack.
    pub refs: u64,
    pub shape: Option<Shape>,
    /// What it reaches and what it brought, if it is a node.
    pub logical_bytes: u64,
    pub new_bytes: u64,
    /// Where it lies.
    pub pack: PackId,
    pub frame_len: u64,
}

/// An object to insert.
#[derive(Debug)]
pub(crate) struct Insert {
    pub header: Header,
    pub offset: u64,
    pub kind: Kind,
    pub refs: u64,
}

/// A stored object to point to its frame in this pack: it was damaged, or its frame did not say
/// that it is a node.
#[derive(Debug)]
pub(crate) struct Relocate {
    pub id: ObjectId,
    pub header: Header,
    pub offset: u64,
    /// Its health after that.
    pub health: Health,
}

/// A node's row to write.
#[derive(Debug)]
pub(crate) struct Contains {
    pub object: ObjectId,
    pub children: Vec<ObjectId>,
    pub shape: Option<Shape>,
    pub logical_bytes: u64,
    pub new_bytes: u64,
}

/// What to write. Every list is in id order, as locks are taken everywhere.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub insert: Vec<Insert>,
    pub relocate: Vec<Relocate>,
    /// Stored already: their lease is raised.
    pub renew: Vec<ObjectId>,
    /// References that stored objects gain.
    pub count: Vec<(ObjectId, u64)>,
    /// Stored blobs that become nodes.
    pub promote: Vec<(ObjectId, Kind)>,
    pub contain: Vec<Contains>,
    /// Stored nodes that are complete again.
    pub recover: Vec<ObjectId>,
    /// Frame bytes of the pack that objects point to.
    pub live_bytes: u64,
    /// Frame bytes that other packs lose.
    pub lost: Vec<(PackId, u64)>,
    /// Whether something was healed: nodes above it may be complete again.
    pub healed: bool,
}
