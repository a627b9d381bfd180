//! Kinds of blobs: whether and how a blob lists other blobs.

use crate::media_type;
use serde::{Deserialize, Serialize};

/// The format of a blob. The discriminant is its stable number in binary formats.
///
/// A blob has at most one kind besides `Blob`. No bytes are valid in the formats of two kinds of
/// nodes, but for an OCI manifest that is no snapshot: it keeps the kind as which it was stored
/// first. A stored node can serve as a plain blob of the same bytes, and the manifest of a snapshot
/// as an image. A stored plain blob cannot serve as a node, because only a node keeps its children
/// from being collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Kind {
    /// A blob that lists no other blobs.
    Blob = 0,
    /// A page chunk.
    Run = 1,
    /// A page tree.
    Tree = 2,
    /// A hybrid checkpoint.
    Checkpoint = 3,
    /// An OCI image manifest. The manifest of a snapshot is one.
    Manifest = 4,
    /// An OCI manifest or index that was pushed as one, see [`crate::image`].
    Image = 5,
}

impl Kind {
    /// Every kind, children before what may list them.
    pub const ALL: [Self; 6] = [Self::Blob, Self::Run, Self::Tree, Self::Checkpoint, Self::Manifest, Self::Image];

    /// The kind with this number in a binary format.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|k| *k as u8 == number)
    }

    /// The kind of a blob with this media type.
    #[must_use]
    pub fn of_media_type(media_type: &str) -> Self {
        match media_type {
            media_type::RUN => Self::Run,
            media_type::TREE => Self::Tree,
            media_type::CHECKPOINT => Self::Checkpoint,
            media_type::OCI_MANIFEST => Self::Manifest,
            _ => Self::Blob,
        }
    }

    /// Whether blobs of this kind list other blobs.
    #[must_use]
    pub fn is_container(self) -> bool {
        self != Self::Blob
    }

    /// Whether a stored blob of kind `self` can serve as one of kind `wanted`.
    #[must_use]
    pub fn satisfies(self, wanted: Self) -> bool {
        wanted == Self::Blob || self == wanted || (self == Self::Manifest && wanted == Self::Image)
    }
}
