//! A response body that yields one piece at a time: the next one when the connection has sent the
//! last.
//!
//! hyper reads half a MiB of a body ahead of a slow client. A thousand slow clients would take more
//! memory than the registry has.

use bytes::Bytes;
use futures::Stream;
use futures::task::AtomicWaker;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

/// Whether a piece is being sent, and the task that waits until it was sent.
#[derive(Default)]
struct Slot {
    taken: AtomicBool,
    waiting: AtomicWaker,
}

/// A piece that frees its slot when it is dropped.
struct Piece {
    bytes: Bytes,
    slot: Arc<Slot>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.slot.taken.store(false, Ordering::SeqCst);
        self.slot.waiting.wake();
    }
}

/// The stream, one piece at a time.
pub(crate) struct OneByOne<S> {
    stream: S,
    slot: Arc<Slot>,
}

impl<S> OneByOne<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, slot: Arc::default() }
    }
}

impl<E, S: Stream<Item = Result<Bytes, E>> + Unpin> Stream for OneByOne<S> {
    type Item = Result<Bytes, E>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.slot.waiting.register(cx.waker());
        if self.slot.taken.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        let next = ready!(Pin::new(&mut self.stream).poll_next(cx));
        Poll::Ready(next.map(|piece| {
            let bytes = piece?;
            self.slot.taken.store(true, Ordering::SeqCst);
            Ok(Bytes::from_owner(Piece { bytes, slot: Arc::clone(&self.slot) }))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt as _, StreamExt as _};

    #[tokio::test]
    async fn the_next_piece_comes_when_the_one_before_was_sent() {
        let pieces = [Bytes::from_static(b"a"), Bytes::from_static(b"b")].map(Ok::<_, std::io::Error>);
        let mut pieces = OneByOne::new(futures::stream::iter(pieces));
        let first = pieces.next().await.unwrap().unwrap();
        assert!(pieces.next().now_or_never().is_none(), "the first piece is still on its way");
        drop(first);
        assert_eq!(pieces.next().await.unwrap().unwrap(), "b");
        assert!(pieces.next().await.is_none());
    }
}
