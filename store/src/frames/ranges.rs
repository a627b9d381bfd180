//! Locations of frames, for readers that can reach the packs themselves.

use super::codecs::are_in_others;
use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::packs::{Extent, locate, path, plan};
use pfr_schema::Digest;
use pfr_schema::codec::Codecs;

/// Consecutive frames in one object.
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
    /// Locations of the frames of `digests`, in that order, for readers of these codecs that fetch
    /// them from the packs themselves. The bytes stay there for a grace period after they are
    /// collected or moved. They are not read here, so the reader verifies them. None if some are in
    /// another codec, or the storage is encrypted: then [`Store::serve`] decodes them.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`], [`Error::Corrupt`] for what is quarantined.
    ///
    /// [`Error::BlobUnknown`]: crate::Error::BlobUnknown
    /// [`Error::Corrupt`]: crate::Error::Corrupt
    #[boxed]
    pub async fn ranges(&self, digests: &[Digest], codecs: Codecs) -> Result<Option<Vec<PackRange>>> {
        let range = |extent: Extent| PackRange {
            path: path(&extent.pack).to_string(),
            offset: extent.range.start,
            length: extent.len(),
            digests: extent.frames.into_iter().map(|(_, digest)| digest).collect(),
        };
        if self.is_encrypted() {
            return Ok(None);
        }
        let located = locate(self, digests).await?;
        if are_in_others(&located, codecs) {
            return Ok(None);
        }
        Ok(Some(plan(located).into_iter().map(range).collect()))
    }
}
