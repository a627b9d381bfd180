//! Codecs: how a blob is encoded at rest and on the wire. Never part of its identity.
//!
//! Numbers are stable. `docs/formats.md` lists them.

mod compression;
mod huffman;
mod set;
mod tensor;

pub use compression::{BlobEncoder, Compression};
pub use pfr_kernels::bitmaps::Kernel;
pub use set::{CODECS_HEADER, Codecs};
pub use tensor::Encoder as TensorEncoder;

use crate::error::FormatError;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use zstd::stream::raw::{DParameter, Decoder as ZstdDecoder, InBuffer, Operation as _, OutBuffer};

macro_rules! codecs {
    ($($(#[$doc:meta])* $variant:ident = $number:literal $name:literal,)+) => {
        /// A codec by its stable number.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[repr(u8)]
        pub enum Codec {
            $($(#[$doc])* #[serde(rename = $name)] $variant = $number,)+
        }

        impl Codec {
            /// Every codec.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Its name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

codecs! {
    /// The bytes themselves.
    Raw = 0 "raw",
    /// One ordinary zstd frame (RFC 8878) with a window of at most 8 MiB.
    Zstd = 1 "zstd",
    /// `bf16` for links and disks that are faster than zstd: three bitmaps for the exponents.
    Bf16Bitmaps = 2 "bf16-bitmaps",
    /// `bf16` for slow links and for storage: Huffman codes for the exponents.
    Bf16Huffman = 3 "bf16-huffman",
    /// Likewise `f16`.
    F16Huffman = 4 "f16-huffman",
    /// Likewise `fp8e4m3`.
    Fp8Huffman = 5 "fp8-huffman",
}

/// Largest zstd window that is decoded, as a power of two: what bounds a decoder's memory.
pub const ZSTD_WINDOW_LOG: u32 = 23;
const ZSTD_LEVEL: i32 = 3;
/// Bytes decoded at a time.
const STEP: usize = 64 << 10;
const EXCESS: &str = "decodes to more bytes than the raw length (a zip bomb, or a wrong length)";
const UNWANTED: &str = "not decoded to the end: nothing waits for it";
const ZSTD_MAGIC: [u8; 4] = 0xFD2F_B528_u32.to_le_bytes();
/// Longest header of a zstd frame.
const ZSTD_HEADER: usize = 18;

impl Codec {
    /// The codec with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|c| *c as u8 == number)
    }

    /// The codec with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|c| c.name() == name)
    }

    /// The error of a payload in this codec.
    pub fn error(self, reason: impl ToString) -> FormatError {
        FormatError::Codec { codec: self.name(), reason: reason.to_string() }
    }
}

/// Encodes a document with zstd, or leaves it raw where that is not smaller.
#[must_use]
pub fn encode_document(raw: &[u8]) -> (Codec, Cow<'_, [u8]>) {
    match zstd::bulk::compress(raw, ZSTD_LEVEL) {
        Ok(encoded) if encoded.len() < raw.len() => (Codec::Zstd, Cow::Owned(encoded)),
        // Raw is always right, so a failing encoder costs bytes, not the push.
        _ => (Codec::Raw, Cow::Borrowed(raw)),
    }
}

/// Encodes a tensor, or leaves it raw where that is not smaller. For many tensors, keep a
/// [`TensorEncoder`].
#[must_use]
pub fn encode_tensor(codec: Codec, raw: &[u8]) -> (Codec, Cow<'_, [u8]>) {
    // Raw is always right, as for documents.
    if let Ok(mut encoder) = TensorEncoder::new(codec)
        && let Some(encoded) = encoder.encode(raw)
    {
        return (codec, Cow::Owned(encoded.to_vec()));
    }
    (Codec::Raw, Cow::Borrowed(raw))
}

/// Decodes a whole payload.
///
/// # Errors
/// [`FormatError::Codec`] if it does not decode to exactly `raw_len` bytes. Memory grows with the
/// decoded bytes, so a false length costs nothing.
pub fn decode(codec: Codec, stored: &[u8], raw_len: u64) -> Result<Vec<u8>, FormatError> {
    let mut raw = Vec::with_capacity(usize::try_from(raw_len.min(stored.len() as u64 * 4)).unwrap_or(0));
    decode_into(codec, stored, raw_len, &mut raw)?;
    Ok(raw)
}

/// Decodes a whole payload behind the bytes in `raw`. After an error, some of it may lie there.
///
/// # Errors
/// As [`decode`].
pub fn decode_into(codec: Codec, stored: &[u8], raw_len: u64, raw: &mut Vec<u8>) -> Result<(), FormatError> {
    let mut decoder = Decoder::new(codec, raw_len)?;
    decoder.update_some(stored, usize::MAX, raw)?;
    decoder.finish()
}

/// Decodes a payload that arrives in pieces, in constant memory.
pub struct Decoder {
    codec: Codec,
    state: State,
    raw_len: u64,
    left: u64,
}

enum State {
    Raw,
    Zstd(Zstd),
    Tensor(Box<tensor::Decoder>),
}

struct Zstd {
    decoder: ZstdDecoder<'static>,
    buffer: Box<[u8]>,
    /// First bytes of the frame, for [`Decoder::finish`].
    head: Vec<u8>,
    ended: bool,
}

impl Decoder {
    /// A decoder of a payload that stands for `raw_len` bytes.
    ///
    /// # Errors
    /// [`FormatError::Codec`] if a decoder cannot be set up.
    pub fn new(codec: Codec, raw_len: u64) -> Result<Self, FormatError> {
        Self::with_kernel(codec, raw_len, Kernel::detect())
    }

    /// Likewise, with one of the kernels of codec 2. All give the same bytes.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_kernel(codec: Codec, raw_len: u64, kernel: Kernel) -> Result<Self, FormatError> {
        let state = match codec {
            Codec::Raw => State::Raw,
            Codec::Zstd => State::Zstd(Zstd::new().map_err(|e| codec.error(e))?),
            Codec::Bf16Bitmaps | Codec::Bf16Huffman | Codec::F16Huffman | Codec::Fp8Huffman => {
                State::Tensor(Box::new(tensor::Decoder::new(codec, kernel)?))
            }
        };
        Ok(Self { codec, state, raw_len, left: raw_len })
    }

    /// Decodes the next piece into `sink`.
    ///
    /// # Errors
    /// [`FormatError::Codec`] on malformed input or more output than promised; what `sink` got
    /// until then must be discarded.
    pub fn update(&mut self, stored: &[u8], sink: &mut dyn FnMut(&[u8])) -> Result<(), FormatError> {
        self.update_while(stored, &mut |raw| {
            sink(raw);
            true
        })
    }

    /// As [`Self::update`], until `sink` returns false: a few bytes may stand for gigabytes.
    ///
    /// # Errors
    /// As [`Self::update`], and if `sink` returned false.
    pub fn update_while(&mut self, stored: &[u8], sink: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), FormatError> {
        self.decode(stored, usize::MAX, To::Sink(sink)).map(|_| ())
    }

    /// Decodes the next piece and appends to `raw`, until about `most` bytes came out, at least
    /// one: a few bytes of a tensor codec may stand for many zeros. Returns how much of the piece
    /// was used. Call it again with the rest, and then with nothing, until nothing comes out any
    /// more. (Of `zstd` a piece is always decoded to its end.)
    ///
    /// # Errors
    /// As [`Self::update`]; what was appended until then must be discarded.
    pub fn update_some(&mut self, stored: &[u8], most: usize, raw: &mut Vec<u8>) -> Result<usize, FormatError> {
        self.decode(stored, most, To::Memory(raw))
    }

    fn decode(&mut self, stored: &[u8], most: usize, to: To<'_>) -> Result<usize, FormatError> {
        let mut out = Out { codec: self.codec, left: &mut self.left, to };
        match &mut self.state {
            State::Raw => {
                let some = &stored[..stored.len().min(most)];
                out.put(some, "more bytes than the raw length").map(|()| some.len())
            }
            State::Zstd(zstd) => zstd.update(stored, &mut out).map(|()| stored.len()),
            State::Tensor(tensor) => tensor.update(stored, most, &mut out),
        }
    }

    /// Ends the payload.
    ///
    /// # Errors
    /// [`FormatError::Codec`] if it was cut short or decoded to fewer bytes than promised.
    pub fn finish(self) -> Result<(), FormatError> {
        let Self { codec, state, raw_len, left } = self;
        if let State::Zstd(Zstd { ended: false, .. }) = state {
            return Err(codec.error("truncated: the frame does not end"));
        }
        if let State::Tensor(tensor) = &state
            && !tensor.is_at_end()
        {
            return Err(codec.error("truncated: the last block does not end"));
        }
        if left > 0 {
            return Err(codec.error(format!("{left} bytes fewer than the raw length")));
        }
        match state {
            State::Raw | State::Tensor(_) => Ok(()),
            State::Zstd(zstd) => zstd.check_head(raw_len).map_err(|reason| codec.error(reason)),
        }
    }
}

/// Where decoded bytes go.
enum To<'a> {
    /// Returns whether more is wanted.
    Sink(&'a mut dyn FnMut(&[u8]) -> bool),
    Memory(&'a mut Vec<u8>),
}

/// Where decoded bytes go, and how many of the raw length have not come yet.
struct Out<'a, 'b> {
    codec: Codec,
    left: &'a mut u64,
    to: To<'b>,
}

impl Out<'_, '_> {
    /// Hands on decoded bytes. `excess` says what is wrong if there are too many.
    fn put(&mut self, bytes: &[u8], excess: &str) -> Result<(), FormatError> {
        *self.left = self.left_after(bytes.len(), excess)?;
        match &mut self.to {
            To::Sink(sink) => return if sink(bytes) { Ok(()) } else { Err(self.codec.error(UNWANTED)) },
            To::Memory(raw) => raw.extend_from_slice(bytes),
        }
        Ok(())
    }

    /// Lets `decode` append a block of `len` bytes: to the memory where it belongs, or to `scratch`
    /// if it goes to a sink.
    fn block(
        &mut self,
        len: usize,
        scratch: &mut Vec<u8>,
        decode: impl FnOnce(&mut Vec<u8>) -> Result<(), String>,
    ) -> Result<(), FormatError> {
        let (codec, left) = (self.codec, self.left_after(len, EXCESS)?);
        match &mut self.to {
            To::Sink(sink) => {
                scratch.clear();
                decode(scratch).and_then(|()| if sink(scratch) { Ok(()) } else { Err(UNWANTED.into()) })
            }
            To::Memory(raw) => decode(raw),
        }
        .map_err(|reason| codec.error(reason))?;
        // Only now: a block that is malformed is missing at the end.
        *self.left = left;
        Ok(())
    }

    fn left_after(&self, bytes: usize, excess: &str) -> Result<u64, FormatError> {
        self.left.checked_sub(bytes as u64).ok_or_else(|| self.codec.error(excess))
    }
}

impl Zstd {
    fn new() -> std::io::Result<Self> {
        let mut decoder = ZstdDecoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG))?;
        Ok(Self { decoder, buffer: vec![0; STEP].into_boxed_slice(), head: Vec::new(), ended: false })
    }

    fn update(&mut self, stored: &[u8], out: &mut Out<'_, '_>) -> Result<(), FormatError> {
        // Given a whole frame at once, zstd decodes it by stricter rules than in pieces. A frame
        // that is accepted in pieces when it is stored must be accepted as a whole when it is read.
        // So the frame's header always goes in byte by byte.
        let (head, rest) = stored.split_at(stored.len().min(ZSTD_HEADER - self.head.len()));
        self.head.extend_from_slice(head);
        for byte in head.chunks(1) {
            self.step(byte, out)?;
        }
        // zstd fails after repeated calls without input: it takes them for an endless loop.
        if rest.is_empty() { Ok(()) } else { self.step(rest, out) }
    }

    fn step(&mut self, stored: &[u8], out: &mut Out<'_, '_>) -> Result<(), FormatError> {
        let (mut input, codec) = (InBuffer::around(stored), out.codec);
        loop {
            if self.ended {
                return if input.pos < stored.len() { Err(codec.error("bytes after the end of the frame")) } else { Ok(()) };
            }
            let mut output = OutBuffer::around(&mut self.buffer[..]);
            let hint = self.decoder.run(&mut input, &mut output).map_err(|e| codec.error(e))?;
            let produced = output.as_slice();
            out.put(produced, EXCESS)?;
            self.ended = hint == 0;
            if !self.ended && input.pos == stored.len() && produced.len() < STEP {
                return Ok(());
            }
        }
    }

    /// Checks what zstd overlooks in the header of a frame that has ended.
    fn check_head(&self, raw_len: u64) -> Result<(), String> {
        if !self.head.starts_with(&ZSTD_MAGIC) {
            return Err("a skippable frame".into());
        }
        // zstd overlooks a wrong content size where the last block is empty.
        match zstd::zstd_safe::get_frame_content_size(&self.head) {
            Ok(stated) if stated.is_none_or(|stated| stated == raw_len) => Ok(()),
            Ok(stated) => Err(format!("the frame states {} bytes", stated.unwrap_or_default())),
            Err(e) => Err(e.to_string()),
        }
    }
}
