//! Blobs that are decoded once, while they are verified: for a reader that wants their raw bytes,
//! and for a store that takes them in behind it without hashing them again.

use crate::error::{Error, Result};
use crate::verify::damaged;
use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use pfr_schema::codec::{self, Codec};
use pfr_schema::frame::{Event, Header, Parser};
use pfr_schema::{Digest, FormatError, Kind, Limits};
use std::collections::VecDeque;
use tokio::task::JoinHandle;

/// Payload bytes for a thread at a time, at least: enough to be worth a task.
const BATCH: u64 = 1 << 20;
/// Payload bytes after which a batch does not wait for more blobs to hash side by side.
const BATCH_MAX: u64 = 4 << 20;
/// Batches of a stream that are opened at a time.
const BATCHES: usize = 4;

/// A blob, decoded and verified. Only [`opened_frames`] makes one.
#[derive(Debug)]
pub struct Opened {
    pub(crate) header: Header,
    /// As it came; for codec `raw` the same bytes as `raw`.
    pub(crate) payload: Vec<Bytes>,
    pub(crate) checksum: u32,
    raw: Bytes,
}

impl Opened {
    /// Its digest, which its bytes have.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.header.digest
    }

    /// Bytes of its frame.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        self.header.frame_len()
    }

    /// Its raw bytes.
    #[must_use]
    pub fn raw(&self) -> &Bytes {
        &self.raw
    }
}

/// Decodes and verifies a stream of frames that ends with an end mark, on blocking threads, blobs
/// of one length side by side. Yields the blobs in order, those before an error too. Nodes are
/// taken for plain blobs.
///
/// Holds the frames that arrived and were not yielded: its caller bounds what the stream brings. A
/// blob of more than `largest` raw bytes ends it with an error before any of it is held.
pub fn opened_frames<S>(stream: S, limits: Limits, largest: u64) -> impl Stream<Item = Result<Opened>> + Send
where
    S: Stream<Item = Result<Bytes>> + Send + Unpin,
{
    let state = (Opener::new(limits, largest), stream);
    futures::stream::try_unfold(state, |(mut opener, mut stream)| async move {
        let opened = opener.next(&mut stream).await?;
        Ok(opened.map(|opened| (opened, (opener, stream))))
    })
}

/// A frame that is complete and not verified.
struct Arrived {
    header: Header,
    payload: Vec<Bytes>,
    checksum: u32,
    position: u64,
}

/// The blobs of a batch up to the first that is wrong, and what is wrong with it.
type Outcome = (Vec<Opened>, Option<Error>);

struct Opener {
    parser: Parser,
    largest: u64,
    current: Option<Arrived>,
    batch: Vec<Arrived>,
    batch_bytes: u64,
    opening: VecDeque<JoinHandle<Outcome>>,
    ready: VecDeque<Opened>,
    fault: Option<Error>,
    ended: Option<Result<()>>,
}

impl Opener {
    fn new(limits: Limits, largest: u64) -> Self {
        Self {
            parser: Parser::new(limits),
            largest,
            current: None,
            batch: Vec::new(),
            batch_bytes: 0,
            opening: VecDeque::new(),
            ready: VecDeque::new(),
            fault: None,
            ended: None,
        }
    }

    async fn next<S>(&mut self, stream: &mut S) -> Result<Option<Opened>>
    where
        S: Stream<Item = Result<Bytes>> + Send + Unpin,
    {
        loop {
            if let Some(opened) = self.ready.pop_front() {
                return Ok(Some(opened));
            }
            if let Some(fault) = self.fault.take() {
                return Err(fault);
            }
            if (self.opening.len() >= BATCHES || self.ended.is_some())
                && let Some(task) = self.opening.pop_front()
            {
                let (opened, fault) = task.await.map_err(|e| Error::Internal(e.to_string()))?;
                self.ready.extend(opened);
                self.fault = fault;
                continue;
            }
            if let Some(ended) = self.ended.take() {
                return ended.map(|()| None);
            }
            match self.parser.next() {
                Ok(Some(event)) => {
                    if let Err(error) = self.event(event) {
                        self.end(Err(error));
                    }
                }
                Ok(None) => match stream.next().await {
                    Some(Ok(bytes)) => self.parser.push(bytes),
                    Some(Err(error)) => self.end(Err(error)),
                    None => self.end(Ok(())),
                },
                Err(error) => self.end(Err(error.into())),
            }
        }
    }

    fn event(&mut self, event: Event) -> Result<()> {
        let none = || Error::Internal("a payload without a frame".into());
        match event {
            Event::Begin(header) => {
                let (position, found) = (self.parser.position(), header.raw_len);
                if found > self.largest {
                    let source = FormatError::TooLarge { what: "a blob that is held whole, in bytes", found, limit: self.largest };
                    return Err(Error::Frame { position, digest: header.digest, source });
                }
                let header = Header { kind: Kind::Blob, ..header };
                self.current = Some(Arrived { header, payload: Vec::new(), checksum: 0, position });
            }
            Event::Payload(piece) => self.current.as_mut().ok_or_else(none)?.payload.push(piece),
            Event::Finish { checksum } => {
                let arrived = self.current.take().ok_or_else(none)?;
                self.batch_bytes += arrived.header.stored_len;
                self.batch.push(Arrived { checksum, ..arrived });
                let is_enough = self.batch_bytes >= BATCH && self.batch.len() >= Digest::SIDE_BY_SIDE;
                if is_enough || self.batch_bytes >= BATCH_MAX {
                    self.dispatch();
                }
            }
            Event::End => self.dispatch(),
        }
        Ok(())
    }

    /// The stream has ended, or is broken: what is complete is opened.
    fn end(&mut self, result: Result<()>) {
        self.dispatch();
        self.ended = Some(result.and_then(|()| Ok(self.parser.finish()?)));
    }

    fn dispatch(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        if !batch.is_empty() {
            self.opening.push_back(tokio::task::spawn_blocking(move || open(batch)));
        }
    }
}

/// Decodes the frames of a batch, and hashes neighbours of one length together.
fn open(batch: Vec<Arrived>) -> Outcome {
    let (mut decoded, mut fault) = (Vec::with_capacity(batch.len()), None);
    for arrived in batch {
        match arrived.decode() {
            Ok(opened) => decoded.push(opened),
            Err(error) => {
                fault = Some(error);
                break;
            }
        }
    }
    let alike = |(a, _): &(Opened, u64), (b, _): &(Opened, u64)| {
        a.raw.len() == b.raw.len() && a.header.digest.algorithm() == b.header.digest.algorithm()
    };
    let mut found = Vec::with_capacity(decoded.len());
    for neighbours in decoded.chunk_by(alike) {
        let blobs: Vec<&[u8]> = neighbours.iter().map(|(opened, _)| &opened.raw[..]).collect();
        found.extend(Digest::of_each(neighbours[0].0.header.digest.algorithm(), &blobs));
    }
    let mut opened = Vec::with_capacity(decoded.len());
    for ((blob, position), found) in decoded.into_iter().zip(found) {
        let digest = blob.header.digest;
        if found != digest {
            let source = FormatError::DigestMismatch { expected: digest.to_string(), found: found.to_string() };
            return (opened, Some(Error::Frame { position, digest, source }));
        }
        opened.push(blob);
    }
    (opened, fault)
}

impl Arrived {
    /// The blob, whose digest is not checked yet, and its position in the stream.
    fn decode(self) -> Result<(Opened, u64)> {
        let Self { header, payload, checksum, position } = self;
        let error = |source| Error::Frame { position, digest: header.digest, source };
        if payload.iter().fold(0, |sum, piece| crc32c::crc32c_append(sum, piece)) != checksum {
            return Err(error(damaged(position)));
        }
        let joined = join(payload);
        let raw = match header.codec {
            Codec::Raw => joined.clone(),
            codec => codec::decode(codec, &joined, header.raw_len).map_err(error)?.into(),
        };
        Ok((Opened { header, payload: vec![joined], checksum, raw }, position))
    }
}

fn join(mut pieces: Vec<Bytes>) -> Bytes {
    if pieces.len() == 1 {
        return pieces.remove(0);
    }
    let mut joined = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
    pieces.iter().for_each(|piece| joined.extend_from_slice(piece));
    joined.freeze()
}
