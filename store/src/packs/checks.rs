//! Checking frames as they lie in a pack, piece by piece and in constant memory.

use crate::error::Error;
use crate::metadata::Packed;
use crate::verify::Check;
use pfr_schema::frame::{CHECKSUM, Header};
use pfr_schema::pack::Entry;
use pfr_schema::{Digest, Limits};

/// A frame that should lie at a place.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub offset: u64,
    pub digest: Digest,
    pub frame_len: u64,
    /// Its header, if the pack's index is there to say it.
    pub header: Option<Header>,
}

impl From<&Entry> for Expected {
    fn from(entry: &Entry) -> Self {
        let header = entry.header;
        Self { offset: entry.offset, digest: header.digest, frame_len: header.frame_len(), header: Some(header) }
    }
}

impl From<&Packed> for Expected {
    fn from(packed: &Packed) -> Self {
        Self { offset: packed.offset, digest: packed.digest, frame_len: packed.frame_len, header: None }
    }
}

/// Checks the frames of one pack. Feed it the pack's bytes in order.
pub(crate) struct FrameChecks {
    /// In order of offset.
    expected: Vec<Expected>,
    full: bool,
    limits: Limits,
    /// Position in `expected` of the frame that comes next.
    next: usize,
    current: Option<Frame>,
    /// Bytes of the pack that were passed.
    position: u64,
    bad: Vec<(Expected, String)>,
}

impl FrameChecks {
    /// With `full`, blobs are decoded and hashed; else only their checksums are compared.
    pub(crate) fn new(mut expected: Vec<Expected>, full: bool, limits: Limits) -> Self {
        expected.sort_by_key(|frame| frame.offset);
        Self { expected, full, limits, next: 0, current: None, position: 0, bad: Vec::new() }
    }

    /// Where in the pack the first byte that is fed lies.
    pub(crate) fn begin_at(&mut self, position: u64) {
        self.position = position;
    }

    pub(crate) fn feed(&mut self, piece: &[u8]) {
        let end = self.position + piece.len() as u64;
        while let Some(expected) = self.expected.get(self.next).filter(|frame| frame.offset < end) {
            let frame = self.current.get_or_insert_with(Frame::default);
            let from = expected.offset + frame.seen;
            let to = expected.offset.saturating_add(expected.frame_len).min(end);
            let part = from.checked_sub(self.position).zip(to.checked_sub(self.position));
            match part.and_then(|(from, to)| piece.get(usize::try_from(from).ok()?..usize::try_from(to).ok()?)) {
                Some(bytes) => frame.feed(bytes, expected, self.full, &self.limits),
                None => frame.failed = Some("it begins inside another frame".into()),
            }
            if to < expected.offset.saturating_add(expected.frame_len) && frame.failed.is_none() {
                break;
            }
            if to < expected.offset.saturating_add(expected.frame_len) && part.is_some() {
                // It failed, and its rest is still to come.
                break;
            }
            let frame = self.current.take().unwrap_or_default();
            if let Err(reason) = frame.finish(expected) {
                self.bad.push((expected.clone(), reason));
            }
            self.next += 1;
        }
        self.position = end;
    }

    /// The frames that are bad, and how; those that the pack ended before are.
    pub(crate) fn finish(mut self) -> Vec<(Expected, String)> {
        let end = self.position;
        let cut = self.expected.drain(self.next..).map(|frame| {
            let reason = format!("the pack ends at byte {end}, before the end of the frame at byte {}", frame.offset);
            (frame, reason)
        });
        self.bad.extend(cut);
        self.bad
    }
}

/// A frame that is being checked.
#[derive(Default)]
struct Frame {
    /// Bytes of it that were passed.
    seen: u64,
    header: Vec<u8>,
    parsed: Option<Header>,
    payload: u64,
    checksum: u32,
    check: Option<Box<Check>>,
    tail: Vec<u8>,
    failed: Option<String>,
}

impl Frame {
    fn feed(&mut self, mut bytes: &[u8], expected: &Expected, full: bool, limits: &Limits) {
        self.seen += bytes.len() as u64;
        if self.failed.is_some() {
            return;
        }
        let header_len = Header::len(expected.digest.algorithm());
        if self.header.len() < header_len {
            let (head, rest) = bytes.split_at(bytes.len().min(header_len - self.header.len()));
            self.header.extend_from_slice(head);
            bytes = rest;
            if self.header.len() < header_len {
                return;
            }
            if let Err(reason) = self.begin(expected, full, limits) {
                self.failed = Some(reason);
                return;
            }
        }
        let Some(header) = self.parsed else { return };
        let left = usize::try_from(header.stored_len - self.payload).unwrap_or(usize::MAX);
        let (payload, tail) = bytes.split_at(bytes.len().min(left));
        self.payload += payload.len() as u64;
        match &mut self.check {
            Some(check) => {
                if let Err(error) = check.update(payload) {
                    self.failed = Some(reason(error));
                }
            }
            None => self.checksum = crc32c::crc32c_append(self.checksum, payload),
        }
        self.tail.extend_from_slice(tail);
    }

    fn begin(&mut self, expected: &Expected, full: bool, limits: &Limits) -> Result<(), String> {
        let header = header_of(&self.header, expected.offset, &expected.digest, limits)?;
        if header.frame_len() != expected.frame_len || expected.header.is_some_and(|h| h != header) {
            return Err(another(expected.offset, &header));
        }
        if full {
            self.check = Some(Box::new(Check::new(&header, expected.offset).map_err(reason)?));
        }
        self.parsed = Some(header);
        Ok(())
    }

    fn finish(self, expected: &Expected) -> Result<(), String> {
        if let Some(reason) = self.failed {
            return Err(reason);
        }
        let checksum: [u8; CHECKSUM] =
            self.tail.try_into().map_err(|_| format!("the frame at byte {} is not complete", expected.offset))?;
        let checksum = u32::from_le_bytes(checksum);
        match self.check {
            Some(check) => check.finish(checksum).map_err(reason),
            None if self.checksum == checksum => Ok(()),
            None => Err("the payload's checksum is wrong".into()),
        }
    }
}

/// The header that `bytes` begin with, if it is of the frame of `digest`. They lie at `offset` of a
/// pack.
pub(crate) fn header_of(bytes: &[u8], offset: u64, digest: &Digest, limits: &Limits) -> Result<Header, String> {
    let header = bytes.get(..Header::len(digest.algorithm())).ok_or("the pack ends before it")?;
    let header = Header::parse_exact(header, offset, limits).map_err(|e| e.to_string())?;
    if header.digest == *digest { Ok(header) } else { Err(another(offset, &header)) }
}

/// In words: there lies another frame.
pub(crate) fn another(offset: u64, found: &Header) -> String {
    format!("another frame lies at byte {offset}: {} of {} bytes", found.digest, found.frame_len())
}

/// What is wrong, without saying again of which blob.
fn reason(error: Error) -> String {
    match error {
        Error::Frame { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}
