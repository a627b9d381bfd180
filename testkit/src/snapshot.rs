//! Snapshots of generated pages.
//!
//! Pages have numbers: the same number is the same page, in every snapshot of a [`Shape`]. Page `i`
//! of a tree has K bytes number `2n` and V bytes number `2n + 1` for n = `numbers[i]`.

use crate::frames;
use pfr_schema::checkpoint::{ABI, Checkpoint, Key, Layout, Tensor};
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, Kind, Limits, media_type, prefix};
use std::collections::{BTreeMap, HashSet};

/// Size and meaning of a page.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Tokens, layers, heads.
    pub geometry: Geometry,
    /// Tokens in the last page of a sequence; 0 if it is full.
    pub fill: u32,
}

impl Shape {
    /// 128 bytes a page: 2 layers × 4 tokens × 2 heads × 4 elements of bf16.
    pub const TINY: Self = Self::of(Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 });
    /// 16 KiB a page.
    pub const SMALL: Self = Self::of(Geometry { page_size_tokens: 16, n_layers: 4, n_heads: 2, head_dim: 64, dtype: Dtype::Bf16 });
    /// 180,224 bytes a page: TinyLlama.
    pub const TINYLLAMA: Self = Self::of(Geometry { page_size_tokens: 16, n_layers: 22, n_heads: 4, head_dim: 64, dtype: Dtype::Bf16 });

    /// Pages of this geometry, the last one of a sequence with one token.
    #[must_use]
    pub const fn of(geometry: Geometry) -> Self {
        Self { geometry, fill: 1 }
    }

    /// Bytes of the K, or the V, of a page.
    #[must_use]
    pub fn page_bytes(self) -> usize {
        usize::try_from(self.geometry.page_bytes(&Limits::default()).unwrap()).unwrap()
    }

    /// The bytes with this number. They cannot be compressed, and differ from those of other
    /// numbers.
    #[must_use]
    pub fn page(self, number: u64) -> Vec<u8> {
        bytes(number, self.page_bytes())
    }

    /// The page manifest of pages with these numbers.
    #[must_use]
    pub fn flat(self, numbers: &[u64]) -> FlatManifest {
        let digest = |number| Digest::sha256(&self.page(number));
        self.flat_of(numbers.iter().map(|n| [digest(2 * n), digest(2 * n + 1)]))
    }

    fn flat_of(self, pages: impl Iterator<Item = [Digest; 2]>) -> FlatManifest {
        let pages: Vec<Page> = pages.zip(0..).map(|([k, v], ix)| Page { ix, k, v }).collect();
        let page_ixs: Vec<u32> = pages.iter().map(|page| page.ix).collect();
        let sequence = Sequence { id: "seq".into(), fill_in_last_page: if page_ixs.is_empty() { 0 } else { self.fill }, page_ixs };
        FlatManifest::new(self.geometry, pages, vec![sequence], &Limits::default()).unwrap()
    }

    /// A snapshot of one tree with these pages.
    #[must_use]
    pub fn snapshot(self, numbers: &[u64]) -> Builder {
        self.trees([numbers])
    }

    /// A snapshot of a tree for each list of pages.
    #[must_use]
    pub fn trees<'a>(self, trees: impl IntoIterator<Item = &'a [u64]>) -> Builder {
        let trees = trees.into_iter().map(<[u64]>::to_vec).collect();
        Builder { shape: self, trees, config: SnapshotConfig::default(), layers: Vec::new() }
    }
}

/// Bytes that cannot be compressed and depend on the number alone.
#[must_use]
pub fn bytes(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SplitMix64.
    let mut state = number.wrapping_mul(0xA076_1D64_78BD_642F);
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..word.len()]);
    }
    bytes
}

/// Numbers of `bf16` around zero, as real pages hold them: a tensor codec makes them smaller.
#[must_use]
pub fn numbers(number: u64, len: usize) -> Vec<u8> {
    // The sum of uniform numbers is nearly normal.
    let sum = |parts: &[u8]| parts.as_chunks::<2>().0.iter().map(|part| f32::from(i16::from_le_bytes(*part)) / 65_536.0).sum::<f32>();
    let mut numbers: Vec<u8> =
        bytes(number, 4 * len + 8).chunks_exact(8).flat_map(|parts| sum(parts).to_le_bytes()[2..].to_vec()).collect();
    numbers.truncate(len);
    numbers
}

/// What a snapshot is made of.
#[derive(Clone, Debug)]
pub struct Builder {
    shape: Shape,
    trees: Vec<Vec<u64>>,
    config: SnapshotConfig,
    layers: Vec<Descriptor>,
}

impl Builder {
    /// With these parents.
    #[must_use]
    pub fn parents(mut self, parents: Vec<Digest>) -> Self {
        self.config.parents = parents;
        self
    }

    /// With this configuration.
    #[must_use]
    pub fn config(self, config: SnapshotConfig) -> Self {
        Self { config, ..self }
    }

    /// With more layers after the trees.
    #[must_use]
    pub fn layers(mut self, layers: Vec<Descriptor>) -> Self {
        self.layers.extend(layers);
        self
    }

    /// The snapshot.
    #[must_use]
    pub fn build(self) -> Snapshot {
        let Self { shape, trees, config, layers } = self;
        let config = Document::new(Kind::Blob, config.to_bytes());
        let trees: Vec<Tree> = trees.iter().map(|numbers| Tree::new(shape, numbers)).collect();
        let listed = trees.iter().map(|tree| Descriptor::of(media_type::TREE, &tree.document)).chain(layers).collect();
        let manifest = Manifest::snapshot(&config, listed, BTreeMap::new()).to_document();
        Snapshot { trees, config, manifest }
    }
}

/// Pages of one group and rank.
#[derive(Clone, Debug)]
pub struct Tree {
    /// K and V of each page.
    pub pages: Vec<Document>,
    /// The runs.
    pub runs: Vec<Document>,
    /// The page tree.
    pub document: Document,
    /// The same as a page manifest.
    pub flat: FlatManifest,
}

impl Tree {
    fn new(shape: Shape, numbers: &[u64]) -> Self {
        let page = |number| Document::new(Kind::Blob, shape.page(number));
        let pages: Vec<Document> = numbers.iter().flat_map(|n| [page(2 * n), page(2 * n + 1)]).collect();
        let flat = shape.flat_of(pages.chunks(2).map(|page| [page[0].digest, page[1].digest]));
        let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
        Self { pages, runs, document: tree.to_document(), flat }
    }
}

/// A snapshot and everything it reaches.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its page trees.
    pub trees: Vec<Tree>,
    /// Its configuration.
    pub config: Document,
    /// Its manifest.
    pub manifest: Document,
}

impl Snapshot {
    /// Its digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.manifest.digest
    }

    /// Nodes and the configuration, children before the nodes that list them.
    #[must_use]
    pub fn documents(&self) -> Vec<&Document> {
        self.trees.iter().flat_map(|tree| tree.runs.iter().chain([&tree.document])).chain([&self.config, &self.manifest]).collect()
    }

    /// Pages and documents, each once, children before the nodes that list them.
    #[must_use]
    pub fn blobs(&self) -> Vec<&Document> {
        let mut seen = HashSet::new();
        let pages = self.trees.iter().flat_map(|tree| &tree.pages);
        pages.chain(self.documents()).filter(|blob| seen.insert(blob.digest)).collect()
    }

    /// All of it as a stream of raw frames.
    #[must_use]
    pub fn stream(&self) -> Vec<u8> {
        frames::stream(self.blobs().into_iter().map(frames::of))
    }
}

/// A snapshot with a state tensor of `elements` bytes that are all the same byte of its payload: a
/// few bytes that take long to hash. Its value hash is wrong, which is found at the end. The
/// manifest comes last.
#[must_use]
pub fn repeated(elements: u64) -> Vec<Document> {
    let payload = Document::new(Kind::Blob, vec![7; 16]);
    let layout = Layout { tag: "x".into(), strides: Some(vec![0]), offset: Some(0) };
    let (of, u8) = (Limits::default(), pfr_schema::checkpoint::Dtype::U8);
    let mut tensor = Tensor::describe("t".into(), "recurrent".into(), None, vec![1], u8, u8, layout, &payload.bytes, &of).unwrap();
    tensor.shape = vec![elements];
    let key = Key {
        scheme: prefix::SCHEME.into(),
        prefix: Digest::sha256(b"prefix"),
        tokens: 16,
        alignment: 16,
        salt: String::new(),
        adapter: None,
    };
    let checkpoint = Document::new(Kind::Checkpoint, Checkpoint { abi: ABI.into(), key, tensors: vec![tensor] }.to_bytes());
    let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
    let layers = vec![Descriptor::of(media_type::CHECKPOINT, &checkpoint)];
    let manifest = Manifest::snapshot(&config, layers, BTreeMap::new()).to_document();
    vec![payload, checkpoint, config, manifest]
}
