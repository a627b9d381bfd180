//! Small, complete snapshots of generated pages, as frames.

use bytes::Bytes;
use pfr_schema::geometry::Geometry;
use pfr_schema::{Digest, Kind};
use pfr_testkit::frames;
use pfr_testkit::snapshot::Shape;

/// A blob of a snapshot.
pub struct Blob {
    /// The digest of the blob.
    pub digest: Digest,
    /// The kind of the blob.
    pub kind: Kind,
    /// The blob as a frame.
    pub frame: Bytes,
}

/// A generated snapshot.
pub struct Generated {
    /// The blobs of the snapshot. Each blob comes before the nodes that list it.
    pub blobs: Vec<Blob>,
    /// The digest of the manifest.
    pub manifest: Digest,
}

/// The length of a page's K or V, in bytes.
pub fn component_bytes(geometry: Geometry) -> u64 {
    Shape::of(geometry).page_bytes() as u64
}

/// The content of the K or V with this number.
pub fn component(geometry: Geometry, number: u64) -> Vec<u8> {
    Shape::of(geometry).page(number)
}

impl Generated {
    /// A snapshot of pages with these numbers: equal numbers give equal pages.
    pub fn new(geometry: Geometry, pages: &[u64]) -> Self {
        let built = Shape::of(geometry).snapshot(pages).build();
        let blobs = built.blobs().into_iter().map(|blob| Blob { digest: blob.digest, kind: blob.kind, frame: frames::of(blob) });
        Self { blobs: blobs.collect(), manifest: built.digest() }
    }
}
