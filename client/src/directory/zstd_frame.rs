//! Decides whether a `.zst` file can be sent unchanged: exactly one zstd frame (RFC 8878) with a
//! small window and no dictionary.
//!
//! Only headers are read. Other files (several frames, `--long` windows) are decoded here and sent
//! raw.

use pfr_schema::codec::ZSTD_WINDOW_LOG;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;

const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Largest window that is decoded here, as a power of two: 32 MiB. Every upload in flight may need
/// the memory of one window.
const LARGEST_WINDOW_LOG: u32 = 25;

/// The facts about a file that its headers give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Whether the file is exactly one frame with a small window and no dictionary.
    pub plain: bool,
    /// Raw bytes of the first frame, if its header gives them.
    pub raw_len: Option<u64>,
}

/// Reads the headers of a file of `len` bytes.
pub(super) fn shape(file: &File, len: u64) -> io::Result<Shape> {
    let other = |raw_len| Ok(Shape { plain: false, raw_len });
    let mut head = [0; 18];
    let got = read_up_to(file, &mut head, 0)?;
    let head = &head[..got];
    let Some((descriptor, fields)) = head.strip_prefix(&MAGIC).and_then(|rest| rest.split_first()) else { return other(None) };
    let single = descriptor & 0x20 != 0;
    let dictionary_len = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size_len = match (descriptor >> 6, single) {
        (0, false) => 0,
        (0, true) => 1,
        (flag, _) => 1 << flag,
    };
    let header_len = usize::from(!single) + dictionary_len + size_len;
    if fields.len() < header_len {
        return other(None);
    }
    let size_bytes = &fields[header_len - size_len..header_len];
    let size = size_bytes.iter().rev().fold(0_u64, |sum, byte| (sum << 8) | u64::from(*byte)) + if size_len == 2 { 256 } else { 0 };
    let raw_len = (size_len > 0).then_some(size);
    let window = if single {
        size
    } else {
        let base = 1_u64 << (10 + (fields[0] >> 3));
        base + base / 8 * u64::from(fields[0] & 7)
    };
    if dictionary_len > 0 || window > 1 << ZSTD_WINDOW_LOG {
        return other(raw_len);
    }
    let checksum_len = if descriptor & 4 != 0 { 4 } else { 0 };
    let end = end_of_blocks(file, (5 + header_len) as u64)?.map(|end| end + checksum_len);
    Ok(Shape { plain: end == Some(len), raw_len })
}

/// The end of the blocks that start at `at`; `None` if the file ends before the last block, or if a
/// block has the reserved type.
fn end_of_blocks(file: &File, mut at: u64) -> io::Result<Option<u64>> {
    loop {
        let mut header = [0; 3];
        if read_up_to(file, &mut header, at)? < header.len() {
            return Ok(None);
        }
        let word = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let content = match (word >> 1) & 3 {
            // One byte that is repeated.
            1 => 1,
            // Reserved.
            3 => return Ok(None),
            // Raw or compressed bytes.
            _ => u64::from(word >> 3),
        };
        at += 3 + content;
        let is_last = word & 1 != 0;
        if is_last {
            return Ok(Some(at));
        }
    }
}

fn read_up_to(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read_at(&mut buffer[got..], at + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Decodes any zstd stream. The caller bounds the number of bytes.
pub(super) fn decoder(file: File) -> io::Result<impl Read> {
    let mut decoder = zstd::stream::read::Decoder::new(file)?;
    decoder.window_log_max(LARGEST_WINDOW_LOG)?;
    Ok(decoder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn found(bytes: &[u8]) -> Shape {
        shape(&file(bytes), bytes.len() as u64).unwrap()
    }

    #[test]
    fn ordinary_frames_of_every_size_and_level_pass_as_they_are() {
        for len in [0_usize, 1, 200, 255, 256, 300, 65_791, 65_792, 180_224, 1 << 20] {
            let raw: Vec<u8> = (0..len).map(|i| (i * i % 251) as u8).collect();
            for level in [-5, 1, 3, 19] {
                let bytes = zstd::bulk::compress(&raw, level).unwrap();
                assert_eq!(found(&bytes), Shape { plain: true, raw_len: Some(len as u64) }, "{len} bytes at level {level}");
                let mut encoder = zstd::stream::Encoder::new(Vec::new(), level).unwrap();
                encoder.include_checksum(true).unwrap();
                encoder.write_all(&raw).unwrap();
                // An empty frame states its length too.
                let raw_len = (len == 0).then_some(0);
                assert_eq!(found(&encoder.finish().unwrap()), Shape { plain: true, raw_len }, "{len} bytes streamed, level {level}");
            }
        }
    }

    #[test]
    fn files_that_the_registry_would_refuse_do_not_pass() {
        let frame = zstd::bulk::compress(&[7; 5000], 1).unwrap();
        let mut long = zstd::stream::Encoder::new(Vec::new(), 3).unwrap();
        long.window_log(25).unwrap();
        long.write_all(&vec![1; 40 << 20]).unwrap();
        for (what, bytes) in [
            ("two frames", [&frame[..], &frame].concat()),
            ("a byte after the end", [&frame[..], b"x"].concat()),
            ("a cut frame", frame[..frame.len() - 1].to_vec()),
            ("no zstd", b"hello, this is not zstd".to_vec()),
            ("nothing", Vec::new()),
            ("a wide window", long.finish().unwrap()),
        ] {
            assert!(!found(&bytes).plain, "{what}");
        }
    }
}
