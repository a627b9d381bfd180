//! The snapshots and tags that one site of a mirror has in a repository.

use pfr_schema::api::SnapshotSummary;
use pfr_schema::{Digest, Tag};
use std::collections::BTreeMap;

/// The snapshots and tags of a repository.
pub(super) struct Names {
    pub snapshots: Vec<SnapshotSummary>,
    pub tags: BTreeMap<Tag, Digest>,
}
