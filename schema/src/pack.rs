//! Packs: immutable objects that hold many frames, and an index from which metadata can be rebuilt.
//!
//! ```text
//! 8 bytes   magic "PFpack\x01\n"
//! frames    back to back, as in [`crate::frame`], without an end mark
//! index     for each frame: offset of the frame u64 LE, then its header's bytes
//! footer    index offset u64 LE, index length u64 LE, frames u32 LE, CRC-32C of the index u32 LE, magic "PFpend\x01\n"
//! ```

use crate::digest::Algorithm;
use crate::error::FormatError;
use crate::frame::Header;
use crate::limits::Limits;

/// First bytes of a pack.
pub const MAGIC: &[u8; 8] = b"PFpack\x01\n";
const END: &[u8; 8] = b"PFpend\x01\n";
/// Bytes of the footer.
pub const FOOTER_LEN: usize = 32;

/// Where a frame lies in its pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Byte offset of the frame's header.
    pub offset: u64,
    /// The frame's header.
    pub header: Header,
}

/// Index and footer of a pack whose frames end at `index_offset`.
#[must_use]
pub fn index_and_footer(entries: &[Entry], index_offset: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(entries.len() * 72 + FOOTER_LEN);
    for entry in entries {
        out.extend_from_slice(&entry.offset.to_le_bytes());
        out.extend_from_slice(&entry.header.to_bytes());
    }
    let (length, checksum) = (out.len() as u64, crc32c::crc32c(&out));
    out.extend_from_slice(&index_offset.to_le_bytes());
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&u32::try_from(entries.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(&checksum.to_le_bytes());
    out.extend_from_slice(END);
    out
}

/// A pack's footer: where its index lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footer {
    /// Byte offset of the index.
    pub index_offset: u64,
    /// Bytes of the index.
    pub index_len: u64,
    /// Frames in the pack.
    pub frames: u32,
    checksum: u32,
}

impl Footer {
    /// Parses the last [`FOOTER_LEN`] bytes of a pack of `pack_len` bytes.
    ///
    /// # Errors
    /// [`FormatError::Pack`] if they are no footer or point outside of the pack.
    pub fn parse(bytes: &[u8], pack_len: u64) -> Result<Self, FormatError> {
        let fail = |reason: String| Err(FormatError::Pack { reason });
        if bytes.len() != FOOTER_LEN || &bytes[24..] != END {
            return fail("no footer at the end: the pack was never completed, or is cut".into());
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        let footer = Self { index_offset: word(0), index_len: word(8), frames: half(16), checksum: half(20) };
        let end = footer.index_offset.checked_add(footer.index_len).and_then(|e| e.checked_add(FOOTER_LEN as u64));
        if end != Some(pack_len) || footer.index_offset < MAGIC.len() as u64 {
            return fail(format!(
                "the footer places the index at {}+{} in a pack of {pack_len} bytes",
                footer.index_offset, footer.index_len
            ));
        }
        Ok(footer)
    }

    /// Parses the index that this footer points to.
    ///
    /// # Errors
    /// [`FormatError::Pack`] or [`FormatError::Frame`] unless the entries lie back to back and fill
    /// the pack.
    pub fn parse_index(&self, index: &[u8], limits: &Limits) -> Result<Vec<Entry>, FormatError> {
        let fail = |reason: String| Err(FormatError::Pack { reason });
        if index.len() as u64 != self.index_len || crc32c::crc32c(index) != self.checksum {
            return fail("the index's length or checksum is wrong".into());
        }
        let mut entries = Vec::new();
        let (mut rest, mut expected) = (index, MAGIC.len() as u64);
        while !rest.is_empty() {
            // The algorithm number is byte 7 of the header, after the 8 bytes of the offset.
            let algorithm = rest.get(15).copied().and_then(Algorithm::from_number);
            let len = algorithm.map_or(usize::MAX, |a| 8 + Header::len(a));
            if rest.len() < len {
                return fail(format!("entry {} of the index is malformed", entries.len()));
            }
            let (entry, after) = rest.split_at(len);
            let offset = u64::from_le_bytes(entry[..8].try_into().unwrap_or_default());
            let header = Header::parse_exact(&entry[8..], offset, limits)?;
            if offset != expected {
                return fail(format!("entry {} lies at {offset}, expected {expected}", entries.len()));
            }
            expected = offset.saturating_add(header.frame_len());
            entries.push(Entry { offset, header });
            rest = after;
        }
        if entries.len() as u64 != u64::from(self.frames) || expected != self.index_offset {
            return fail(format!(
                "the index lists {} frames that end at {expected}; the footer says {} and {}",
                entries.len(),
                self.frames,
                self.index_offset
            ));
        }
        Ok(entries)
    }
}
