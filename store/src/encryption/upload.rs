//! Uploads of encrypted objects in parts.

use super::failed;
use super::objects::blocking;
use super::segments::{SEGMENT, Sealer};
use bytes::Bytes;
use futures::FutureExt as _;
use object_store::{MultipartUpload, PutPayload, PutResult, Result, UploadPart};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use tokio::sync::{Mutex, oneshot};

/// Bytes that a part of an upload to a bucket has at least, but the last one: 80 segments.
const PART: usize = 5 << 20;

/// An upload that encrypts. It holds less than a segment of what it was given; where parts may not
/// be small, less than a part if it was given less.
pub(super) struct SealedUpload {
    inner: Arc<Mutex<Box<dyn MultipartUpload>>>,
    sealer: Arc<Sealer>,
    small_parts: bool,
    held: VecDeque<Bytes>,
    held_bytes: usize,
    /// The number of the next segment.
    next: u64,
    /// Received when the part before was handed on: parts have an order.
    turn: Option<oneshot::Receiver<()>>,
}

impl fmt::Debug for SealedUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedUpload").field("inner", &self.inner).field("next", &self.next).finish_non_exhaustive()
    }
}

impl SealedUpload {
    pub(super) fn new(inner: Box<dyn MultipartUpload>, sealer: Sealer, small_parts: bool) -> Self {
        let inner = Arc::new(Mutex::new(inner));
        Self { inner, sealer: Arc::new(sealer), small_parts, held: VecDeque::new(), held_bytes: 0, next: 0, turn: None }
    }

    /// The first bytes of what is held. The rest, less than a segment, is copied: it may be a small
    /// slice of much memory.
    fn take(&mut self, bytes: usize) -> Vec<Bytes> {
        let (mut taken, mut wanted) = (Vec::new(), bytes);
        while wanted > 0 {
            let Some(mut first) = self.held.pop_front() else { break };
            let now = first.split_to(first.len().min(wanted));
            wanted -= now.len();
            taken.push(now);
            if !first.is_empty() {
                self.held.push_front(Bytes::copy_from_slice(&first));
            }
        }
        self.held_bytes -= bytes;
        taken
    }

    /// Encrypts a part, and hands it on when those before were handed on.
    fn send(&mut self, plain: Vec<Bytes>, is_end: bool) -> UploadPart {
        let bytes: usize = plain.iter().map(Bytes::len).sum();
        let (first, sealer, inner) = (self.next, Arc::clone(&self.sealer), Arc::clone(&self.inner));
        self.next += bytes as u64 / SEGMENT;
        let (done, turn) = oneshot::channel();
        let before = self.turn.replace(turn);
        let sealing = blocking(move || sealer.seal(first, &plain, is_end));
        async move {
            let sealed = sealing.await?.map_err(failed)?;
            if let Some(before) = before {
                before.await.map_err(|_| failed("a part before was given up"))?;
            }
            let part = inner.lock().await.put_part(sealed.into());
            // A later part that is not waited for any more is not sent.
            let _ = done.send(());
            part.await
        }
        .boxed()
    }
}

#[async_trait::async_trait]
impl MultipartUpload for SealedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.held_bytes += data.content_length();
        self.held.extend(data);
        let segment = usize::try_from(SEGMENT).unwrap_or(usize::MAX);
        let ready = self.held_bytes / segment * segment;
        if ready == 0 || (!self.small_parts && ready < PART) {
            return futures::future::ready(Ok(())).boxed();
        }
        let plain = self.take(ready);
        self.send(plain, false)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let rest = self.take(self.held_bytes);
        self.send(rest, true).await?;
        self.inner.lock().await.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.lock().await.abort().await
    }
}
