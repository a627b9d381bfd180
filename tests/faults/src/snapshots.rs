//! Small snapshots that share most of their blobs.

use bytes::Bytes;
use pfr_schema::{Digest, Kind};
use pfr_testkit::frames;
use pfr_testkit::snapshot::Shape;
use std::collections::BTreeMap;

/// A snapshot as a client has it.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its digest.
    pub digest: Digest,
    /// Its parents.
    pub parents: Vec<Digest>,
    /// Every blob by digest: what must come back.
    pub blobs: BTreeMap<Digest, Vec<u8>>,
    /// What to send, children before the nodes that list them.
    pub order: Vec<(Digest, Kind)>,
}

impl Snapshot {
    /// A snapshot of one tree for each list of page numbers.
    #[must_use]
    pub fn new(trees: &[Vec<u64>], parents: Vec<Digest>) -> Self {
        let made = Shape::TINY.trees(trees.iter().map(Vec::as_slice)).parents(parents.clone()).build();
        let order = made.blobs().into_iter().map(|blob| (blob.digest, blob.kind)).collect();
        let blobs = made.blobs().into_iter().map(|blob| (blob.digest, blob.bytes.clone())).collect();
        Self { digest: made.digest(), parents, blobs, order }
    }

    /// A frame of each of `wanted` that is a blob of this snapshot, in the order to send.
    #[must_use]
    pub fn frames(&self, wanted: impl Fn(&Digest) -> bool) -> Vec<Bytes> {
        let wanted = self.order.iter().filter(|(digest, _)| wanted(digest));
        wanted.map(|(digest, kind)| frames::claiming(*kind, *digest, &self.blobs[digest])).collect()
    }
}
