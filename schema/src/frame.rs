//! Frames: one blob as stored and as sent. A stream is frames back to back and an end mark.
//!
//! ```text
//! frame                                          end mark
//! 0   4  magic "PFfr"                            0   4  magic "PFen"
//! 4   1  version, 1                              4   8  frames in the stream, u64 LE
//! 5   1  codec (number)                          12  4  CRC-32C of bytes 0..12
//! 6   1  kind (number)
//! 7   1  digest algorithm (number)
//! 8   8  raw length, u64 LE
//! 16  8  stored length, u64 LE
//! 24  n  digest of the raw bytes, 32 or 64
//! +n  4  CRC-32C of everything before, u32 LE
//! …      payload, stored-length bytes
//! …   4  CRC-32C of the payload, u32 LE
//! ```
//!
//! The checksum of the payload follows it so that a blob of any size is sent in one pass.
//! [`Parser`] does no I/O, keeps at most one header in memory and hands payload bytes through as
//! they came.

use crate::codec::Codec;
use crate::digest::{Algorithm, Digest};
use crate::error::FormatError;
use crate::kind::Kind;
use crate::limits::Limits;
use bytes::{Buf, Bytes, BytesMut};

const MAGIC: &[u8; 4] = b"PFfr";
const END: &[u8; 4] = b"PFen";
const FIXED: usize = 24;
/// Bytes of the checksum after a header and after a payload.
pub const CHECKSUM: usize = 4;
/// Bytes of the end mark.
pub const END_LEN: usize = 16;

/// What a frame says about its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// How the payload is encoded.
    pub codec: Codec,
    /// How the blob is to be read.
    pub kind: Kind,
    /// Digest of the raw bytes.
    pub digest: Digest,
    /// Raw bytes.
    pub raw_len: u64,
    /// Payload bytes.
    pub stored_len: u64,
}

impl Header {
    /// Bytes of a header with this algorithm.
    #[must_use]
    pub const fn len(algorithm: Algorithm) -> usize {
        FIXED + algorithm.len() + CHECKSUM
    }

    /// Bytes of the whole frame.
    #[must_use]
    pub const fn frame_len(&self) -> u64 {
        Self::len(self.digest.algorithm()) as u64 + self.stored_len + CHECKSUM as u64
    }

    /// The header's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::len(self.digest.algorithm()));
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[1, self.codec as u8, self.kind as u8, self.digest.algorithm() as u8]);
        out.extend_from_slice(&self.raw_len.to_le_bytes());
        out.extend_from_slice(&self.stored_len.to_le_bytes());
        out.extend_from_slice(self.digest.as_bytes());
        out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
        out
    }

    /// Parses a header at the start of `bytes`; `None` if more bytes are needed.
    ///
    /// # Errors
    /// The reason, if the bytes cannot be the start of a header or state an impossible length.
    fn parse(bytes: &[u8], limits: &Limits) -> Result<Option<Self>, String> {
        if bytes.len() < FIXED {
            return Ok(None);
        }
        if &bytes[..4] != MAGIC {
            return Err(format!("expected the magic PFfr, found {:02x?}", &bytes[..4]));
        }
        if bytes[4] != 1 {
            return Err(format!("expected version 1, found {}", bytes[4]));
        }
        let algorithm = Algorithm::from_number(bytes[7]).ok_or_else(|| format!("unknown digest algorithm {}", bytes[7]))?;
        let len = Self::len(algorithm);
        if bytes.len() < len {
            return Ok(None);
        }
        let (covered, checksum) = bytes[..len].split_at(len - CHECKSUM);
        if crc32c::crc32c(covered).to_le_bytes() != checksum {
            return Err("the header's checksum is wrong".into());
        }
        let codec = Codec::from_number(bytes[5]).ok_or_else(|| format!("unknown codec {}", bytes[5]))?;
        let kind = Kind::from_number(bytes[6]).ok_or_else(|| format!("unknown kind {}", bytes[6]))?;
        let digest = Digest::from_bytes(algorithm, &covered[FIXED..]).map_err(|e| e.to_string())?;
        let word = |at: usize| u64::from_le_bytes(covered[at..at + 8].try_into().unwrap_or_default());
        let (raw_len, stored_len) = (word(8), word(16));
        let limit = if kind.is_container() { limits.document_bytes } else { limits.blob_bytes };
        if raw_len > limit {
            return Err(format!("{digest} says it has {raw_len} bytes, the limit is {limit}"));
        }
        let agrees = match codec {
            Codec::Raw => stored_len == raw_len,
            // An encoding is kept only where it is smaller; foreign zstd frames add a few bytes at
            // most.
            Codec::Zstd => stored_len <= raw_len.saturating_add(raw_len / 128).saturating_add(1024),
            Codec::Bf16Bitmaps | Codec::Bf16Huffman | Codec::F16Huffman | Codec::Fp8Huffman => stored_len < raw_len,
        };
        if !agrees {
            return Err(format!("{digest} says {stored_len} stored bytes for {raw_len} raw ones ({})", codec.name()));
        }
        Ok(Some(Self { codec, kind, digest, raw_len, stored_len }))
    }

    /// Parses exactly one header, as a pack's index holds them.
    ///
    /// # Errors
    /// [`FormatError::Frame`] at `position`.
    pub fn parse_exact(bytes: &[u8], position: u64, limits: &Limits) -> Result<Self, FormatError> {
        match Self::parse(bytes, limits) {
            Ok(Some(header)) if Self::len(header.digest.algorithm()) == bytes.len() => Ok(header),
            Ok(_) => Err(FormatError::Frame { position, reason: "not one whole header".into() }),
            Err(reason) => Err(FormatError::Frame { position, reason }),
        }
    }
}

/// A whole frame in memory: the payload may be in pieces.
#[must_use]
pub fn encode(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut out = header.to_bytes();
    out.extend_from_slice(payload);
    out.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    out
}

/// The end mark of a stream of `frames` frames.
#[must_use]
pub fn end_mark(frames: u64) -> Vec<u8> {
    let mut out = END.to_vec();
    out.extend_from_slice(&frames.to_le_bytes());
    out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
    out
}

/// What [`Parser::next`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A frame begins.
    Begin(Header),
    /// The next bytes of its payload, never empty.
    Payload(Bytes),
    /// The frame is complete. The caller compares the checksum, on a thread where that does not
    /// delay the reader.
    Finish {
        /// CRC-32C that the payload should have.
        checksum: u32,
    },
    /// The stream is complete.
    End,
}

enum State {
    Header,
    Payload(u64),
    Checksum,
    End,
}

/// Takes a stream of frames apart. Push bytes in, pull events out.
pub struct Parser {
    limits: Limits,
    state: State,
    pending: Bytes,
    joined: BytesMut,
    position: u64,
    frames: u64,
}

impl Parser {
    /// A parser at the start of a stream.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, state: State::Header, pending: Bytes::new(), joined: BytesMut::new(), position: 0, frames: 0 }
    }

    /// Adds bytes. Call [`Self::next`] until it yields `None` before adding more.
    pub fn push(&mut self, bytes: Bytes) {
        if self.pending.is_empty() {
            self.pending = bytes;
        } else {
            let mut joined = BytesMut::with_capacity(self.pending.len() + bytes.len());
            joined.extend_from_slice(&self.pending);
            joined.extend_from_slice(&bytes);
            self.pending = joined.freeze();
        }
    }

    /// Byte offset in the stream of what is parsed next.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next event, or `None` if more bytes are needed.
    ///
    /// # Errors
    /// [`FormatError::Frame`] with the position of the frame.
    #[expect(clippy::should_implement_trait, reason = "an iterator would have to end where this waits for bytes")]
    pub fn next(&mut self) -> Result<Option<Event>, FormatError> {
        let position = self.position;
        let fail = |reason: String| Err(FormatError::Frame { position, reason });
        match self.state {
            State::Header => {
                // A header may be split over pieces: join only its few bytes, never the payload
                // behind it.
                let missing = Header::len(Algorithm::Sha512).saturating_sub(self.joined.len()).min(self.pending.len());
                let carried = self.joined.len();
                self.joined.extend_from_slice(&self.pending[..missing]);
                if self.joined.len() >= 4 && &self.joined[..4] == END {
                    if self.joined.len() < END_LEN {
                        self.pending.advance(missing);
                        return Ok(None);
                    }
                    let end = &self.joined[..END_LEN];
                    if *end != end_mark(self.frames) {
                        return fail(format!("the end mark does not say {} frames", self.frames));
                    }
                    self.pending.advance(END_LEN - carried);
                    self.joined.clear();
                    self.state = State::End;
                    self.position += END_LEN as u64;
                    return Ok(Some(Event::End));
                }
                match Header::parse(&self.joined, &self.limits) {
                    Err(reason) => fail(reason),
                    Ok(None) => {
                        self.pending.advance(missing);
                        Ok(None)
                    }
                    Ok(Some(header)) => {
                        let len = Header::len(header.digest.algorithm());
                        self.pending.advance(len - carried);
                        self.joined.clear();
                        self.position += len as u64;
                        self.state = if header.stored_len == 0 { State::Checksum } else { State::Payload(header.stored_len) };
                        Ok(Some(Event::Begin(header)))
                    }
                }
            }
            State::Payload(left) => {
                if self.pending.is_empty() {
                    return Ok(None);
                }
                let take = usize::try_from(left).unwrap_or(usize::MAX).min(self.pending.len());
                let piece = self.pending.split_to(take);
                self.position += take as u64;
                let left = left - take as u64;
                self.state = if left == 0 { State::Checksum } else { State::Payload(left) };
                Ok(Some(Event::Payload(piece)))
            }
            State::Checksum => {
                let missing = (CHECKSUM - self.joined.len()).min(self.pending.len());
                self.joined.extend_from_slice(&self.pending.split_to(missing));
                if self.joined.len() < CHECKSUM {
                    return Ok(None);
                }
                let checksum = u32::from_le_bytes(self.joined[..].try_into().unwrap_or_default());
                self.joined.clear();
                self.position += CHECKSUM as u64;
                self.frames += 1;
                self.state = State::Header;
                Ok(Some(Event::Finish { checksum }))
            }
            State::End if self.pending.is_empty() => Ok(None),
            State::End => fail("bytes after the end mark".into()),
        }
    }

    /// Call when the bytes have ended.
    ///
    /// # Errors
    /// [`FormatError::Truncated`] unless the end mark was seen.
    pub fn finish(&self) -> Result<(), FormatError> {
        let reason = match self.state {
            State::End => return Ok(()),
            State::Header if self.joined.is_empty() => "no end mark",
            State::Header => "inside a header",
            State::Payload(_) => "inside a payload",
            State::Checksum => "inside a checksum",
        };
        Err(FormatError::Truncated { position: self.position + self.joined.len() as u64, reason })
    }
}
