//! The size of a snapshot, from its manifest, page trees and checkpoints, without reading page
//! chunks or pages.

use crate::error::Result;
use crate::plan::parse;
use pfr_schema::Limits;
use pfr_schema::container::Container;
use pfr_schema::tree::Document;

/// Bytes of a run besides its digests, and of one digest in it.
const RUN_HEADER: u64 = 20;
const RUN_DIGEST: u64 = 32;

/// Sums over a snapshot. A blob that is listed twice counts twice: sharing within a snapshot is
/// deduplication too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Pages over all trees.
    pub pages: u64,
    /// Blobs and nodes, the manifest included.
    pub blobs: u64,
    /// Raw bytes of them.
    pub bytes: u64,
}

impl Totals {
    /// Of a manifest and those of its layers that list more.
    pub(crate) fn of<'a>(documents: impl IntoIterator<Item = &'a Document>, limits: &Limits) -> Result<Self> {
        let mut totals = Self::default();
        for document in documents {
            totals.add(&parse(document, limits)?, document.bytes.len() as u64);
        }
        Ok(totals)
    }

    fn add(&mut self, container: &Container, own_bytes: u64) {
        let mut blobs = |count: u64, bytes: u64| {
            self.blobs = self.blobs.saturating_add(count);
            self.bytes = self.bytes.saturating_add(bytes);
        };
        match container {
            Container::Manifest(manifest) => {
                blobs(2 + manifest.layers.len() as u64, own_bytes + manifest.config.size);
                manifest.layers.iter().for_each(|layer| blobs(0, layer.size));
            }
            Container::Tree(tree) => {
                let components = tree.pages() * tree.components.len() as u64;
                blobs(tree.runs.len() as u64, tree.runs.len() as u64 * RUN_HEADER + components * RUN_DIGEST);
                blobs(components, components.saturating_mul(tree.page_bytes));
                self.pages += tree.pages();
            }
            Container::Checkpoint(checkpoint) => checkpoint.tensors.iter().for_each(|tensor| blobs(1, tensor.payload_bytes)),
            Container::Run(_) => {}
            Container::Image(image) => image.children().iter().for_each(|child| blobs(1, child.size.unwrap_or(0))),
        }
    }
}
