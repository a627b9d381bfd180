//! Small, complete snapshots of generated pages, as frames.

use bytes::Bytes;
use pfr_schema::geometry::Geometry;
use pfr_schema::{Digest, Kind};
use pfr_testkit::frames;
use pfr_testkit::snapshot::Shape;

/// A blob of a snapshot.
pub struct Part {
    /// Its digest.
    pub digest: Digest,
    /// Its kind.
    pub kind: Kind,
    /// Header and payload.
    pub frame: Bytes,
}

/// A snapshot.
pub struct Made {
    /// Its blobs, children before what lists them.
    pub parts: Vec<Part>,
    /// Its manifest.
    pub manifest: Digest,
}

/// Bytes of a page's K or V.
pub fn component_bytes(geometry: Geometry) -> u64 {
    Shape::of(geometry).page_bytes() as u64
}

/// Bytes of component number `number`.
pub fn blob(geometry: Geometry, number: u64) -> Vec<u8> {
    Shape::of(geometry).page(number)
}

impl Made {
    /// A snapshot of pages with these numbers: the same number is the same page.
    pub fn new(geometry: Geometry, pages: &[u64]) -> Self {
        let made = Shape::of(geometry).snapshot(pages).build();
        let parts = made.blobs().into_iter().map(|blob| Part { digest: blob.digest, kind: blob.kind, frame: frames::of(blob) });
        Self { parts: parts.collect(), manifest: made.digest() }
    }
}
