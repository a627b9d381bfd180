//! Blocks of codecs 3 to 5: exponents in a zstd frame that has Huffman codes and no matches, the
//! other bits as they are.
//!
//! [`planes`](pfr_kernels::planes) says which bits these are.
//!
//! Exponents hardly repeat in longer sequences, so a search for matches costs time and finds
//! nothing.

use pfr_kernels::planes::{self, Width};
use std::io;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch, find_frame_compressed_size};

/// Bytes before the other bits: the length of the zstd frame.
pub const HEAD: usize = 3;
/// zstd steps so far ahead in its search that it never begins.
const LEVEL: i32 = -131_072;
const MAGIC: [u8; 4] = 0xFD2F_B528_u32.to_le_bytes();

/// Encodes blocks.
pub struct Encoder {
    width: Width,
    zstd: Compressor<'static>,
    exponents: Box<[u8]>,
}

impl Encoder {
    /// An encoder of blocks of at most `block` bytes.
    pub fn new(width: Width, block: usize) -> io::Result<Self> {
        let mut zstd = Compressor::new(LEVEL)?;
        zstd.set_parameter(CParameter::WindowLog(17))?;
        zstd.set_parameter(CParameter::HashLog(6))?;
        zstd.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
        Ok(Self { width, zstd, exponents: vec![0; block / 2].into_boxed_slice() })
    }

    /// Encodes a block of an even number of bytes. `None` if it does not become smaller.
    pub fn encode(&mut self, raw: &[u8], out: &mut [u8]) -> Option<usize> {
        let pairs = raw.len() / 2;
        let exponents = &mut self.exponents[..pairs];
        let (head, out) = out.split_at_mut(HEAD);
        let (rest, out) = out.split_at_mut(pairs);
        planes::split(self.width, raw, exponents, rest);
        // A frame that would not be smaller does not fit.
        let room = out.get_mut(..pairs.saturating_sub(HEAD + 1))?;
        let frame = self.zstd.compress_to_buffer(exponents, room).ok()?;
        head.copy_from_slice(&(frame as u32).to_le_bytes()[..HEAD]);
        Some(HEAD + pairs + frame)
    }
}

/// Bytes after the head of a block of `raw_len` bytes.
///
/// # Errors
/// If the frame is not smaller than what it stands for.
pub fn body_len(head: [u8; HEAD], raw_len: usize) -> Result<usize, &'static str> {
    let frame = u32::from_le_bytes([head[0], head[1], head[2], 0]) as usize;
    let pairs = raw_len / 2;
    if frame < pairs { Ok(pairs + frame) } else { Err("a frame that is not smaller than what it stands for") }
}

/// Decodes blocks.
pub struct Decoder {
    width: Width,
    zstd: Decompressor<'static>,
    exponents: Box<[u8]>,
}

impl Decoder {
    /// A decoder of blocks of at most `block` bytes.
    pub fn new(width: Width, block: usize) -> io::Result<Self> {
        Ok(Self { width, zstd: Decompressor::new()?, exponents: vec![0; block / 2].into_boxed_slice() })
    }

    /// Decodes a block of [`body_len`] bytes into `raw`, of the block's length.
    pub fn decode(&mut self, body: &[u8], raw: &mut [u8]) -> Result<(), String> {
        let (rest, frame) = body.split_at(raw.len() / 2);
        let exponents = &mut self.exponents[..raw.len() / 2];
        if !frame.starts_with(&MAGIC) || find_frame_compressed_size(frame).ok() != Some(frame.len()) {
            return Err("not one zstd frame".into());
        }
        let decoded = self.zstd.decompress_to_buffer(frame, exponents).map_err(|e| e.to_string())?;
        if decoded != exponents.len() {
            return Err(format!("the frame decodes to {decoded} bytes, expected {}", exponents.len()));
        }
        planes::join(self.width, exponents, rest, raw);
        Ok(())
    }
}
