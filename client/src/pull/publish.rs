//! The documents of a snapshot directory: which there are, whether another snapshot's are present,
//! and the order in which they appear.

use super::writer::Writer;
use crate::directory::{build, layout};
use crate::error::{Error, Result};
use build::{Opaque, Parts};
use pfr_schema::container::Container;
use pfr_schema::flat::FlatManifest;
use pfr_schema::run::Run;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig, TITLE};
use pfr_schema::tree::{Document, PageTree};
use pfr_schema::{Digest, Kind, Limits, media_type};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Documents to write, in memory.
#[derive(Debug, Default)]
pub(super) struct Publication {
    /// Page manifests by name. They appear last: a directory that has them is complete.
    page_manifests: BTreeMap<String, Vec<u8>>,
    /// Other documents directly in the directory, by name.
    documents: BTreeMap<String, Vec<u8>>,
    /// All nodes of the snapshot.
    nodes: Arc<[Document]>,
    /// Positions of those that lie in `blobs/`.
    in_blobs: Vec<usize>,
    attachments: HashSet<PathBuf>,
    /// Blobs that lie in one place and belong in another as well.
    copies: Vec<(Digest, PathBuf)>,
}

impl Publication {
    /// Takes the manifest of a snapshot, all nodes that it lists, and its configuration.
    pub fn new(manifest: &Manifest, nodes: Arc<[Document]>, config: Document, limits: &Limits) -> Result<Self> {
        let own = nodes.iter().find(|d| d.kind == Kind::Manifest).ok_or_else(|| Error::Internal("no manifest".into()))?;
        let snapshot = own.digest;
        let received = |source| Error::Received { digest: snapshot, source };
        SnapshotConfig::parse(&config.bytes, limits).map_err(received)?;
        let files = layout::named_files(manifest).map_err(|title| Error::Internal(format!("title {title:?} was accepted")))?;
        let named: HashMap<Digest, &PathBuf> = files.iter().skip(1).rev().map(|(d, path)| (d.digest, path)).collect();
        let flats = flats(manifest, &nodes, limits)?;
        let count = flats.len();
        // Unless every layer but the trees has its own file, the files cannot describe the
        // snapshot.
        let all_named = files.len() - 1 == manifest.layers.len() - count;
        let is_described = all_named && rebuilt(manifest, &flats, &nodes, &config)? == Some(snapshot);

        let mut publication = Self { nodes: Arc::clone(&nodes), ..Self::default() };
        // Each is dropped once it is text: both forms are long.
        for (group, rank, flat) in flats.into_iter().flatten() {
            let name = if count == 1 { layout::PAGE_MANIFEST.to_owned() } else { layout::page_manifest(&group, rank) };
            if publication.page_manifests.insert(name, flat.to_bytes()).is_some() {
                let reason = format!("has two page trees of group {group:?}, rank {rank}; pull it into a store");
                return Err(Error::Unsuitable { digest: snapshot, reason });
            }
        }
        if config.bytes != SnapshotConfig::default().to_bytes() {
            publication.documents.insert(layout::CONFIG.into(), config.bytes.clone());
        }
        for (at, checkpoint) in nodes.iter().enumerate().filter(|(_, node)| node.kind == Kind::Checkpoint) {
            match named.get(&checkpoint.digest).and_then(|path| path.to_str()) {
                Some(name) => drop(publication.documents.insert(name.to_owned(), checkpoint.bytes.clone())),
                None => publication.in_blobs.push(at),
            }
        }
        publication.copies = copies(&files, &named, &nodes, limits)?;
        publication.attachments = files.iter().map(|(_, path)| path.clone()).collect();
        if !is_described {
            publication.documents.insert(layout::SNAPSHOT.into(), own.bytes.clone());
            let listing = nodes.iter().enumerate().filter(|(_, node)| matches!(node.kind, Kind::Run | Kind::Tree));
            publication.in_blobs.extend(listing.map(|(at, _)| at));
        }
        Ok(publication)
    }

    /// Refuses a directory that holds documents of another snapshot.
    pub fn check_free(&self, root: &Path) -> Result<()> {
        let list = |path: &Path| -> Result<Vec<String>> {
            match std::fs::read_dir(path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
                Err(error) => Err(Error::io("list", path)(error)),
                Ok(entries) => Ok(entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect()),
            }
        };
        for name in list(root)? {
            let known = [layout::CONFIG, layout::CHECKPOINT, layout::SNAPSHOT, layout::PAGE_MANIFEST].contains(&name.as_str());
            let tokens = name == layout::TOKENS && !self.attachments.contains(Path::new(&name));
            if !known && !tokens && layout::group_and_rank(&name).is_none() {
                continue;
            }
            let path = root.join(&name);
            let expected = self.documents.get(&name).or_else(|| self.page_manifests.get(&name));
            let same = expected.is_some_and(|bytes| {
                let length = std::fs::symlink_metadata(&path).map_or(0, |m| m.len());
                length == bytes.len() as u64 && std::fs::read(&path).is_ok_and(|found| found == *bytes)
            });
            if !same {
                return Err(Error::OtherSnapshot { path });
            }
        }
        let attachments = root.join(layout::ATTACHMENTS);
        for name in list(&attachments)? {
            let relative = Path::new(layout::ATTACHMENTS).join(&name);
            if !self.attachments.contains(&relative) {
                return Err(Error::OtherSnapshot { path: attachments.join(name) });
            }
        }
        Ok(())
    }

    /// Writes everything, page manifests last, when the rest is durable. Without page manifests
    /// `snapshot.json` is last.
    pub fn write(mut self, writer: &Writer) -> Result<()> {
        let mut last = self.page_manifests;
        if last.is_empty() {
            last.extend(self.documents.remove_entry(layout::SNAPSHOT));
        }
        for node in self.in_blobs.iter().map(|at| &self.nodes[*at]) {
            writer.write_bytes(&layout::blob(&node.digest), &node.bytes)?;
        }
        for (name, bytes) in &self.documents {
            writer.write_bytes(Path::new(name), bytes)?;
        }
        for (digest, target) in &self.copies {
            writer.copy(digest, target)?;
        }
        writer.sync()?;
        last.iter().try_for_each(|(name, bytes)| writer.publish(Path::new(name), bytes))
    }
}

/// Second places of blobs: two attachments may be equal, and one may equal a page.
fn copies(
    files: &[(&Descriptor, PathBuf)],
    first: &HashMap<Digest, &PathBuf>,
    containers: &[Document],
    limits: &Limits,
) -> Result<Vec<(Digest, PathBuf)>> {
    let attachment = |path: &Path| path.starts_with(layout::ATTACHMENTS) || path == Path::new(layout::TOKENS);
    let alike = files.iter().filter(|(d, path)| attachment(path) && first.get(&d.digest) != Some(&path));
    let mut copies: Vec<(Digest, PathBuf)> = alike.map(|(d, path)| (d.digest, path.clone())).collect();
    let mut seen = HashSet::new();
    for container in containers.iter().filter(|d| matches!(d.kind, Kind::Run | Kind::Checkpoint)) {
        let listed = crate::plan::children(container, limits)?;
        let elsewhere = listed.iter().filter(|item| first.contains_key(&item.digest) && seen.insert(item.digest));
        copies.extend(elsewhere.map(|item| (item.digest, layout::blob(&item.digest))));
    }
    Ok(copies)
}

type Flat = (String, u32, FlatManifest);

/// The flat form of each page tree, in the manifest's order; `None` for one that has none.
fn flats(manifest: &Manifest, containers: &[Document], limits: &Limits) -> Result<Vec<Option<Flat>>> {
    let by_digest: HashMap<Digest, &Document> = containers.iter().map(|d| (d.digest, d)).collect();
    let find = |digest: &Digest| by_digest.get(digest).copied().ok_or_else(|| Error::Internal(format!("{digest} was not fetched")));
    let mut flats = Vec::new();
    for layer in manifest.layers_of(media_type::TREE) {
        let Container::Tree(tree) = crate::plan::parse(find(&layer.digest)?, limits)? else {
            return Err(Error::Internal("a tree parsed as something else".into()));
        };
        flats.push(if tree.flat_digest.is_some() { Some(flat(&tree, layer.digest, find, limits)?) } else { None });
    }
    Ok(flats)
}

fn flat<'a>(tree: &PageTree, digest: Digest, find: impl Fn(&Digest) -> Result<&'a Document>, limits: &Limits) -> Result<Flat> {
    let documents: Vec<&Document> = tree.runs.iter().map(|run| find(&run.digest)).collect::<Result<_>>()?;
    let runs = documents.iter().map(|document| Run::parse(&document.bytes, limits));
    let flat = tree.to_flat_of(runs, limits).map_err(|source| Error::Received { digest, source })?;
    Ok((tree.group.name.clone(), tree.rank, flat))
}

/// The snapshot that the files alone describe; `None` if they cannot describe one.
fn rebuilt(manifest: &Manifest, flats: &[Option<Flat>], containers: &[Document], config: &Document) -> Result<Option<Digest>> {
    let Some(mut flats) = flats.iter().map(Option::as_ref).collect::<Option<Vec<&Flat>>>() else { return Ok(None) };
    if flats.is_empty() {
        return Ok(None);
    }
    flats.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    let shards: Vec<(String, u32)> = flats.iter().map(|(group, rank, _)| (group.clone(), *rank)).collect();
    let mut parts = Parts::default();
    for ((_, _, flat), shard) in flats.iter().zip(&shards) {
        let named = (shards.len() > 1).then_some(shard);
        let Ok((tree, _)) = build::tree(flat, build::shard(named, &shards)) else { return Ok(None) };
        parts.trees.push(tree);
    }
    parts.checkpoint = containers.iter().find(|d| d.kind == Kind::Checkpoint).cloned();
    for layer in &manifest.layers {
        match (layer.media_type.as_str(), layer.annotations.get(TITLE)) {
            (media_type::TOKENS, None) => parts.tokens = Some((layer.digest, layer.size)),
            (_, Some(name)) => parts.attachments.push(Opaque { name: name.clone(), digest: layer.digest, size: layer.size }),
            _ => {}
        }
    }
    parts.attachments.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Some(build::manifest(config, &parts).digest))
}
