//! Pull into a snapshot directory: every byte is written once, straight from the wire.

use super::fetch::{Fetcher, IN_FLIGHT, Watched, batches, watch};
use super::publish::Publication;
use super::writer::{Large, Writer};
use crate::directory::layout;
use crate::error::{Error, Result, blocking};
use crate::meter::{Meter, Tally};
use crate::plan::{Above, Below, CHUNKS, Item, Plan, PlanDestination, PlanSource, Totals, parse, plan_above, plan_below};
use crate::progress::{Phase, Progress};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::Codecs;
use pfr_schema::container::Container;
use pfr_schema::frame::Header;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind};
use pfr_store::{Incoming, Sink, Store, verified_frames_into};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many files that are already there one task hashes.
const HASHED: usize = 64;

pub(super) async fn pull(fetcher: &Fetcher<'_>, digest: Digest, path: &Path, store: Option<&Store>) -> Result<Totals> {
    let progress = fetcher.progress;
    let unsuitable = |reason: String| Error::Unsuitable { digest, reason };
    let mut nodes = Nodes { fetcher, store, manifest: None };
    let document = only(nodes.documents(&[Item::manifest(digest)]).await?)?;
    nodes.manifest = Some(document.clone());
    let Container::Manifest(manifest) = parse(&document, &fetcher.limits)? else {
        return Err(Error::Internal("a manifest parsed as something else".into()));
    };
    if !manifest.is_snapshot() {
        return Err(unsuitable("is an OCI image, not a snapshot; pull it with an OCI client".into()));
    }
    let files = layout::named_files(&manifest)
        .map_err(|title| unsuitable(format!("an attachment has the title {title:?}, which no file may have; pull it into a store")))?;
    // All files except the configuration, which is the first one. It is written with the documents.
    let named = files.iter().skip(1).rev().map(|(descriptor, path)| (descriptor.digest, path.clone())).collect();
    let root = path.to_owned();
    let writer = Arc::new(blocking(move || Writer::open(&root, named)).await?);

    let config = Item { digest: manifest.config.digest, kind: Kind::Blob, size: Some(manifest.config.size), elements: None };
    let destination = Present { writer: Arc::clone(&writer), config: config.digest };
    let Above { plan: above, chunks } = plan_above(Item::manifest(digest), &nodes, &destination, &fetcher.limits).await?;
    let mut all = nodes.documents(&chunks).await?;
    let config = only(nodes.documents(&[config]).await?)?;
    let totals = Totals::of(&above.containers, &fetcher.limits)?;
    progress.begin(&totals);
    all.extend(above.containers);
    let all: Arc<[Document]> = all.into();

    let (limits, to_check, of_all) = (fetcher.limits.clone(), Arc::clone(&writer), Arc::clone(&all));
    // The directory is checked before the first blob is written, so that a directory of another
    // snapshot stays as it is.
    let publication = blocking(move || {
        let publication = Publication::new(&manifest, of_all, config, &limits)?;
        publication.check_free(to_check.root())?;
        Ok(publication)
    });
    let publication = publication.await?;

    let receiver = Receiver { fetcher, store, writer: Arc::clone(&writer) };
    let held = Held(&all[..chunks.len()]);
    let mut parts = chunks.chunks(CHUNKS).peekable();
    let mut unlisted = Some(above.blobs.clone());
    // Bytes of which the progress does not know yet: they are fetched, or are here.
    let mut left = totals.bytes.saturating_sub(fetcher.document_bytes());
    loop {
        let part = parts.next().unwrap_or_default();
        let Below { plan: Plan { blobs: pages, containers }, listed } =
            plan_below(part, &above.blobs, &held, &destination, &fetcher.limits).await?;
        let of_chunks = containers.iter().map(|chunk| chunk.bytes.len() as u64).sum::<u64>();
        drop(containers);
        let mut blobs = unlisted.take().unwrap_or_default();
        blobs.extend(pages);
        progress.enter(Phase::Receiving);
        let (in_store, to_fetch) = receiver.divide(blobs).await?;
        let moving = to_fetch.iter().map(Item::bytes).sum::<u64>();
        left = left.saturating_sub(moving);
        let is_last = parts.peek().is_none();
        let here = if is_last { left } else { listed.saturating_sub(of_chunks).saturating_sub(moving).min(left) };
        left -= here;
        progress.add_bytes_deduplicated(here);
        receiver.receive_all(in_store, to_fetch).await?;
        if is_last {
            break;
        }
        // A later part may list a page of this one.
        writer.look_for_written_blobs();
    }
    progress.enter(Phase::Writing);
    blocking(move || publication.write(&writer)).await?;
    Ok(totals)
}

fn only(documents: Vec<Document>) -> Result<Document> {
    documents.into_iter().next().ok_or_else(|| Error::Internal("one document was requested, and none came".into()))
}

/// Reads nodes from the local store if it has them, otherwise from the registry.
struct Nodes<'a> {
    fetcher: &'a Fetcher<'a>,
    store: Option<&'a Store>,
    /// The manifest, once it was read.
    manifest: Option<Document>,
}

impl PlanSource for Nodes<'_> {
    const NEAR: bool = false;

    async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        let mut found: Vec<Option<Document>> = Vec::with_capacity(items.len());
        for item in items {
            let held = self.manifest.as_ref().filter(|d| d.digest == item.digest).cloned();
            found.push(match (held, self.store) {
                (Some(document), _) => Some(document),
                (None, Some(store)) => match store.read(&item.digest).await {
                    Ok(bytes) => Some(Document { digest: item.digest, kind: item.kind, bytes: bytes.to_vec() }),
                    // A node that the store lacks, or that is damaged there, is fetched.
                    Err(_) => None,
                },
                (None, None) => None,
            });
        }
        let to_fetch: Vec<Item> = items.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(item, _)| *item).collect();
        let mut fetched = self.fetcher.documents(&to_fetch).await?.into_iter();
        let all: Option<Vec<Document>> = found.into_iter().map(|document| document.or_else(|| fetched.next())).collect();
        all.ok_or_else(|| Error::Internal("fewer documents than were asked for".into()))
    }
}

/// Page chunks in memory.
struct Held<'a>(&'a [Document]);

impl PlanSource for Held<'_> {
    const NEAR: bool = true;

    async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        let find = |item: &Item| self.0.iter().find(|chunk| chunk.digest == item.digest).cloned();
        items.iter().map(|item| find(item).ok_or_else(|| Error::Internal(format!("{} was not read", item.digest)))).collect()
    }
}

/// The directory as the destination of the plan. A file is present if its hash is right. Nodes
/// always count as missing: the plan then lists all of them, and they say what to write.
struct Present {
    writer: Arc<Writer>,
    config: Digest,
}

impl PlanDestination for Present {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        // Only those that are looked at are copied for it.
        stream::iter((0..items.len()).step_by(HASHED))
            .map(|first| {
                let part = items[first..items.len().min(first + HASHED)].to_vec();
                let (writer, config) = (Arc::clone(&self.writer), self.config);
                blocking(move || {
                    let mut lacking = Vec::new();
                    for (at, item) in (first..).zip(part) {
                        let wanted =
                            item.kind.is_container() || ((item.digest != config || writer.names(&config)) && !writer.holds(&item)?);
                        if wanted {
                            lacking.push(at);
                        }
                    }
                    Ok(lacking)
                })
            })
            .buffered(4)
            .try_concat()
            .await
    }
}

/// Writes blobs into files: those of the local store, and those that it fetches.
struct Receiver<'a> {
    fetcher: &'a Fetcher<'a>,
    store: Option<&'a Store>,
    writer: Arc<Writer>,
}

impl Receiver<'_> {
    async fn receive_all(&self, in_store: Vec<Item>, to_fetch: Vec<Item>) -> Result<()> {
        for batch in batches(in_store) {
            if let Some(store) = self.store {
                self.copy(store, batch.into()).await?;
            }
        }
        let requests = batches(to_fetch).into_iter();
        stream::iter(requests)
            .map(|batch| self.fetcher.fetch_all(batch, |left| self.receive(left)))
            .buffer_unordered(IN_FLIGHT)
            .try_collect()
            .await
    }

    /// Splits blobs into those that the local store has and those that it lacks.
    async fn divide(&self, blobs: Vec<Item>) -> Result<(Vec<Item>, Vec<Item>)> {
        let Some(store) = self.store else { return Ok((Vec::new(), blobs)) };
        let found = store.metadata().locate(blobs.iter().map(|item| item.digest).collect()).await?;
        let held: HashSet<Digest> = blobs.iter().zip(&found).filter(|(_, at)| at.is_some()).map(|(item, _)| item.digest).collect();
        Ok(blobs.into_iter().partition(|item| held.contains(&item.digest)))
    }

    async fn copy(&self, store: &Store, items: Arc<[Item]>) -> Result<()> {
        let frames = store.frames(items.iter().map(|item| item.digest).collect()).await?;
        // The progress of a pull counts bytes from the registry, so a copy on this host counts
        // nowhere.
        let meter = Meter::expecting(&self.fetcher.limits, Tally::new(&Progress::default()), items);
        let done = AtomicUsize::new(0);
        self.write(watch(frames.map_err(Error::from).boxed(), meter), &done).await
    }

    /// Fetches blobs into files, and returns those still to fetch.
    async fn receive(&self, items: Arc<[Item]>) -> (Vec<Item>, Result<()>) {
        let tally = Tally::new(self.fetcher.progress);
        let done = AtomicUsize::new(0);
        let result = match self.fetcher.frames(&items, Codecs::ALL, &tally).await {
            Ok(frames) => self.write(frames, &done).await,
            Err(error) => Err(error),
        };
        self.fetcher.count(&tally);
        (items[done.into_inner().min(items.len())..].to_vec(), result)
    }

    /// Writes blobs as their frames come, each on the thread that has verified it. Counts in `done`
    /// the files that are complete. They are the first ones of the request.
    async fn write(&self, frames: Watched, done: &AtomicUsize) -> Result<()> {
        let Watched { frames, slot } = frames;
        let (writer, kept) = (Arc::clone(&self.writer), slot.clone());
        let sink: Sink = Arc::new(move |header: &Header, raw: &[u8]| {
            let written = writer.write(&header.digest, raw);
            written.map_err(|error| pfr_store::Error::Input(kept.keep(error).to_string()))
        });
        let (limits, large_documents) = (self.fetcher.limits.clone(), Arc::clone(&self.fetcher.large_documents));
        let mut frames = Box::pin(verified_frames_into(frames, limits, large_documents, sink));
        let mut large: Option<Large> = None;
        while let Some(incoming) = frames.next().await {
            // If the stream fails, the files that are complete are kept.
            match incoming.map_err(|error| self.fetcher.remote.received(&slot, error))? {
                Incoming::Whole(_) => {
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Incoming::Begin(header) => {
                    let writer = Arc::clone(&self.writer);
                    large = Some(blocking(move || Large::begin(&writer, &header)).await?);
                }
                Incoming::Piece(piece) => {
                    let mut open = large.take().ok_or_else(|| Error::Internal("a piece without a beginning".into()))?;
                    large = Some(blocking(move || open.append(&piece).map(|()| open)).await?);
                }
                Incoming::Finish { .. } => {
                    let open = large.take().ok_or_else(|| Error::Internal("an end without a beginning".into()))?;
                    blocking(move || open.finish()).await?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}
