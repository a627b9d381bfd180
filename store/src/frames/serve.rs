//! Downloads of frames by clients that may be slow.
//!
//! A download at full speed has a place among [`crate::Options::outputs`], is read ahead by some
//! MiB, and is handed out in pieces of [`LARGE`] bytes. A download without a place is read and
//! handed out in pieces of [`PIECE`] bytes, as its client takes them: it needs no memory while the
//! client is slow, and never waits for a place. A download that could use a place takes it from one
//! whose client does not take the bytes that were read. Only a few large pieces are handed out at a
//! time, so a client that was fast and stops holds little memory too.

use super::codecs::{are_in_others, in_codecs};
use super::outputs::{At, Hold};
use super::{AHEAD, BoxFrames};
use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::packs::{Extent, READ, locate, plan, read_extent};
use bytes::Bytes;
use futures::StreamExt as _;
use parking_lot::Mutex;
use pfr_schema::Digest;
use pfr_schema::codec::Codecs;
use pfr_schema::frame::{Header, end_mark};
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::Instrument as _;

/// Bytes handed out at a time, each piece in memory of its own.
const PIECE: u64 = 64 << 10;
/// The same at full speed: each piece costs the client a wake-up.
const LARGE: u64 = crate::packs::PIECE;

/// Frames for a client that may be slow.
pub struct Served {
    /// Bytes of all pieces together, the end mark included. `None` where some are decoded on
    /// the way.
    pub bytes: Option<u64>,
    /// The pieces. Poll for one only when the piece before was sent.
    pub pieces: BoxFrames,
}

struct Download {
    store: Store,
    extents: Arc<[Extent]>,
    hold: Arc<Mutex<Hold>>,
    frames: u64,
    ended: bool,
}

impl Store {
    /// [`Store::frames`] for a client that may be slow, and that reads these codecs: in small
    /// pieces, and without memory while the client does not take them.
    ///
    /// # Errors
    /// As [`Store::frames`].
    #[boxed]
    pub async fn serve(&self, digests: Vec<Digest>, codecs: Codecs) -> Result<Served> {
        let located = locate(self, &digests).await?;
        let others = are_in_others(&located, codecs);
        let extents: Arc<[Extent]> = plan(located).into();
        let frames = digests.len() as u64;
        let bytes = extents.iter().map(Extent::len).sum::<u64>() + end_mark(frames).len() as u64;
        let hold = Arc::new(Mutex::new(Hold::default()));
        let download = Download { store: self.clone(), extents, hold, frames, ended: false };
        let pieces =
            futures::stream::try_unfold(download, |mut download| async move { Ok(download.next().await?.map(|piece| (piece, download))) });
        if others {
            return Ok(Served { bytes: None, pieces: in_codecs(pieces.boxed(), codecs, &self.options.limits) });
        }
        Ok(Served { bytes: Some(bytes), pieces: pieces.boxed() })
    }
}

/// The bytes of one extent from `from` on, without an end mark.
pub(super) fn from_within(store: &Store, extent: Extent, from: u64) -> BoxFrames {
    let hold = Arc::new(Mutex::new(Hold::default()));
    hold.lock().next = At { extent: 0, offset: from };
    let download = Download { store: store.clone(), extents: Arc::from([extent]), hold, frames: 1, ended: true };
    let pieces =
        futures::stream::try_unfold(download, |mut download| async move { Ok(download.next().await?.map(|piece| (piece, download))) });
    pieces.boxed()
}

impl Download {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            let reading = {
                let mut hold = self.hold.lock();
                hold.handed = None;
                if let Some((at, piece)) = hold.ready.pop_front() {
                    let piece = self.hand_out(at, piece, &mut hold);
                    if hold.place.is_some() {
                        self.read_ahead(&mut hold);
                    }
                    hold.handed = Some(Instant::now());
                    return Ok(Some(piece));
                }
                self.read_ahead(&mut hold);
                hold.reading.pop_front()
            };
            match reading {
                Some((_, task)) => {
                    let pieces = task.await??;
                    self.hold.lock().ready.extend(pieces);
                }
                None if self.ended => return Ok(None),
                None => {
                    self.ended = true;
                    return Ok(Some(end_mark(self.frames).into()));
                }
            }
        }
    }

    /// The piece as it is; or the beginning of a large one, if too many large ones are on their
    /// way.
    fn hand_out(&self, at: At, piece: Bytes, hold: &mut Hold) -> Bytes {
        if piece.len() as u64 <= PIECE {
            return piece;
        }
        if let Some(permit) = self.store.outputs.take_large() {
            return Bytes::from_owner(Large { piece, _permit: permit });
        }
        hold.ready.push_front((At { offset: at.offset + PIECE, ..at }, piece.slice(PIECE as usize..)));
        Bytes::copy_from_slice(&piece[..PIECE as usize])
    }

    /// Starts the reads that the download may have in flight.
    fn read_ahead(&self, hold: &mut Hold) {
        if hold.place.is_none() && hold.next.extent < self.extents.len() {
            hold.place = self.store.outputs.take(&self.hold);
            hold.taken = Instant::now();
        }
        let (bytes, piece, reads) = if hold.place.is_some() { (READ, LARGE, AHEAD) } else { (PIECE, PIECE, 1) };
        while hold.reading.len() < reads
            && let Some(extent) = self.extents.get(hold.next.extent)
        {
            let at = hold.next;
            let ranges = cut_into_pieces(extent, at.offset, bytes, piece);
            let end = ranges.last().map_or(at.offset, |range| range.end);
            hold.next = if end < extent.len() { At { offset: end, ..at } } else { At { extent: at.extent + 1, offset: 0 } };
            let (store, extents) = (self.store.clone(), Arc::clone(&self.extents));
            let read = async move {
                let extent = &extents[at.extent];
                let pieces = read_extent(&store, extent, &ranges).await?;
                let place = |range: &Range<u64>| At { extent: at.extent, offset: range.start };
                Ok(ranges.iter().map(place).zip(pieces).collect())
            };
            let task = pfr_service::task::spawn(read.in_current_span());
            hold.reading.push_back((at, task));
        }
    }
}

/// A large piece, which is counted until it is sent.
struct Large {
    piece: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Large {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

/// Ranges of an extent from `from` on, of `piece` bytes at most and about `bytes` bytes in all. No
/// frame's header lies in two of them: each can be checked.
fn cut_into_pieces(extent: &Extent, from: u64, bytes: u64, piece: u64) -> Vec<Range<u64>> {
    let len = extent.len();
    let until = len.min(from + bytes);
    let (mut ranges, mut start) = (Vec::new(), from);
    while start < until {
        let mut end = until.min(start + piece);
        let last = extent.frames.partition_point(|(begin, _)| *begin < end).checked_sub(1).map(|i| &extent.frames[i]);
        if let Some((begin, digest)) = last
            && *begin > start
            && begin + Header::len(digest.algorithm()) as u64 > end
        {
            end = *begin;
        }
        ranges.push(start..end);
        start = end;
    }
    ranges
}
