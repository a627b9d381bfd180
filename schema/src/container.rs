//! Containers: blobs that list other blobs. The one place where references are followed.

use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::error::FormatError;
use crate::limits::Limits;
use crate::media_type;
use crate::run::{Run, Shape};
use crate::snapshot::Manifest;
use crate::tree::PageTree;
use serde::{Deserialize, Serialize};

/// How a blob is to be read. The discriminant is its stable number in binary formats.
///
/// A blob has at most one kind besides `Blob`: the containers' formats exclude each other. A stored container
/// satisfies a wish for a plain blob of the same bytes; not the other way round, since only a container holds its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Kind {
    /// Bytes that list nothing.
    Blob = 0,
    /// A run of pages.
    Run = 1,
    /// A page tree.
    Tree = 2,
    /// A hybrid checkpoint.
    Checkpoint = 3,
    /// An OCI image manifest, among them snapshots.
    Manifest = 4,
}

impl Kind {
    /// Every kind, children before what may list them.
    pub const ALL: [Self; 5] = [Self::Blob, Self::Run, Self::Tree, Self::Checkpoint, Self::Manifest];

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
        wanted == Self::Blob || self == wanted
    }
}

/// A reference from a container to a blob, and what the container says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Child {
    /// The blob.
    pub digest: Digest,
    /// How it is to be read.
    pub kind: Kind,
    /// Its raw bytes, where the container says so.
    pub size: Option<u64>,
    /// The shape of a run, where the container says so.
    pub shape: Option<Shape>,
}

/// A parsed container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Container {
    /// A run of pages.
    Run(Run),
    /// A page tree.
    Tree(PageTree),
    /// A hybrid checkpoint.
    Checkpoint(Checkpoint),
    /// An OCI image manifest.
    Manifest(Manifest),
}

impl Container {
    /// Parses `bytes` as `kind`; `None` for a plain blob.
    ///
    /// # Errors
    /// [`FormatError`]: a container that cannot be parsed is never taken for one without children.
    pub fn parse(kind: Kind, bytes: &[u8], limits: &Limits) -> Result<Option<Self>, FormatError> {
        Ok(match kind {
            Kind::Blob => None,
            Kind::Run => Some(Self::Run(Run::parse(bytes, limits)?)),
            Kind::Tree => Some(Self::Tree(PageTree::parse(bytes, limits)?)),
            Kind::Checkpoint => Some(Self::Checkpoint(Checkpoint::parse(bytes, limits)?)),
            Kind::Manifest => Some(Self::Manifest(Manifest::parse(bytes, limits)?)),
        })
    }

    /// What it lists, in its own order; a blob listed twice appears twice.
    #[must_use]
    pub fn children(&self) -> Vec<Child> {
        let blob = |digest, size| Child { digest, kind: Kind::Blob, size: Some(size), shape: None };
        match self {
            Self::Run(run) => run.digests().iter().map(|d| blob(*d, run.shape().page_bytes)).collect(),
            Self::Tree(tree) => {
                tree.run_shapes().map(|(digest, shape)| Child { digest, kind: Kind::Run, size: None, shape: Some(shape) }).collect()
            }
            Self::Checkpoint(checkpoint) => checkpoint.tensors.iter().map(|t| blob(t.payload_hash, t.payload_bytes)).collect(),
            Self::Manifest(manifest) => std::iter::once(&manifest.config)
                .chain(&manifest.layers)
                .map(|d| Child { digest: d.digest, kind: d.kind(), size: Some(d.size), shape: None })
                .collect(),
        }
    }

    /// The shape, if it is a run.
    #[must_use]
    pub fn shape(&self) -> Option<Shape> {
        match self {
            Self::Run(run) => Some(run.shape()),
            _ => None,
        }
    }
}
