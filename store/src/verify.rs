//! Verification of frames as they stream in: each blob is hashed once, off the async threads, several at a time.

use crate::error::{Error, Result};
use bytes::Bytes;
use futures::Stream;
use futures::StreamExt as _;
use pfr_schema::codec::{self, Codec, Decoder};
use pfr_schema::frame::{Event, Header, Parser};
use pfr_schema::{FormatError, Hasher, Limits};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

/// Frames up to this many payload bytes are held whole; larger ones pass in pieces.
pub const WHOLE_MAX: u64 = 4 << 20;
/// Payload bytes being hashed at a time, per stream.
const WINDOW: u64 = 6 << 20;
/// Payload bytes per hashing task: enough to be worth a task, little enough for two cores to share.
const BATCH: u64 = 1 << 20;

/// A verified frame, whole.
#[derive(Debug)]
pub struct Whole {
    /// Its header.
    pub header: Header,
    /// The encoded payload, in pieces as they came from the network.
    pub payload: Vec<Bytes>,
    /// CRC-32C of the payload.
    pub checksum: u32,
    /// Where the payload began in the stream.
    pub position: u64,
    /// Held while a large document is in memory.
    permit: Option<OwnedSemaphorePermit>,
}

impl Whole {
    /// The raw bytes, joined and decoded.
    ///
    /// # Errors
    /// None for a frame that was verified; the type is the codec's.
    pub fn raw(&self) -> std::result::Result<Cow<'_, [u8]>, FormatError> {
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

    fn verify(&self) -> Result<()> {
        let mut check = Check::new(&self.header, self.position)?;
        for piece in &self.payload {
            check.update(piece)?;
        }
        check.finish(self.checksum)
    }
}

/// What comes out of [`verified_frames`].
#[derive(Debug)]
pub enum Incoming {
    /// A whole frame, verified.
    Whole(Whole),
    /// A large frame begins. Its pieces are not verified until [`Incoming::Finish`] arrives: do not publish them.
    Begin(Header),
    /// Encoded payload of the large frame.
    Piece(Bytes),
    /// The large frame is complete and verified.
    Finish {
        /// CRC-32C of the payload.
        checksum: u32,
    },
}

/// A blob's checksum and digest, in the making.
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
        self.checksum = crc32c::crc32c_append(self.checksum, piece);
        let hasher = &mut self.hasher;
        self.decoder.update(piece, &mut |raw| hasher.update(raw)).map_err(|e| self.error(e))
    }

    pub(crate) fn finish(self, checksum: u32) -> Result<()> {
        let (position, digest) = (self.position, self.header.digest);
        let error = |source| Error::Frame { position, digest, source };
        if self.checksum != checksum {
            return Err(error(FormatError::Frame {
                position,
                reason: "the payload does not match its checksum: it was damaged on the disk or on the way".into(),
            }));
        }
        self.decoder.finish().map_err(error)?;
        let found = self.hasher.finish();
        if found != digest {
            return Err(error(FormatError::DigestMismatch { expected: digest, found }));
        }
        Ok(())
    }
}

/// Verifies a stream of frames that ends with an end mark; yields them in order.
///
/// Holds at most about 10 MiB of the stream; a document larger than [`WHOLE_MAX`] is held whole under `large_documents`, so
/// that only one such is in memory at a time: it is handed on as soon as it is verified, and the next one waits until it is dropped. Do not
/// keep it while waiting for the next item.
pub fn verified_frames<S>(stream: S, limits: Limits, large_documents: Arc<Semaphore>) -> impl Stream<Item = Result<Incoming>> + Send
where
    S: Stream<Item = Result<Bytes>> + Send + Unpin,
{
    let state = State {
        stream,
        parser: Parser::new(limits),
        large_documents,
        current: None,
        batch: Vec::new(),
        batch_bytes: 0,
        hashing: VecDeque::new(),
        hashing_bytes: 0,
        ready: VecDeque::new(),
        hand_on: false,
        begin: None,
        ended: None,
    };
    futures::stream::try_unfold(state, |mut state| async move { Ok(state.next().await?.map(|item| (item, state))) })
}

enum Current {
    Whole(Whole),
    // Boxed: decoder and hasher are much larger than a whole frame's entry.
    Pieces { check: Option<Box<Check>> },
}

struct State<S> {
    stream: S,
    parser: Parser,
    large_documents: Arc<Semaphore>,
    current: Option<Current>,
    batch: Vec<Whole>,
    batch_bytes: u64,
    hashing: VecDeque<(u64, JoinHandle<Result<Vec<Whole>>>)>,
    hashing_bytes: u64,
    ready: VecDeque<Whole>,
    /// What came is handed on before more is read.
    hand_on: bool,
    begin: Option<Header>,
    ended: Option<Result<()>>,
}

impl<S: Stream<Item = Result<Bytes>> + Send + Unpin> State<S> {
    async fn next(&mut self) -> Result<Option<Incoming>> {
        loop {
            if let Some(whole) = self.ready.pop_front() {
                return Ok(Some(Incoming::Whole(whole)));
            }
            let draining = self.ended.is_some() || self.hand_on;
            if (draining && !self.hashing.is_empty()) || self.hashing_bytes > WINDOW {
                self.collect().await?;
                continue;
            }
            self.hand_on = false;
            if let Some(header) = self.begin.take() {
                return Ok(Some(Incoming::Begin(header)));
            }
            match &mut self.ended {
                Some(Ok(())) => return Ok(None),
                Some(error @ Err(_)) => return std::mem::replace(error, Ok(())).map(|()| None),
                None => {}
            }
            match self.advance().await {
                Ok(None) => {}
                Ok(Some(item)) => return Ok(Some(item)),
                Err(error) => {
                    self.dispatch();
                    self.ended = Some(Err(error));
                }
            }
        }
    }

    async fn advance(&mut self) -> Result<Option<Incoming>> {
        if let Some(event) = self.parser.next()? {
            return self.event(event).await;
        }
        match self.stream.next().await {
            Some(bytes) => self.parser.push(bytes?),
            None => {
                self.parser.finish()?;
                self.ended = Some(Ok(()));
            }
        }
        Ok(None)
    }

    async fn event(&mut self, event: Event) -> Result<Option<Incoming>> {
        match event {
            Event::Begin(header) => {
                let position = self.parser.position();
                if header.stored_len.max(header.raw_len) <= WHOLE_MAX || header.kind.is_container() {
                    let permit = if header.stored_len.max(header.raw_len) > WHOLE_MAX {
                        let semaphore = Arc::clone(&self.large_documents);
                        Some(semaphore.acquire_owned().await.map_err(|e| Error::Internal(e.to_string()))?)
                    } else {
                        None
                    };
                    self.current = Some(Current::Whole(Whole { header, payload: Vec::new(), checksum: 0, position, permit }));
                    return Ok(None);
                }
                self.dispatch();
                let check = Some(Box::new(Check::new(&header, position)?));
                self.current = Some(Current::Pieces { check });
                self.begin = Some(header);
                self.hand_on = true;
                Ok(None)
            }
            Event::Payload(piece) => match &mut self.current {
                Some(Current::Whole(whole)) => {
                    whole.payload.push(piece);
                    Ok(None)
                }
                Some(Current::Pieces { check }) => {
                    let mut moved = check.take().ok_or_else(|| Error::Internal("a piece without a check".into()))?;
                    let bytes = piece.clone();
                    *check = Some(
                        tokio::task::spawn_blocking(move || moved.update(&bytes).map(|()| moved))
                            .await
                            .map_err(|e| Error::Internal(e.to_string()))??,
                    );
                    Ok(Some(Incoming::Piece(piece)))
                }
                None => Err(Error::Internal("a payload without a frame".into())),
            },
            Event::Finish { checksum } => match self.current.take() {
                Some(Current::Whole(mut whole)) => {
                    whole.checksum = checksum;
                    // Others wait for its permit, and so does this stream when the next one begins: it must not lie here until then.
                    self.hand_on = whole.permit.is_some();
                    self.batch_bytes += whole.header.stored_len + 256;
                    self.batch.push(whole);
                    if self.hand_on || self.batch_bytes >= BATCH {
                        self.dispatch();
                    }
                    Ok(None)
                }
                Some(Current::Pieces { check }) => {
                    let check = check.ok_or_else(|| Error::Internal("an end without a check".into()))?;
                    tokio::task::spawn_blocking(move || check.finish(checksum)).await.map_err(|e| Error::Internal(e.to_string()))??;
                    Ok(Some(Incoming::Finish { checksum }))
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
        if self.batch.is_empty() {
            return;
        }
        let batch = std::mem::take(&mut self.batch);
        let bytes = std::mem::take(&mut self.batch_bytes);
        self.hashing_bytes += bytes;
        let task = tokio::task::spawn_blocking(move || {
            for whole in &batch {
                whole.verify()?;
            }
            Ok(batch)
        });
        self.hashing.push_back((bytes, task));
    }

    /// Waits for the oldest hashing task.
    async fn collect(&mut self) -> Result<()> {
        if let Some((bytes, task)) = self.hashing.pop_front() {
            self.hashing_bytes -= bytes;
            self.ready.extend(task.await.map_err(|e| Error::Internal(e.to_string()))??);
        }
        Ok(())
    }
}
