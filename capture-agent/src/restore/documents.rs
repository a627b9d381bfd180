//! A snapshot's documents, read from the local store or on their way to it; lists of pages only
//! when the plan has found that they fit.

use super::source::Source;
use crate::engines::MAX_LOGITS;
use crate::error::Result;
use pfr_schema::checkpoint::{self, Checkpoint};
use pfr_schema::engine::Oracle;
use pfr_schema::run::Run;
use pfr_schema::shards::Shards;
use pfr_schema::snapshot::{Manifest, SnapshotConfig};
use pfr_schema::tree::PageTree;
use pfr_schema::{Digest, FormatError, json, media_type};

/// What a snapshot says of itself.
#[derive(Debug)]
pub(super) struct Documents {
    pub digest: Digest,
    /// Where its blobs are read from.
    pub source: Source,
    pub config: SnapshotConfig,
    /// Each tree with the digests of its pages: page by page, component by component.
    pub trees: Vec<(PageTree, Vec<Digest>)>,
    /// By rank.
    pub checkpoints: Vec<(u32, Checkpoint)>,
    /// `None` if there is no such layer.
    pub tokens: Option<Vec<u32>>,
    pub oracle: Option<Oracle>,
    /// How the engine's ranks shared the state, if it said so.
    pub shards: Option<Shards>,
    /// Whether it may be cut anew for an engine that differs only in its ranks.
    pub reshard: bool,
}

impl Documents {
    pub async fn read(source: &Source, digest: Digest, reshard: bool) -> Result<Self> {
        let limits = source.limits();
        let manifest = manifest(source, &digest).await?;
        if !manifest.is_snapshot() {
            return Err(field("$.artifactType", media_type::SNAPSHOT, format!("{:?}", manifest.artifact_type)).into());
        }
        let config = SnapshotConfig::parse(&source.read(&manifest.config.digest).await?, limits)?;
        let mut trees = Vec::new();
        for layer in manifest.layers_of(media_type::TREE) {
            let tree = PageTree::parse(&source.read(&layer.digest).await?, limits)?;
            let mut digests = Vec::new();
            for (run, shape) in tree.run_shapes() {
                let run = Run::parse(&source.read(&run).await?, limits)?;
                if run.shape() != shape {
                    return Err(field("a run", format!("{shape:?}"), format!("{:?}", run.shape())).into());
                }
                digests.extend_from_slice(run.digests());
            }
            trees.push((tree, digests));
        }
        let mut checkpoints = Vec::new();
        for layer in manifest.layers_of(media_type::CHECKPOINT) {
            let checkpoint = Checkpoint::parse(&source.read(&layer.digest).await?, limits)?;
            checkpoints.push((checkpoint::rank(layer)?, checkpoint));
        }
        let tokens = match only(&manifest, media_type::TOKENS)? {
            Some(digest) => Some(tokens(&source.read(&digest).await?)?),
            None => None,
        };
        let oracle = match only(&manifest, media_type::ORACLE)? {
            Some(digest) => Some(oracle(&source.read(&digest).await?)?),
            None => None,
        };
        let shards = match only(&manifest, media_type::SHARDS)? {
            Some(digest) => Some(Shards::parse(&source.read(&digest).await?, limits)?),
            None => None,
        };
        Ok(Self { digest, source: source.clone(), config, trees, checkpoints, tokens, oracle, shards, reshard })
    }
}

/// The manifest of a snapshot.
async fn manifest(source: &Source, digest: &Digest) -> Result<Manifest> {
    match source {
        Source::Store(store) => Ok(store.manifest(digest).await?),
        Source::Registry { .. } => Ok(Manifest::parse(&source.read(digest).await?, source.limits())?),
    }
}

/// The one layer of a type.
fn only(manifest: &Manifest, media_type: &str) -> Result<Option<Digest>, FormatError> {
    let mut layers = manifest.layers_of(media_type).map(|layer| layer.digest);
    let first = layers.next();
    match layers.count() {
        0 => Ok(first),
        more => Err(field("$.layers", format!("at most one layer of type {media_type}"), (more + 1).to_string())),
    }
}

pub(super) fn tokens(bytes: &[u8]) -> Result<Vec<u32>, FormatError> {
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(field("tokens", "whole u32 numbers", format!("{} bytes", bytes.len())));
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

pub(super) fn oracle(bytes: &[u8]) -> Result<Oracle, FormatError> {
    let oracle: Oracle = json::parse("oracle", bytes, bytes.len() as u64)?;
    if oracle.top.is_empty() || oracle.top.len() > MAX_LOGITS {
        return Err(field("oracle.top", format!("1 to {MAX_LOGITS} logits"), oracle.top.len().to_string()));
    }
    Ok(oracle)
}

pub(super) fn field(path: &str, expected: impl Into<String>, found: impl Into<String>) -> FormatError {
    FormatError::Field { document: "snapshot", path: path.into(), expected: expected.into(), found: found.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_readers_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let read = tokens(&bytes);
            prop_assert_eq!(read.is_ok(), bytes.len() % 4 == 0);
            prop_assert!(oracle(&bytes).is_err());
        }

        #[test]
        fn tokens_come_back(tokens_in in proptest::collection::vec(any::<u32>(), 0..100)) {
            let bytes: Vec<u8> = tokens_in.iter().flat_map(|token| token.to_le_bytes()).collect();
            prop_assert_eq!(tokens(&bytes).expect("whole numbers"), tokens_in);
        }
    }
}
