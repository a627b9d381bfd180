//! Builds the snapshot of a directory without `snapshot.json`: a pure function of its files, for
//! readers and writers.

use pfr_schema::flat::FlatManifest;
use pfr_schema::snapshot::{Descriptor, Manifest, TITLE};
use pfr_schema::tree::{Document, Group, GroupKind, PageTree};
use pfr_schema::{Digest, FormatError, media_type};
use std::collections::BTreeMap;

/// A file that `pf` does not parse.
#[derive(Clone, Debug)]
pub struct Opaque {
    /// The file's name.
    pub name: String,
    /// Digest of its bytes.
    pub digest: Digest,
    /// How many bytes it has.
    pub size: u64,
}

/// The documents a directory consists of, as parsed.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// Trees by group and rank.
    pub trees: Vec<Document>,
    pub checkpoint: Option<Document>,
    pub tokens: Option<(Digest, u64)>,
    /// Sorted by name.
    pub attachments: Vec<Opaque>,
}

/// The group, rank and world of a page manifest: of the only one, or of those named by group and
/// rank.
pub(crate) fn shard(name: Option<&(String, u32)>, all: &[(String, u32)]) -> (Group, u32, u32) {
    match name {
        None => (Group::default(), 0, 1),
        Some((group, rank)) => {
            let highest = all.iter().filter(|(other, _)| other == group).map(|(_, rank)| *rank).max().unwrap_or(0);
            (Group { name: group.clone(), kind: GroupKind::FullAttention }, *rank, highest.saturating_add(1))
        }
    }
}

/// A page tree and its runs.
pub(crate) fn tree(flat: &FlatManifest, shard: (Group, u32, u32)) -> Result<(Document, Vec<Document>), FormatError> {
    let (group, rank, world) = shard;
    let (tree, runs) = PageTree::from_flat(flat, group, rank, world)?;
    Ok((tree.to_document(), runs))
}

/// The manifest: page trees, checkpoint, tokens, attachments, in this order.
pub(crate) fn manifest(config: &Document, parts: &Parts) -> Document {
    let opaque = |media_type: &str, digest, size| Descriptor { media_type: media_type.into(), digest, size, annotations: BTreeMap::new() };
    let mut layers: Vec<Descriptor> = parts.trees.iter().map(|tree| Descriptor::of(media_type::TREE, tree)).collect();
    layers.extend(parts.checkpoint.iter().map(|checkpoint| Descriptor::of(media_type::CHECKPOINT, checkpoint)));
    layers.extend(parts.tokens.iter().map(|(digest, size)| opaque(media_type::TOKENS, *digest, *size)));
    layers.extend(parts.attachments.iter().map(|file| {
        let annotations = BTreeMap::from([(TITLE.to_owned(), file.name.clone())]);
        Descriptor { annotations, ..opaque(media_type::OCTETS, file.digest, file.size) }
    }));
    Manifest::snapshot(config, layers, BTreeMap::new()).to_document()
}
