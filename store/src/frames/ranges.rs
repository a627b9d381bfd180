//! Where frames lie, for readers that can reach the packs themselves.

use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::packs::{Extent, locate, path, plan};
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

impl Store {
    /// Where the frames of `digests` lie, in that order: for readers that fetch them from the packs
    /// themselves. What is there stays there for a grace period after it is collected or moved, and
    /// is not read here: the reader verifies.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`], [`Error::Corrupt`] for what is quarantined.
    ///
    /// [`Error::BlobUnknown`]: crate::Error::BlobUnknown
    /// [`Error::Corrupt`]: crate::Error::Corrupt
    #[boxed]
    pub async fn ranges(&self, digests: &[Digest]) -> Result<Vec<PackRange>> {
        let range = |extent: Extent| PackRange {
            path: path(&extent.pack).to_string(),
            offset: extent.range.start,
            length: extent.len(),
            digests: extent.frames.into_iter().map(|(_, digest)| digest).collect(),
        };
        Ok(plan(locate(self, digests).await?).into_iter().map(range).collect())
    }
}
