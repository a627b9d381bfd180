//! The plan of a transfer: the part of a snapshot that the destination lacks. Push and pull share
//! it.
//!
//! The walk goes from the manifest down, one level at a time, and stops at each node that the
//! destination holds: there a node is stored only when everything below it is. So time and
//! round trips are proportional to the difference.

mod totals;

pub use totals::Totals;

use crate::error::{Error, Result};
use pfr_schema::checkpoint::Dtype;
use pfr_schema::container::{Child, Container};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, FormatError, Kind, Limits};
use std::collections::HashMap;

/// Bytes of a frame besides its payload, at most.
pub(crate) const FRAME_OVERHEAD: u64 = 128;

/// Page chunks whose pages are looked at and moved at a time, with at most 1,024 pages each: what
/// bounds memory, whatever the number of pages.
pub(crate) const CHUNKS: usize = 128;

/// A blob or node that a node lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub digest: Digest,
    pub kind: Kind,
    /// Raw bytes, where the node that lists it says so.
    pub size: Option<u64>,
    /// Type of its elements, or of those of the pages that it lists, where the node says so. Only
    /// for the choice of a codec.
    pub elements: Option<Dtype>,
}

impl Item {
    /// The manifest of a snapshot.
    pub fn manifest(digest: Digest) -> Self {
        Self { digest, kind: Kind::Manifest, size: None, elements: None }
    }

    /// Raw bytes, for sums. Page chunks count as 0: their nodes do not give a size, and they are
    /// small.
    pub fn bytes(&self) -> u64 {
        self.size.unwrap_or(0)
    }
}

impl From<&Child> for Item {
    fn from(child: &Child) -> Self {
        Self { digest: child.digest, kind: child.kind, size: child.size, elements: None }
    }
}

/// The source of the snapshot.
pub(crate) trait PlanSource {
    /// Whether reading a node costs no round trip.
    const NEAR: bool;
    /// Nodes as bytes, in the order of `items`, each with the requested digest.
    async fn documents(&self, items: &[Item]) -> Result<Vec<Document>>;
}

/// The destination of the snapshot.
pub(crate) trait PlanDestination {
    /// Positions of the items that it lacks, ascending.
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>>;
}

/// The parts that the destination lacks.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Plain blobs, in the order in which nodes list them, each once.
    pub blobs: Vec<Item>,
    /// Nodes, children before what lists them.
    pub containers: Vec<Document>,
}

impl Plan {
    /// Raw bytes of everything in it.
    pub fn bytes(&self) -> u64 {
        self.blobs.iter().map(Item::bytes).sum::<u64>() + self.containers.iter().map(|d| d.bytes.len() as u64).sum::<u64>()
    }
}

/// The parts of a snapshot that the destination lacks, down to its page chunks. Their pages are not
/// looked at.
#[derive(Debug, Default)]
pub(crate) struct Above {
    /// All but page chunks and pages.
    pub plan: Plan,
    /// Page chunks that it lacks.
    pub chunks: Vec<Item>,
}

/// The parts of some page chunks that the destination lacks.
#[derive(Debug, Default)]
pub(crate) struct Below {
    /// Pages that it lacks, and these page chunks.
    pub plan: Plan,
    /// Raw bytes of the page chunks and of everything that they list.
    pub listed: u64,
}

/// Finds the parts of `manifest` that the destination lacks. Holds an item for each page.
pub(crate) async fn plan<G: PlanSource, H: PlanDestination>(manifest: Item, source: &G, destination: &H, limits: &Limits) -> Result<Plan> {
    Ok(walk(manifest, source, destination, limits, true).await?.plan)
}

/// Finds the parts of `manifest` that the destination lacks, all but pages: so memory does not
/// depend on their number. [`plan_below`] has the pages, of some page chunks at a time.
pub(crate) async fn plan_above<G: PlanSource, H: PlanDestination>(
    manifest: Item,
    source: &G,
    destination: &H,
    limits: &Limits,
) -> Result<Above> {
    walk(manifest, source, destination, limits, false).await
}

/// Finds the pages of these page chunks that the destination lacks and that are not `before`.
pub(crate) async fn plan_below<G: PlanSource, H: PlanDestination>(
    chunks: &[Item],
    before: &[Item],
    source: &G,
    destination: &H,
    limits: &Limits,
) -> Result<Below> {
    if chunks.is_empty() {
        return Ok(Below::default());
    }
    let mut seen = Seen::default();
    drop(seen.new_ones(before.iter().copied()));
    let containers = source.documents(chunks).await?;
    let (mut blobs, mut listed) = (Vec::new(), 0_u64);
    for (item, document) in chunks.iter().zip(&containers) {
        let mut pages = children(document, limits)?;
        pages.iter_mut().for_each(|page| page.elements = item.elements);
        listed = pages.iter().map(Item::bytes).fold(listed.saturating_add(document.bytes.len() as u64), u64::saturating_add);
        blobs.extend(seen.new_ones(pages));
    }
    let lacking = destination.lacks(&blobs).await?;
    keep(&mut blobs, &lacking);
    Ok(Below { plan: Plan { blobs, containers }, listed })
}

async fn walk<G: PlanSource, H: PlanDestination>(
    manifest: Item,
    source: &G,
    destination: &H,
    limits: &Limits,
    reads_chunks: bool,
) -> Result<Above> {
    let (mut plan, mut chunks) = (Plan::default(), Vec::new());
    let mut seen = Seen::default();
    let mut documents: HashMap<Digest, Document> = HashMap::new();
    let mut level = seen.new_ones([manifest]);
    if G::NEAR {
        // Ask about the manifest and what it lists in one request.
        for document in source.documents(&[manifest]).await? {
            let children = children(&document, limits)?;
            level.extend(seen.new_ones(children));
            documents.insert(document.digest, document);
        }
    }
    while !level.is_empty() {
        let lacking = destination.lacks(&level).await?;
        // A snapshot may have millions of pages, so the list of its last level is not copied.
        let has = |level: &[Item]| level.iter().any(|item| item.digest == manifest.digest);
        let was_asked = has(&level);
        keep(&mut level, &lacking);
        if was_asked && !has(&level) {
            return Ok(Above { plan, chunks });
        }
        if !reads_chunks {
            chunks.extend(level.iter().filter(|item| item.kind == Kind::Run).copied());
            level.retain(|item| item.kind != Kind::Run);
        }
        let containers: Vec<Item> = level.iter().filter(|item| item.kind.is_container()).copied().collect();
        level.retain(|item| !item.kind.is_container());
        plan.blobs.append(&mut level);
        let to_read: Vec<Item> = containers.iter().filter(|item| !documents.contains_key(&item.digest)).copied().collect();
        if !to_read.is_empty() {
            documents.extend(source.documents(&to_read).await?.into_iter().map(|d| (d.digest, d)));
        }
        level = Vec::new();
        for item in &containers {
            let document = documents.remove(&item.digest).ok_or_else(|| Error::Internal(format!("{} was not read", item.digest)))?;
            let mut listed = children(&document, limits)?;
            if item.kind == Kind::Run {
                // A page chunk does not say it; the tree does.
                listed.iter_mut().for_each(|page| page.elements = item.elements);
            }
            level.extend(seen.new_ones(listed));
            plan.containers.push(document);
        }
    }
    plan.containers.sort_by_key(|document| document.kind);
    Ok(Above { plan, chunks })
}

/// Keeps the items at these positions, which ascend.
fn keep(items: &mut Vec<Item>, positions: &[usize]) {
    let (mut positions, mut at) = (positions.iter().peekable(), 0);
    items.retain(|_| {
        let is_kept = positions.next_if(|position| **position == at).is_some();
        at += 1;
        is_kept
    });
}

/// The children of a node.
pub(crate) fn children(document: &Document, limits: &Limits) -> Result<Vec<Item>> {
    let container = parse(document, limits)?;
    let mut items: Vec<Item> = container.children().iter().map(Item::from).collect();
    match &container {
        Container::Tree(tree) => {
            let elements = tree.geometry.map(|geometry| geometry.dtype.into());
            items.iter_mut().for_each(|run| run.elements = elements);
        }
        Container::Checkpoint(checkpoint) => {
            items.iter_mut().zip(&checkpoint.tensors).for_each(|(item, tensor)| item.elements = Some(tensor.storage_dtype));
        }
        Container::Run(_) | Container::Manifest(_) | Container::Image(_) => {}
    }
    Ok(items)
}

/// A node, parsed.
pub(crate) fn parse(document: &Document, limits: &Limits) -> Result<Container> {
    let digest = document.digest;
    let container = Container::parse(document.kind, &document.bytes, limits).map_err(|source| Error::Received { digest, source })?;
    container.ok_or_else(|| Error::Internal(format!("{digest} is not a node")))
}

/// The blobs met so far. A blob may be listed as plain bytes and as a node; stored as a
/// node it serves as both.
#[derive(Default)]
struct Seen(HashMap<Digest, Kind>);

impl Seen {
    fn new_ones(&mut self, items: impl IntoIterator<Item = Item>) -> Vec<Item> {
        let mut level: Vec<Item> = Vec::new();
        for item in items {
            match self.0.get_mut(&item.digest) {
                Some(kind) if kind.satisfies(item.kind) => {}
                Some(kind) => {
                    *kind = item.kind;
                    level.retain(|before| before.digest != item.digest);
                    level.push(item);
                }
                None => {
                    self.0.insert(item.digest, item.kind);
                    level.push(item);
                }
            }
        }
        level
    }
}

/// Checks the length of a blob, if its node gives one.
pub(crate) fn check_size(item: &Item, found: u64) -> Result<()> {
    match item.size {
        Some(expected) if expected != found => {
            let digest = item.digest;
            Err(Error::Received { digest, source: FormatError::LengthMismatch { digest: digest.to_string(), expected, found } })
        }
        _ => Ok(()),
    }
}

/// Cuts a list into consecutive parts of at most `limit` bytes, one item at least.
pub(crate) fn cut<T>(items: Vec<T>, bytes: impl Fn(&T) -> u64, limit: u64) -> Vec<Vec<T>> {
    let (mut parts, mut part, mut sum) = (Vec::new(), Vec::new(), 0_u64);
    for item in items {
        let size = bytes(&item).saturating_add(FRAME_OVERHEAD);
        if !part.is_empty() && sum.saturating_add(size) > limit {
            parts.push(std::mem::take(&mut part));
            sum = 0;
        }
        sum = sum.saturating_add(size);
        part.push(item);
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

#[cfg(test)]
mod tests;
