//! Codecs 2 to 5, for tensors. A payload is a sequence of blocks, each of which says its length:
//!
//! ```text
//! 0  3  raw bytes of the block, u24 LE, at least 1
//! 3  1  form
//!    0  raw: the bytes
//!    1  zeros: nothing
//!    2  coded: an even number of bytes as `bitmaps` or `huffman` encode them
//! ```
//!
//! So the decoder needs no more memory than a block, runs of zeros cost four bytes, and the blocks
//! may follow the layers of a page.

use super::{Codec, EXCESS, Out, huffman};
use crate::error::FormatError;
use pfr_kernels::bitmaps::{self, Kernel};
use pfr_kernels::planes::{Width, is_zero};

const HEADER: usize = 4;
/// Bytes of a coded block before what follows its lengths.
const CODED_HEADER: usize = HEADER + 3;
const RAW: u8 = 0;
const ZEROS: u8 = 1;
const CODED: u8 = 2;
/// Zeros are looked for in steps of so many bytes: 64 values of two bytes.
const STEP: usize = 128;
/// Largest block of zeros: the last multiple of [`STEP`] that 24 bits can say.
const MOST_ZEROS: usize = (1 << 24) - STEP;
/// Zeros that are handed out at a time.
static SOME_ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// How a codec encodes a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Bitmaps,
    Huffman(Width),
}

impl Method {
    fn of(codec: Codec) -> Result<Self, FormatError> {
        match codec {
            Codec::Raw | Codec::Zstd => Err(codec.error("not a codec for tensors")),
            Codec::Bf16Bitmaps => Ok(Self::Bitmaps),
            Codec::Bf16Huffman | Codec::F16Huffman => Ok(Self::Huffman(Width::Two)),
            Codec::Fp8Huffman => Ok(Self::Huffman(Width::One)),
        }
    }

    /// Largest coded block, in raw bytes.
    const fn block(self) -> usize {
        match self {
            Self::Bitmaps => 8 << 10,
            Self::Huffman(_) => 64 << 10,
        }
    }

    /// Zeros that end a block: where a block of zeros and another one cost less.
    const fn zeros(self) -> usize {
        match self {
            Self::Bitmaps => STEP,
            Self::Huffman(_) => 4 * STEP,
        }
    }

    /// Bytes that encoding a block may write.
    const fn room(self) -> usize {
        HEADER
            + match self {
                Self::Bitmaps => bitmaps::room(self.block() / 2),
                Self::Huffman(_) => huffman::HEAD + self.block(),
            }
            + HEADER
            + self.block()
    }
}

/// Encodes tensors, one after the other, in the same memory.
pub struct Encoder {
    method: Method,
    kernel: Kernel,
    huffman: Option<huffman::Encoder>,
    /// Whether all but zeros stays raw.
    only_zeros: bool,
    out: Vec<u8>,
}

impl Encoder {
    /// The codec of what [`Self::of_zeros`] writes.
    pub const ZEROS: Codec = Codec::Bf16Bitmaps;

    /// An encoder for this codec.
    ///
    /// # Errors
    /// [`FormatError::Codec`] if the codec is not for tensors, or zstd cannot be set up.
    pub fn new(codec: Codec) -> Result<Self, FormatError> {
        Self::with_kernel(codec, Kernel::detect())
    }

    /// Likewise, with one of the kernels of codec 2. All give the same bytes.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_kernel(codec: Codec, kernel: Kernel) -> Result<Self, FormatError> {
        let method = Method::of(codec)?;
        let huffman = match method {
            Method::Bitmaps => None,
            Method::Huffman(width) => Some(huffman::Encoder::new(width, method.block()).map_err(|e| codec.error(e))?),
        };
        Ok(Self { method, kernel, huffman, only_zeros: false, out: Vec::new() })
    }

    /// An encoder that only leaves out zeros, for elements of any type.
    #[must_use]
    pub fn of_zeros() -> Self {
        // The larger blocks: here they only say where a raw one ends.
        let method = Method::Huffman(Width::Two);
        Self { method, kernel: Kernel::PORTABLE, huffman: None, only_zeros: true, out: Vec::new() }
    }

    /// The payload of `raw`, or `None` where it would not be smaller: then the codec is
    /// [`Codec::Raw`].
    #[must_use]
    pub fn encode(&mut self, raw: &[u8]) -> Option<&[u8]> {
        let len = self.blocks(raw, raw.len())?;
        (len < raw.len()).then(|| &self.out[..len])
    }

    /// The payload of `raw`, even where it is not smaller.
    #[must_use]
    pub fn encode_anyway(&mut self, raw: &[u8]) -> &[u8] {
        let len = self.blocks(raw, usize::MAX).unwrap_or_default();
        &self.out[..len]
    }

    /// Writes the blocks to the start of `out`. Gives up at `limit` bytes.
    fn blocks(&mut self, raw: &[u8], limit: usize) -> Option<usize> {
        let (mut at, mut len) = (0, 0);
        while at < raw.len() {
            if len >= limit {
                return None;
            }
            // Room for all blocks at once: a fresh page of memory costs more than encoding it.
            if self.out.len() < len + self.method.room() {
                self.out.resize(raw.len().max(len) + self.method.room(), 0);
            }
            let left = &raw[at..];
            let zeros = leading_zeros(left);
            if zeros == left.len() || zeros >= self.method.zeros() {
                let zeros = zeros.min(MOST_ZEROS);
                put_header(&mut self.out[len..], zeros, ZEROS);
                len += HEADER;
                at += zeros;
            } else {
                let block = &left[..block_len(left, self.method)];
                len += self.block(block, len);
                at += block.len();
            }
        }
        Some(len)
    }

    /// Writes a block at `len`. Returns its bytes.
    fn block(&mut self, raw: &[u8], len: usize) -> usize {
        let out = &mut self.out[len..];
        let (even, odd) = raw.split_at(raw.len() & !1);
        let coded = match &mut self.huffman {
            _ if self.only_zeros => None,
            None => Some(bitmaps::encode(self.kernel, even, &mut out[HEADER..])),
            Some(huffman) => huffman.encode(even, &mut out[HEADER..]),
        };
        match coded {
            Some(coded) if coded < even.len() => {
                put_header(out, even.len(), CODED);
                let len = HEADER + coded;
                len + put_raw(&mut out[len..], odd)
            }
            _ => put_raw(out, raw),
        }
    }
}

fn put_header(out: &mut [u8], raw_len: usize, form: u8) {
    out[..HEADER].copy_from_slice(&(raw_len as u32 | u32::from(form) << 24).to_le_bytes());
}

fn put_raw(out: &mut [u8], raw: &[u8]) -> usize {
    if raw.is_empty() {
        return 0;
    }
    put_header(out, raw.len(), RAW);
    out[HEADER..HEADER + raw.len()].copy_from_slice(raw);
    HEADER + raw.len()
}

/// Zero bytes in whole steps: what an encoder leaves out, or a little more.
pub(super) fn zero_bytes(bytes: &[u8]) -> usize {
    bytes.chunks(STEP).filter(|step| is_zero(step)).map(<[u8]>::len).sum()
}

/// Zero bytes at the start, in whole steps or up to the end.
fn leading_zeros(bytes: &[u8]) -> usize {
    bytes.chunks(STEP).take_while(|step| is_zero(step)).map(<[u8]>::len).sum()
}

/// Bytes before the zeros that end a block, at most those of the largest.
fn block_len(bytes: &[u8], method: Method) -> usize {
    let limit = bytes.len().min(method.block());
    let (mut len, mut zeros) = (0, 0);
    for step in bytes[..limit].chunks(STEP) {
        len += step.len();
        zeros = if is_zero(step) { zeros + step.len() } else { 0 };
        if zeros >= method.zeros() && len > zeros {
            return len - zeros;
        }
    }
    limit
}

/// Decodes a payload that arrives in pieces.
pub(super) struct Decoder {
    method: Method,
    kernel: Kernel,
    huffman: Option<huffman::Decoder>,
    /// The beginning of a block, and how long it must be to go on.
    pending: Vec<u8>,
    needed: usize,
    /// Bytes of a raw block that have not arrived.
    raw_left: usize,
    /// Bytes of a block of zeros that were not handed out.
    zeros_left: usize,
    /// Memory for a block that goes to a sink.
    raw: Vec<u8>,
}

/// What a block's beginning says.
enum Block {
    /// To go on, so many bytes of it are needed.
    Needs(usize),
    Raw(usize),
    Zeros(usize),
    /// Raw length of a coded block, and length of what follows [`CODED_HEADER`]. It is all there.
    Coded(usize, usize),
}

impl Decoder {
    pub fn new(codec: Codec, kernel: Kernel) -> Result<Self, FormatError> {
        let method = Method::of(codec)?;
        let huffman = match method {
            Method::Bitmaps => None,
            Method::Huffman(width) => Some(huffman::Decoder::new(width, method.block()).map_err(|e| codec.error(e))?),
        };
        Ok(Self { method, kernel, huffman, pending: Vec::new(), needed: 0, raw_left: 0, zeros_left: 0, raw: Vec::new() })
    }

    /// Whether the payload may end here.
    pub const fn is_at_end(&self) -> bool {
        self.pending.is_empty() && self.raw_left == 0 && self.zeros_left == 0
    }

    /// Decodes until the piece is used up, or `most` bytes or a block more came out. Returns how
    /// much of the piece was used.
    pub fn update(&mut self, piece: &[u8], most: usize, out: &mut Out<'_, '_>) -> Result<usize, FormatError> {
        let (mut stored, codec, before) = (piece, out.codec, *out.left);
        while before - *out.left < most as u64 && (self.zeros_left > 0 || !stored.is_empty()) {
            if self.zeros_left > 0 {
                let zeros = &SOME_ZEROS[..self.zeros_left.min(SOME_ZEROS.len())];
                self.zeros_left -= zeros.len();
                out.put(zeros, EXCESS)?;
            } else if self.raw_left > 0 {
                let raw = split_off(&mut stored, self.raw_left);
                self.raw_left -= raw.len();
                out.put(raw, EXCESS)?;
            } else if self.pending.is_empty() {
                match self.begin(stored).map_err(|reason| codec.error(reason))? {
                    Block::Needs(needed) => {
                        self.needed = needed;
                        self.pending.extend_from_slice(stored);
                        return Ok(piece.len());
                    }
                    block => {
                        let bytes = split_off(&mut stored, block.len());
                        self.read(&block, bytes, out)?;
                    }
                }
            } else {
                // A block in several pieces: no more is joined than its own bytes.
                let more = split_off(&mut stored, self.needed - self.pending.len());
                self.pending.extend_from_slice(more);
                if self.pending.len() < self.needed {
                    return Ok(piece.len());
                }
                let mut joined = std::mem::take(&mut self.pending);
                match self.begin(&joined).map_err(|reason| codec.error(reason))? {
                    Block::Needs(needed) => self.needed = needed,
                    block => {
                        self.read(&block, &joined, out)?;
                        joined.clear();
                    }
                }
                self.pending = joined;
            }
        }
        Ok(piece.len() - stored.len())
    }

    /// Reads what the beginning of a block says.
    fn begin(&self, bytes: &[u8]) -> Result<Block, String> {
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(Block::Needs(HEADER)) };
        let raw_len = u32::from_le_bytes([header[0], header[1], header[2], 0]) as usize;
        if raw_len == 0 {
            return Err("an empty block".into());
        }
        match header[3] {
            RAW => Ok(Block::Raw(raw_len)),
            ZEROS => Ok(Block::Zeros(raw_len)),
            CODED => {
                if raw_len > self.method.block() || raw_len % 2 == 1 {
                    return Err(format!("a coded block of {raw_len} bytes, expected an even number up to {}", self.method.block()));
                }
                let Some(lengths) = bytes.get(HEADER..).and_then(<[u8]>::first_chunk) else { return Ok(Block::Needs(CODED_HEADER)) };
                let body = match self.method {
                    Method::Bitmaps => bitmaps::body_len(*lengths, raw_len),
                    Method::Huffman(_) => huffman::body_len(*lengths, raw_len)?,
                };
                let len = CODED_HEADER + body;
                Ok(if bytes.len() < len { Block::Needs(len) } else { Block::Coded(raw_len, body) })
            }
            form => Err(format!("unknown form {form} of a block")),
        }
    }

    /// Reads a coded block, or the header of another one.
    fn read(&mut self, block: &Block, bytes: &[u8], out: &mut Out<'_, '_>) -> Result<(), FormatError> {
        match *block {
            Block::Needs(_) => {}
            Block::Raw(raw_len) => self.raw_left = raw_len,
            Block::Zeros(raw_len) => self.zeros_left = raw_len,
            Block::Coded(raw_len, _) => {
                let (head, body) = bytes[HEADER..].split_at(CODED_HEADER - HEADER);
                let (kernel, huffman) = (self.kernel, &mut self.huffman);
                out.block(raw_len, &mut self.raw, |raw| match huffman {
                    None => bitmaps::decode(kernel, [head[0], head[1], head[2]], body, raw_len, raw).map_err(Into::into),
                    Some(huffman) => {
                        let from = raw.len();
                        raw.resize(from + raw_len, 0);
                        huffman.decode(body, &mut raw[from..])
                    }
                })?;
            }
        }
        Ok(())
    }
}

impl Block {
    /// Bytes of it that [`Decoder::read`] reads.
    const fn len(&self) -> usize {
        match *self {
            Self::Needs(len) => len,
            Self::Raw(_) | Self::Zeros(_) => HEADER,
            Self::Coded(_, body) => CODED_HEADER + body,
        }
    }
}

/// Takes at most `len` bytes from the front.
fn split_off<'a>(bytes: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (front, back) = bytes.split_at(len.min(bytes.len()));
    *bytes = back;
    front
}
