//! A snapshot that passes this host on its way to a reader, such as an engine's memory: blobs in
//! the order in which the reader wants them, each verified before it is handed on.
//!
//! ```text
//! nodes, small documents ─▶ the reader's order ─▶ requests, within a budget ─▶ decode, hash ─┬▶ reader
//!                                                        the local store, behind the reader ◀┘
//! ```
//!
//! The local store gets the same bytes without hashing them again, or nothing ([`Way`]). It takes
//! nodes only when everything that they list is stored, so they come last ([`Passage::finish`]).

use super::fetch::{Fetcher, IN_FLIGHT, Watched};
use super::flight::{Flight, Part, Taken, largest};
use super::into_store::Session;
use super::keep_signatures;
use crate::boxed;
use crate::error::{Error, Result};
use crate::local::LocalSession;
use crate::meter::Tally;
use crate::plan::{Item, Plan, PlanDestination as _, PlanSource as _, check_size, cut, parse, plan};
use crate::progress::Progress;
use crate::remote::Remote;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream;
use parking_lot::Mutex;
use pfr_schema::api::{Signature, SnapshotDetail, TagState};
use pfr_schema::codec::Codecs;
use pfr_schema::container::Container;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, RepositoryName, Tag, media_type};
use pfr_service::task::Task;
use pfr_store::{Ingested, LivePush, Opened, Store, opened_frames};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tracing::Instrument as _;

/// Raw bytes in one request, at most: the first blobs of a request are handed on while the others
/// come, but a request that is cut is sent again for what is left.
const BATCH_BYTES: u64 = 64 << 20;
/// Digests in one request.
const BATCH_DIGESTS: usize = 16 << 10;
/// Part of a lease after which it is renewed.
const RENEW: u32 = 4;
/// Layers that a reader needs before any page.
const READ_FIRST: [&str; 3] = [media_type::TOKENS, media_type::ORACLE, media_type::SHARDS];

/// Whether the local store keeps the bytes that pass.
#[derive(Clone, Debug)]
pub enum Way {
    /// The local store is filled behind the reader, and the tag moved there, if one is given. A tag
    /// that something else has moved since the reader began stays: it may be newer.
    Keep(Option<Tag>),
    /// Nothing is added to the local store.
    Pass,
}

/// A snapshot on its way to a reader. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Passage(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    remote: Remote,
    repository: RepositoryName,
    store: Store,
    /// Holds the leases of the blobs that the local store has.
    push: LivePush,
    digest: Digest,
    /// Its signatures, as the registry tells them; not verified here.
    signatures: Vec<Signature>,
    way: Way,
    /// Where the tag pointed in the local store, if one is to be moved there.
    before: Option<TagState>,
    /// Blobs that the local store lacks.
    lacking: HashMap<Digest, Item>,
    /// Small blobs, and nodes that the local store lacks, children first.
    documents: Vec<Document>,
    /// Positions in it.
    places: HashMap<Digest, usize>,
    behind: Mutex<Option<Behind>>,
    /// Whether the local session has ended.
    is_over: AtomicBool,
    flight: Flight,
    progress: Progress,
    received: AtomicU64,
    wanted: AtomicU64,
    verified: AtomicU64,
}

impl Passage {
    /// Fetches the nodes of a snapshot that [`crate::look_up`] found and the local store lacks, and
    /// the small documents that a reader needs first.
    ///
    /// # Errors
    /// As [`crate::pull()`].
    #[boxed]
    pub async fn open(
        remote: &Remote,
        repository: &RepositoryName,
        found: &SnapshotDetail,
        store: &Store,
        way: Way,
        flight: &Flight,
    ) -> Result<Self> {
        let progress = Progress::default();
        let digest = found.summary.digest;
        let before = match &way {
            Way::Keep(Some(tag)) => Some(state_of(store, repository, tag).await?),
            Way::Keep(None) | Way::Pass => None,
        };
        let local = LocalSession::open(store, repository).await?;
        let fetcher = Fetcher::new(remote, repository, &progress);
        let (Plan { blobs, containers }, mut documents) = local.end(nodes(&fetcher, &local, digest).await).await?;
        documents.extend(containers);
        let places = documents.iter().enumerate().map(|(at, document)| (document.digest, at)).collect();
        let lacking: HashMap<Digest, Item> = blobs.into_iter().map(|item| (item.digest, item)).collect();
        let behind = match way {
            Way::Keep(_) if !lacking.is_empty() => Some(Behind::start(store, &local.push)),
            Way::Keep(_) | Way::Pass => None,
        };
        let received = AtomicU64::new(fetcher.frame_bytes());
        let passage = Self(Arc::new(Inner {
            remote: remote.clone(),
            repository: repository.clone(),
            store: store.clone(),
            push: local.push.clone(),
            digest,
            signatures: found.signatures.clone(),
            way,
            before,
            lacking,
            documents,
            places,
            behind: Mutex::new(behind),
            is_over: AtomicBool::new(false),
            flight: flight.clone(),
            received,
            wanted: AtomicU64::new(0),
            verified: AtomicU64::new(0),
            progress,
        }));
        pfr_service::task::spawn(stay_alive(Arc::downgrade(&passage.0), store.options().lease / RENEW));
        Ok(passage)
    }

    /// The snapshot.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.0.digest
    }

    /// Whether the local store is filled behind the reader.
    #[must_use]
    pub fn keeps(&self) -> bool {
        matches!(self.0.way, Way::Keep(_))
    }

    /// Whether every blob is in the local store: nothing is left to fetch.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.0.lacking.is_empty()
    }

    /// Whether a blob comes from the registry, and not from the local store.
    #[must_use]
    pub fn lacks(&self, digest: &Digest) -> bool {
        self.0.lacking.contains_key(digest)
    }

    /// Bytes of frames received.
    #[must_use]
    pub fn bytes_received(&self) -> u64 {
        self.0.received.load(Ordering::Relaxed)
    }

    /// Raw bytes that readers have asked for, and those of them that were verified.
    #[must_use]
    pub fn bytes_wanted_and_verified(&self) -> (u64, u64) {
        (self.0.wanted.load(Ordering::Relaxed), self.0.verified.load(Ordering::Relaxed))
    }

    /// A node, or one of the documents that are read before any page.
    ///
    /// # Errors
    /// Those of the local store.
    pub async fn read(&self, digest: &Digest) -> Result<Bytes> {
        match self.0.places.get(digest) {
            Some(at) => Ok(Bytes::copy_from_slice(&self.0.documents[*at].bytes)),
            None => Ok(self.0.store.read(digest).await?),
        }
    }

    /// Asks the registry for those of these blobs that the local store lacks. They come in this
    /// order.
    #[must_use]
    pub fn arrivals(&self, digests: &[Digest]) -> Arrivals {
        let items: Vec<Item> = digests.iter().filter_map(|digest| self.0.lacking.get(digest)).copied().collect();
        self.0.wanted.fetch_add(items.iter().map(Item::bytes).sum(), Ordering::Relaxed);
        let (give, requests) = unbounded_channel();
        let asking = pfr_service::task::spawn(ask(Arc::clone(&self.0), items, give).in_current_span());
        Arrivals { requests, current: None, asking }
    }

    /// Fetches what no reader asked for, and makes the snapshot visible in the local store; ends
    /// the session there if nothing is kept. Only after all [`Arrivals`] were dropped.
    ///
    /// # Errors
    /// As [`crate::pull()`].
    #[boxed]
    pub async fn finish(&self) -> Result<()> {
        let inner = &*self.0;
        let Way::Keep(tag) = &inner.way else {
            self.close().await;
            return Ok(());
        };
        let fetcher = inner.fetcher();
        let session = Session { fetcher: &fetcher, repository: &inner.repository, local: inner.local() };
        let publish = async {
            let behind = inner.behind.lock().take();
            if let Some(behind) = behind {
                behind.end().await?;
            }
            let left: Vec<Item> = inner.lacking.values().filter(|item| !inner.places.contains_key(&item.digest)).copied().collect();
            let lacking = session.local.lacks(&left).await?;
            session.fetch(lacking.into_iter().map(|at| left[at]).collect()).await?;
            session.publish(inner.documents.clone(), inner.digest, tag.clone(), inner.before).await?;
            keep_signatures(&inner.store, &inner.repository, &inner.digest, &inner.signatures).await
        };
        let published = publish.await;
        inner.received.fetch_add(fetcher.frame_bytes(), Ordering::Relaxed);
        let ended = session.local.end(published).await;
        inner.is_over.store(true, Ordering::Relaxed);
        ended
    }

    /// Gives the snapshot up. What was verified by now stays in the local store until the next
    /// collection there, so that the next try fetches only the rest. Only after all [`Arrivals`]
    /// were dropped.
    #[boxed]
    pub async fn close(&self) {
        let behind = self.0.behind.lock().take();
        end(&self.0.store, &self.0.push, behind).await;
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Ends a local session without a commit, when everything that was sent to it is durable.
async fn end(store: &Store, push: &LivePush, behind: Option<Behind>) {
    if let Some(behind) = behind
        && let Err(error) = behind.end().await
    {
        tracing::debug!(%error, "blobs of a snapshot that was given up were not stored");
    }
    if let Err(error) = store.abort(push).await {
        tracing::debug!(%error, "a local session stays open until its lease ends");
    }
}

impl Drop for Inner {
    /// A reader that was cancelled has closed nothing.
    fn drop(&mut self) {
        if !self.is_over.load(Ordering::Relaxed)
            && let Ok(runtime) = Handle::try_current()
        {
            let (store, push, behind) = (self.store.clone(), self.push.clone(), self.behind.get_mut().take());
            pfr_service::task::spawn_on(&runtime, async move { end(&store, &push, behind).await });
        }
    }
}

/// Renews the lease of what was found in the local store for as long as the passage lives: a reader
/// may take longer than a lease.
async fn stay_alive(inner: Weak<Inner>, pause: Duration) {
    loop {
        tokio::time::sleep(pause).await;
        let Some(inner) = inner.upgrade() else { return };
        match inner.store.live_push(&inner.repository, &inner.push).await {
            Ok(_) => {}
            Err(pfr_store::Error::PushUnknown(_)) => return,
            Err(error) => tracing::debug!(%error, "lease renewal failed, retrying"),
        }
    }
}

/// Where a tag points in a store.
async fn state_of(store: &Store, repository: &RepositoryName, tag: &Tag) -> Result<TagState> {
    match store.tag(repository, tag).await {
        Ok(row) => Ok(TagState::At(row.digest)),
        Err(pfr_store::Error::RepositoryUnknown(_) | pfr_store::Error::TagUnknown { .. }) => Ok(TagState::Absent),
        Err(error) => Err(error.into()),
    }
}

/// The nodes that the local store lacks, and small documents.
async fn nodes(fetcher: &Fetcher<'_>, local: &LocalSession<'_>, digest: Digest) -> Result<(Plan, Vec<Document>)> {
    let plan = plan(Item::manifest(digest), fetcher, local, &fetcher.limits).await?;
    let mut first = Vec::new();
    if let Some(document) = plan.containers.iter().find(|document| document.digest == digest)
        && let Container::Manifest(manifest) = parse(document, &fetcher.limits)?
    {
        let layers = READ_FIRST.iter().flat_map(|media_type| manifest.layers_of(media_type));
        let wanted: HashSet<Digest> = layers.map(|layer| layer.digest).chain([manifest.config.digest]).collect();
        first.extend(plan.blobs.iter().filter(|item| wanted.contains(&item.digest)).copied());
    }
    let documents = fetcher.documents(&first).await?;
    Ok((plan, documents))
}

impl Inner {
    fn fetcher(&self) -> Fetcher<'_> {
        Fetcher::new(&self.remote, &self.repository, &self.progress)
    }

    fn local(&self) -> LocalSession<'_> {
        LocalSession { store: &self.store, push: self.push.clone() }
    }

    /// Codecs that a frame may have: what is kept must be one that the local store takes.
    fn codecs(&self) -> Codecs {
        if matches!(self.way, Way::Keep(_)) { self.store.options().codecs } else { Codecs::ALL }
    }

    /// One try of a request. Returns the blobs that have not arrived.
    async fn receive(&self, fetcher: &Fetcher<'_>, items: Arc<[Item]>, to: &To) -> (Vec<Item>, Result<()>) {
        let (tally, mut arrived) = (Tally::new(&self.progress), 0);
        let result = self.hand_on(fetcher, &items, &tally, to, &mut arrived).await;
        fetcher.count(&tally);
        (items[arrived..].to_vec(), result)
    }

    async fn hand_on(&self, fetcher: &Fetcher<'_>, items: &Arc<[Item]>, tally: &Arc<Tally>, to: &To, arrived: &mut usize) -> Result<()> {
        let most = items.iter().map(largest).max().unwrap_or(0);
        let Watched { frames, slot } = fetcher.frames(items, self.codecs(), tally).await?;
        let mut blobs = Box::pin(opened_frames(frames, fetcher.limits.clone(), most));
        while let Some(opened) = blobs.next().await {
            let opened = opened.map_err(|error| fetcher.remote.received(&slot, error))?;
            // The meter has made sure that frames come in the order of the items.
            let item = items.get(*arrived).ok_or_else(|| Error::Internal("more blobs than were asked for".into()))?;
            check_size(item, opened.raw().len() as u64)?;
            let (digest, part) = (opened.digest(), Arc::new(to.taken.lock().part(item)));
            let bytes = Bytes::from_owner(Guarded { bytes: opened.raw().clone(), _part: Arc::clone(&part) });
            self.received.fetch_add(opened.frame_bytes(), Ordering::Relaxed);
            self.verified.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            *arrived += 1;
            match &to.store {
                // A store that fails says so at the end; the reader goes on without it.
                Some(store) => _ = store.send((opened, part)),
                // Only the reader has it from here on.
                None => drop((opened, part)),
            }
            if to.reader.send(Ok((digest, bytes))).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Where the blobs of a request go.
struct To {
    taken: Mutex<Taken>,
    reader: UnboundedSender<Arrival>,
    store: Option<UnboundedSender<(Opened, Arc<Part>)>>,
}

type Arrival = Result<(Digest, Bytes)>;

/// Sends requests, one after another as the budget allows, several in flight.
async fn ask(inner: Arc<Inner>, items: Vec<Item>, give: UnboundedSender<UnboundedReceiver<Arrival>>) {
    let limit = (inner.flight.total() / (IN_FLIGHT as u64 + 1)).min(2 * BATCH_BYTES);
    let mut running = JoinSet::new();
    for batch in cut(items, |item| inner.flight.cost(item), limit) {
        for batch in batch.chunks(BATCH_DIGESTS) {
            while running.len() >= IN_FLIGHT {
                running.join_next().await;
            }
            let (reader, told) = unbounded_channel();
            if give.send(told).is_err() {
                return;
            }
            match inner.flight.take(batch).await {
                Ok(taken) => {
                    let store = inner.behind.lock().as_ref().map(|behind| behind.send.clone());
                    let to = To { taken: Mutex::new(taken), reader, store };
                    pfr_service::task::spawn_in(&mut running, request(Arc::clone(&inner), batch.to_vec(), to).in_current_span());
                }
                Err(error) => _ = reader.send(Err(error)),
            }
        }
    }
    while running.join_next().await.is_some() {}
}

async fn request(inner: Arc<Inner>, items: Vec<Item>, to: To) {
    let fetcher = inner.fetcher();
    let result = fetcher.fetch_all(items, |left| inner.receive(&fetcher, left, &to)).await;
    if let Err(error) = result {
        _ = to.reader.send(Err(error));
    }
}

/// Verified blobs, in the order asked for. Dropping it ends the requests.
#[derive(Debug)]
pub struct Arrivals {
    /// For each request its blobs.
    requests: UnboundedReceiver<UnboundedReceiver<Arrival>>,
    current: Option<UnboundedReceiver<Arrival>>,
    asking: Task<()>,
}

impl Arrivals {
    /// The raw bytes of the next blob, which must be `digest`. They count against the budget until
    /// they are dropped.
    ///
    /// # Errors
    /// As [`crate::pull()`].
    pub async fn next(&mut self, digest: &Digest) -> Result<Bytes> {
        loop {
            if let Some(current) = &mut self.current
                && let Some(arrived) = current.recv().await
            {
                let (found, bytes) = arrived?;
                return if found == *digest { Ok(bytes) } else { Err(Error::Internal(format!("{found} came instead of {digest}"))) };
            }
            let next = self.requests.recv().await;
            self.current = Some(next.ok_or_else(|| Error::Internal("fewer blobs than were asked for".into()))?);
        }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.asking.abort();
    }
}

/// Bytes that count against a budget until the last clone of them is dropped.
struct Guarded {
    bytes: Bytes,
    _part: Arc<Part>,
}

impl AsRef<[u8]> for Guarded {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The task that fills the local store.
#[derive(Debug)]
struct Behind {
    send: UnboundedSender<(Opened, Arc<Part>)>,
    task: Task<pfr_store::Result<Ingested>>,
}

impl Behind {
    fn start(store: &Store, push: &LivePush) -> Self {
        let (send, mut receive) = unbounded_channel::<(Opened, Arc<Part>)>();
        let (store, push) = (store.clone(), push.clone());
        let taking = async move {
            // The store's own memory is bounded. Bytes that waited in it for the rest of a pack
            // must not hold up the requests that bring this rest.
            let mut blobs = stream::poll_fn(move |context| receive.poll_recv(context)).map(|(opened, _part)| opened);
            store.ingest_opened(&push, &mut blobs).await
        };
        let task = pfr_service::task::spawn(taking.in_current_span());
        Self { send, task }
    }

    /// Waits until everything that was sent is durable.
    async fn end(self) -> Result<()> {
        drop(self.send);
        self.task.await.map_err(|error| Error::Internal(error.to_string()))??;
        Ok(())
    }
}
