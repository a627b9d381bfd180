//! Memory that request bodies share while they arrive.
//!
//! No slow body keeps a fast one waiting. If the memory is spent, the slowest body gives up what it
//! has, and its client is told to come back.

use crate::http::permit::RequestPermit;
use crate::problem::ApiError;
use pfr_schema::ErrorCode;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A body is slow if the time spent waiting for its client exceeds this…
const LINGER: Duration = Duration::from_millis(100);
/// …plus the time that its bytes take at this rate, in bytes per second.
const FAST: f64 = (4 << 20) as f64;
/// A piece is waited for at least for this long.
const LEAST: Duration = Duration::from_millis(10);
/// A body that waits for memory looks again after this time: others have become slow.
const AGAIN: Duration = Duration::from_millis(20);

/// The bodies that arrive, and the memory that they share.
pub(crate) struct Arrivals {
    limit: usize,
    bodies: Mutex<Bodies>,
    freed: Notify,
}

#[derive(Default)]
struct Bodies {
    next: u64,
    all: BTreeMap<u64, Arriving>,
    /// Bytes of all of them.
    held: usize,
    /// Bytes of those that are to give theirs up and have not yet.
    leaving: usize,
}

struct Arriving {
    own: RequestPermit,
    bytes: usize,
    /// For how long its client was waited for, up to the last piece.
    waited: Duration,
    /// Since when its client is waited for now, and how long the request had queued by then.
    since: Option<(Instant, Duration)>,
    /// It waits for memory.
    is_blocked: bool,
    /// It is complete, and only waits for its turn or for its end.
    is_whole: bool,
    is_leaving: bool,
    leave: Arc<Notify>,
}

impl Arriving {
    /// For how long its client was waited for. Without the time in which the bytes were there, and
    /// the registry was busy.
    fn waited(&self) -> Duration {
        let now = self.since.map_or(Duration::ZERO, |(begun, queued)| {
            let busy = self.own.queued().saturating_sub(queued);
            begun.elapsed().saturating_sub(busy)
        });
        self.waited + now
    }

    /// Bytes per second, if that is slow.
    fn slow_rate(&self) -> Option<f64> {
        let waited = self.waited();
        let is_slow = waited > LINGER + Duration::from_secs_f64(self.bytes as f64 / FAST);
        is_slow.then(|| self.bytes as f64 / waited.as_secs_f64())
    }
}

/// What became of a wish for memory.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Held,
    Wait,
    Leave,
}

impl Arrivals {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, bodies: Mutex::default(), freed: Notify::new() })
    }

    /// A body begins to arrive, of the request that has this permit.
    pub(crate) fn begin(self: &Arc<Self>, own: RequestPermit) -> Arrival {
        let leave = Arc::new(Notify::new());
        let mut bodies = self.bodies();
        let id = bodies.next;
        bodies.next += 1;
        let (waited, since) = (Duration::ZERO, None);
        let arriving =
            Arriving { own, bytes: 0, waited, since, is_blocked: false, is_whole: false, is_leaving: false, leave: Arc::clone(&leave) };
        bodies.all.insert(id, arriving);
        drop(bodies);
        Arrival { arrivals: Arc::clone(self), id, leave }
    }

    fn bodies(&self) -> MutexGuard<'_, Bodies> {
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bodies {
    /// The body that must leave so that another has room: the slowest. If none is slow and all wait
    /// for memory, none would ever go on: then the one that came last.
    fn victim(&self) -> Option<u64> {
        let holding = || self.all.iter().filter(|(_, body)| body.bytes > 0 && !body.is_leaving);
        let slow = holding().filter(|(_, body)| !body.is_whole).filter_map(|(id, body)| Some((*id, body.slow_rate()?)));
        let slowest = slow.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(id, _)| id);
        let all_wait = holding().all(|(_, body)| body.is_blocked);
        slowest.or_else(|| holding().next_back().map(|(id, _)| *id).filter(|_| all_wait))
    }

    /// Takes memory for `bytes` bytes of a body in all, or sees to it that there will be some.
    fn hold(&mut self, id: u64, bytes: usize, limit: usize) -> Step {
        let Some(body) = self.all.get_mut(&id).filter(|body| !body.is_leaving) else { return Step::Leave };
        let more = bytes.saturating_sub(body.bytes);
        body.is_blocked = self.held + more > limit;
        if !body.is_blocked {
            body.bytes += more;
            self.held += more;
            return Step::Held;
        }
        while self.held - self.leaving + more > limit {
            match self.victim() {
                None => return Step::Wait,
                Some(victim) if victim == id => return Step::Leave,
                Some(victim) => {
                    let Some(body) = self.all.get_mut(&victim) else { return Step::Wait };
                    body.is_leaving = true;
                    self.leaving += body.bytes;
                    body.leave.notify_one();
                }
            }
        }
        Step::Wait
    }
}

/// A body that arrives. It gives its memory back when it is dropped.
pub(crate) struct Arrival {
    arrivals: Arc<Arrivals>,
    id: u64,
    leave: Arc<Notify>,
}

impl Arrival {
    /// Waits for the next piece from the client, which has `most` time for all pieces.
    ///
    /// # Errors
    /// `timeout`; `overloaded` if the body is the slowest, and others need its memory.
    pub(crate) async fn next<T>(&self, most: Duration, piece: impl Future<Output = T>) -> Result<T, ApiError> {
        self.with(|body| body.since = Some((Instant::now(), body.own.queued())));
        let mut piece = pin!(piece);
        let next = loop {
            let left = most.saturating_sub(self.waited()).max(LEAST);
            let received = tokio::select! {
                biased;
                () = self.leave.notified() => break Err(slow()),
                received = tokio::time::timeout(left, &mut piece) => received,
            };
            match received {
                Ok(piece) => break Ok(piece),
                Err(_) if self.waited() >= most => break Err(ApiError::stalled()),
                Err(_) => {}
            }
        };
        self.with(|body| {
            (body.waited, body.since) = (body.waited(), None);
            if next.is_err() {
                body.own.give_back();
            }
        });
        next
    }

    /// Waits until there is memory for so many bytes of it, at most for `limit`.
    ///
    /// # Errors
    /// `overloaded`.
    pub(crate) async fn hold(&self, bytes: usize, limit: Duration) -> Result<(), ApiError> {
        let begun = Instant::now();
        loop {
            let mut freed = pin!(self.arrivals.freed.notified());
            freed.as_mut().enable();
            let step = self.arrivals.bodies().hold(self.id, bytes, self.arrivals.limit);
            match step {
                Step::Held => return Ok(()),
                Step::Leave => return Err(slow()),
                Step::Wait if begun.elapsed() >= limit => {
                    let detail = "request bodies hold as much memory as they may; try again in a moment";
                    return Err(ApiError::new(ErrorCode::Overloaded, detail));
                }
                Step::Wait => {}
            }
            tokio::select! {
                () = self.leave.notified() => return Err(slow()),
                () = freed => {}
                () = tokio::time::sleep(AGAIN) => {}
            }
        }
    }

    /// It is complete: its memory is given back soon.
    pub(crate) fn is_whole(&self) {
        self.with(|body| body.is_whole = true);
    }

    fn waited(&self) -> Duration {
        self.with(|body| body.waited()).unwrap_or_default()
    }

    fn with<T>(&self, act: impl FnOnce(&mut Arriving) -> T) -> Option<T> {
        self.arrivals.bodies().all.get_mut(&self.id).map(act)
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut bodies = self.arrivals.bodies();
        if let Some(body) = bodies.all.remove(&self.id) {
            bodies.held -= body.bytes;
            if body.is_leaving {
                bodies.leaving -= body.bytes;
            }
        }
        drop(bodies);
        self.arrivals.freed.notify_waiters();
    }
}

fn slow() -> ApiError {
    ApiError::new(ErrorCode::Overloaded, "this request body comes slowly, and others need its memory; try again in a moment")
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    const QUEUE: Duration = Duration::from_secs(60);

    fn begin(arrivals: &Arc<Arrivals>) -> Arrival {
        arrivals.begin(RequestPermit::new(None, None))
    }

    /// A body of so many bytes whose client has been waited for.
    async fn arrived(arrivals: &Arc<Arrivals>, bytes: usize, waited: Duration) -> Arrival {
        let body = begin(arrivals);
        body.hold(bytes, QUEUE).await.expect("room");
        body.next(QUEUE, tokio::time::sleep(waited)).await.expect("a piece");
        body
    }

    #[tokio::test(start_paused = true)]
    async fn the_slowest_body_makes_room_and_only_that_one() {
        let arrivals = Arrivals::new(100);
        let fast = arrived(&arrivals, 30, Duration::ZERO).await;
        let slow = arrived(&arrivals, 30, Duration::from_secs(1)).await;
        let slowest = arrived(&arrivals, 30, Duration::from_secs(2)).await;
        let new = begin(&arrivals);
        let mut room = Box::pin(new.hold(20, QUEUE));
        assert!(room.as_mut().now_or_never().is_none(), "it waits until the memory is given back");
        let refused = slowest.next(QUEUE, std::future::pending::<()>()).await.expect_err("it must leave");
        assert_eq!(refused.code, ErrorCode::Overloaded);
        drop(slowest);
        room.await.expect("room");
        for body in [&fast, &slow] {
            body.next(QUEUE, async {}).await.expect("it stays");
        }
        assert_eq!(arrivals.bodies().held, 80);
        drop((fast, slow, new));
        let bodies = arrivals.bodies();
        assert_eq!((bodies.held, bodies.leaving, bodies.all.len()), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_is_slow_before_its_next_piece_and_the_slowest_may_be_the_one_that_asks() {
        let arrivals = Arrivals::new(100);
        let stalled = arrived(&arrivals, 90, Duration::ZERO).await;
        let new = begin(&arrivals);
        let begun = Instant::now();
        let (room, refused) = tokio::join!(new.hold(20, QUEUE), async move {
            let refused = stalled.next(QUEUE, std::future::pending::<()>()).await;
            drop(stalled);
            refused
        });
        room.expect("room");
        assert_eq!(refused.expect_err("it must leave").code, ErrorCode::Overloaded);
        assert!(begun.elapsed() <= LINGER + AGAIN * 2, "{:?}", begun.elapsed());
        new.next(QUEUE, tokio::time::sleep(Duration::from_secs(1))).await.expect("a piece");
        let fast = arrived(&arrivals, 80, Duration::ZERO).await;
        assert_eq!(new.hold(30, QUEUE).await.expect_err("it is the slowest").code, ErrorCode::Overloaded);
        drop(fast);
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_all_wait_for_memory_do_not_wait_for_ever() {
        let arrivals = Arrivals::new(100);
        let (first, last) = (arrived(&arrivals, 50, Duration::ZERO).await, arrived(&arrivals, 50, Duration::ZERO).await);
        let begun = Instant::now();
        let (one, other) = tokio::join!(first.hold(60, QUEUE), async {
            let refused = last.hold(60, QUEUE).await;
            drop(last);
            refused
        });
        one.expect("room");
        assert_eq!(other.expect_err("it came last").code, ErrorCode::Overloaded);
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn complete_bodies_are_waited_for_and_not_longer_than_allowed() {
        let arrivals = Arrivals::new(100);
        let whole = arrived(&arrivals, 100, Duration::from_secs(5)).await;
        whole.is_whole();
        let new = begin(&arrivals);
        let begun = Instant::now();
        let refused = new.hold(1, Duration::from_secs(3)).await.expect_err("no room");
        assert_eq!(refused.code, ErrorCode::Overloaded);
        assert!(begun.elapsed() >= Duration::from_secs(3));
        drop(whole);
        new.hold(1, QUEUE).await.expect("room");
    }
}
