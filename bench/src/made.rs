//! Small whole snapshots of made-up pages, as frames.

use crate::Result;
use bytes::Bytes;
use pfr_schema::codec::Codec;
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::frame::{self, Header};
use pfr_schema::geometry::Geometry;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, Kind, Limits, media_type};
use pfr_store::document_frame;

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
pub fn component_bytes(g: Geometry) -> u64 {
    u64::from(g.page_size_tokens) * u64::from(g.n_layers) * u64::from(g.n_heads) * u64::from(g.head_dim) * g.dtype.bytes()
}

/// Bytes of component number `number`.
pub fn blob(geometry: Geometry, number: u64) -> Vec<u8> {
    (0..component_bytes(geometry) / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number).to_le_bytes()).collect()
}

impl Made {
    /// A snapshot of pages with these numbers: the same number is the same page.
    pub fn new(geometry: Geometry, pages: &[u64]) -> Result<Self> {
        let mut parts = Vec::new();
        let mut component = |number: u64| {
            let raw = blob(geometry, number);
            let len = raw.len() as u64;
            let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(&raw), raw_len: len, stored_len: len };
            parts.push(Part { digest: header.digest, kind: Kind::Blob, frame: frame::encode(&header, &raw).into() });
            header.digest
        };
        let entries: Vec<Page> =
            pages.iter().enumerate().map(|(ix, n)| Page { ix: ix as u32, k: component(2 * n), v: component(2 * n + 1) }).collect();
        let sequence = Sequence { id: "seq".into(), page_ixs: (0..pages.len() as u32).collect(), fill_in_last_page: 0 };
        let flat = FlatManifest::new(geometry, entries, vec![sequence], &Limits::default())?;
        let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1)?;
        let tree = tree.to_document();
        let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
        let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree)], Default::default()).to_document();
        let documents = runs.iter().chain([&tree, &config, &manifest]);
        parts.extend(documents.map(|d| Part { digest: d.digest, kind: d.kind, frame: document_frame(d) }));
        Ok(Self { parts, manifest: manifest.digest })
    }
}
