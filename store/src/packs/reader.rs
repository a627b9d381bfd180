//! Bytes of packs, and what a failed read means.
//!
//! A pack that is not found was moved, or collected, or is lost, or its storage is away. This file
//! tells the last case apart: it says "there is no such pack" only of a storage that is there. For
//! the other three the caller asks the metadata.

use super::PIECE;
use super::paths::path;
use crate::Store;
use crate::encryption::SEGMENT;
use crate::error::{Error, Result};
use crate::trace::Stage;
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use object_store::path::Path;
use object_store::{GetOptions, GetResult, GetResultPayload, ObjectStoreExt as _};
use pfr_service::buffers::Pool;
use rustix::buffer::spare_capacity;
use rustix::io::{Errno, pread};
use std::fs::File;
use std::ops::Range;

/// Memory for pieces of downloads at full speed. Others are small, and need it for long.
static PIECES: Pool = Pool::new(PIECE as usize, 32);
/// In the place of bytes that cannot be decrypted: many of them are in no frame, as zeros may be.
const UNKNOWN: u8 = 0xc5;

/// Why a read failed.
enum Failed {
    NoPack,
    /// The pack has fewer bytes than were asked for: it ends here.
    Ends(u64),
}

impl Store {
    /// Bytes of a pack; fewer than asked for, or none, if it ends early. `None` if it is not there.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the storage is away, [`Error::Altered`] for bytes that cannot be
    /// decrypted, and others of [`Error::packs`].
    pub(crate) async fn read_pack(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>> {
        let stage = Stage::storage("get pack", key, range.end.saturating_sub(range.start));
        stage.end(self.read_range(&path(key), range).await)
    }

    async fn read_range(&self, path: &Path, range: Range<u64>) -> Result<Option<Bytes>> {
        match self.packs.get_range(path, range.clone()).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => match self.why(path, range.end, error).await? {
                Failed::NoPack => Ok(None),
                Failed::Ends(end) if end <= range.start => Ok(Some(Bytes::new())),
                Failed::Ends(end) => self.packs.get_range(path, range.start..end).await.map(Some).map_err(Error::packs),
            },
        }
    }

    /// Bytes of a pack, for a caller that checks every frame. Bytes that cannot be decrypted are
    /// replaced by others, so that the frames beside them can be checked too.
    ///
    /// # Errors
    /// As [`Self::read_pack`], but for [`Error::Altered`].
    pub(crate) async fn read_pack_to_check(&self, key: &str, range: Range<u64>) -> Result<Option<Bytes>> {
        let error = match self.read_pack(key, range.clone()).await {
            Err(error @ Error::Altered { .. }) => error,
            read => return read,
        };
        tracing::debug!(%error, "bytes of a pack cannot be decrypted");
        let (mut bytes, mut at) = (BytesMut::new(), range.start);
        while at < range.end {
            let end = range.end.min((at / SEGMENT + 1) * SEGMENT);
            let length = usize::try_from(end - at).unwrap_or(usize::MAX);
            match self.read_pack(key, at..end).await {
                Ok(None) => return Ok(None),
                Ok(Some(read)) => {
                    bytes.extend_from_slice(&read);
                    if read.len() < length {
                        break;
                    }
                }
                Err(Error::Altered { .. }) => bytes.resize(bytes.len() + length, UNKNOWN),
                Err(error) => return Err(error),
            }
            at = end;
        }
        Ok(Some(bytes.freeze()))
    }

    /// Ranges that follow each other, each in memory of its own: a piece that was sent is free
    /// again at once. If the pack ends early, the last pieces are short, or lacking. `None` if it
    /// is not there.
    ///
    /// # Errors
    /// As [`Self::read_pack`].
    pub(crate) async fn read_pack_in_pieces(&self, key: &str, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>> {
        let range = match ranges {
            [] => return Ok(Some(Vec::new())),
            [one] => return Ok(self.read_pack(key, one.clone()).await?.map(|bytes| vec![bytes])),
            [first, .., last] => first.start..last.end,
        };
        let stage = Stage::storage("get pack", key, range.end.saturating_sub(range.start));
        let (path, options) = (path(key), GetOptions { range: Some(range.clone().into()), ..GetOptions::default() });
        let pieces = match self.packs.get_opts(&path, options).await {
            Ok(result) => take_apart(result, ranges).await,
            Err(error) => Err(error),
        };
        match pieces {
            Ok(pieces) => Ok(Some(pieces)),
            Err(error) => Ok(match stage.end(self.why(&path, range.end, error).await)? {
                Failed::NoPack => None,
                Failed::Ends(_) => Some(Vec::new()),
            }),
        }
    }

    /// Bytes that a pack has; `None` if it is not there.
    ///
    /// # Errors
    /// As [`Self::read_pack`].
    pub(crate) async fn pack_len(&self, key: &str) -> Result<Option<u64>> {
        match self.packs.head(&path(key)).await {
            Ok(found) => Ok(Some(found.size)),
            Err(object_store::Error::NotFound { .. }) => self.storage_is_there().await.map(|()| None),
            Err(error) => Err(Error::packs(error)),
        }
    }

    /// Deletes the bytes of a pack. It is no error if they are gone already.
    ///
    /// # Errors
    /// As [`Self::read_pack`]. If the storage is away, the bytes may come back with it: the row
    /// must still name them.
    pub(crate) async fn delete_pack(&self, key: &str) -> Result<()> {
        let _stage = Stage::storage("delete pack", key, 0);
        match self.packs.delete(&path(key)).await {
            Ok(()) => Ok(()),
            Err(object_store::Error::NotFound { .. }) => self.storage_is_there().await,
            Err(error) => Err(Error::packs(error)),
        }
    }

    /// Why a read up to `end` failed. A pack that ends before is damage, and not a storage out of
    /// reach.
    async fn why(&self, path: &Path, end: u64, error: object_store::Error) -> Result<Failed> {
        let absent = || async { self.storage_is_there().await.map(|()| Failed::NoPack) };
        match error {
            object_store::Error::NotFound { .. } => absent().await,
            error => match self.packs.head(path).await {
                Ok(found) if found.size < end => Ok(Failed::Ends(found.size)),
                Err(object_store::Error::NotFound { .. }) => absent().await,
                _ => Err(Error::packs(error)),
            },
        }
    }
}

async fn take_apart(result: GetResult, ranges: &[Range<u64>]) -> object_store::Result<Vec<Bytes>> {
    let lengths: Vec<usize> = ranges.iter().map(|range| usize::try_from(range.end - range.start).unwrap_or(usize::MAX)).collect();
    let start = result.range.start;
    match result.payload {
        GetResultPayload::File(file, path) => {
            let read = move || {
                let mut at = start;
                let piece = |length: usize| {
                    let piece = read_piece(&file, at, length)?;
                    at += length as u64;
                    Ok(piece)
                };
                lengths.into_iter().map(piece).collect::<std::io::Result<Vec<Bytes>>>()
            };
            let failed = |source: Box<dyn std::error::Error + Send + Sync>| object_store::Error::Generic { store: "file", source };
            let read = pfr_service::task::spawn_blocking(read).await.map_err(|e| failed(e.into()))?;
            read.map_err(|e| failed(format!("{}: {e}", path.display()).into()))
        }
        GetResultPayload::Stream(mut stream) => {
            let mut lengths = lengths.into_iter();
            let (mut pieces, mut piece) = (Vec::with_capacity(ranges.len()), BytesMut::new());
            let mut length = lengths.next().unwrap_or(0);
            while let Some(bytes) = stream.next().await {
                let mut bytes = bytes?;
                while !bytes.is_empty() && length > 0 {
                    if piece.is_empty() {
                        piece.reserve(length);
                    }
                    piece.extend_from_slice(&bytes.split_to(bytes.len().min(length - piece.len())));
                    if piece.len() == length {
                        pieces.push(std::mem::take(&mut piece).freeze());
                        length = lengths.next().unwrap_or(0);
                    }
                }
            }
            Ok(pieces)
        }
    }
}

/// Bytes of a file, fewer if it ends before, in memory that is used again if there are many.
fn read_piece(file: &File, start: u64, length: usize) -> std::io::Result<Bytes> {
    // As much is read as there is room for.
    let of_pool = (PIECES.size() / 8 * 7..=PIECES.size()).contains(&length);
    let mut bytes = if of_pool { PIECES.take() } else { PIECES.hold(Vec::with_capacity(length)) };
    fill(file, start, length, &mut bytes)?;
    Ok(bytes.freeze())
}

/// Bytes of a file, fewer if it ends before.
pub(crate) fn read_at(file: &File, start: u64, length: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length);
    fill(file, start, length, &mut bytes)?;
    Ok(bytes)
}

/// `Read::read_to_end` would ask for 8 KiB, then 16, and so on, for each piece.
fn fill(file: &File, start: u64, length: usize, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    while bytes.len() < length {
        let at = start + bytes.len() as u64;
        match pread(file, spare_capacity(bytes), at) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    bytes.truncate(length);
    Ok(())
}
