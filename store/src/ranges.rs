//! Where frames lie, for readers that can reach the packs themselves.

use crate::Store;
use crate::error::Result;
use crate::frames::{locate, plan};
use crate::pack_writer::path;
use pfr_schema::Digest;

/// Frames that lie back to back in one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackRange {
    /// Path of the object in the store's object store.
    pub path: String,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The blobs whose frames these are, in order.
    pub digests: Vec<Digest>,
}

pub(crate) async fn ranges(store: &Store, digests: &[Digest]) -> Result<Vec<PackRange>> {
    let extents = plan(locate(store, digests).await?);
    let range = |extent: crate::frames::Extent| PackRange {
        path: path(&extent.pack).to_string(),
        offset: extent.range.start,
        length: extent.range.end - extent.range.start,
        digests: extent.frames.into_iter().map(|(_, digest)| digest).collect(),
    };
    Ok(extents.into_iter().map(range).collect())
}
