//! Counts the frames of a request for progress and reports, and checks that received frames are the
//! requested ones.

use crate::error::{Error, Result};
use crate::plan::{Item, check_size};
use crate::progress::Progress;
use bytes::Bytes;
use parking_lot::Mutex;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{Event, Header, Parser};
use pfr_schema::{FormatError, Limits};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes and frames that one try of a request has moved. A new try starts at zero.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    progress: Progress,
    raw: AtomicU64,
    blobs: AtomicU64,
    frame_bytes: AtomicU64,
    /// Whether the request was given up. Nothing counts then, although its body may still be read.
    is_over: Mutex<bool>,
}

impl Tally {
    pub fn new(progress: &Progress) -> Arc<Self> {
        Arc::new(Self { progress: progress.clone(), ..Self::default() })
    }

    /// Frames moved.
    pub fn blobs(&self) -> u64 {
        self.blobs.load(Ordering::Relaxed)
    }

    /// Raw bytes moved.
    pub fn raw(&self) -> u64 {
        self.raw.load(Ordering::Relaxed)
    }

    /// Bytes of frames moved.
    pub fn frame_bytes(&self) -> u64 {
        self.frame_bytes.load(Ordering::Relaxed)
    }

    /// Sets the counts back to zero, also in the progress, before the request is tried again.
    pub fn reset(&self) {
        self.progress.undo(self.raw.swap(0, Ordering::Relaxed), self.blobs.swap(0, Ordering::Relaxed));
        self.frame_bytes.store(0, Ordering::Relaxed);
    }

    fn give_up(&self) {
        let mut is_over = self.is_over.lock();
        *is_over = true;
        self.reset();
    }

    fn add_raw(&self, bytes: u64) {
        let is_over = self.is_over.lock();
        if *is_over {
            return;
        }
        self.raw.fetch_add(bytes, Ordering::Relaxed);
        self.progress.add_bytes_done(bytes);
    }

    fn end_frame(&self, header: &Header) {
        let is_over = self.is_over.lock();
        if *is_over {
            return;
        }
        self.blobs.fetch_add(1, Ordering::Relaxed);
        self.progress.add_blobs_done(1);
        self.frame_bytes.fetch_add(header.frame_len(), Ordering::Relaxed);
    }
}

/// An upload that the registry has not acknowledged. Dropping this takes its counts back, also in
/// the progress: a later request sends the same again, or the push has failed.
pub(crate) struct Unacknowledged(Option<Arc<Tally>>);

impl Unacknowledged {
    pub fn new(tally: &Arc<Tally>) -> Self {
        Self(Some(Arc::clone(tally)))
    }

    /// Keeps the counts.
    pub fn acknowledged(mut self) {
        self.0 = None;
    }
}

impl Drop for Unacknowledged {
    fn drop(&mut self) {
        if let Some(tally) = self.0.take() {
            tally.give_up();
        }
    }
}

/// Follows a stream of frames piece by piece. Payloads are not verified here.
pub(crate) struct Meter {
    parser: Parser,
    tally: Arc<Tally>,
    expected: Option<(Arc<[Item]>, usize)>,
    current: Option<Header>,
}

impl Meter {
    /// A meter that counts and accepts any frame.
    pub fn new(limits: &Limits, tally: Arc<Tally>) -> Self {
        Self { parser: Parser::new(limits.clone()), tally, expected: None, current: None }
    }

    /// A meter that counts and accepts only the frames of `items`, in this order and with these
    /// lengths: a hostile registry must not fill the disk with other frames.
    pub fn expecting(limits: &Limits, tally: Arc<Tally>, items: Arc<[Item]>) -> Self {
        Self { expected: Some((items, 0)), ..Self::new(limits, tally) }
    }

    /// Follows the next piece.
    pub fn look(&mut self, piece: &Bytes) -> Result<()> {
        self.parser.push(piece.clone());
        while let Some(event) = self.next()? {
            match event {
                Event::Begin(header) => {
                    self.check(&header)?;
                    self.current = Some(header);
                }
                Event::Payload(bytes) => {
                    if self.current.is_some_and(|h| h.codec == Codec::Raw) {
                        self.tally.add_raw(bytes.len() as u64);
                    }
                }
                Event::Finish { .. } => {
                    if let Some(header) = self.current.take() {
                        if header.codec != Codec::Raw {
                            self.tally.add_raw(header.raw_len);
                        }
                        self.tally.end_frame(&header);
                    }
                }
                Event::End => self.check_end()?,
            }
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Event>> {
        self.parser.next().map_err(|source| match self.wanted() {
            Some(item) => Error::Received { digest: item.digest, source },
            None => Error::Internal(source.to_string()),
        })
    }

    fn check_end(&self) -> Result<()> {
        match &self.expected {
            Some((items, next)) if *next < items.len() => {
                let source = FormatError::Frame { position: self.parser.position(), reason: "the stream ends without it".into() };
                Err(Error::Received { digest: items[*next].digest, source })
            }
            _ => Ok(()),
        }
    }

    fn wanted(&self) -> Option<Item> {
        let (items, next) = self.expected.as_ref()?;
        items.get(*next).or(items.last()).copied()
    }

    fn check(&mut self, header: &Header) -> Result<()> {
        let (digest, position) = (header.digest, self.parser.position());
        let Some((items, next)) = &mut self.expected else { return Ok(()) };
        let unasked = |reason: &str| Error::Received { digest, source: FormatError::Frame { position, reason: reason.into() } };
        let Some(item) = items.get(*next) else { return Err(unasked("the request does not name it")) };
        if item.digest != digest {
            return Err(unasked(&format!("the request names {} here", item.digest)));
        }
        *next += 1;
        check_size(item, header.raw_len)
    }
}
