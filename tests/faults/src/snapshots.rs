//! Small snapshots that share much: what a history pushes.

use bytes::Bytes;
use pfr_schema::codec::Codec;
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::frame::{self, Header};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, FormatError, Kind, Limits, media_type};
use std::collections::BTreeMap;

/// 2 layers × 4 tokens × 2 heads × 4 elements of bf16: 128 bytes a page.
const GEOMETRY: Geometry = Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 };

/// A snapshot as a client has it.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its digest.
    pub digest: Digest,
    /// Its parents.
    pub parents: Vec<Digest>,
    /// Every blob by digest: what must come back.
    pub blobs: BTreeMap<Digest, Vec<u8>>,
    /// What to send, children before the containers that list them.
    pub order: Vec<(Digest, Kind)>,
}

/// One page's bytes, different for each number.
fn page(number: u64) -> Vec<u8> {
    (0..16_u64).flat_map(|i| (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i.wrapping_mul(0x1234_5678_9abc_def1)).to_le_bytes()).collect()
}

/// One tree of pages with its runs, children first.
fn tree(numbers: &[u64], blobs: &mut Vec<(Kind, Vec<u8>)>) -> Result<Document, FormatError> {
    let raw: Vec<Vec<u8>> = numbers.iter().flat_map(|n| [page(2 * n), page(2 * n + 1)]).collect();
    let entries = raw
        .chunks(2)
        .enumerate()
        .map(|(ix, kv)| Page { ix: u32::try_from(ix).unwrap_or(0), k: Digest::sha256(&kv[0]), v: Digest::sha256(&kv[1]) })
        .collect();
    let sequence = Sequence { id: "seq".into(), page_ixs: (0..u32::try_from(numbers.len()).unwrap_or(0)).collect(), fill_in_last_page: 0 };
    let flat = FlatManifest::new(GEOMETRY, entries, vec![sequence], &Limits::default())?;
    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1)?;
    blobs.extend(raw.into_iter().map(|bytes| (Kind::Blob, bytes)));
    blobs.extend(runs.into_iter().map(|run| (run.kind, run.bytes)));
    Ok(tree.to_document())
}

impl Snapshot {
    /// A snapshot of one tree for each list of page numbers.
    ///
    /// # Errors
    /// Those of the formats.
    pub fn new(trees: &[Vec<u64>], parents: Vec<Digest>) -> Result<Self, FormatError> {
        let mut sent = Vec::new();
        let mut layers = Vec::new();
        for numbers in trees {
            let tree = tree(numbers, &mut sent)?;
            layers.push(Descriptor::of(media_type::TREE, &tree));
            sent.push((tree.kind, tree.bytes));
        }
        let config = Document::new(Kind::Blob, SnapshotConfig { parents: parents.clone(), ..SnapshotConfig::default() }.to_bytes());
        let manifest = Manifest::snapshot(&config, layers, Default::default()).to_document();
        let digest = manifest.digest;
        sent.extend([(config.kind, config.bytes), (manifest.kind, manifest.bytes)]);
        let (mut blobs, mut order) = (BTreeMap::new(), Vec::new());
        for (kind, bytes) in sent {
            let digest = Digest::sha256(&bytes);
            if blobs.insert(digest, bytes).is_none() {
                order.push((digest, kind));
            }
        }
        Ok(Self { digest, parents, blobs, order })
    }

    /// A frame of each of `wanted` that is a blob of this snapshot, in the order to send.
    #[must_use]
    pub fn frames(&self, wanted: impl Fn(&Digest) -> bool) -> Vec<Bytes> {
        self.order.iter().filter(|(digest, _)| wanted(digest)).map(|(digest, kind)| frame_of(*kind, *digest, &self.blobs[digest])).collect()
    }
}

/// A blob as a raw frame.
fn frame_of(kind: Kind, digest: Digest, raw: &[u8]) -> Bytes {
    let len = raw.len() as u64;
    frame::encode(&Header { codec: Codec::Raw, kind, digest, raw_len: len, stored_len: len }, raw).into()
}
