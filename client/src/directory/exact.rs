//! Reads a directory with a `snapshot.json`: it must hold exactly the files that this lists.

use super::{Directory, Look, layout, zstd_frame};
use crate::error::{Error, Result};
use pfr_schema::container::{Child, Container};
use pfr_schema::snapshot::{MAX_BYTES, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, PageTree};
use pfr_schema::{Digest, FormatError, Kind};
use std::collections::{HashMap, HashSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};

impl Directory {
    pub(super) fn read_exact(&mut self) -> Result<()> {
        let path = self.root.path().join(layout::SNAPSHOT);
        let bytes = self.root.read(Path::new(layout::SNAPSHOT), MAX_BYTES)?;
        let manifest = Manifest::parse(&bytes, &self.limits).map_err(Error::document(&path))?;
        if !manifest.is_snapshot() {
            return Err(Error::Refused { path, reason: "is not the manifest of a snapshot".into() });
        }
        let files = layout::named_files(&manifest).map_err(|title| Error::Refused {
            path: path.clone(),
            reason: format!("a layer has the title {title:?}, which no file may have"),
        })?;
        // Of several files with the same bytes the first is the one read.
        let files: HashMap<Digest, PathBuf> = files.into_iter().rev().map(|(descriptor, path)| (descriptor.digest, path)).collect();
        self.set_manifest(Document::new(Kind::Manifest, bytes));
        self.read_config_of(&manifest, &files)?;
        let mut seen = HashSet::from([manifest.config.digest]);
        let mut stack = vec![(path, Container::Manifest(manifest))];
        while let Some((document, container)) = stack.pop() {
            for (i, child) in container.children().iter().enumerate() {
                // A set of all digests would be most of the memory that a push takes.
                let is_skipped = self.look == Look::Nothing && matches!(container, Container::Run(_));
                if is_skipped || !seen.insert(child.digest) {
                    continue;
                }
                let at = || place(&container, i);
                if child.kind.is_container() {
                    let (path, read) = self.read_container(&document, at, child, files.get(&child.digest))?;
                    if let Container::Tree(tree) = &read {
                        self.check_page_manifest(&path, tree)?;
                    }
                    stack.push((path, read));
                } else if let Some(file) = files.get(&child.digest) {
                    self.check_named(child, file)?;
                } else {
                    self.check_blob(&document, at, &child.digest, child.size.unwrap_or(0))?;
                }
            }
        }
        Ok(())
    }

    fn read_config_of(&mut self, manifest: &Manifest, files: &HashMap<Digest, PathBuf>) -> Result<()> {
        let default = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
        let config = match files.get(&manifest.config.digest) {
            Some(file) if self.root.exists(file)? => {
                let document = Document::new(Kind::Blob, self.root.read(file, MAX_BYTES)?);
                self.expect(&self.root.path().join(file), &manifest.config.digest, document)?
            }
            _ if default.digest == manifest.config.digest => default,
            _ => return Err(self.lost(layout::CONFIG)),
        };
        SnapshotConfig::parse(&config.bytes, &self.limits).map_err(Error::document(&self.root.path().join(layout::CONFIG)))?;
        self.add(config);
        Ok(())
    }

    fn read_container(
        &mut self,
        document: &Path,
        at: impl Fn() -> String,
        child: &Child,
        file: Option<&PathBuf>,
    ) -> Result<(PathBuf, Container)> {
        let limit = self.limits.document_bytes;
        let relative = file.cloned().unwrap_or_else(|| layout::blob(&child.digest));
        let path = self.root.path().join(&relative);
        let bytes = if self.root.exists(&relative)? {
            self.root.read(&relative, limit)?
        } else if self.root.exists(&layout::encoded(&relative))? {
            let encoded = layout::encoded(&relative);
            let mut bytes = Vec::new();
            let decoder = zstd_frame::decoder(self.root.file(&encoded)?.0);
            // A document above the limit is cut here. The check of its digest then refuses it.
            decoder.and_then(|d| d.take(limit).read_to_end(&mut bytes)).map_err(Error::io("decode", &layout::encoded(&path)))?;
            bytes
        } else {
            return Err(Error::MissingBlob { document: document.to_owned(), at: at(), digest: child.digest, path });
        };
        let named = Document { digest: Digest::of(child.digest.algorithm(), &bytes), kind: child.kind, bytes };
        let read = self.expect(&path, &child.digest, named)?;
        let container = Container::parse(child.kind, &read.bytes, &self.limits).map_err(Error::document(&path))?;
        self.add(read);
        Ok((path, container.ok_or_else(|| Error::Internal("a node is a plain blob".into()))?))
    }

    fn expect(&self, path: &Path, expected: &Digest, found: Document) -> Result<Document> {
        if found.digest == *expected {
            return Ok(found);
        }
        let source = FormatError::DigestMismatch { expected: expected.to_string(), found: found.digest.to_string() };
        Err(Error::Document { path: path.to_owned(), source })
    }

    fn check_named(&mut self, child: &Child, file: &Path) -> Result<()> {
        match self.hash_file(file)? {
            Some((digest, _)) if digest == child.digest => Ok(()),
            // The registry checks files of other algorithms.
            Some((_, _)) if child.digest.algorithm() != pfr_schema::Algorithm::Sha256 => {
                self.named.insert(child.digest, file.to_owned());
                Ok(())
            }
            Some(_) => Err(self.stale(file)),
            None => Err(self.lost(&file.display().to_string())),
        }
    }

    /// Checks the page manifest of a tree. It is for readers that do not know trees, and must have
    /// the same content.
    fn check_page_manifest(&self, tree_path: &Path, tree: &PageTree) -> Result<()> {
        let Some(expected) = tree.flat_digest else { return Ok(()) };
        let named = layout::page_manifest(&tree.group.name, tree.rank);
        let file = [Path::new(layout::PAGE_MANIFEST), Path::new(&named)]
            .into_iter()
            .find(|name| self.root.exists(name).unwrap_or(false))
            .ok_or_else(|| self.lost(&format!("{named} (of {})", tree_path.display())))?;
        let bytes = self.root.read(file, self.limits.document_bytes)?;
        if Digest::sha256(&bytes) == expected { Ok(()) } else { Err(self.stale(file)) }
    }

    fn lost(&self, name: &str) -> Error {
        let reason = format!("snapshot.json lists {name}, which is not there. If a pull made this directory, run that pull again");
        Error::Refused { path: self.root.path().to_owned(), reason }
    }

    fn stale(&self, file: &Path) -> Error {
        let reason = "is not what snapshot.json says. To push the directory as it is now, as another snapshot, remove snapshot.json";
        Error::Refused { path: self.root.path().join(file), reason: reason.into() }
    }
}

/// The place in a node that lists its `i`-th child.
fn place(container: &Container, i: usize) -> String {
    match container {
        Container::Manifest(_) => i.checked_sub(1).map_or("$.config".into(), |layer| format!("$.layers[{layer}]")),
        Container::Tree(_) => format!("$.runs[{i}]"),
        Container::Image(_) => format!("blob {i}"),
        Container::Checkpoint(_) => format!("$.tensors[{i}].payload_hash"),
        Container::Run(run) => {
            let components = usize::from(run.shape().components);
            format!("page {}, component {}", i / components, i % components)
        }
    }
}
