//! Small snapshots with every kind of container, and frame streams of them, good and bad.

use bytes::Bytes;
use pfr_schema::codec::{self, Codec};
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::frame::{self, Event, Header, Parser};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, Kind, Limits, media_type};
use std::collections::BTreeMap;

pub const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 2, n_heads: 2, head_dim: 8, dtype: Dtype::F16 };

/// A snapshot and everything it reaches.
pub struct Snapshot {
    pub manifest: Digest,
    pub config: Digest,
    pub flat: FlatManifest,
    /// Children before the containers that list them.
    pub blobs: Vec<Document>,
}

/// Page bytes that depend on the seed alone.
pub fn page(seed: u64) -> Vec<u8> {
    let len = GEOMETRY.page_bytes(&Limits::default()).expect("a small page") as usize;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(&mut next).take(len).collect()
}

/// A snapshot of the pages with these seeds.
pub fn snapshot(seeds: impl IntoIterator<Item = u64>, parents: Vec<Digest>) -> Snapshot {
    let mut blobs = Vec::new();
    let mut pages = Vec::new();
    for (ix, seed) in seeds.into_iter().enumerate() {
        let k = Document::new(Kind::Blob, page(seed * 2));
        let v = Document::new(Kind::Blob, page(seed * 2 + 1));
        pages.push(Page { ix: ix as u32, k: k.digest, v: v.digest });
        blobs.extend([k, v]);
    }
    let sequence = Sequence { id: "seq-1".into(), page_ixs: (0..pages.len() as u32).collect(), fill_in_last_page: 7 };
    let flat = FlatManifest::new(GEOMETRY, pages, vec![sequence], &Limits::default()).expect("a valid manifest");
    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).expect("a valid tree");
    blobs.extend(runs);
    let tree = tree.to_document();
    let config = SnapshotConfig { agent: Some("test".into()), parents, ..SnapshotConfig::default() };
    let config = Document::new(Kind::Blob, config.to_bytes());
    let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree)], BTreeMap::new()).to_document();
    let (manifest_digest, config_digest) = (manifest.digest, config.digest);
    blobs.extend([tree, config, manifest]);
    Snapshot { manifest: manifest_digest, config: config_digest, flat, blobs }
}

impl Snapshot {
    /// All of it as a frame stream.
    pub fn stream(&self) -> Vec<u8> {
        stream(&self.blobs)
    }

    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Document> {
        self.blobs.iter().filter(move |blob| blob.kind == kind)
    }

    pub fn digests(&self) -> Vec<Digest> {
        self.blobs.iter().map(|blob| blob.digest).collect()
    }
}

/// A frame stream with its end mark.
pub fn stream(blobs: &[Document]) -> Vec<u8> {
    let mut out: Vec<u8> = blobs.iter().flat_map(|blob| raw_frame(blob.kind, blob.digest, &blob.bytes)).collect();
    out.extend(frame::end_mark(blobs.len() as u64));
    out
}

/// One frame, not encoded, under any digest.
pub fn raw_frame(kind: Kind, digest: Digest, bytes: &[u8]) -> Vec<u8> {
    let len = bytes.len() as u64;
    frame::encode(&Header { codec: Codec::Raw, kind, digest, raw_len: len, stored_len: len }, bytes)
}

/// A frame stream taken apart, every blob verified, the end mark required.
pub fn decode(stream: Bytes) -> Vec<(Kind, Vec<u8>)> {
    let mut parser = Parser::new(Limits::default());
    parser.push(stream);
    let mut blobs = Vec::new();
    let mut current: Option<(Header, Vec<u8>)> = None;
    while let Some(event) = parser.next().expect("a well-formed stream") {
        match event {
            Event::Begin(header) => current = Some((header, Vec::new())),
            Event::Payload(piece) => current.as_mut().expect("a frame").1.extend_from_slice(&piece),
            Event::Finish { checksum: _ } => {
                let (header, payload) = current.take().expect("a frame");
                let raw = codec::decode(header.codec, &payload, header.raw_len).expect("a payload that decodes");
                assert_eq!(Digest::of(header.digest.algorithm(), &raw), header.digest);
                blobs.push((header.kind, raw));
            }
            Event::End => {}
        }
    }
    parser.finish().expect("an end mark");
    blobs
}
