//! Exports that are written: plan, packs that are not there yet, manifest.

use super::layout::{Layout, malformed};
use super::place::{Place, PlaceOptions};
use super::read::{check_documents, index, manifest};
use super::spool::{Writing, Written};
use crate::encoding::Encoding;
use crate::error::{Error, Result};
use crate::meter::{Meter, Tally};
use crate::plan::{Item, Plan, PlanDestination, children, parse, plan};
use crate::progress::{Phase, Progress};
use crate::pull::fetch::{Watched, watch};
use crate::push::Source;
use crate::push::source::OpenedSource;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream;
use pfr_schema::codec::{Codecs, Compression};
use pfr_schema::container::Container;
use pfr_schema::export::{EMPTY, Export, Layer, contents, packs};
use pfr_schema::frame::{Header, end_mark};
use pfr_schema::pack::{self, Entry, MAGIC};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, Limits, RepositoryName, Tag};
use pfr_service::Backoff;
use pfr_store::{Incoming, document_frame, verified_frames};
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How often a pack is begun again whose frames were cut.
const TRIES: u32 = 5;
const WAITS: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));

/// The result of an export.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportReport {
    /// The snapshot.
    pub digest: Digest,
    /// The manifest of the export.
    pub manifest_digest: Digest,
    /// Pages in the snapshot, over all page trees.
    pub pages: u64,
    /// Packs of the export.
    pub packs: u64,
    /// Packs that the place lacked.
    pub packs_written: u64,
    /// Raw bytes of everything that the snapshot lists.
    pub bytes_raw: u64,
    /// Bytes of the packs that the place lacked.
    pub bytes_written: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Writes exports into one place.
#[derive(Debug)]
pub struct Exporter {
    layout: Arc<dyn Layout>,
    /// Packs that the place lists, by their contents.
    known: HashMap<Digest, Layer>,
}

/// A pack to be made: blobs, and then nodes.
struct Part {
    blobs: Vec<Item>,
    nodes: Vec<Document>,
}

impl Part {
    fn digests(&self) -> Vec<Digest> {
        let nodes = self.nodes.iter().map(|node| node.digest);
        self.blobs.iter().map(|item| item.digest).chain(nodes).collect()
    }

    fn bytes(&self) -> u64 {
        let nodes = self.nodes.iter().map(|node| node.bytes.len() as u64);
        self.blobs.iter().map(Item::bytes).chain(nodes).sum()
    }
}

/// A destination that has nothing.
struct Nothing;

impl PlanDestination for Nothing {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        Ok((0..items.len()).collect())
    }
}

impl Exporter {
    /// Opens a place, made if it is not there, and reads which packs it has.
    ///
    /// # Errors
    /// A directory that is neither empty nor a layout; a tar file that exists; a registry or a
    /// bucket that does not answer or refuses.
    pub async fn begin(place: &Place, options: &PlaceOptions) -> Result<Self> {
        let layout = place.create(options).await?;
        let mut known = HashMap::new();
        for entry in layout.entries().await? {
            if !entry.may_be_export() {
                continue;
            }
            match manifest(&layout, &entry).await {
                Ok(export) => {
                    let layers = export.into_iter().flat_map(|export| export.layers);
                    known.extend(layers.filter_map(|layer| Some((layer.contents?, layer))));
                }
                // Its packs are written again.
                Err(error) => tracing::debug!(%error, "an earlier export cannot be read"),
            }
        }
        Ok(Self { layout, known })
    }

    /// Exports a snapshot. It is visible when this returns, in a tar file after [`Self::finish`].
    ///
    /// # Errors
    /// Those of the source and of the place. What was exported before stays as it was.
    pub async fn add(
        &mut self,
        source: &Source,
        repository: &RepositoryName,
        tag: Option<&Tag>,
        progress: &Progress,
    ) -> Result<ExportReport> {
        let start = Instant::now();
        progress.enter(Phase::Reading);
        let opened = OpenedSource::open(source, &[]).await?;
        let totals = opened.totals().await?;
        progress.begin(&totals);
        let snapshot = opened.manifest();
        let parts = parts(plan(snapshot, &opened, &Nothing, opened.limits()).await?, &snapshot.digest, opened.limits())?;
        progress.enter(Phase::Writing);
        let (mut layers, mut packs_written, mut bytes_written) = (Vec::new(), 0, 0);
        for part in parts {
            let (digests, bytes) = (part.digests(), part.bytes());
            let is_first = layers.is_empty();
            if is_first {
                check_documents(bytes).map_err(malformed(self.layout.name(), "the export"))?;
            }
            let name = contents(&digests);
            let layer = match self.stored(&name, &digests, opened.limits()).await {
                Some(layer) => {
                    progress.add_bytes_deduplicated(bytes);
                    layer
                }
                None => {
                    let written = self.pack(&opened, part, progress).await?;
                    if is_first {
                        check_documents(written.size).map_err(malformed(self.layout.name(), "the export"))?;
                    }
                    let layer = Layer { digest: written.digest, size: written.size, contents: Some(name) };
                    if self.layout.put(written).await? {
                        packs_written += 1;
                        bytes_written += layer.size;
                    }
                    layer
                }
            };
            layers.push(layer);
            self.known.insert(name, layer);
        }
        progress.enter(Phase::Committing);
        let export = Export { snapshot: snapshot.digest, layers };
        let document = export.to_document(opened.limits()).map_err(malformed(self.layout.name(), "the export"))?;
        self.layout.put(self.layout.spool()?.all(EMPTY).await?).await?;
        let entry = pfr_schema::export::Entry::of(&document, &snapshot.digest, repository, tag);
        self.layout.publish(&document, entry).await?;
        progress.enter(Phase::Done);
        Ok(ExportReport {
            digest: snapshot.digest,
            manifest_digest: document.digest,
            pages: totals.pages,
            packs: export.layers.len() as u64,
            packs_written,
            bytes_raw: totals.bytes,
            bytes_written,
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    /// Completes the place.
    ///
    /// # Errors
    /// Those of a tar file, which has no name before.
    pub async fn finish(self) -> Result<()> {
        self.layout.finish().await
    }

    /// A pack of the place with exactly these blobs, as its own index says.
    async fn stored(&self, name: &Digest, digests: &[Digest], limits: &Limits) -> Option<Layer> {
        let layer = self.known.get(name)?;
        match index(&self.layout, layer, limits).await {
            Ok(entries) => entries.iter().map(|entry| &entry.header.digest).eq(digests).then_some(*layer),
            Err(error) => {
                tracing::debug!(%error, "a pack that the place lists cannot be used");
                None
            }
        }
    }

    /// Makes a pack, again if its frames are cut.
    async fn pack(&self, opened: &OpenedSource, part: Part, progress: &Progress) -> Result<Written> {
        let items: Arc<[Item]> = part.blobs.into();
        let mut failures = 0;
        loop {
            let tally = Tally::new(progress);
            match self.attempt(opened, &items, &part.nodes, &tally).await {
                Err(error @ Error::Cut { .. }) => {
                    tally.reset();
                    failures += 1;
                    if failures == TRIES {
                        return Err(error);
                    }
                    tokio::time::sleep(WAITS.wait(failures)).await;
                }
                done => return done,
            }
        }
    }

    async fn attempt(&self, opened: &OpenedSource, items: &Arc<[Item]>, nodes: &[Document], tally: &Arc<Tally>) -> Result<Written> {
        let limits = opened.limits();
        let encoding = Encoding::new(Compression::default(), Codecs::ALL);
        let end = Ok(Bytes::from(end_mark(items.len() as u64)));
        let frames = opened.blob_frames(Arc::clone(items), &encoding).chain(stream::iter([end])).boxed();
        let Watched { frames, slot } = watch(frames, Meter::expecting(limits, Arc::clone(tally), Arc::clone(items)));
        let mut frames = Box::pin(verified_frames(frames, limits.clone(), Arc::new(Semaphore::new(1))));
        let mut making = Making::begin(Writing::begin(self.layout.spool()?)).await?;
        let filled = async {
            while let Some(incoming) = frames.next().await {
                match incoming.map_err(|error| slot.take().unwrap_or(Error::Store(error)))? {
                    Incoming::Whole(whole) => {
                        making.header(whole.header).await?;
                        for piece in whole.payload {
                            making.write(piece).await?;
                        }
                        making.checksum(whole.checksum).await?;
                    }
                    Incoming::Begin(header) => making.header(header).await?,
                    Incoming::Piece(piece) => making.write(piece).await?,
                    Incoming::Finish { checksum } => making.checksum(checksum).await?,
                }
            }
            for node in nodes {
                making.node(document_frame(node), limits).await?;
            }
            Ok::<_, Error>(())
        };
        let filled = filled.await;
        match filled {
            Ok(()) => making.end().await,
            Err(error) => {
                // The next try has a file of the same name: nothing may still write to this one.
                drop(making.writing.end().await);
                Err(error)
            }
        }
    }
}

/// A pack that is being made.
struct Making {
    writing: Writing,
    entries: Vec<Entry>,
    offset: u64,
}

impl Making {
    async fn begin(writing: Writing) -> Result<Self> {
        let mut making = Self { writing, entries: Vec::new(), offset: 0 };
        making.write(Bytes::from_static(MAGIC)).await?;
        Ok(making)
    }

    async fn write(&mut self, bytes: Bytes) -> Result<()> {
        self.offset += bytes.len() as u64;
        self.writing.write(bytes).await
    }

    async fn header(&mut self, header: Header) -> Result<()> {
        self.entries.push(Entry { offset: self.offset, header });
        self.write(header.to_bytes().into()).await
    }

    async fn checksum(&mut self, checksum: u32) -> Result<()> {
        self.write(Bytes::copy_from_slice(&checksum.to_le_bytes())).await
    }

    /// A complete frame.
    async fn node(&mut self, frame: Bytes, limits: &Limits) -> Result<()> {
        // Documents are named by SHA-256, and may be by another algorithm: the byte says which.
        let algorithm = frame.get(7).copied().and_then(pfr_schema::Algorithm::from_number);
        let header = algorithm.and_then(|algorithm| frame.get(..Header::len(algorithm)));
        let header = header.ok_or_else(|| Error::Internal("a frame of ours without a header".into()))?;
        let header = Header::parse_exact(header, self.offset, limits).map_err(|error| Error::Internal(error.to_string()))?;
        self.entries.push(Entry { offset: self.offset, header });
        self.write(frame).await
    }

    async fn end(mut self) -> Result<Written> {
        let end = pack::index_and_footer(&self.entries, self.offset);
        self.write(end.into()).await?;
        self.writing.end().await
    }
}

/// The packs of a snapshot: documents and configuration, then pages, and at last what changes with
/// every snapshot: tensors and attachments.
fn parts(plan: Plan, snapshot: &Digest, limits: &Limits) -> Result<Vec<Part>> {
    let Plan { blobs, containers } = plan;
    let (mut named, mut config) = (HashSet::new(), None);
    for document in containers.iter().filter(|document| matches!(document.kind, Kind::Manifest | Kind::Checkpoint)) {
        if document.digest == *snapshot {
            match parse(document, limits)? {
                Container::Manifest(manifest) if manifest.is_snapshot() => config = Some(manifest.config.digest),
                _ => {
                    let reason = "is an OCI image, not a snapshot; copy it with an OCI client".to_owned();
                    return Err(Error::Unsuitable { digest: *snapshot, reason });
                }
            }
        }
        named.extend(children(document, limits)?.into_iter().filter(|item| item.kind == Kind::Blob).map(|item| item.digest));
    }
    let (first, others): (Vec<Item>, Vec<Item>) = blobs.into_iter().partition(|item| Some(item.digest) == config);
    let (last, pages): (Vec<Item>, Vec<Item>) = others.into_iter().partition(|item| named.contains(&item.digest));
    let all = [pages, last].concat();
    let cuts = packs(all.iter().map(|item| (item.digest, item.bytes())));
    let rest = cuts.into_iter().map(|range| Part { blobs: all[range].to_vec(), nodes: Vec::new() });
    Ok(std::iter::once(Part { blobs: first, nodes: containers }).chain(rest).collect())
}
