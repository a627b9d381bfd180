//! Reading a directory without `snapshot.json`: its files are the snapshot.

use super::build::{self, Opaque, Parts};
use super::files::hash;
use super::{Directory, Look, layout};
use crate::error::{Error, Result};
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::flat::FlatManifest;
use pfr_schema::snapshot::SnapshotConfig;
use pfr_schema::tree::Document;
use pfr_schema::{Algorithm, Digest, FormatError, Kind};
use std::collections::HashSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};

impl Directory {
    pub(super) fn read_plain(&mut self) -> Result<()> {
        let mut parts = Parts::default();
        let names = self.page_manifests()?;
        let shards: Vec<(String, u32)> = names.iter().filter_map(|name| layout::group_and_rank(name)).collect();
        let mut seen = HashSet::new();
        for name in &names {
            let shard = build::shard(layout::group_and_rank(name).as_ref(), &shards);
            let path = self.root.path().join(name);
            let flat = {
                let bytes = self.root.read(Path::new(name), self.limits.document_bytes)?;
                FlatManifest::parse(&bytes, &self.limits).map_err(Error::document(&path))?
            };
            self.check_pages(&path, &flat, &mut seen)?;
            let (tree, runs) = build::tree(&flat, shard).map_err(Error::document(&path))?;
            runs.into_iter().for_each(|run| self.add(run));
            parts.trees.push(tree.clone());
            self.add(tree);
        }
        parts.checkpoint = self.read_checkpoint(&mut seen)?;
        if let Some(file) = self.hash_file(Path::new(layout::TOKENS))? {
            parts.tokens = Some(file);
        }
        for name in self.root.names(Path::new(layout::ATTACHMENTS))? {
            let path = Path::new(layout::ATTACHMENTS).join(&name);
            if !layout::is_component(&name) {
                return Err(Error::Refused { path: self.root.path().join(path), reason: "no attachment may have this name".into() });
            }
            if let Some((digest, size)) = self.hash_file(&path)? {
                parts.attachments.push(Opaque { name, digest, size });
            }
        }
        let config = self.read_config()?;
        self.set_manifest(build::manifest(&config, &parts));
        self.add(config);
        // Finds here what the registry would refuse later, such as too many attachments.
        self.manifest().map(|_| ())
    }

    /// Names of the page manifests: the one, or one for each group and rank.
    fn page_manifests(&self) -> Result<Vec<String>> {
        let mut several: Vec<(String, u32)> =
            self.root.names(Path::new(""))?.iter().filter_map(|name| layout::group_and_rank(name)).collect();
        several.sort();
        let refuse = |reason: &str| Err(Error::Refused { path: self.root.path().to_owned(), reason: reason.to_owned() });
        match (self.root.exists(Path::new(layout::PAGE_MANIFEST))?, several.is_empty()) {
            (true, true) => Ok(vec![layout::PAGE_MANIFEST.to_owned()]),
            (false, false) => Ok(several.iter().map(|(group, rank)| layout::page_manifest(group, *rank)).collect()),
            (true, false) => refuse("has both page_manifest.json and page_manifest.<group>.<rank>.json; keep the ones that are meant"),
            (false, true) => {
                refuse("is no snapshot directory: there is no page_manifest.json in it. If a pull made this directory, run that pull again")
            }
        }
    }

    fn read_config(&self) -> Result<Document> {
        let path = Path::new(layout::CONFIG);
        if !self.root.exists(path)? {
            return Ok(Document::new(Kind::Blob, SnapshotConfig::default().to_bytes()));
        }
        let bytes = self.root.read(path, pfr_schema::snapshot::MAX_BYTES)?;
        SnapshotConfig::parse(&bytes, &self.limits).map_err(Error::document(&self.root.path().join(path)))?;
        Ok(Document::new(Kind::Blob, bytes))
    }

    fn read_checkpoint(&mut self, seen: &mut HashSet<Digest>) -> Result<Option<Document>> {
        let relative = Path::new(layout::CHECKPOINT);
        if !self.root.exists(relative)? {
            return Ok(None);
        }
        let path = self.root.path().join(relative);
        let bytes = self.root.read(relative, self.limits.document_bytes)?;
        let checkpoint = Checkpoint::parse(&bytes, &self.limits).map_err(Error::document(&path))?;
        for (i, tensor) in checkpoint.tensors.iter().enumerate() {
            if seen.insert(tensor.payload_hash) {
                self.check_blob(&path, || format!("$.tensors[{i}].payload_hash"), &tensor.payload_hash, tensor.payload_bytes)?;
            }
        }
        let document = Document::new(Kind::Checkpoint, bytes);
        self.add(document.clone());
        Ok(Some(document))
    }

    pub(super) fn check_pages(&self, path: &Path, flat: &FlatManifest, seen: &mut HashSet<Digest>) -> Result<()> {
        // A set of all digests would be most of the memory that a push takes.
        if self.look == Look::Nothing {
            return Ok(());
        }
        for (i, page) in flat.pages().iter().enumerate() {
            for (component, digest) in [("k", &page.k), ("v", &page.v)] {
                if seen.insert(*digest) {
                    self.check_blob(path, || format!("$.pages[{i}].{component}"), digest, flat.page_bytes())?;
                }
            }
        }
        Ok(())
    }

    /// Checks that a blob is there, and the length of a raw one. The length of an encoded blob is
    /// checked when it is read.
    pub(super) fn check_blob(&self, document: &Path, at: impl Fn() -> String, digest: &Digest, expected: u64) -> Result<()> {
        if !self.look.at(digest) {
            return Ok(());
        }
        let relative = layout::blob(digest);
        let path = self.root.path().join(&relative);
        match self.root.length(&relative)? {
            Some(found) if found == expected => Ok(()),
            Some(found) => Err(Error::WrongLength { path, document: document.to_owned(), at: at(), expected, found }),
            None if self.root.exists(&layout::encoded(&relative))? => Ok(()),
            None => Err(Error::MissingBlob { document: document.to_owned(), at: at(), digest: *digest, path }),
        }
    }

    /// Digest and length of a file whose digest is not known yet.
    pub(super) fn hash_file(&mut self, relative: &Path) -> Result<Option<(Digest, u64)>> {
        if !self.root.exists(relative)? {
            return Ok(None);
        }
        let path = self.root.path().join(relative);
        let (file, length) = self.root.file(relative)?;
        // Before it is read: a file with holes costs nothing to make and hours to hash.
        if length > self.limits.blob_bytes {
            let source = FormatError::TooLarge { what: "a blob in bytes", found: length, limit: self.limits.blob_bytes };
            return Err(Error::Document { path, source });
        }
        let (digest, hashed) = hash(Algorithm::Sha256, file.take(length + 1)).map_err(Error::io("read", &path))?;
        if hashed != length {
            return Err(Error::Changed { path, reason: format!("it had {length} bytes, then {hashed} or more") });
        }
        self.named.insert(digest, PathBuf::from(relative));
        Ok(Some((digest, length)))
    }
}
