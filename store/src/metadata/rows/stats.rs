//! The costs of snapshots.

use super::SnapshotRow;

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
