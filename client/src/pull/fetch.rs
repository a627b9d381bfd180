//! Frames from a registry: checked against the request, and requested again if the stream was cut.

use crate::error::{Error, Result};
use crate::meter::{Meter, Tally};
use crate::plan::{Item, PlanSource, check_size, cut};
use crate::progress::Progress;
use crate::remote::backoff::Tries;
use crate::remote::{BoxFrames, Remote};
use crate::slot::Slot;
use futures::{StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use pfr_schema::codec::{self, Codecs};
use pfr_schema::frame::Header;
use pfr_schema::tree::Document;
use pfr_schema::{FormatError, Limits, RepositoryName};
use pfr_store::{Incoming, verified_frames};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;

/// Raw bytes in one request.
const BATCH_BYTES: u64 = 64 << 20;
/// Digests in one request.
const BATCH_DIGESTS: usize = 16 << 10;
/// Requests in flight.
pub(super) const IN_FLIGHT: usize = 3;
/// Bytes of nodes held at a time: the page lists of some two million pages. A pull into a store
/// holds those of some page chunks at a time, so it takes any number.
const DOCUMENTS: u64 = 128 << 20;

/// Asks one repository of one registry for frames, and counts what came.
pub(crate) struct Fetcher<'a> {
    pub remote: &'a Remote,
    pub repository: &'a RepositoryName,
    pub progress: &'a Progress,
    pub limits: Limits,
    /// Lets large documents into memory one at a time.
    pub large_documents: Arc<Semaphore>,
    blobs: AtomicU64,
    raw_bytes: AtomicU64,
    frame_bytes: AtomicU64,
    document_bytes: AtomicU64,
    /// Of them, those that are held.
    held: AtomicU64,
}

impl<'a> Fetcher<'a> {
    pub fn new(remote: &'a Remote, repository: &'a RepositoryName, progress: &'a Progress) -> Self {
        Self {
            remote,
            repository,
            progress,
            limits: Limits::default(),
            large_documents: Arc::new(Semaphore::new(1)),
            blobs: AtomicU64::new(0),
            raw_bytes: AtomicU64::new(0),
            frame_bytes: AtomicU64::new(0),
            document_bytes: AtomicU64::new(0),
            held: AtomicU64::new(0),
        }
    }

    /// Frames received.
    pub fn blobs(&self) -> u64 {
        self.blobs.load(Ordering::Relaxed)
    }

    /// Raw bytes received.
    pub fn raw_bytes(&self) -> u64 {
        self.raw_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of frames received.
    pub fn frame_bytes(&self) -> u64 {
        self.frame_bytes.load(Ordering::Relaxed)
    }

    /// Raw bytes of documents received.
    pub fn document_bytes(&self) -> u64 {
        self.document_bytes.load(Ordering::Relaxed)
    }

    /// Documents of so many bytes are not held any more.
    pub fn release(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Adds what a try has brought.
    pub fn count(&self, tally: &Tally) {
        self.blobs.fetch_add(tally.blobs(), Ordering::Relaxed);
        self.raw_bytes.fetch_add(tally.raw(), Ordering::Relaxed);
        self.frame_bytes.fetch_add(tally.frame_bytes(), Ordering::Relaxed);
    }

    /// The frames of `items`, in these codecs. Any other frame ends the stream with an error, which
    /// the slot keeps.
    pub async fn frames(&self, items: &Arc<[Item]>, codecs: Codecs, tally: &Arc<Tally>) -> Result<Watched> {
        let digests = items.iter().map(|item| item.digest).collect();
        let frames = self.remote.frames(self.repository, digests, codecs).await?;
        Ok(watch(frames, Meter::expecting(&self.limits, Arc::clone(tally), Arc::clone(items))))
    }

    /// Repeats `attempt`, which returns the items still missing, until none is left. Waits between
    /// two attempts, and fails when several in a row bring nothing. Only cut streams are retried
    /// here: requests have their own retries.
    pub async fn fetch_all<F, T>(&self, items: Vec<Item>, attempt: F) -> Result<()>
    where
        F: Fn(Arc<[Item]>) -> T,
        T: Future<Output = (Vec<Item>, Result<()>)>,
    {
        let (mut left, mut tries) = (items, Tries::of(self.remote));
        while !left.is_empty() {
            let before = left.len();
            let (rest, result) = attempt(left.into()).await;
            left = rest;
            let error = match result {
                _ if left.is_empty() => return Ok(()),
                Ok(()) => return Err(self.remote.protocol(format!("it did not send {}", left[0].digest))),
                Err(error) => error,
            };
            if left.len() < before {
                tries = Tries::of(self.remote);
            }
            if !matches!(error, Error::Cut { .. }) {
                return Err(error);
            }
            tries.again(error, None).await?;
        }
        Ok(())
    }

    async fn documents_of(&self, items: Arc<[Item]>) -> (Vec<Document>, Result<()>) {
        let tally = Tally::new(self.progress);
        let mut documents = Vec::with_capacity(items.len());
        let result = self.collect(&items, &tally, &mut documents).await;
        self.count(&tally);
        (documents, result)
    }

    async fn collect(&self, items: &Arc<[Item]>, tally: &Arc<Tally>, documents: &mut Vec<Document>) -> Result<()> {
        let Watched { frames, slot } = self.frames(items, Codecs::ALL, tally).await?;
        let mut frames = Box::pin(verified_frames(frames, self.limits.clone(), Arc::clone(&self.large_documents)));
        let mut large: Option<(Header, Vec<u8>)> = None;
        while let Some(incoming) = frames.next().await {
            let (header, bytes) = match incoming.map_err(|error| self.remote.received(&slot, error))? {
                Incoming::Whole(whole) => {
                    let digest = whole.header.digest;
                    (whole.header, whole.raw().map_err(|source| Error::Received { digest, source })?.into_owned())
                }
                // A document that the registry holds as a plain blob.
                Incoming::Begin(header) => {
                    self.check_document(&header)?;
                    large = Some((header, Vec::new()));
                    continue;
                }
                Incoming::Piece(piece) => {
                    large.iter_mut().for_each(|(_, stored)| stored.extend_from_slice(&piece));
                    continue;
                }
                Incoming::Finish { .. } => {
                    let (header, stored) = large.take().ok_or_else(|| Error::Internal("an end without a beginning".into()))?;
                    let digest = header.digest;
                    let raw = codec::decode(header.codec, &stored, header.raw_len);
                    (header, raw.map_err(|source| Error::Received { digest, source })?)
                }
            };
            self.check_document(&header)?;
            self.document_bytes.fetch_add(header.raw_len, Ordering::Relaxed);
            let held = self.held.fetch_add(header.raw_len, Ordering::Relaxed) + header.raw_len;
            if held > DOCUMENTS {
                let source = FormatError::TooLarge { what: "the page lists of a snapshot, in bytes", found: held, limit: DOCUMENTS };
                return Err(Error::Received { digest: header.digest, source });
            }
            // The meter has made sure that frames come in the order of the items.
            let item = items.get(documents.len()).ok_or_else(|| Error::Internal("more documents than were asked for".into()))?;
            check_size(item, bytes.len() as u64)?;
            documents.push(Document { digest: item.digest, kind: item.kind, bytes });
        }
        Ok(())
    }

    fn check_document(&self, header: &Header) -> Result<()> {
        let (found, limit) = (header.raw_len, self.limits.document_bytes);
        if found <= limit {
            return Ok(());
        }
        Err(Error::Received { digest: header.digest, source: FormatError::TooLarge { what: "a document, in bytes", found, limit } })
    }
}

impl PlanSource for Fetcher<'_> {
    const NEAR: bool = false;

    async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        let mut all = Vec::with_capacity(items.len());
        for batch in batches(items.to_vec()) {
            let got = Mutex::new(Vec::with_capacity(batch.len()));
            let attempt = |left: Arc<[Item]>| {
                let got = &got;
                async move {
                    let (documents, result) = self.documents_of(Arc::clone(&left)).await;
                    let rest = left[documents.len()..].to_vec();
                    got.lock().extend(documents);
                    (rest, result)
                }
            };
            self.fetch_all(batch, attempt).await?;
            all.extend(got.into_inner());
        }
        Ok(all)
    }
}

/// A stream for a reader that keeps only the text of an error.
pub(crate) struct Watched {
    pub frames: futures::stream::BoxStream<'static, std::result::Result<bytes::Bytes, pfr_store::Error>>,
    pub slot: Slot,
}

/// Lets a meter look at every piece.
pub(crate) fn watch(frames: BoxFrames, mut meter: Meter) -> Watched {
    let slot = Slot::default();
    let kept = slot.clone();
    let frames = frames
        .and_then(move |piece| futures::future::ready(meter.look(&piece).map(|()| piece)))
        .map_err(move |error| pfr_store::Error::Input(kept.keep(error).to_string()))
        .boxed();
    Watched { frames, slot }
}

/// Cuts blobs into requests.
pub(super) fn batches(items: Vec<Item>) -> Vec<Vec<Item>> {
    let by_bytes = cut(items, Item::bytes, BATCH_BYTES).into_iter();
    by_bytes.flat_map(|batch| batch.chunks(BATCH_DIGESTS).map(<[Item]>::to_vec).collect::<Vec<_>>()).collect()
}
