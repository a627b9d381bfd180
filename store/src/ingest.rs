//! Ingest of frames: verify, append to a pack, make the pack durable, index it, and only then
//! acknowledge.

mod source;

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::live::LivePush;
use crate::metadata::NewContainer;
use crate::packs::PackWriter;
use crate::trace;
use crate::verify::{For, Incoming, Opened, Step, Verifier, Whole, is_large};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::{Container, Digest, Kind, Limits};
use source::{Read, Source, Wanted};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::time::Duration;
use tracing::Instrument as _;

/// Memory for one frame's entry until its pack is indexed, in bytes.
const ENTRY: u64 = 512;
/// Time after which a wait for the next blob looks at leases.
const TICK: Duration = Duration::from_secs(1);
const NO_LARGE: &str = "the registry is busy with other large documents";

/// The counts of an ingested stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ingested {
    /// Frames received.
    pub frames: u64,
    /// Of these, blobs the store did not have.
    pub new: u64,
    /// Payload bytes received.
    pub stored_bytes: u64,
    /// Raw bytes they stand for.
    pub raw_bytes: u64,
}

impl Store {
    /// Takes in a stream of frames (with its end mark); returns when all of it is durable and
    /// indexed.
    ///
    /// Every frame is verified against its digest, off the async threads. Memory is bounded
    /// whatever the size of blobs. If it fails, packs that were already complete stay stored under
    /// the session's lease, so a retry sends only the rest.
    ///
    /// # Errors
    /// [`Error::Frame`], [`Error::Format`], [`Error::Missing`], [`Error::WrongShape`],
    /// [`Error::PushUnknown`], [`Error::Full`], [`Error::QuotaExceeded`], [`Error::Unavailable`];
    /// [`Error::Input`] for errors of the stream itself.
    pub async fn ingest<S, E>(&self, push: &LivePush, stream: S) -> Result<Ingested>
    where
        S: Stream<Item = std::result::Result<Bytes, E>> + Send + Unpin,
        E: std::fmt::Display,
    {
        self.ingest_stream(push, &mut stream.map_err(|e| Error::Input(e.to_string()))).await
    }

    /// Takes in blobs that were verified when they were opened, and does not hash them again.
    /// Returns when all of them are durable and indexed. Holds the part of a pack that is being
    /// written.
    ///
    /// # Errors
    /// [`Error::PushUnknown`], [`Error::Full`], [`Error::Unavailable`]. Packs that were complete
    /// stay stored under the session's lease.
    #[boxed]
    pub async fn ingest_opened(&self, push: &LivePush, blobs: &mut (dyn Stream<Item = Opened> + Send + Unpin)) -> Result<Ingested> {
        let mut ingest = Ingest { store: self, push: push.clone(), pack: None, done: Ingested::default() };
        match ingest.take_opened(blobs).await {
            Ok(()) => Ok(ingest.done),
            Err(error) => {
                ingest.abandon().await;
                Err(error)
            }
        }
    }

    /// The same as [`Store::ingest`]; errors of the stream are those of the upload.
    #[boxed]
    pub(crate) async fn ingest_stream(
        &self,
        push: &LivePush,
        stream: &mut (dyn Stream<Item = Result<Bytes>> + Send + Unpin),
    ) -> Result<Ingested> {
        let mut ingest = Ingest { store: self, push: push.clone(), pack: None, done: Ingested::default() };
        let span = trace::storing();
        let taken = ingest.take_all(stream).instrument(span.clone()).await;
        span.record("pf.frames", trace::number(ingest.done.frames)).record("pf.bytes", trace::number(ingest.done.stored_bytes));
        span.record("pf.frames.new", trace::number(ingest.done.new));
        match taken {
            Ok(()) => Ok(ingest.done),
            Err(Fault::Stream(error)) => {
                // Keep the complete blobs, so that a retry sends only the rest.
                ingest.keep_what_came().await;
                Err(error)
            }
            Err(Fault::Store(error)) => {
                ingest.abandon().await;
                Err(error)
            }
        }
    }
}

/// Why an upload ended early.
enum Fault {
    /// The stream or its client failed: the complete blobs are good.
    Stream(Error),
    /// The store could not take something in.
    Store(Error),
}

struct Ingest<'a> {
    store: &'a Store,
    /// Its lease is renewed here while no pack is open.
    push: LivePush,
    pack: Option<Open>,
    done: Ingested,
}

struct Open {
    writer: PackWriter,
    /// Whether a large frame is half written: the pack must then not be completed.
    inside_frame: bool,
    /// Blobs that are complete in the pack. A second copy would waste space and memory.
    holds: HashSet<(Digest, Kind)>,
}

impl Ingest<'_> {
    async fn take_all<S>(&mut self, stream: S) -> std::result::Result<(), Fault>
    where
        S: Stream<Item = Result<Bytes>> + Send + Unpin,
    {
        let mut source = Source::new(self.store, stream);
        let mut frames = Verifier::new(self.store.options.limits.clone(), self.store.options.codecs, For::Store);
        // Whether complete blobs are being handed on, because other work waits for the place or the
        // one for large documents is taken.
        let mut leaving = false;
        loop {
            match frames.step().await.map_err(Fault::Stream)? {
                Step::Item(item) => self.take(item).await.map_err(Fault::Store)?,
                Step::End => return self.close_pack().await.map_err(Fault::Store),
                Step::Large => {
                    let large = &self.store.large;
                    if let Some(permit) = large.try_take() {
                        leaving = false;
                        frames.grant(permit);
                    } else if !leaving {
                        leaving = true;
                        frames.settle();
                    } else {
                        // Not in a place: the upload that has the permit may need one to go on.
                        leaving = false;
                        if !self.leave(&mut source, &frames).await? {
                            return Err(Fault::Stream(Error::Overloaded(NO_LARGE)));
                        }
                        source.queues();
                        let permit = large.take(self.store.options.queue, NO_LARGE).await.map_err(Fault::Stream)?;
                        source.enter().await.map_err(Fault::Stream)?;
                        frames.grant(permit);
                    }
                }
                Step::Input => {
                    if std::mem::take(&mut leaving) && !self.leave(&mut source, &frames).await? {
                        source.keep().map_err(Fault::Stream)?;
                    }
                    self.stay_alive().await.map_err(Fault::Store)?;
                    let wanted = Wanted { rest: frames.rest(), large: frames.holds_large() };
                    match source.read(wanted).await.map_err(Fault::Stream)? {
                        Read::Bytes(bytes) => frames.push(bytes),
                        Read::Tick => {}
                        Read::Leave => {
                            leaving = true;
                            frames.settle();
                        }
                        Read::End(result) => frames.end(result),
                    }
                }
            }
        }
    }

    async fn take_opened(&mut self, blobs: &mut (dyn Stream<Item = Opened> + Send + Unpin)) -> Result<()> {
        loop {
            let Ok(next) = tokio::time::timeout(TICK, blobs.next()).await else {
                self.stay_alive().await?;
                continue;
            };
            let Some(Opened { header, payload, checksum, .. }) = next else { return self.close_pack().await };
            self.stay_alive().await?;
            if !is_large(&header) {
                self.take_whole(header, None, payload, checksum).await?;
                continue;
            }
            self.take(Incoming::Begin(header)).await?;
            for piece in payload {
                self.take(Incoming::Piece(piece)).await?;
            }
            self.take(Incoming::Finish { checksum }).await?;
        }
    }

    /// Gives the place back, once everything complete was handed on; false if there is too much to
    /// hold without it.
    async fn leave<S>(&mut self, source: &mut Source<'_, S>, frames: &Verifier) -> std::result::Result<bool, Fault>
    where
        S: Stream<Item = Result<Bytes>> + Send + Unpin,
    {
        let held = match &mut self.pack {
            Some(open) => open.writer.rest().await.map_err(Fault::Store)? + open.writer.entries() as u64 * ENTRY,
            None => 0,
        };
        if source.try_leave(held + frames.partial()) {
            return Ok(true);
        }
        if self.pack.as_ref().is_some_and(|open| open.inside_frame) {
            return Ok(source.leave(held + frames.partial()).await);
        }
        // Close the pack, although it is small, so that its blobs are stored, before other uploads
        // must make room.
        self.close_pack().await.map_err(Fault::Store)?;
        Ok(source.leave(frames.partial()).await)
    }

    /// Renews leases in time while bytes are waited for: those of the open pack and its session.
    /// While a large first frame comes slowly, there is no pack yet.
    async fn stay_alive(&mut self) -> Result<()> {
        if let Some(open) = &mut self.pack {
            return open.writer.renew().await;
        }
        let Some(now) = self.push.renewal.due(self.store) else { return Ok(()) };
        let renewed = self.store.metadata.renew_push(self.push.id.clone(), self.store.options.lease).await;
        self.push.renewal.note(self.store, now, renewed.map(drop))
    }

    async fn take(&mut self, item: Incoming) -> Result<()> {
        match item {
            Incoming::Whole(whole) => {
                let container = if self.holds(&whole.header) { None } else { references(&whole, &self.store.options.limits)? };
                self.take_whole(whole.header, container, whole.payload, whole.checksum).await
            }
            Incoming::Begin(header) => {
                // A blob larger than a pack gets one of its own.
                self.count(&header);
                self.close_pack().await?;
                self.begin_frame(header, None).await?;
                self.open()?.inside_frame = true;
                Ok(())
            }
            Incoming::Piece(piece) => self.open()?.writer.append(piece).await,
            Incoming::Finish { checksum } => {
                self.open()?.inside_frame = false;
                self.end_frame(checksum).await
            }
        }
    }

    async fn take_whole(&mut self, header: Header, container: Option<NewContainer>, payload: Vec<Bytes>, checksum: u32) -> Result<()> {
        self.count(&header);
        if self.holds(&header) {
            self.open()?.writer.leave_out(header.stored_len);
            return Ok(());
        }
        self.begin_frame(header, container).await?;
        self.open()?.holds.insert((header.digest, header.kind));
        for piece in payload {
            self.open()?.writer.append(piece).await?;
        }
        self.end_frame(checksum).await
    }

    /// Whether the pack that is open holds a blob.
    fn holds(&self, header: &Header) -> bool {
        self.pack.as_ref().is_some_and(|open| open.holds.contains(&(header.digest, header.kind)))
    }

    fn open(&mut self) -> Result<&mut Open> {
        self.pack.as_mut().ok_or_else(|| Error::Internal("no pack is open".into()))
    }

    fn count(&mut self, header: &Header) {
        self.done.frames += 1;
        self.done.stored_bytes += header.stored_len;
        self.done.raw_bytes += header.raw_len;
    }

    async fn begin_frame(&mut self, header: Header, container: Option<NewContainer>) -> Result<()> {
        if self.pack.is_none() {
            self.pack =
                Some(Open { writer: PackWriter::begin(self.store, Some(&self.push)).await?, inside_frame: false, holds: HashSet::new() });
        }
        self.open()?.writer.header(header, container).await
    }

    async fn end_frame(&mut self, checksum: u32) -> Result<()> {
        self.open()?.writer.checksum(checksum).await?;
        if self.open()?.writer.is_full() { self.close_pack().await } else { Ok(()) }
    }

    async fn close_pack(&mut self) -> Result<()> {
        if let Some(open) = self.pack.take() {
            self.done.new += open.writer.finish().await?.new;
        }
        Ok(())
    }

    async fn keep_what_came(&mut self) {
        if self.pack.as_ref().is_some_and(|open| open.inside_frame) {
            return self.abandon().await;
        }
        if let Err(error) = self.close_pack().await {
            tracing::debug!(%error, "storing the complete blobs of a broken stream failed");
        }
    }

    async fn abandon(&mut self) {
        if let Some(open) = self.pack.take() {
            open.writer.abandon().await;
        }
    }
}

/// What a verified frame lists, if it is a node.
fn references(whole: &Whole, limits: &Limits) -> Result<Option<NewContainer>> {
    let header = &whole.header;
    if !header.kind.is_container() {
        return Ok(None);
    }
    let error = |source| Error::Frame { position: whole.position, digest: header.digest, source };
    let raw = whole.raw().map_err(error)?;
    let container = Container::parse(header.kind, &raw, limits).map_err(error)?;
    Ok(container.map(|c| NewContainer { children: each_once(c.children()), shape: c.shape() }))
}

/// Children without those that say the same of a blob as its first mention: a page chunk may list
/// one page thousands of times, in few bytes.
fn each_once(mut children: Vec<Child>) -> Vec<Child> {
    let mut first: HashMap<Digest, Child> = HashMap::new();
    children.retain(|child| match first.entry(child.digest) {
        Entry::Vacant(entry) => {
            entry.insert(child.clone());
            true
        }
        // A node that lists one child in two ways is refused when it is indexed.
        Entry::Occupied(entry) => entry.get() != child,
    });
    children.shrink_to_fit();
    children
}
