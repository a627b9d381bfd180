//! The costs of snapshots.

use super::{ObjectId, SnapshotRow};

/// Row ids of objects, compressed: an eighth of a byte for each where they lie close together.
pub type ObjectSet = roaring::RoaringTreemap;

/// The costs of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// The snapshot.
    pub snapshot: SnapshotRow,
    /// Raw bytes that it is the first to reach.
    pub new: u64,
    /// Raw bytes that a deletion of it and its tags would free.
    pub exclusive: u64,
}

/// The costs of some snapshots.
#[derive(Clone, Debug)]
pub struct CostsPage {
    /// The oldest first.
    pub costs: Vec<Costs>,
    /// What they reach that was not reached before.
    pub reached: ObjectSet,
    /// Frame bytes of that.
    pub stored: u64,
    /// Row id of the last manifest; none if no more follow.
    pub next: Option<i64>,
}

/// Objects, and what holds them besides the nodes that were asked about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Raw bytes of the objects with a single reference.
    pub bytes: u64,
    /// Frame bytes of the same.
    pub stored: u64,
    /// The nodes among them.
    pub nodes: Vec<ObjectId>,
    /// The objects with several references.
    pub shared: Vec<SharedObject>,
    /// Nodes that were asked about and not looked at: the lists of the others are long.
    pub left: Vec<ObjectId>,
}

/// An object with several references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedObject {
    /// Its row id.
    pub id: ObjectId,
    /// Raw bytes.
    pub size: u64,
    /// Frame bytes.
    pub frame_len: u64,
    /// Its references.
    pub refs: u64,
    /// Of these, those that were asked about.
    pub seen: u64,
    /// Whether it is a node.
    pub is_node: bool,
}
