//! What the floor and the limit have in common: blobs come into one buffer, several at a time, are
//! hashed side by side while the cache of the core still has them, and leave it from there.

use crate::Result;
use crate::workload::Blob;
use pfr_schema::Digest;
use pfr_schema::digest::Algorithm;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Bytes of an output file.
pub const FILE: usize = 64 << 20;
/// Bytes of a page of the workload, each of K and V.
const PAGE: u64 = 180_224;
/// Direct writes start and end at multiples of this.
const ALIGN: usize = 4096;

/// How many blobs are hashed side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Lanes {
    /// At most four, on every processor: the goals are set by this.
    Four,
    /// As many as `pf` hashes at a time on this processor.
    AsPf,
}

impl Lanes {
    /// Whether [`Self::AsPf`] is more than [`Self::Four`] here.
    pub fn differ() -> bool {
        Self::AsPf.most() > Self::Four.most()
    }

    /// How many blobs of the workload are hashed side by side.
    pub fn most(self) -> usize {
        self.of(PAGE)
    }

    /// Bytes of a buffer: 1 MiB, with which `pf-bench floor` most often was the fastest, or 4 MiB
    /// where more blobs are hashed side by side than fit.
    pub fn buffer(self) -> usize {
        if self.most() > 4 { 4 << 20 } else { 1 << 20 }
    }

    /// The value of the option `--lanes`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Four => "four",
            Self::AsPf => "as-pf",
        }
    }

    /// How many blobs of `len` bytes are hashed side by side.
    fn of(self, len: u64) -> usize {
        let all = Digest::side_by_side(len);
        match self {
            Self::Four => all.min(4),
            Self::AsPf => all,
        }
    }
}

/// The digest and the length that a blob must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// SHA-256.
    pub digest: [u8; 32],
    /// Bytes.
    pub len: usize,
}

impl Promise {
    /// What the workload says of a blob.
    pub fn of(blob: &Blob) -> Self {
        Self { digest: blob.digest, len: blob.len }
    }
}

/// Where one blob's bytes are.
#[derive(Clone, Debug)]
pub struct Piece {
    file: PathBuf,
    offset: u64,
    /// What it must be.
    pub promise: Promise,
}

impl Piece {
    /// A blob in a file of its own.
    pub fn of(blob: &Blob) -> Self {
        Self { file: blob.path.clone(), offset: 0, promise: Promise::of(blob) }
    }
}

/// Runs of pieces that fill an output file each. Consecutive pieces stay together, so that the
/// copy is read sequentially too.
pub fn split(pieces: &[Piece]) -> Vec<&[Piece]> {
    let mut runs = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, piece) in pieces.iter().enumerate() {
        bytes += piece.promise.len;
        if bytes >= FILE {
            runs.push(&pieces[start..=i]);
            (start, bytes) = (i + 1, 0);
        }
    }
    if start < pieces.len() {
        runs.push(&pieces[start..]);
    }
    runs
}

/// Reads pieces, and keeps the last file open.
#[derive(Default)]
pub struct Source(Option<(PathBuf, File)>);

impl Source {
    /// Reads `pieces`, one after the other, into `place`, which has their length. Neighbours in one
    /// file are one read.
    pub fn read(&mut self, mut pieces: &[Piece], mut place: &mut [u8]) -> Result<()> {
        while let Some(first) = pieces.first() {
            let (mut count, mut len) = (0, 0);
            while pieces.get(count).is_some_and(|piece| piece.file == first.file && piece.offset == first.offset + len as u64) {
                len += pieces[count].promise.len;
                count += 1;
            }
            let (now, rest) = place.split_at_mut_checked(len).ok_or("too little room")?;
            self.open(&first.file)?.read_exact_at(now, first.offset)?;
            (pieces, place) = (&pieces[count..], rest);
        }
        Ok(())
    }

    fn open(&mut self, path: &Path) -> Result<&File> {
        if self.0.as_ref().is_none_or(|(open, _)| open != path) {
            self.0 = Some((path.to_owned(), File::open(path)?));
        }
        Ok(self.0.as_ref().map(|(_, file)| file).ok_or("no file")?)
    }
}

/// A buffer that is used again and again, for as many blobs at a time as fit.
pub struct Groups {
    buffer: Buffer,
    hash: Option<Lanes>,
}

/// Brings the blobs of a range into a buffer of their length.
type Fill<'a> = dyn FnMut(Range<usize>, &mut [u8]) -> Result<()> + 'a;
/// Takes blobs that have passed.
type Done<'a> = dyn FnMut(&Filled<'_>) -> Result<()> + 'a;

/// Blobs that lie in the buffer, one after the other.
pub struct Filled<'a> {
    /// Which of the blobs.
    pub blobs: Range<usize>,
    /// Their bytes.
    pub bytes: &'a [u8],
    /// The same bytes up to the next multiple of 4096, for a direct write.
    padded: &'a [u8],
}

impl Groups {
    /// A buffer of `len` bytes; with `hash`, blobs are compared with their digests.
    pub fn new(len: usize, hash: Option<Lanes>) -> Self {
        Self { buffer: Buffer::new(len.next_multiple_of(ALIGN)), hash }
    }

    /// Lets `fill` bring the next blobs into the buffer, checks them, and hands them to `done`,
    /// until all of `blobs` have passed.
    ///
    /// # Errors
    /// The first error of `fill` or `done`; a blob that is larger than the buffer, or that is not
    /// what was promised.
    pub fn each(&mut self, blobs: &[Promise], fill: &mut Fill<'_>, done: &mut Done<'_>) -> Result<()> {
        let mut start = 0;
        while start < blobs.len() {
            let count = group(&blobs[start..], self.buffer.len, self.hash);
            let range = start..start + count;
            let len = blobs[range.clone()].iter().map(|blob| blob.len).sum();
            if count == 0 {
                return Err("a blob is larger than the buffer".into());
            }
            fill(range.clone(), self.buffer.bytes_mut(len)?)?;
            let padded = self.buffer.bytes(len.next_multiple_of(ALIGN))?;
            if let Some(lanes) = self.hash {
                verify(&blobs[range.clone()], &padded[..len], lanes)?;
            }
            done(&Filled { blobs: range, bytes: &padded[..len], padded })?;
            start += count;
        }
        Ok(())
    }

    /// Writes `blobs` into a new file, which is on disk when this returns; `direct`: past the page
    /// cache. Returns where they now are.
    ///
    /// # Errors
    /// As [`Self::each`].
    pub fn pack(&mut self, path: &Path, blobs: &[Promise], direct: bool, fill: &mut Fill<'_>) -> Result<Vec<Piece>> {
        let flags = if direct { OFlags::DIRECT.bits() } else { 0 };
        let file = OpenOptions::new().write(true).create_new(true).custom_flags(flags.cast_signed()).open(path)?;
        let (mut at, mut placed) = (0, Vec::with_capacity(blobs.len()));
        self.each(blobs, fill, &mut |filled| {
            // The last block of a direct write is padded.
            let bytes = if direct { filled.padded } else { filled.bytes };
            file.write_all_at(bytes, at)?;
            let mut offset = at;
            for promise in &blobs[filled.blobs.clone()] {
                placed.push(Piece { file: path.to_owned(), offset, promise: *promise });
                offset += promise.len as u64;
            }
            at += bytes.len() as u64;
            Ok(())
        })?;
        file.sync_all()?;
        Ok(placed)
    }
}

/// How many of `blobs` come next: as many as fit, and then a multiple of those that are hashed side
/// by side, or of four. 0 if the first does not fit.
fn group(blobs: &[Promise], room: usize, hash: Option<Lanes>) -> usize {
    let mut bytes = 0;
    let fitting = blobs.iter().take_while(|blob| {
        bytes += blob.len;
        bytes <= room
    });
    let fitting = fitting.count();
    let lanes = blobs.first().zip(hash).map_or(1, |(blob, hash)| hash.of(blob.len as u64));
    [lanes.max(4), 4].into_iter().find(|lanes| fitting >= *lanes).map_or(fitting, |lanes| fitting - fitting % lanes)
}

/// Compares `bytes`, which are `blobs` one after the other, with their digests.
///
/// # Errors
/// The first digest that is wrong.
pub fn verify(blobs: &[Promise], mut bytes: &[u8], lanes: Lanes) -> Result<()> {
    let lanes = blobs.first().map_or(1, |blob| lanes.of(blob.len as u64));
    for together in blobs.chunks(lanes) {
        let mut parts = Vec::with_capacity(together.len());
        for blob in together {
            let (part, rest) = bytes.split_at_checked(blob.len).ok_or("a blob is shorter than promised")?;
            parts.push(part);
            bytes = rest;
        }
        let found = Digest::of_each(Algorithm::Sha256, &parts);
        if let Some((blob, _)) = together.iter().zip(found).find(|(blob, found)| found.as_bytes() != blob.digest) {
            return Err(format!("{} is not what its name says", hex::encode(blob.digest)).into());
        }
    }
    Ok(())
}

/// Memory that direct writes accept.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Self {
        let memory = vec![0; len + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN);
        Self { memory, start, len }
    }

    /// The first `len` bytes.
    fn bytes(&self, len: usize) -> Result<&[u8]> {
        Ok(self.memory[self.start..self.start + self.len].get(..len).ok_or("the buffer is too small")?)
    }

    fn bytes_mut(&mut self, len: usize) -> Result<&mut [u8]> {
        Ok(self.memory[self.start..self.start + self.len].get_mut(..len).ok_or("the buffer is too small")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promises(blobs: &[Vec<u8>]) -> Vec<Promise> {
        blobs.iter().map(|blob| Promise { digest: Digest::sha256(blob).as_bytes().try_into().unwrap(), len: blob.len() }).collect()
    }

    #[test]
    fn what_is_packed_is_read_back_and_damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        // Six blobs of one length, and three of others: groups of four, of two, and padding.
        let lens = [10_000, 10_000, 10_000, 10_000, 10_000, 10_000, 1, 0, 50_000];
        let blobs: Vec<Vec<u8>> = lens.iter().zip(0..).map(|(len, n)| pfr_testkit::snapshot::bytes(n, *len)).collect();
        let promised = promises(&blobs);
        for direct in [false, true] {
            let mut groups = Groups::new(50_000, Some(Lanes::AsPf));
            let path = dir.path().join(format!("{direct}"));
            let packed = groups.pack(&path, &promised, direct, &mut |range, place| {
                place.copy_from_slice(&blobs[range].concat());
                Ok(())
            });
            let packed = match packed {
                // Some file systems cannot be written past the page cache.
                Err(error) if direct && error.to_string().contains("Invalid argument") => continue,
                packed => packed.unwrap(),
            };
            let mut read = vec![0; lens.iter().sum()];
            Source::default().read(&packed, &mut read).unwrap();
            assert_eq!(read, blobs.concat());
            verify(&promised, &read, Lanes::Four).unwrap();
            let last = read.len() - 1;
            read[last] ^= 1;
            let digest = hex::encode(promised[8].digest);
            assert!(verify(&promised, &read, Lanes::Four).unwrap_err().to_string().contains(&digest));
            assert!(verify(&promised, &read[1..], Lanes::AsPf).is_err());
        }
    }

    #[test]
    fn groups_are_multiples_of_four_where_four_fit() {
        let equal = |count: usize| vec![Promise { digest: [0; 32], len: 100 }; count];
        for (blobs, room, expected) in [(9, 550, 4), (9, 899, 8), (9, 1000, 8), (3, 1000, 3), (9, 350, 3), (9, 99, 0), (0, 99, 0)] {
            assert_eq!(group(&equal(blobs), room, Some(Lanes::Four)), expected, "{blobs} blobs, {room} bytes");
        }
        let lanes = Digest::side_by_side(100).max(4);
        let found = group(&equal(100), 100 * (3 * lanes + 1), Some(Lanes::AsPf));
        assert_eq!(found, 3 * lanes, "three times as many as are hashed side by side");
        assert_eq!(group(&equal(100), 799, Some(Lanes::Four)), 4);
    }

    #[test]
    fn a_blob_larger_than_the_buffer_is_an_error() {
        let promised = promises(&[vec![0; 5000]]);
        let error = Groups::new(4096, Some(Lanes::Four)).each(&promised, &mut |_, _| Ok(()), &mut |_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "a blob is larger than the buffer");
    }
}
