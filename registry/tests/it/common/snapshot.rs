//! Small snapshots with every kind of node, and frame streams of them, good and bad.

use bytes::Bytes;
use pfr_schema::codec;
use pfr_schema::flat::FlatManifest;
use pfr_schema::frame::{Event, Header, Parser};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::snapshot::SnapshotConfig;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, Limits};
use pfr_testkit::frames;
use pfr_testkit::snapshot::Shape;

pub const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 2, n_heads: 2, head_dim: 8, dtype: Dtype::F16 };
const SHAPE: Shape = Shape { fill: 7, ..Shape::of(GEOMETRY) };

/// A snapshot and everything it reaches.
pub struct Snapshot {
    pub manifest: Digest,
    pub config: Digest,
    pub flat: FlatManifest,
    /// Children before the nodes that list them.
    pub blobs: Vec<Document>,
}

/// Page bytes that depend on the seed alone.
pub fn page(seed: u64) -> Vec<u8> {
    SHAPE.page(seed)
}

/// A snapshot of the pages with these seeds.
pub fn snapshot(seeds: impl IntoIterator<Item = u64>, parents: Vec<Digest>) -> Snapshot {
    let seeds: Vec<u64> = seeds.into_iter().collect();
    let config = SnapshotConfig { agent: Some("test".into()), parents, ..SnapshotConfig::default() };
    let made = SHAPE.snapshot(&seeds).config(config).build();
    let blobs = made.blobs().into_iter().cloned().collect();
    Snapshot { manifest: made.digest(), config: made.config.digest, flat: made.trees[0].flat.clone(), blobs }
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
    frames::stream(blobs.iter().map(frames::of))
}

/// One frame, not encoded, under any digest.
pub fn raw_frame(kind: Kind, digest: Digest, bytes: &[u8]) -> Vec<u8> {
    frames::claiming(kind, digest, bytes).into()
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
