//! Nodes (in code: containers): blobs that list other blobs. Only this module follows references.

use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::error::FormatError;
use crate::image::Image;
use crate::kind::Kind;
use crate::limits::Limits;
use crate::run::{Run, Shape};
use crate::snapshot::Manifest;
use crate::tree::PageTree;

/// A reference from a node to a blob, and what the node says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Child {
    /// The blob.
    pub digest: Digest,
    /// How it is to be read.
    pub kind: Kind,
    /// Its raw bytes, if the node gives them.
    pub size: Option<u64>,
    /// The shape of a page chunk, if the node gives it.
    pub shape: Option<Shape>,
    /// It need not be stored. If it is, the node holds it as any other.
    pub optional: bool,
}

/// A parsed node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Container {
    /// A page chunk.
    Run(Run),
    /// A page tree.
    Tree(PageTree),
    /// A hybrid checkpoint.
    Checkpoint(Checkpoint),
    /// An OCI image manifest.
    Manifest(Manifest),
    /// An OCI manifest or index that was pushed as one.
    Image(Image),
}

impl Container {
    /// Parses `bytes` as `kind`; `None` for a plain blob.
    ///
    /// # Errors
    /// [`FormatError`]: a node that cannot be parsed is never taken for one without children.
    pub fn parse(kind: Kind, bytes: &[u8], limits: &Limits) -> Result<Option<Self>, FormatError> {
        Ok(match kind {
            Kind::Blob => None,
            Kind::Run => Some(Self::Run(Run::parse(bytes, limits)?)),
            Kind::Tree => Some(Self::Tree(PageTree::parse(bytes, limits)?)),
            Kind::Checkpoint => Some(Self::Checkpoint(Checkpoint::parse(bytes, limits)?)),
            Kind::Manifest => Some(Self::Manifest(Manifest::parse(bytes, limits)?)),
            Kind::Image => Some(Self::Image(Image::parse(bytes, limits)?)),
        })
    }

    /// What it lists, in its own order; a blob listed twice appears twice.
    #[must_use]
    pub fn children(&self) -> Vec<Child> {
        let blob = |digest, size| Child { digest, kind: Kind::Blob, size: Some(size), shape: None, optional: false };
        match self {
            Self::Run(run) => run.digests().iter().map(|d| blob(*d, run.shape().page_bytes)).collect(),
            Self::Tree(tree) => {
                let run = |(digest, shape)| Child { digest, kind: Kind::Run, size: None, shape: Some(shape), optional: false };
                tree.run_shapes().map(run).collect()
            }
            Self::Checkpoint(checkpoint) => checkpoint.tensors.iter().map(|t| blob(t.payload_hash, t.payload_bytes)).collect(),
            Self::Manifest(manifest) => std::iter::once(&manifest.config)
                .chain(&manifest.layers)
                .map(|d| Child { digest: d.digest, kind: d.kind(), size: Some(d.size), shape: None, optional: false })
                .collect(),
            Self::Image(image) => image.children().to_vec(),
        }
    }

    /// The shape, if it is a page chunk.
    #[must_use]
    pub fn shape(&self) -> Option<Shape> {
        match self {
            Self::Run(run) => Some(run.shape()),
            _ => None,
        }
    }
}
