//! Memory that request bodies share while they arrive: one share for small bodies, one for large.
//!
//! A body that grows beyond the size of small ones takes its memory from the share for large ones.
//! While it waits for that, small bodies do not wait for it.

use crate::http::permit::RequestPermit;
use crate::problem::ApiError;
use axum::body::Bytes;
use pfr_schema::ErrorCode;
use pfr_service::memory::{Pace, Part, Refused, SharedMemory};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Bytes above which a body is a large one.
pub(crate) const SMALL_BODY: usize = 256 << 10;
/// Bytes that any body may hold. Only those with more count.
const FREE: usize = 32 << 10;
/// A piece is waited for at least for this long.
const LEAST: Duration = Duration::from_millis(10);

/// The memory that the bodies share.
pub(crate) struct Arrivals {
    small: Arc<SharedMemory>,
    large: Arc<SharedMemory>,
}

impl Arrivals {
    /// Takes the bytes that small bodies may hold together, and those for large ones.
    pub(crate) fn new(small: usize, large: usize) -> Self {
        Self { small: SharedMemory::new(small), large: SharedMemory::new(large) }
    }

    /// A body begins to arrive, of the request that has this permit. It waits for memory at most
    /// for `queue` in all.
    pub(crate) fn begin(&self, own: RequestPermit, queue: Duration) -> Arrival {
        let pace = Pace::without({
            let own = own.clone();
            move || own.queued()
        });
        Arrival { own, part: self.small.part(&pace), pace, large: Arc::clone(&self.large), is_large: false, queue }
    }
}

/// A body that arrives. It gives its memory back when it is dropped.
pub(crate) struct Arrival {
    own: RequestPermit,
    pace: Pace,
    part: Part,
    large: Arc<SharedMemory>,
    is_large: bool,
    queue: Duration,
}

impl Arrival {
    /// Waits for the next piece from the client, which has `most` time for all pieces.
    ///
    /// # Errors
    /// `timeout`; `overloaded` if the body is the slowest, and others need its memory.
    pub(crate) async fn next<E>(
        &self,
        most: Duration,
        piece: impl Future<Output = Option<Result<Bytes, E>>>,
    ) -> Result<Option<Result<Bytes, E>>, ApiError> {
        self.pace.wait();
        let mut piece = pin!(piece);
        let next = loop {
            let left = most.saturating_sub(self.pace.waited()).max(LEAST);
            let received = tokio::select! {
                biased;
                () = self.part.must_leave() => break Err(refused(Refused::Slow)),
                received = tokio::time::timeout(left, &mut piece) => received,
            };
            match received {
                Ok(piece) => break Ok(piece),
                Err(_) if self.pace.waited() >= most => break Err(ApiError::stalled()),
                Err(_) => {}
            }
        };
        self.pace.received(next.iter().flatten().flatten().map(Bytes::len).sum());
        if next.is_err() {
            self.own.give_back();
        }
        next
    }

    /// Waits until there is memory for so many bytes of it.
    ///
    /// # Errors
    /// `overloaded`.
    pub(crate) async fn hold(&mut self, bytes: usize) -> Result<(), ApiError> {
        if bytes <= FREE {
            return Ok(());
        }
        let begun = Instant::now();
        let held = if self.is_large || bytes <= SMALL_BODY { self.part.hold(bytes, self.queue).await } else { self.grow(bytes).await };
        self.queue = self.queue.saturating_sub(begun.elapsed());
        held.map_err(refused)
    }

    async fn grow(&mut self, bytes: usize) -> Result<(), Refused> {
        self.part.spare();
        let part = self.large.part(&self.pace);
        tokio::select! {
            biased;
            held = part.hold(bytes, self.queue) => held?,
            () = self.part.must_leave() => return Err(Refused::Slow),
        }
        (self.part, self.is_large) = (part, true);
        Ok(())
    }

    /// The client has sent everything.
    pub(crate) fn complete(&self) {
        self.part.complete();
    }

    /// How long the request may still wait for what others hold.
    pub(crate) fn queue(&self) -> Duration {
        self.queue
    }
}

fn refused(why: Refused) -> ApiError {
    let detail = match why {
        Refused::Slow => "this request body is not complete, and other requests need its memory; try again in a moment",
        Refused::Spent => "request bodies hold as much memory as they may; try again in a moment",
    };
    ApiError::new(ErrorCode::Overloaded, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const QUEUE: Duration = Duration::from_secs(60);
    const KIB: usize = 1 << 10;

    /// A body that arrived at once.
    async fn arrived(arrivals: &Arrivals, bytes: usize) -> Arrival {
        let mut body = arrivals.begin(RequestPermit::new(None, None), QUEUE);
        let piece = std::future::ready(Some(Ok::<_, Infallible>(vec![0; bytes].into())));
        body.next(QUEUE, piece).await.expect("a piece");
        body.hold(bytes).await.expect("room");
        body
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_whose_client_stalls_makes_room_and_is_told_so() {
        let arrivals = Arrivals::new(200 * KIB, 0);
        let stalled = arrived(&arrivals, 200 * KIB).await;
        let (refused, new) = tokio::join!(
            async move { stalled.next(QUEUE, std::future::pending::<Option<Result<_, Infallible>>>()).await },
            arrived(&arrivals, 100 * KIB)
        );
        assert_eq!(refused.expect_err("it must leave").code, ErrorCode::Overloaded);
        drop(new);
        assert_eq!(arrivals.small.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_waits_for_memory_no_longer_than_allowed_in_all() {
        let arrivals = Arrivals::new(100 * KIB, 0);
        let complete = arrived(&arrivals, 100 * KIB).await;
        complete.complete();
        let mut new = arrivals.begin(RequestPermit::new(None, None), Duration::from_secs(3));
        let begun = Instant::now();
        for _ in 0..2 {
            assert_eq!(new.hold(50 * KIB).await.expect_err("no room").code, ErrorCode::Overloaded);
            assert_eq!((begun.elapsed().as_secs(), new.queue()), (3, Duration::ZERO));
        }
        drop(complete);
        new.hold(50 * KIB).await.expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn small_bodies_do_not_wait_for_large_ones() {
        let arrivals = Arrivals::new(400 * KIB, 400 * KIB);
        let complete = arrived(&arrivals, 400 * KIB).await;
        complete.complete();
        let mut growing = arrived(&arrivals, 250 * KIB).await;
        let begun = Instant::now();
        let (refused, small) = tokio::join!(async move { growing.hold(300 * KIB).await }, arrived(&arrivals, 250 * KIB));
        assert_eq!(refused.expect_err("a small one needs its memory").code, ErrorCode::Overloaded);
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        drop(complete);
        let mut grown = arrived(&arrivals, 150 * KIB).await;
        grown.hold(300 * KIB).await.expect("room");
        assert_eq!((arrivals.small.held(), arrivals.large.held()), (250 * KIB, 300 * KIB));
        drop((small, grown));
        assert_eq!((arrivals.small.held(), arrivals.large.held()), (0, 0));
    }
}
