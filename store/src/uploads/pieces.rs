//! Cuts a body into blobs, each small enough to be hashed before it is stored.
//!
//! An upload may hold [`LEAST`] bytes and what one read brought, as any other. A piece grows to
//! [`MOST`] only with one of a few permits, and only for a moment: a client that is slow, or one
//! among many, gets small pieces. Nothing here waits for a permit, so an upload that has one may
//! wait for a place.

use super::BodyStream;
use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::UploadPart;
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use futures::stream;
use parking_lot::Mutex;
use pfr_schema::codec::Codec;
use pfr_schema::digest::Algorithm;
use pfr_schema::frame::{Header, end_mark};
use pfr_schema::{Digest, FormatError, Kind};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

/// Bytes of a piece that any upload may hold.
const LEAST: usize = 64 << 10;
/// Bytes of a piece of a fast upload.
const MOST: usize = 1 << 20;
/// Time in which a piece must grow to its full size.
const LINGER: Duration = Duration::from_secs(1);
/// Pieces of one chunk: each has a row, and an entry in memory until the chunk is complete.
const PIECES: u64 = 128 << 10;

/// The frames of a body, with an end mark. What was cut is noted in `parts`, from byte `begin_at`
/// of the upload on.
pub(super) fn frames(store: &Store, body: BodyStream, begin_at: u64, parts: Arc<Mutex<Vec<UploadPart>>>) -> BodyStream {
    let cutter = Cutter {
        store: store.clone(),
        body,
        parts,
        at: begin_at,
        piece: BytesMut::new(),
        more: None,
        ready: VecDeque::new(),
        ended: false,
    };
    stream::try_unfold(cutter, |mut cutter| async move { Ok::<_, Error>(cutter.next().await?.map(|bytes| (bytes, cutter))) }).boxed()
}

struct Cutter {
    store: Store,
    body: BodyStream,
    parts: Arc<Mutex<Vec<UploadPart>>>,
    /// Where the current piece begins.
    at: u64,
    piece: BytesMut,
    /// The permit to hold more than [`LEAST`].
    more: Option<OwnedSemaphorePermit>,
    /// Bytes of frames to hand out.
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl Cutter {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Ok(Some(bytes));
            }
            if self.ended {
                return Ok(None);
            }
            // The last piece is its reader's now, and counts there.
            self.more = None;
            self.ended = !self.fill().await?;
            if !self.piece.is_empty() {
                self.cut().await?;
            }
            if self.ended {
                let count = self.parts.lock().len();
                self.ready.push_back(end_mark(count as u64).into());
            }
        }
    }

    /// Reads until the piece is large enough; false at the end of the body.
    async fn fill(&mut self) -> Result<bool> {
        let deadline = Instant::now() + LINGER;
        loop {
            let is_enough = self.piece.len() >= MOST || (self.piece.len() >= LEAST && !self.may_grow());
            if is_enough {
                return Ok(true);
            }
            let received = if self.piece.len() < LEAST {
                self.body.next().await
            } else {
                match tokio::time::timeout_at(deadline, self.body.next()).await {
                    Ok(received) => received,
                    Err(_) => return Ok(true),
                }
            };
            match received {
                Some(bytes) => self.piece.extend_from_slice(&bytes?),
                None => return Ok(false),
            }
        }
    }

    /// Whether there is a permit for a piece of full size.
    fn may_grow(&mut self) -> bool {
        if self.more.is_none() {
            self.more = Arc::clone(&self.store.pieces).try_acquire_owned().ok();
        }
        self.more.is_some()
    }

    /// Makes a frame of the piece. Its name is a BLAKE3 digest: no other program asks for it, and
    /// it costs least.
    async fn cut(&mut self) -> Result<()> {
        let size = self.piece.len() as u64;
        let (end, count) = (self.at + size, self.parts.lock().len() as u64);
        for (what, found, limit) in [
            ("a blob in bytes", end, self.store.options.limits.blob_bytes),
            ("pieces in one chunk of a slow upload: send smaller chunks", count, PIECES),
        ] {
            if found > limit {
                return Err(FormatError::TooLarge { what, found, limit }.into());
            }
        }
        let bytes = self.piece.split().freeze();
        let hashed = bytes.clone();
        let hash = move || (Digest::of(Algorithm::Blake3, &hashed), crc32c::crc32c(&hashed));
        let (digest, checksum) = pfr_service::task::spawn_blocking(hash).await?;
        let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest, raw_len: size, stored_len: size };
        self.ready.push_back(header.to_bytes().into());
        // In slices, so that its reader takes no more of it than it may hold.
        self.ready.extend((0..bytes.len()).step_by(LEAST).map(|from| bytes.slice(from..bytes.len().min(from + LEAST))));
        self.ready.push_back(Bytes::copy_from_slice(&checksum.to_le_bytes()));
        self.parts.lock().push(UploadPart { begin_at: self.at, size, digest });
        self.at += size;
        Ok(())
    }
}
