//! Snapshot directories in ProcessFork's form: `page_manifest.json` and
//! `blobs/sha256/<2 hex>/<64 hex>`.
//!
//! The manifest's bytes are the canonical ones: compact JSON, fields in declared order, pages by
//! `ix`, sequences by id. Page numbers are given out in order of first appearance, so they do not
//! tell in which physical blocks the pages lay.

use crate::Engine;
use crate::cache::{BlockId, KvShape, PAGE_TOKENS, SeqId};
use crate::error::EngineError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name of the manifest in a snapshot directory.
pub const MANIFEST: &str = "page_manifest.json";
/// The name of the layout of pages.
pub const LAYOUT: &str = "paged-batchinvariant-v1";

/// One page's blobs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    /// Number of the page.
    pub ix: u32,
    /// `sha256:<hex>` of the K bytes.
    pub k: String,
    /// `sha256:<hex>` of the V bytes.
    pub v: String,
}

/// One sequence's pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogicalSeq {
    /// Name of the sequence.
    pub id: String,
    /// Its pages in token order.
    pub page_ixs: Vec<u32>,
    /// Tokens in the last page; 0 = full.
    pub fill_in_last_page: u32,
}

/// `page_manifest.json`. The order of the fields is the order of the bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always [`LAYOUT`].
    pub layout: String,
    /// Tokens in a page.
    pub page_size_tokens: u32,
    /// Number of layers.
    pub n_layers: u32,
    /// Number of KV heads.
    pub n_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Type of the elements. This engine always writes `bf16`.
    pub dtype: String,
    /// Pages, sorted by `ix`.
    pub pages: Vec<Page>,
    /// Sequences, sorted by `id`.
    pub logical_seqs: Vec<LogicalSeq>,
}

impl Manifest {
    /// An empty manifest of pages of this shape.
    #[must_use]
    pub fn new(shape: KvShape) -> Self {
        Self {
            layout: LAYOUT.into(),
            page_size_tokens: PAGE_TOKENS as u32,
            n_layers: shape.layers as u32,
            n_heads: shape.heads as u32,
            head_dim: shape.head_dim as u32,
            dtype: "bf16".into(),
            pages: Vec::new(),
            logical_seqs: Vec::new(),
        }
    }

    /// Reads a snapshot directory's manifest.
    ///
    /// # Errors
    /// [`EngineError::Io`], [`EngineError::Snapshot`] if it is not a manifest.
    pub fn read(dir: &Path) -> Result<Self, EngineError> {
        let path = dir.join(MANIFEST);
        let bytes = std::fs::read(&path).map_err(EngineError::io("read", &path))?;
        serde_json::from_slice(&bytes).map_err(|error| EngineError::Snapshot(format!("{}: {error}", path.display())))
    }
}

/// The amount that a [`SnapshotWriter`] has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Pages in the manifest.
    pub pages: usize,
    /// Blob files written by this call.
    pub blobs: usize,
    /// Bytes in these files.
    pub bytes: u64,
}

/// A snapshot directory being written. The manifest comes last, so a directory with one is
/// complete.
pub struct SnapshotWriter {
    dir: PathBuf,
    written: Written,
}

impl SnapshotWriter {
    /// Begins a snapshot in a directory, which must not hold a manifest yet. Creates the directory
    /// if it does not exist.
    ///
    /// # Errors
    /// [`EngineError::Snapshot`] if there is a manifest, [`EngineError::Io`].
    pub fn create(dir: &Path) -> Result<Self, EngineError> {
        std::fs::create_dir_all(dir).map_err(EngineError::io("create", dir))?;
        if dir.join(MANIFEST).exists() {
            return Err(EngineError::Snapshot(format!("{} already holds a snapshot: choose another directory", dir.display())));
        }
        Ok(Self { dir: dir.to_owned(), written: Written::default() })
    }

    /// Writes a blob unless it is there, and returns `sha256:<hex>`.
    ///
    /// # Errors
    /// [`EngineError::Io`].
    pub fn blob(&mut self, bytes: &[u8]) -> Result<String, EngineError> {
        let digest = pfr_schema::Digest::sha256(bytes).hex();
        let path = blob_path(&self.dir, &digest);
        if !path.exists() {
            self.create_parent(&path)?;
            std::fs::write(&path, bytes).map_err(EngineError::io("write", &path))?;
            self.written.blobs += 1;
            self.written.bytes += bytes.len() as u64;
        }
        Ok(format!("sha256:{digest}"))
    }

    /// Links a blob from another snapshot directory, or copies it if it cannot be linked.
    ///
    /// # Errors
    /// [`EngineError::Snapshot`] if `digest` is not `sha256:<64 hex>`, [`EngineError::Io`].
    pub fn share(&mut self, from: &Path, digest: &str) -> Result<(), EngineError> {
        let hex = digest.strip_prefix("sha256:").filter(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit()));
        let hex = hex.ok_or_else(|| EngineError::Snapshot(format!("{digest:?} is not a sha256 digest")))?;
        let (from, to) = (blob_path(from, hex), blob_path(&self.dir, hex));
        if to.exists() {
            return Ok(());
        }
        self.create_parent(&to)?;
        if std::fs::hard_link(&from, &to).is_err() {
            std::fs::copy(&from, &to).map_err(EngineError::io("copy", &from))?;
        }
        Ok(())
    }

    fn create_parent(&self, path: &Path) -> Result<(), EngineError> {
        let parent = path.parent().unwrap_or(&self.dir);
        std::fs::create_dir_all(parent).map_err(EngineError::io("create", parent))
    }

    /// Sorts and writes the manifest.
    ///
    /// # Errors
    /// [`EngineError::Io`].
    pub fn finish(mut self, mut manifest: Manifest) -> Result<Written, EngineError> {
        manifest.pages.sort_by_key(|page| page.ix);
        manifest.logical_seqs.sort_by(|a, b| a.id.cmp(&b.id));
        self.written.pages = manifest.pages.len();
        let path = self.dir.join(MANIFEST);
        let bytes = serde_json::to_vec(&manifest).map_err(|error| EngineError::Snapshot(error.to_string()))?;
        std::fs::write(&path, bytes).map_err(EngineError::io("write", &path))?;
        Ok(self.written)
    }
}

fn blob_path(dir: &Path, hex: &str) -> PathBuf {
    dir.join("blobs").join("sha256").join(&hex[..2]).join(hex)
}

/// Writes the given sequences of an engine as a snapshot directory. A block that several sequences
/// hold is one page; equal bytes are one blob.
///
/// # Errors
/// [`EngineError::NoSequence`], [`EngineError::Snapshot`] if the directory holds a snapshot,
/// [`EngineError::Io`].
pub fn write_snapshot_dir(dir: &Path, engine: &Engine, sequences: &[SeqId]) -> Result<Written, EngineError> {
    let mut writer = SnapshotWriter::create(dir)?;
    let mut manifest = Manifest::new(engine.cache().shape());
    let mut names: Vec<(String, SeqId)> = sequences.iter().map(|seq| (seq.to_string(), *seq)).collect();
    names.sort();
    names.dedup();
    let mut numbers: BTreeMap<BlockId, u32> = BTreeMap::new();
    for (id, seq) in names {
        let mut page_ixs = Vec::new();
        for block in engine.pages(seq)? {
            let next = numbers.len() as u32;
            let ix = *numbers.entry(*block).or_insert(next);
            if ix == next {
                let (k, v) = engine.page_bytes(*block);
                manifest.pages.push(Page { ix, k: writer.blob(k)?, v: writer.blob(v)? });
            }
            page_ixs.push(ix);
        }
        let fill_in_last_page = (engine.tokens(seq)?.len() % PAGE_TOKENS) as u32;
        manifest.logical_seqs.push(LogicalSeq { id, page_ixs, fill_in_last_page });
    }
    writer.finish(manifest)
}
