//! Small snapshots that share most of their blobs.

use bytes::Bytes;
use pfr_schema::api::MatchRequest;
use pfr_schema::checkpoint::Key;
use pfr_schema::snapshot::{Descriptor, SnapshotConfig};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, media_type, prefix};
use pfr_testkit::frames;
use pfr_testkit::snapshot::Shape;
use std::collections::BTreeMap;

/// Tokens that stand for a page of the first tree: lengths of several blocks and parts of blocks.
const TOKENS: u64 = 40;

/// A snapshot as a client has it.
#[derive(Clone)]
pub struct Snapshot {
    /// Its digest.
    pub digest: Digest,
    /// Its parents.
    pub parents: Vec<Digest>,
    /// Every blob by digest: what must come back.
    pub blobs: BTreeMap<Digest, Vec<u8>>,
    /// What to send, children before the nodes that list them.
    pub order: Vec<(Digest, Kind)>,
    /// The tokens that its state belongs to.
    pub tokens: Vec<u32>,
    /// Whether it lists them.
    lists_tokens: bool,
}

/// Without the bytes: a counterexample lists many snapshots.
impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} blobs and {} tokens", self.digest, self.blobs.len(), self.tokens.len())
    }
}

impl Snapshot {
    /// A snapshot of one tree for each list of page numbers.
    #[must_use]
    pub fn new(trees: &[Vec<u64>], parents: Vec<Digest>) -> Self {
        let pages = trees.first().map_or(&[][..], Vec::as_slice);
        let tokens: Vec<u32> = pages.iter().flat_map(|page| page * TOKENS..(page + 1) * TOKENS).map(|token| token as u32).collect();
        let lists_tokens = !pages.len().is_multiple_of(4);
        let list = Document::new(Kind::Blob, tokens.iter().flat_map(|token| token.to_le_bytes()).collect());
        let prefix = prefix::key(&fingerprint(), "", None, &tokens);
        let (scheme, salt) = (prefix::SCHEME.into(), String::new());
        let key = Key { scheme, prefix, tokens: tokens.len() as u64, alignment: 1, salt, adapter: None };
        let config =
            SnapshotConfig { parents: parents.clone(), fingerprint: Some(fingerprint()), prefix: Some(key), ..SnapshotConfig::default() };
        let layers = if lists_tokens { vec![Descriptor::of(media_type::TOKENS, &list)] } else { Vec::new() };
        let made = Shape::TINY.trees(trees.iter().map(Vec::as_slice)).config(config).layers(layers).build();
        let listed = lists_tokens.then_some(&list).into_iter();
        let blobs: Vec<&Document> = listed.chain(made.blobs()).collect();
        let order = blobs.iter().map(|blob| (blob.digest, blob.kind)).collect();
        let blobs = blobs.into_iter().map(|blob| (blob.digest, blob.bytes.clone())).collect();
        Self { digest: made.digest(), parents, blobs, order, tokens, lists_tokens }
    }

    /// Tokens of a request that need not be computed with this snapshot: all of its own, or with
    /// other ones behind them, those before the end of a page of its trees.
    #[must_use]
    pub fn saves(&self, request: &[u32]) -> u64 {
        let agree = self.tokens.iter().zip(request).take_while(|(a, b)| a == b).count();
        let page = Shape::TINY.geometry.page_size_tokens as usize;
        match agree == self.tokens.len() {
            true => agree as u64,
            false if self.lists_tokens => (agree / page * page) as u64,
            false => 0,
        }
    }

    /// A frame of each of `wanted` that is a blob of this snapshot, in the order to send.
    #[must_use]
    pub fn frames(&self, wanted: impl Fn(&Digest) -> bool) -> Vec<Bytes> {
        let wanted = self.order.iter().filter(|(digest, _)| wanted(digest));
        wanted.map(|(digest, kind)| frames::claiming(*kind, *digest, &self.blobs[digest])).collect()
    }
}

/// A question for state of these tokens.
#[must_use]
pub fn request(tokens: Vec<u32>) -> MatchRequest {
    MatchRequest { tokens, fingerprint: fingerprint(), salt: String::new(), adapter: None }
}

/// What stands for the configuration of the engine.
#[must_use]
pub fn fingerprint() -> Digest {
    Digest::sha256(b"engine configuration")
}
