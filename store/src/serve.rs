//! Giving out frames to clients that may be slow.
//!
//! Every download is handed out in pieces of [`PIECE`] bytes. One at full speed has a place among [`crate::Options::outputs`] and is read ahead by
//! some MiB. One without a place is read piece by piece, as its client takes them: it needs no memory while the client is slow, and waits for
//! nobody. A download that could use a place takes it from one whose client does not take what was read.

use crate::Store;
use crate::error::{Error, Result};
use crate::frames::{AHEAD, BoxFrames, Extent, READ, check_headers, cut, gone, locate, plan, short};
use crate::pack_writer::path;
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use object_store::{GetOptions, GetResult, GetResultPayload, ObjectStoreExt as _};
use parking_lot::Mutex;
use pfr_schema::Digest;
use pfr_schema::frame::{Header, end_mark};
use std::collections::VecDeque;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Bytes handed out at a time, each piece in memory of its own.
const PIECE: u64 = 64 << 10;
/// Time for which a client may leave a piece lying before its download may lose its place.
const LINGER: Duration = Duration::from_millis(250);
/// Time after which any download may lose its place to another.
const SLICE: Duration = Duration::from_secs(1);

/// The places for downloads at full speed.
#[derive(Debug)]
pub(crate) struct Outputs {
    places: Arc<Semaphore>,
    holders: Mutex<Vec<Weak<Mutex<Hold>>>>,
}

impl Outputs {
    pub(crate) fn new(count: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(count.max(1))), holders: Mutex::default() }
    }

    /// A place for `own`, from a download that does not need it if need be.
    fn take(&self, own: &Arc<Mutex<Hold>>) -> Option<OwnedSemaphorePermit> {
        let take = || Arc::clone(&self.places).try_acquire_owned().ok();
        let place = take().or_else(|| {
            // Whoever is locked is being read from, and does need it.
            let idle = |hold: &Arc<Mutex<Hold>>| hold.try_lock().is_some_and(|mut hold| hold.give_way());
            let found = self.holders.lock().iter().filter_map(Weak::upgrade).any(|hold| !Arc::ptr_eq(&hold, own) && idle(&hold));
            found.then(take).flatten()
        })?;
        let mut holders = self.holders.lock();
        holders.retain(|hold| hold.strong_count() > 0 && !std::ptr::eq(hold.as_ptr(), Arc::as_ptr(own)));
        holders.push(Arc::downgrade(own));
        Some(place)
    }
}

/// Where in a download.
#[derive(Clone, Copy, Debug)]
struct At {
    extent: usize,
    offset: u64,
}

type Pieces = Vec<(At, Bytes)>;

/// What a download has in memory, apart from the piece that is on its way to the client.
#[derive(Debug)]
struct Hold {
    place: Option<OwnedSemaphorePermit>,
    taken: Instant,
    /// When a piece was handed out; none while the client waits for the next one.
    handed: Option<Instant>,
    ready: VecDeque<(At, Bytes)>,
    reading: VecDeque<(At, JoinHandle<Result<Pieces>>)>,
    /// What is read next.
    next: At,
}

impl Hold {
    /// Gives up the place, and what was read ahead, if the client does not take it.
    fn give_way(&mut self) -> bool {
        let idle = self.handed.is_some_and(|handed| handed.elapsed() >= LINGER || self.taken.elapsed() >= SLICE);
        if self.place.is_none() || !idle {
            return false;
        }
        if let Some(at) = self.ready.front().map(|(at, _)| *at).or_else(|| self.reading.front().map(|(at, _)| *at)) {
            self.next = at;
        }
        self.ready = VecDeque::new();
        for (_, task) in self.reading.drain(..) {
            task.abort();
        }
        self.place = None;
        true
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        for (_, task) in self.reading.drain(..) {
            task.abort();
        }
    }
}

struct Download {
    store: Store,
    extents: Arc<[Extent]>,
    hold: Arc<Mutex<Hold>>,
    frames: u64,
    ended: bool,
}

/// Frames of `digests` with an end mark, in small pieces.
pub(crate) async fn serve(store: &Store, digests: Vec<Digest>) -> Result<BoxFrames> {
    let extents = plan(locate(store, &digests).await?).into();
    let hold = Hold {
        place: None,
        taken: Instant::now(),
        handed: None,
        ready: VecDeque::new(),
        reading: VecDeque::new(),
        next: At { extent: 0, offset: 0 },
    };
    let download = Download { store: store.clone(), extents, hold: Arc::new(Mutex::new(hold)), frames: digests.len() as u64, ended: false };
    let pieces =
        futures::stream::try_unfold(download, |mut download| async move { Ok(download.next().await?.map(|piece| (piece, download))) });
    Ok(pieces.boxed())
}

impl Download {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            let reading = {
                let mut hold = self.hold.lock();
                hold.handed = None;
                if let Some((_, piece)) = hold.ready.pop_front() {
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
                    let pieces = task.await.map_err(|e| Error::Internal(e.to_string()))??;
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

    /// Starts the reads that the download may have in flight.
    fn read_ahead(&self, hold: &mut Hold) {
        if hold.place.is_none() && hold.next.extent < self.extents.len() {
            hold.place = self.store.outputs.take(&self.hold);
            hold.taken = Instant::now();
        }
        let (bytes, reads) = if hold.place.is_some() { (READ, AHEAD) } else { (PIECE, 1) };
        while hold.reading.len() < reads
            && let Some(extent) = self.extents.get(hold.next.extent)
        {
            let at = hold.next;
            let ranges = cut_into_pieces(extent, at.offset, bytes);
            let end = ranges.last().map_or(at.offset, |range| range.end);
            hold.next = if end < extent.range.end - extent.range.start {
                At { offset: end, ..at }
            } else {
                At { extent: at.extent + 1, offset: 0 }
            };
            let (store, extents) = (self.store.clone(), Arc::clone(&self.extents));
            let task = tokio::spawn(async move {
                let extent = &extents[at.extent];
                let pieces = read(&store, extent, &ranges).await?;
                for (range, piece) in ranges.iter().zip(&pieces) {
                    check_headers(extent, range.start, piece, &store.options.limits)?;
                }
                let place = |range: &Range<u64>| At { extent: at.extent, offset: range.start };
                Ok(ranges.iter().map(place).zip(pieces).collect())
            });
            hold.reading.push_back((at, task));
        }
    }
}

/// Ranges of an extent from `from` on, of about `bytes` bytes in all. No frame's header lies in two of them: each can be checked.
fn cut_into_pieces(extent: &Extent, from: u64, bytes: u64) -> Vec<Range<u64>> {
    let len = extent.range.end - extent.range.start;
    let until = len.min(from + bytes);
    let (mut ranges, mut start) = (Vec::new(), from);
    while start < until {
        let mut end = until.min(start + PIECE);
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

/// Reads ranges of an extent that follow each other, each into memory of its own: one that was sent is free again at once.
async fn read(store: &Store, extent: &Extent, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
    let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return Ok(Vec::new()) };
    let base = extent.range.start;
    let options = GetOptions { range: Some((base + first.start..base + last.end).into()), ..GetOptions::default() };
    let pieces = match store.packs.get_opts(&path(&extent.pack), options).await {
        Ok(result) => take_apart(result, ranges).await,
        Err(object_store::Error::NotFound { .. }) => return read_moved(store, extent, ranges).await,
        Err(error) => Err(error),
    };
    let pieces = match pieces {
        Ok(pieces) => pieces,
        Err(error) => return Err(cut(store, extent, error).await),
    };
    let complete = ranges.iter().zip(&pieces).all(|(range, piece)| piece.len() as u64 == range.end - range.start);
    match extent.frames.first() {
        Some((_, digest)) if !complete => Err(short(*digest, extent)),
        _ => Ok(pieces),
    }
}

async fn take_apart(result: GetResult, ranges: &[Range<u64>]) -> object_store::Result<Vec<Bytes>> {
    let lengths: Vec<usize> = ranges.iter().map(|range| usize::try_from(range.end - range.start).unwrap_or(usize::MAX)).collect();
    let start = result.range.start;
    match result.payload {
        GetResultPayload::File(mut file, path) => {
            let read = move || {
                file.seek(SeekFrom::Start(start))?;
                let piece = |length: usize| {
                    let mut piece = Vec::with_capacity(length);
                    (&file).take(length as u64).read_to_end(&mut piece)?;
                    Ok(Bytes::from(piece))
                };
                lengths.into_iter().map(piece).collect::<std::io::Result<Vec<Bytes>>>()
            };
            let failed = |source: Box<dyn std::error::Error + Send + Sync>| object_store::Error::Generic { store: "file", source };
            let read = tokio::task::spawn_blocking(read).await.map_err(|e| failed(e.into()))?;
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

/// Compaction moved the frames between the look and the read: look again. They are the same bytes wherever they lie.
async fn read_moved(store: &Store, extent: &Extent, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
    let digests: Vec<Digest> = extent.frames.iter().map(|(_, digest)| *digest).collect();
    let mut parts = Vec::new();
    let mut at = 0;
    for part in plan(locate(store, &digests).await?) {
        let len = part.range.end - part.range.start;
        parts.push((at..at + len, part));
        at += len;
    }
    let mut pieces = Vec::with_capacity(ranges.len());
    for range in ranges {
        let mut piece = BytesMut::new();
        for (lies, part) in &parts {
            let (from, to) = (range.start.max(lies.start), range.end.min(lies.end));
            if from >= to {
                continue;
            }
            let base = part.range.start;
            match store.packs.get_range(&path(&part.pack), base + from - lies.start..base + to - lies.start).await {
                Ok(bytes) => piece.extend_from_slice(&bytes),
                Err(error) => return Err(gone(store, part, error).await),
            }
        }
        match extent.frames.first() {
            Some((_, digest)) if (piece.len() as u64) < range.end - range.start => return Err(short(*digest, extent)),
            _ => pieces.push(piece.freeze()),
        }
    }
    Ok(pieces)
}
