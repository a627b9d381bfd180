//! The snapshot directory: the interchange form on disk, as ProcessFork's store writes it and any
//! script can.
//!
//! ```text
//! page_manifest.json                 flat page manifest (one: group "main", rank 0 of 1)
//! page_manifest.<group>.<rank>.json  several: one for each group and rank
//! blobs/<algorithm>/<aa>/<hex>       raw bytes of pages and checkpoint payloads…
//! blobs/<algorithm>/<aa>/<hex>.zst   …or one zstd frame of them
//! config.json                        optional: snapshot configuration
//! checkpoint.json                    optional: hybrid checkpoint
//! tokens.bin                         optional: token ids, u32 little-endian
//! attachments/<name>                 optional: anything
//! snapshot.json                      only where the above does not say everything: the snapshot's manifest
//! ```
//!
//! Without `snapshot.json` the snapshot is built from the files (`plain`), always in the same way,
//! so that an unchanged directory has one digest. With it, the files must be exactly what it says
//! (`exact`), and page trees and runs lie in `blobs/` too. Everything is read in place. `layout`
//! has the names, for readers and writers alike.

pub mod blobs;
pub(crate) mod build;
mod exact;
pub(crate) mod files;
pub(crate) mod frames;
pub mod layout;
mod plain;
mod zstd_frame;

pub use crate::plan::Totals;
pub use build::Opaque;
pub use files::Root;

use crate::error::{Error, Result};
use crate::plan::{Item, PlanSource};
use pfr_schema::snapshot::{Manifest, SnapshotConfig};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, Limits};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A snapshot directory, checked: every document parses, every blob has a file, every raw file the
/// right length. A push of a path looks at files only when it knows which blobs it sends.
#[derive(Debug)]
pub struct Directory {
    root: Root,
    limits: Limits,
    look: Look,
    manifest: Document,
    /// The manifest, its nodes and its configuration, in memory.
    documents: HashMap<Digest, Document>,
    /// Files outside of `blobs/`.
    named: HashMap<Digest, PathBuf>,
}

/// Which files of blobs are looked at while the documents are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    All,
    Nothing,
    /// Of this blob.
    Only(Digest),
}

impl Look {
    fn at(self, digest: &Digest) -> bool {
        match self {
            Self::All => true,
            Self::Nothing => false,
            Self::Only(wanted) => wanted == *digest,
        }
    }
}

impl Directory {
    /// Reads and checks the directory at `path`, all but the contents of pages. Blocks.
    ///
    /// # Errors
    /// [`Error::Document`] with the place in the file, [`Error::MissingBlob`] and
    /// [`Error::WrongLength`] with the JSON path and the digest, [`Error::Refused`] for symbolic
    /// links that leave the directory, for anything that is not a regular file, and for names that
    /// no file may have.
    pub fn open(path: &Path, limits: &Limits) -> Result<Self> {
        Self::read(path, limits, Look::All)
    }

    /// The same without a look at the files of pages and checkpoint payloads: a push needs only
    /// those that the registry lacks.
    ///
    /// # Errors
    /// Those of [`Self::open`] that are about documents.
    pub(crate) fn open_documents(path: &Path, limits: &Limits) -> Result<Self> {
        Self::read(path, limits, Look::Nothing)
    }

    /// Looks at the files of these blobs, if none was looked at before. Blocks.
    ///
    /// # Errors
    /// Those of [`Self::open`] that are about the file of a blob; [`Error::Refused`] if the
    /// directory is not the one that was read.
    pub(crate) fn check(&self, blobs: &[Item]) -> Result<()> {
        if self.look == Look::All {
            return Ok(());
        }
        for item in blobs {
            let Some(relative) = self.file_of(&item.digest) else { continue };
            let is_well = match self.root.length(&relative) {
                Ok(Some(found)) => item.size.is_none_or(|expected| expected == found),
                Ok(None) => self.root.exists(&layout::encoded(&relative)).unwrap_or(false),
                Err(_) => false,
            };
            if !is_well {
                // Read again, to say which document lists it. If none does any more, this is
                // another snapshot now.
                Self::read(self.root.path(), &self.limits, Look::Only(item.digest))?;
                let reason = "it changed while it was being pushed: push again".into();
                return Err(Error::Refused { path: self.root.path().join(relative), reason });
            }
        }
        Ok(())
    }

    fn read(path: &Path, limits: &Limits, look: Look) -> Result<Self> {
        let root = Root::open(path)?;
        let mut directory = Self {
            root,
            limits: limits.clone(),
            look,
            manifest: Document { digest: Digest::sha256(b""), kind: Kind::Manifest, bytes: Vec::new() },
            documents: HashMap::new(),
            named: HashMap::new(),
        };
        if directory.root.exists(Path::new(layout::SNAPSHOT))? {
            directory.read_exact()?;
        } else {
            directory.read_plain()?;
        }
        Ok(directory)
    }

    /// The same snapshot with other parents in its configuration.
    ///
    /// # Errors
    /// [`Error::Refused`] for more than two.
    pub fn with_parents(mut self, parents: Vec<Digest>) -> Result<Self> {
        if parents.len() > 2 {
            let reason = format!("a snapshot has at most 2 parents, found {}", parents.len());
            return Err(Error::Refused { path: self.root.path().to_owned(), reason });
        }
        let mut manifest = self.manifest()?;
        let path = self.root.path().join(layout::CONFIG);
        let old = self.documents.remove(&manifest.config.digest).map(|d| d.bytes).unwrap_or_default();
        let config = SnapshotConfig::parse(&old, &self.limits).map_err(Error::document(&path))?;
        // If the parents are the same, the bytes stay as they are.
        let bytes = if config.parents == parents { old } else { SnapshotConfig { parents, ..config }.to_bytes() };
        let config = Document::new(Kind::Blob, bytes);
        if config.digest != manifest.config.digest {
            (manifest.config.digest, manifest.config.size) = (config.digest, config.bytes.len() as u64);
            self.documents.remove(&self.manifest.digest);
            self.set_manifest(manifest.to_document());
        }
        self.add(config);
        Ok(self)
    }

    /// The snapshot's digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.manifest.digest
    }

    /// The snapshot's manifest.
    ///
    /// # Errors
    /// None for a directory that was opened; the type is the parser's.
    pub fn manifest(&self) -> Result<Manifest> {
        Manifest::parse(&self.manifest.bytes, &self.limits).map_err(Error::document(self.root.path()))
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// How much the snapshot holds.
    ///
    /// # Errors
    /// None for a directory that was opened; the type is the parser's.
    pub fn totals(&self) -> Result<Totals> {
        let counted = |d: &&Document| matches!(d.kind, Kind::Manifest | Kind::Tree | Kind::Checkpoint);
        Totals::of(self.documents.values().filter(counted), &self.limits)
    }

    /// The file with a blob's bytes, without `.zst`; `None` if the bytes are in memory.
    pub(crate) fn file_of(&self, digest: &Digest) -> Option<PathBuf> {
        if self.documents.contains_key(digest) {
            return None;
        }
        Some(self.named.get(digest).cloned().unwrap_or_else(|| layout::blob(digest)))
    }

    /// The existing file that holds a blob, for messages.
    pub(crate) fn path_for_people(&self, digest: &Digest) -> Option<PathBuf> {
        let relative = self.file_of(digest)?;
        let path = self.root.path().join(&relative);
        let encoded = layout::encoded(&path);
        [path, encoded].into_iter().find(|p| p.exists())
    }

    fn add(&mut self, document: Document) {
        self.documents.insert(document.digest, document);
    }

    fn set_manifest(&mut self, manifest: Document) {
        self.manifest = manifest.clone();
        self.add(manifest);
    }
}

impl PlanSource for Directory {
    const NEAR: bool = true;

    async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        let find = |item: &Item| self.documents.get(&item.digest).cloned();
        items.iter().map(|item| find(item).ok_or_else(|| Error::Internal(format!("{} was not read", item.digest)))).collect()
    }
}

#[cfg(test)]
mod tests;
