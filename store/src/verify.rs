//! Verification of frames as they stream in: each blob is hashed once, off the async threads,
//! several at a time. One [`Verifier`] serves stores, which keep the frames, and readers, which
//! want the raw bytes as well.
//!
//! ```text
//! bytes ─▶ parser ─▶ batch: whole frames in memory of a pool ─▶ groups: decode, hash ─▶ in order
//! ```

mod batch;
mod groups;
mod lanes;
mod opened;

pub use opened::{Opened, opened_frames};

use crate::error::{Error, Result};
use crate::trace::Stage;
use batch::Batch;
use bytes::Bytes;
use futures::Stream;
use futures::StreamExt as _;
use groups::Outcome;
use pfr_schema::codec::{self, Codec, Codecs, Decoder};
use pfr_schema::frame::{CHECKSUM, Event, Header, Parser};
use pfr_schema::{FormatError, Hasher, Limits};
use pfr_service::task::Task;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Frames up to this many payload bytes are held whole; larger ones pass in pieces.
pub const WHOLE_MAX: u64 = 4 << 20;
/// Payload bytes being hashed at a time, per stream of a store.
const WINDOW: u64 = 6 << 20;
/// Batches being hashed at a time, per stream of a reader, whose caller bounds the bytes.
const BATCHES: usize = 4;

/// Whether a store lets the blob pass in pieces.
pub(crate) fn is_large(header: &Header) -> bool {
    header.stored_len.max(header.raw_len) > WHOLE_MAX
}

/// A verified frame, whole.
#[derive(Debug)]
pub struct Whole {
    /// Its header.
    pub header: Header,
    /// The encoded payload: in one piece, but for large documents, whose pieces are as they came.
    pub payload: Vec<Bytes>,
    /// CRC-32C of the payload.
    pub checksum: u32,
    /// Where the payload began in the stream.
    pub position: u64,
    /// The raw bytes, if a reader wants them.
    raw: Option<Bytes>,
    /// Held while a large document is in memory.
    _permit: Option<OwnedSemaphorePermit>,
}

impl Whole {
    /// The raw bytes, joined and decoded.
    ///
    /// # Errors
    /// None for a frame that was verified; the type is the codec's.
    pub fn raw(&self) -> std::result::Result<Cow<'_, [u8]>, FormatError> {
        if let Some(raw) = &self.raw {
            return Ok(Cow::Borrowed(&raw[..]));
        }
        let joined = match &self.payload[..] {
            [] => Cow::Borrowed(&[][..]),
            [one] => Cow::Borrowed(&one[..]),
            many => Cow::Owned(many.concat()),
        };
        match self.header.codec {
            Codec::Raw => Ok(joined),
            other => Ok(Cow::Owned(codec::decode(other, &joined, self.header.raw_len)?)),
        }
    }

    /// Verifies it by itself, and hands out its raw bytes on the way.
    fn verify(&self, sink: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut check = Check::new(&self.header, self.position)?;
        for piece in &self.payload {
            check.update_into(piece, sink)?;
        }
        check.finish(self.checksum)
    }
}

/// An item of [`verified_frames`].
#[derive(Debug)]
pub enum Incoming {
    /// A whole frame, verified.
    Whole(Whole),
    /// A large frame begins. Its pieces are not verified until [`Incoming::Finish`] arrives: do not
    /// publish them.
    Begin(Header),
    /// Encoded payload of the large frame.
    Piece(Bytes),
    /// The large frame is complete and verified.
    Finish {
        /// CRC-32C of the payload.
        checksum: u32,
    },
}

/// The checksum and digest of a blob while it is read.
pub(crate) struct Check {
    header: Header,
    position: u64,
    checksum: u32,
    decoder: Decoder,
    hasher: Hasher,
}

impl Check {
    pub(crate) fn new(header: &Header, position: u64) -> Result<Self> {
        Ok(Self {
            header: *header,
            position,
            checksum: 0,
            decoder: Decoder::new(header.codec, header.raw_len)?,
            hasher: Hasher::new(header.digest.algorithm()),
        })
    }

    fn error(&self, source: FormatError) -> Error {
        Error::Frame { position: self.position, digest: self.header.digest, source }
    }

    pub(crate) fn update(&mut self, piece: &[u8]) -> Result<()> {
        self.update_into(piece, &mut |_| {})
    }

    /// The next piece, whose raw bytes go to `sink` as well.
    fn update_into(&mut self, piece: &[u8], sink: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.update_while(piece, &mut |raw| {
            sink(raw);
            true
        })
    }

    /// The next piece, until `sink` returns false: it may stand for gigabytes.
    fn update_while(&mut self, piece: &[u8], sink: &mut dyn FnMut(&[u8]) -> bool) -> Result<()> {
        self.checksum = crc32c::crc32c_append(self.checksum, piece);
        let hasher = &mut self.hasher;
        let mut take = |raw: &[u8]| {
            hasher.update(raw);
            sink(raw)
        };
        self.decoder.update_while(piece, &mut take).map_err(|e| self.error(e))
    }

    pub(crate) fn finish(self, checksum: u32) -> Result<()> {
        let (position, digest) = (self.position, self.header.digest);
        let error = |source| Error::Frame { position, digest, source };
        if self.checksum != checksum {
            return Err(error(damaged(position)));
        }
        self.decoder.finish().map_err(error)?;
        let found = self.hasher.finish();
        if found != digest {
            return Err(error(FormatError::DigestMismatch { expected: digest.to_string(), found: found.to_string() }));
        }
        Ok(())
    }
}

/// A payload that does not have its checksum.
fn damaged(position: u64) -> FormatError {
    let reason = "the payload does not match its checksum: it was damaged on the disk or on the way".into();
    FormatError::Frame { position, reason }
}

/// Takes the header and the raw bytes of a whole frame that was verified. It runs on the thread
/// that has decoded and hashed these bytes, several at a time.
pub type Sink = Arc<dyn Fn(&Header, &[u8]) -> Result<()> + Send + Sync>;

/// The same as [`verified_frames`]. A whole frame is yielded when the sink has taken it, so its
/// bytes are decoded once. The stream ends with the first error of the sink.
pub fn verified_frames_into<S>(
    stream: S,
    limits: Limits,
    large_documents: Arc<Semaphore>,
    sink: Sink,
) -> impl Stream<Item = Result<Incoming>> + Send
where
    S: Stream<Item = Result<Bytes>> + Send + Unpin,
{
    verified_by(Verifier { sink: Some(sink), ..Verifier::new(limits, Codecs::ALL, For::Store) }, stream, large_documents)
}

/// Verifies a stream of frames that ends with an end mark; yields them in order.
///
/// Holds at most about 10 MiB of the stream; a document larger than [`WHOLE_MAX`] is held whole
/// under `large_documents`, so that only one such is in memory at a time: it is handed on as soon
/// as it is verified, and the next one waits until it is dropped. Do not keep it while waiting for
/// the next item.
pub fn verified_frames<S>(stream: S, limits: Limits, large_documents: Arc<Semaphore>) -> impl Stream<Item = Result<Incoming>> + Send
where
    S: Stream<Item = Result<Bytes>> + Send + Unpin,
{
    verified_by(Verifier::new(limits, Codecs::ALL, For::Store), stream, large_documents)
}

fn verified_by<S>(verifier: Verifier, stream: S, large_documents: Arc<Semaphore>) -> impl Stream<Item = Result<Incoming>> + Send
where
    S: Stream<Item = Result<Bytes>> + Send + Unpin,
{
    let state = (verifier, stream, large_documents);
    futures::stream::try_unfold(state, |(mut verifier, mut stream, large)| async move {
        loop {
            match verifier.step().await? {
                Step::Item(item) => return Ok(Some((item, (verifier, stream, large)))),
                Step::End => return Ok(None),
                Step::Large => {
                    let permit = Arc::clone(&large).acquire_owned().await?;
                    verifier.grant(permit);
                }
                Step::Input => verifier.read(stream.next().await),
            }
        }
    })
}

/// The next item of a [`Verifier`], or what it needs.
pub(crate) enum Step {
    /// The next item of the stream.
    Item(Incoming),
    /// It needs bytes: [`Verifier::push`], or [`Verifier::end`].
    Input,
    /// A large document begins, and it needs a permit to hold it: [`Verifier::grant`].
    Large,
    /// The stream is complete.
    End,
}

/// Where verified frames go.
#[derive(Clone, Copy)]
pub(crate) enum For {
    /// To a store, which keeps them as they came. Large blobs pass in pieces.
    Store,
    /// To a reader: all items are whole frames and have their raw bytes. A blob of more than
    /// `largest` raw bytes ends the stream with an error before any of it is held.
    Reader { largest: u64 },
}

enum Current {
    /// In the batch.
    Small,
    /// A large document.
    Whole(Whole),
    // Boxed: decoder and hasher are much larger than a whole frame's entry.
    Pieces {
        check: Option<Box<Check>>,
    },
}

/// Verifies frames whose bytes are pushed into it. It reads nothing and waits only for its own
/// hashing, so that its owner decides when to read, and what to release while it waits for a
/// client.
pub(crate) struct Verifier {
    parser: Parser,
    purpose: For,
    /// A frame in another codec ends the stream with an error.
    codecs: Codecs,
    /// A large document that begins when its permit is granted.
    asked: Option<Header>,
    current: Option<Current>,
    batch: Batch,
    /// Payload bytes of the large document that is not complete yet.
    partial: u64,
    hashing: VecDeque<(u64, Task<Outcome>)>,
    hashing_bytes: u64,
    ready: VecDeque<Whole>,
    /// What is wrong with the frame after those that are ready.
    fault: Option<Error>,
    /// Bytes that have arrived are handed on before more are read.
    hand_on: bool,
    begin: Option<Header>,
    ended: Option<Result<()>>,
    /// Gets whole frames on the threads that have verified them.
    sink: Option<Sink>,
    owner: Owner,
}

/// The owner of a [`Verifier`]. When it is dropped, hashing tasks stop: what they were given may
/// stand for gigabytes.
#[derive(Default)]
struct Owner(Arc<AtomicBool>);

/// Whether the owner of a [`Verifier`] is still there.
#[derive(Clone)]
struct Wanted(Arc<AtomicBool>);

impl Owner {
    fn wanted(&self) -> Wanted {
        Wanted(Arc::clone(&self.0))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Wanted {
    fn go_on(&self) -> bool {
        !self.0.load(Ordering::Relaxed)
    }
}

impl Verifier {
    pub(crate) fn new(limits: Limits, codecs: Codecs, purpose: For) -> Self {
        Self {
            parser: Parser::new(limits),
            purpose,
            codecs,
            asked: None,
            current: None,
            batch: Batch::default(),
            partial: 0,
            hashing: VecDeque::new(),
            hashing_bytes: 0,
            ready: VecDeque::new(),
            fault: None,
            hand_on: false,
            begin: None,
            ended: None,
            sink: None,
            owner: Owner::default(),
        }
    }

    /// The next thing to do. After an error it is of no use any more.
    ///
    /// # Errors
    /// What is wrong with the bytes, or the error that [`Self::end`] was told. Frames before it
    /// were yielded.
    pub(crate) async fn step(&mut self) -> Result<Step> {
        loop {
            if let Some(whole) = self.ready.pop_front() {
                return Ok(Step::Item(Incoming::Whole(whole)));
            }
            if let Some(fault) = self.fault.take() {
                return Err(fault);
            }
            let flushing = self.ended.is_some() || self.hand_on;
            // What is hashed is handed on at once, while it is in the processor's cache.
            let is_hashed = self.hashing.front().is_some_and(|(_, task)| task.is_finished());
            if is_hashed || (flushing && !self.hashing.is_empty()) || self.is_behind() {
                self.collect().await?;
                continue;
            }
            self.hand_on = false;
            if let Some(header) = self.begin.take() {
                return Ok(Step::Item(Incoming::Begin(header)));
            }
            match &mut self.ended {
                Some(Ok(())) => return Ok(Step::End),
                Some(error @ Err(_)) => return std::mem::replace(error, Ok(())).map(|()| Step::End),
                None => {}
            }
            match self.advance().await {
                Ok(None) => {}
                Ok(Some(step)) => return Ok(step),
                Err(error) => self.end(Err(error)),
            }
        }
    }

    /// The next bytes of the stream. To be called when a step asks for them.
    pub(crate) fn push(&mut self, bytes: Bytes) {
        self.parser.push(bytes);
    }

    /// What a stream gave when a step asked for bytes.
    fn read(&mut self, next: Option<Result<Bytes>>) {
        match next {
            Some(Ok(bytes)) => self.push(bytes),
            Some(Err(error)) => self.end(Err(error)),
            None => self.end(Ok(())),
        }
    }

    /// The stream has ended, or is broken.
    pub(crate) fn end(&mut self, result: Result<()>) {
        self.dispatch();
        self.ended = Some(result.and_then(|()| Ok(self.parser.finish()?)));
    }

    /// Permit to hold the large document that a step asked for.
    pub(crate) fn grant(&mut self, permit: OwnedSemaphorePermit) {
        if let Some(header) = self.asked.take() {
            let position = self.parser.position();
            self.current =
                Some(Current::Whole(Whole { header, payload: Vec::new(), checksum: 0, position, raw: None, _permit: Some(permit) }));
        }
    }

    /// Yields everything that is complete before it asks for more: afterwards it holds nothing but
    /// [`Self::partial`].
    pub(crate) fn settle(&mut self) {
        self.dispatch();
        self.batch.shrink();
        self.hand_on = true;
    }

    /// Bytes of the frame that is not complete yet.
    pub(crate) fn partial(&self) -> u64 {
        self.partial + self.batch.partial()
    }

    /// Bytes to the end of the frame that is held until it is complete; none if there is no such
    /// frame.
    pub(crate) fn rest(&self) -> Option<u64> {
        let header = match &self.current {
            Some(Current::Small) => self.batch.coming()?,
            Some(Current::Whole(whole)) => &whole.header,
            _ => return None,
        };
        Some(header.stored_len - self.partial() + CHECKSUM as u64)
    }

    /// Whether it holds a large document.
    pub(crate) fn holds_large(&self) -> bool {
        matches!(&self.current, Some(Current::Whole(_)))
    }

    /// Whether hashing is so far behind that nothing more is read.
    fn is_behind(&self) -> bool {
        match self.purpose {
            For::Store => self.hashing_bytes > WINDOW,
            For::Reader { .. } => self.hashing.len() >= BATCHES,
        }
    }

    async fn advance(&mut self) -> Result<Option<Step>> {
        if self.asked.is_some() {
            return Ok(Some(Step::Large));
        }
        match self.parser.next()? {
            Some(event) => self.event(event).await,
            None => Ok(Some(Step::Input)),
        }
    }

    fn check_codec(&self, header: &Header) -> Result<()> {
        if self.codecs.contains(header.codec) {
            return Ok(());
        }
        let source = header.codec.error(format_args!("not taken here, only {}; encode the blob in one of these", self.codecs));
        Err(Error::Frame { position: self.parser.position(), digest: header.digest, source })
    }

    /// Whether a frame is held in the batch.
    fn is_held(&self, header: &Header) -> Result<bool> {
        let For::Reader { largest: limit } = self.purpose else { return Ok(!is_large(header)) };
        let found = header.raw_len;
        if found > limit {
            let source = FormatError::TooLarge { what: "a blob that is held whole, in bytes", found, limit };
            return Err(Error::Frame { position: self.parser.position(), digest: header.digest, source });
        }
        Ok(true)
    }

    async fn event(&mut self, event: Event) -> Result<Option<Step>> {
        match event {
            Event::Begin(header) => {
                self.check_codec(&header)?;
                if self.is_held(&header)? {
                    self.batch.begin(header, self.parser.position());
                    self.current = Some(Current::Small);
                    return Ok(None);
                }
                if header.kind.is_container() {
                    self.asked = Some(header);
                    return Ok(Some(Step::Large));
                }
                self.dispatch();
                let check = Some(Box::new(Check::new(&header, self.parser.position())?));
                self.current = Some(Current::Pieces { check });
                self.begin = Some(header);
                self.hand_on = true;
                Ok(None)
            }
            Event::Payload(piece) => match &mut self.current {
                Some(Current::Small) => {
                    self.batch.append(&piece);
                    Ok(None)
                }
                Some(Current::Whole(whole)) => {
                    self.partial += piece.len() as u64;
                    whole.payload.push(piece);
                    Ok(None)
                }
                Some(Current::Pieces { check }) => {
                    let mut moved = check.take().ok_or_else(|| Error::Internal("a piece without a check".into()))?;
                    let (bytes, wanted) = (piece.clone(), self.owner.wanted());
                    let update = move || moved.update_while(&bytes, &mut |_| wanted.go_on()).map(|()| moved);
                    *check = Some(pfr_service::task::spawn_blocking(update).await??);
                    Ok(Some(Step::Item(Incoming::Piece(piece))))
                }
                None => Err(Error::Internal("a payload without a frame".into())),
            },
            Event::Finish { checksum } => match self.current.take() {
                Some(Current::Small) => {
                    if self.batch.finish(checksum) {
                        self.dispatch();
                    }
                    Ok(None)
                }
                Some(Current::Whole(mut whole)) => {
                    self.partial = 0;
                    whole.checksum = checksum;
                    self.batch.add(whole);
                    // Others wait for its permit, and so does this stream when the next one begins:
                    // it must not lie here until then.
                    self.hand_on = true;
                    self.dispatch();
                    Ok(None)
                }
                Some(Current::Pieces { check }) => {
                    let check = check.ok_or_else(|| Error::Internal("an end without a check".into()))?;
                    pfr_service::task::spawn_blocking(move || check.finish(checksum)).await??;
                    Ok(Some(Step::Item(Incoming::Finish { checksum })))
                }
                None => Err(Error::Internal("an end without a frame".into())),
            },
            Event::End => {
                self.dispatch();
                Ok(None)
            }
        }
    }

    /// Sends the batch to a hashing task.
    fn dispatch(&mut self) {
        let (frames, bytes) = self.batch.take();
        if frames.is_empty() {
            return;
        }
        self.hashing_bytes += bytes;
        let keep = matches!(self.purpose, For::Reader { .. });
        let (sink, wanted, stage) = (self.sink.clone(), self.owner.wanted(), Stage::verify(frames.len(), bytes));
        let task = pfr_service::task::spawn_blocking(move || {
            let (right, fault) = groups::verify(frames, keep, sink.as_ref(), &wanted);
            (right, stage.end(fault.map_or(Ok(()), Err)).err())
        });
        self.hashing.push_back((bytes, task));
    }

    /// Waits for the oldest hashing task. If it has failed, for the others too: none of them gives
    /// a frame to the sink later.
    async fn collect(&mut self) -> Result<()> {
        let Some((bytes, task)) = self.hashing.pop_front() else { return Ok(()) };
        self.hashing_bytes -= bytes;
        let outcome = task.await.map_err(Error::from);
        let (right, fault) = outcome.unwrap_or_else(|error| (Vec::new(), Some(error)));
        self.ready.extend(right);
        self.fault = fault;
        if self.fault.is_some() {
            while let Some((bytes, task)) = self.hashing.pop_front() {
                self.hashing_bytes -= bytes;
                drop(task.await);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::codec::encode_document;
    use pfr_schema::frame::{encode, end_mark};
    use pfr_schema::{Digest, Kind};
    use std::time::{Duration, Instant};

    /// A few KiB that stand for 256 MiB.
    #[test]
    fn a_large_blob_that_nothing_waits_for_any_more_is_not_hashed_to_its_end() {
        let raw = vec![0; 256 << 20];
        let (codec, stored) = encode_document(&raw);
        let (raw_len, stored_len) = (raw.len() as u64, stored.len() as u64);
        let header = Header { codec, kind: Kind::Blob, digest: Digest::sha256(&raw), raw_len, stored_len };
        let stream = Bytes::from([encode(&header, &stored), end_mark(1)].concat());
        let hash = |to_its_end: bool| {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
            let started = Instant::now();
            runtime.block_on(async {
                let (stream, large) = (futures::stream::iter([Ok(stream.clone())]), Arc::new(Semaphore::new(1)));
                let mut frames = Box::pin(verified_frames(stream, Limits::default(), large));
                assert!(matches!(frames.next().await, Some(Ok(Incoming::Begin(_)))));
                let piece = tokio::time::timeout(Duration::from_millis(if to_its_end { 60_000 } else { 10 }), frames.next()).await;
                assert_eq!(matches!(piece, Ok(Some(Ok(Incoming::Piece(_))))), to_its_end);
            });
            // Waits for the work on other threads.
            drop(runtime);
            started.elapsed()
        };
        // A pause of the machine may lengthen one of them.
        let times: Vec<_> = std::iter::repeat_with(|| (hash(true), hash(false))).take(3).collect();
        assert!(times.iter().any(|(whole, left)| *left < *whole / 2), "{times:?}");
    }
}
