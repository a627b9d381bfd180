//! The documents of a snapshot. Trees, checkpoints and tokens depend on the state alone; the
//! configuration tells its origin.

use super::capture::Capture;
use super::copy::Copied;
use super::inventory::Paged;
use crate::engines::Engine;
use crate::error::{Error, Result};
use pfr_schema::checkpoint::{self, Checkpoint};
use pfr_schema::engine::Oracle;
use pfr_schema::flat::{self, FlatManifest};
use pfr_schema::run::{self, Run};
use pfr_schema::snapshot::{Descriptor, Manifest, RANK, SnapshotConfig};
use pfr_schema::tree::{self, Document, PageTree, RunRef, TreeSequence};
use pfr_schema::{Digest, Kind, Limits, media_type, prefix};
use std::collections::{BTreeMap, BTreeSet};

/// The one sequence of a tree. The engine's own name would give one state two digests.
const SEQUENCE: &str = "0";

/// Documents in the order in which a store takes them, and the layers that the manifest lists.
#[derive(Debug, Default)]
pub(super) struct Documents {
    pub documents: Vec<Document>,
    layers: Vec<Descriptor>,
}

/// The origin of a snapshot, for its configuration.
#[derive(Debug)]
pub(super) struct Origin {
    pub agent: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub parent: Option<Digest>,
    pub created: String,
}

impl Documents {
    fn layer(&mut self, media_type: &str, document: Document, rank: Option<u32>) {
        let mut layer = Descriptor::of(media_type, &document);
        layer.annotations.extend(rank.map(|rank| (RANK.to_owned(), rank.to_string())));
        self.layers.push(layer);
        self.documents.push(document);
    }

    /// Trees, checkpoints and tokens.
    pub fn of_state(engine: &Engine, capture: &Capture, copied: &Copied, limits: &Limits) -> Result<Self> {
        let mut documents = Self::default();
        let several = engine.world() > 1;
        for paged in &capture.inventory.paged {
            let digests = &copied.digests[paged.sources.clone()];
            let (tree, runs) = tree(paged, digests, capture.sequence.boundary, engine.world(), limits)?;
            documents.documents.extend(runs);
            documents.layer(media_type::TREE, tree.to_document(), several.then_some(paged.rank));
        }
        let key = key(engine, capture);
        for rank in capture.inventory.tensors.iter().map(|tensor| tensor.rank).collect::<BTreeSet<_>>() {
            let of_rank = capture.inventory.tensors.iter().filter(|tensor| tensor.rank == rank);
            let tensors: Option<Vec<_>> = of_rank.map(|tensor| copied.tensors.get(&tensor.source).cloned()).collect();
            let mut tensors = tensors.ok_or_else(|| Error::Internal("a state tensor was not read".into()))?;
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            let checkpoint = Checkpoint { abi: checkpoint::ABI.into(), key: key.clone(), tensors };
            let document = Document::new(Kind::Checkpoint, checkpoint.to_bytes());
            documents.layer(media_type::CHECKPOINT, document, several.then_some(rank));
        }
        let tokens = capture.sequence.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        documents.layer(media_type::TOKENS, Document::new(Kind::Blob, tokens), None);
        if let Some(shards) = engine.shards() {
            documents.layer(media_type::SHARDS, Document::new(Kind::Blob, shards.to_bytes()), None);
        }
        Ok(documents)
    }

    /// Adds the logits of the next step.
    pub fn add_oracle(&mut self, oracle: &Oracle) -> Result<()> {
        let json = serde_json::to_vec(oracle).map_err(|e| Error::Internal(e.to_string()))?;
        self.layer(media_type::ORACLE, Document::new(Kind::Blob, json), None);
        Ok(())
    }

    /// Adds configuration and manifest; the manifest's digest is the snapshot's.
    pub fn finish(mut self, engine: &Engine, capture: &Capture, origin: Origin) -> (Digest, Vec<Document>) {
        let sequence = &capture.sequence;
        let config = SnapshotConfig {
            agent: origin.agent,
            engine: engine.deployment().get("engine").and_then(|value| value.as_str()).map(Into::into),
            deployment: engine.deployment().clone(),
            fingerprint: Some(engine.fingerprint()),
            boundary: Some(sequence.boundary),
            prefix: Some(key(engine, capture)),
            sampling: sequence.sampling.clone(),
            unrecorded: sequence.unrecorded.clone(),
            parents: origin.parent.into_iter().collect(),
            exactness: Some(capture.exactness),
            created: Some(origin.created),
        };
        let config = Document::new(Kind::Blob, config.to_bytes());
        let manifest = Manifest::snapshot(&config, self.layers, origin.labels).to_document();
        let digest = manifest.digest;
        self.documents.extend([config, manifest]);
        (digest, self.documents)
    }
}

fn key(engine: &Engine, capture: &Capture) -> checkpoint::Key {
    let sequence = &capture.sequence;
    let computed = &sequence.tokens[..sequence.boundary as usize];
    checkpoint::Key {
        scheme: prefix::SCHEME.into(),
        prefix: prefix::key(&engine.fingerprint(), &sequence.salt, sequence.adapter.as_deref(), computed),
        tokens: sequence.boundary,
        alignment: 1,
        salt: sequence.salt.clone(),
        adapter: sequence.adapter.clone(),
    }
}

/// The tree of a group. The ix of a page is its column, so the tree of a window starts at its first
/// column.
fn tree(paged: &Paged, digests: &[Digest], boundary: u64, world: u32, limits: &Limits) -> Result<(PageTree, Vec<Document>)> {
    let layout = &paged.group.layout;
    let group = tree::Group { name: layout.name.clone(), kind: layout.kind };
    let column = |at: u64| u32::try_from(at).map_err(|_| Error::Invalid(format!("column {at} of group {:?}", layout.name)));
    let ixs: Vec<u32> = (paged.columns.start..paged.columns.end).map(column).collect::<Result<_>>()?;
    let fill = if ixs.is_empty() { 0 } else { (boundary % u64::from(layout.block_tokens)) as u32 };
    if let Some(geometry) = layout.geometry {
        let pages = ixs.iter().zip(digests.chunks_exact(2)).map(|(ix, kv)| flat::Page { ix: *ix, k: kv[0], v: kv[1] });
        let sequence = flat::Sequence { id: SEQUENCE.into(), page_ixs: ixs.clone(), fill_in_last_page: fill };
        let manifest = FlatManifest::new(geometry, pages.collect(), vec![sequence], limits)?;
        return Ok(PageTree::from_flat(&manifest, group, paged.rank, world)?);
    }
    let components = layout.components.len();
    let (mut runs, mut documents, mut rest) = (Vec::new(), Vec::new(), digests);
    for pages in run::cut(digests.iter().step_by(components)) {
        let (now, later) = rest.split_at(pages * components);
        let run = Run::new(components as u8, paged.group.page_bytes(), now.to_vec())?;
        let document = Document::new(Kind::Run, run.to_bytes());
        runs.push(RunRef { digest: document.digest, pages: pages as u32 });
        documents.push(document);
        rest = later;
    }
    let tree = PageTree {
        schema: tree::SCHEMA.into(),
        layout: layout.layout.clone(),
        page_size_tokens: layout.block_tokens,
        page_bytes: paged.group.page_bytes(),
        geometry: None,
        components: layout.components.iter().map(|component| component.name.clone()).collect(),
        group,
        rank: paged.rank,
        world,
        runs,
        ix: ixs.iter().copied().collect(),
        sequences: vec![TreeSequence { id: SEQUENCE.into(), ix: ixs.into_iter().collect(), fill }],
        flat_digest: None,
    };
    Ok((tree, documents))
}
