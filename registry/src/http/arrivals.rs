//! Memory that request bodies share while they arrive: one share for small bodies, one for large.
//!
//! No slow body keeps a fast one waiting. If a share is spent, its slowest body gives up what it
//! has, and its client is told to come back.

use crate::http::permit::RequestPermit;
use crate::problem::ApiError;
use axum::body::Bytes;
use pfr_schema::ErrorCode;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Bytes above which a body is a large one.
pub(crate) const SMALL_BODY: usize = 256 << 10;
/// Bytes that any body may hold. Only those with more count.
const FREE: usize = 32 << 10;
/// A body is slow if the time spent waiting for its client exceeds this…
const LINGER: Duration = Duration::from_millis(100);
/// …plus the time that its bytes take at this rate, in bytes per second.
const FAST: f64 = (4 << 20) as f64;
/// It is slow too if nothing has come from its client for this long.
const STALL: Duration = Duration::from_secs(1);
/// A piece is waited for at least for this long.
const LEAST: Duration = Duration::from_millis(10);
/// A body that waits for memory looks again after this time: others have become slow.
const AGAIN: Duration = Duration::from_millis(20);
/// All bodies of a share are looked at no more often than this.
const BETWEEN_SEARCHES: Duration = Duration::from_millis(10);

/// The bodies that arrive, and the memory that they share.
pub(crate) struct Arrivals {
    bodies: Mutex<Bodies>,
    freed: Notify,
}

struct Bodies {
    next: u64,
    all: BTreeMap<u64, Arriving>,
    small: Share,
    large: Share,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Small,
    Large,
}

impl Size {
    fn of(bytes: usize) -> Self {
        if bytes > SMALL_BODY { Self::Large } else { Self::Small }
    }
}

/// Memory for the bodies of one size.
struct Share {
    limit: usize,
    /// Bytes of all of them.
    held: usize,
    /// Bytes of those that are to give theirs up and have not yet.
    leaving: usize,
    /// The last search for bodies that must leave.
    searched: Option<Instant>,
}

impl Share {
    fn new(limit: usize) -> Self {
        Self { limit, held: 0, leaving: 0, searched: None }
    }

    /// Bytes that are missing for so many more. One body always has room.
    fn missing(&self, more: usize) -> usize {
        if self.held == 0 { 0 } else { (self.held + more).saturating_sub(self.limit) }
    }
}

struct Arriving {
    own: RequestPermit,
    /// Bytes that it holds, of the share of `size`.
    held: usize,
    size: Size,
    /// The memory that it waits for.
    wanted: Option<(Size, usize)>,
    /// Bytes that its client has sent.
    received: usize,
    /// How long its client was waited for, up to the last piece.
    waited: Duration,
    /// When the present wait for its client began, and how long the request had queued by then.
    since: Option<(Instant, Duration)>,
    /// It only waits for its turn or for its end.
    is_complete: bool,
    is_leaving: bool,
    leave: Arc<Notify>,
}

impl Arriving {
    /// How long its client has been waited for since the last piece, without the time in which the
    /// bytes were there and the registry was busy.
    fn waits(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |(begun, queued)| {
            let busy = self.own.queued().saturating_sub(queued);
            begun.elapsed().saturating_sub(busy)
        })
    }

    /// Bytes per second, if that is slow.
    fn slow_rate(&self) -> Option<f64> {
        let (waits, received) = (self.waits(), self.received as f64);
        let waited = self.waited + waits;
        let is_slow = waits >= STALL || waited > LINGER + Duration::from_secs_f64(received / FAST);
        is_slow.then(|| received / waited.as_secs_f64())
    }
}

/// The result of a request for memory.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Held,
    Wait,
    Leave,
}

impl Arrivals {
    /// Takes the bytes that small bodies may hold together, and those for large ones.
    pub(crate) fn new(small: usize, large: usize) -> Arc<Self> {
        let bodies = Bodies { next: 0, all: BTreeMap::new(), small: Share::new(small), large: Share::new(large) };
        Arc::new(Self { bodies: Mutex::new(bodies), freed: Notify::new() })
    }

    /// A body begins to arrive, of the request that has this permit. It waits for memory at most
    /// for `queue` in all.
    pub(crate) fn begin(self: &Arc<Self>, own: RequestPermit, queue: Duration) -> Arrival {
        let leave = Arc::new(Notify::new());
        let mut bodies = self.bodies();
        let id = bodies.next;
        bodies.next += 1;
        let arriving = Arriving {
            own,
            held: 0,
            size: Size::Small,
            wanted: None,
            received: 0,
            waited: Duration::ZERO,
            since: None,
            is_complete: false,
            is_leaving: false,
            leave: Arc::clone(&leave),
        };
        bodies.all.insert(id, arriving);
        drop(bodies);
        Arrival { arrivals: Arc::clone(self), id, leave, queue }
    }

    fn bodies(&self) -> MutexGuard<'_, Bodies> {
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bodies {
    fn share(&mut self, size: Size) -> &mut Share {
        match size {
            Size::Small => &mut self.small,
            Size::Large => &mut self.large,
        }
    }

    /// Takes memory so that a body holds `bytes` bytes, or sees to it that there will be some.
    fn hold(&mut self, id: u64, bytes: usize) -> Step {
        let Some(body) = self.all.get_mut(&id).filter(|body| !body.is_leaving) else { return Step::Leave };
        let (from, held, to) = (body.size, body.held, Size::of(bytes));
        // A body that has become a large one takes all of its memory from the other share.
        let more = if from == to { bytes.saturating_sub(held) } else { bytes };
        body.wanted = Some((to, more));
        if self.share(to).missing(more) > 0 {
            self.make_room(to, more);
            let is_leaving = self.all.get(&id).is_some_and(|body| body.is_leaving);
            return if is_leaving { Step::Leave } else { Step::Wait };
        }
        if from != to {
            self.share(from).held -= held;
        }
        self.share(to).held += more;
        if let Some(body) = self.all.get_mut(&id) {
            (body.size, body.wanted) = (to, None);
            body.held = if from == to { held + more } else { more };
        }
        Step::Held
    }

    /// Tells bodies to leave if that makes room for `more` bytes: the slowest ones; then those that
    /// wait for memory of large bodies, the last first. If all wait for memory, none would ever go
    /// on: then the last one.
    fn make_room(&mut self, size: Size, more: usize) {
        let share = self.share(size);
        if share.searched.is_some_and(|searched| searched.elapsed() < BETWEEN_SEARCHES) {
            return;
        }
        share.searched = Some(Instant::now());
        let (missing, leaving) = (share.missing(more), share.leaving);
        if leaving >= missing {
            return;
        }
        let missing = missing - leaving;
        let (mut slow, mut moving, mut last, mut all_wait) = (Vec::new(), Vec::new(), None, true);
        for (&id, body) in self.all.iter().rev().filter(|(_, body)| body.size == size && body.held > 0 && !body.is_leaving) {
            let is_blocked = body.wanted.is_some_and(|(size, more)| self.missing(size, more) > 0);
            all_wait &= is_blocked;
            last.get_or_insert(id);
            match body.slow_rate().filter(|_| !body.is_complete) {
                Some(rate) => slow.push((rate, id)),
                None if is_blocked && body.wanted.is_some_and(|(wanted, _)| wanted != size) => moving.push(id),
                None => {}
            }
        }
        slow.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let mut bytes = 0;
        let mut enough = Vec::new();
        for id in slow.into_iter().map(|(_, id)| id).chain(moving) {
            if bytes < missing {
                bytes += self.all.get(&id).map_or(0, |body| body.held);
                enough.push(id);
            }
        }
        if bytes < missing {
            enough = last.filter(|_| all_wait && leaving == 0).into_iter().collect();
        }
        for id in enough {
            if let Some(body) = self.all.get_mut(&id) {
                body.is_leaving = true;
                body.leave.notify_one();
                let held = body.held;
                self.share(size).leaving += held;
            }
        }
    }

    fn missing(&self, size: Size, more: usize) -> usize {
        match size {
            Size::Small => self.small.missing(more),
            Size::Large => self.large.missing(more),
        }
    }

    /// A body is to leave no more.
    fn keep(&mut self, id: u64) {
        if let Some(body) = self.all.get_mut(&id).filter(|body| body.is_leaving) {
            body.is_leaving = false;
            let (size, held) = (body.size, body.held);
            self.share(size).leaving -= held;
        }
    }
}

/// A body that arrives. It gives its memory back when it is dropped.
pub(crate) struct Arrival {
    arrivals: Arc<Arrivals>,
    id: u64,
    leave: Arc<Notify>,
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
            body.waited += body.waits();
            body.since = None;
            match &next {
                Ok(piece) => body.received += piece.iter().flatten().map(Bytes::len).sum::<usize>(),
                Err(_) => body.own.give_back(),
            }
        });
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
        let result = self.hold_within(bytes, begun).await;
        self.queue = self.queue.saturating_sub(begun.elapsed());
        result
    }

    async fn hold_within(&self, bytes: usize, begun: Instant) -> Result<(), ApiError> {
        loop {
            let mut freed = pin!(self.arrivals.freed.notified());
            freed.as_mut().enable();
            let step = self.arrivals.bodies().hold(self.id, bytes);
            match step {
                Step::Held => return Ok(()),
                Step::Leave => return Err(slow()),
                Step::Wait if begun.elapsed() >= self.queue => {
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

    /// No piece follows, so its memory is given back soon.
    pub(crate) fn complete(&self) {
        let mut bodies = self.arrivals.bodies();
        bodies.keep(self.id);
        if let Some(body) = bodies.all.get_mut(&self.id) {
            body.is_complete = true;
        }
    }

    /// How long the request may still wait for what others hold.
    pub(crate) fn queue(&self) -> Duration {
        self.queue
    }

    fn waited(&self) -> Duration {
        self.with(|body| body.waited + body.waits()).unwrap_or_default()
    }

    fn with<T>(&self, act: impl FnOnce(&mut Arriving) -> T) -> Option<T> {
        self.arrivals.bodies().all.get_mut(&self.id).map(act)
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut bodies = self.arrivals.bodies();
        bodies.keep(self.id);
        let Some(body) = bodies.all.remove(&self.id) else { return };
        bodies.share(body.size).held -= body.held;
        drop(bodies);
        if body.held > 0 {
            self.arrivals.freed.notify_waiters();
        }
    }
}

fn slow() -> ApiError {
    let detail = "this request body arrives too slowly, and other requests need its memory; try again in a moment";
    ApiError::new(ErrorCode::Overloaded, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use std::convert::Infallible;

    const QUEUE: Duration = Duration::from_secs(60);
    const KIB: usize = 1 << 10;

    fn begin(arrivals: &Arc<Arrivals>) -> Arrival {
        arrivals.begin(RequestPermit::new(None, None), QUEUE)
    }

    /// The next piece of a body, for which its client needs so long.
    async fn piece(body: &Arrival, bytes: usize, time: Duration) -> Result<(), ApiError> {
        let piece = async {
            tokio::time::sleep(time).await;
            Some(Ok::<_, Infallible>(vec![0; bytes].into()))
        };
        body.next(QUEUE, piece).await.map(|_| ())
    }

    /// A body that arrived in `time`.
    async fn arrived(arrivals: &Arc<Arrivals>, bytes: usize, time: Duration) -> Arrival {
        let mut body = begin(arrivals);
        piece(&body, bytes, time).await.expect("a piece");
        body.hold(bytes).await.expect("room");
        body
    }

    async fn leaves(body: Arrival) {
        let refused = body.next(QUEUE, std::future::pending::<Option<Result<_, Infallible>>>()).await.expect_err("it must leave");
        assert_eq!(refused.code, ErrorCode::Overloaded);
    }

    /// Bytes that small and large bodies hold, and those of bodies that must leave.
    fn held(arrivals: &Arrivals) -> [(usize, usize); 2] {
        let bodies = arrivals.bodies();
        [&bodies.small, &bodies.large].map(|share| (share.held, share.leaving))
    }

    fn empty(arrivals: &Arrivals) {
        assert_eq!(held(arrivals), [(0, 0); 2]);
        assert!(arrivals.bodies().all.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_slowest_body_makes_room_and_only_that_one() {
        let arrivals = Arrivals::new(200 * KIB, 0);
        let fast = arrived(&arrivals, 60 * KIB, Duration::ZERO).await;
        let slow = arrived(&arrivals, 60 * KIB, Duration::from_secs(1)).await;
        let slowest = arrived(&arrivals, 60 * KIB, Duration::from_secs(2)).await;
        let mut new = begin(&arrivals);
        let mut room = Box::pin(new.hold(40 * KIB));
        assert!(room.as_mut().now_or_never().is_none(), "it waits until the memory is given back");
        leaves(slowest).await;
        room.await.expect("room");
        for body in [&fast, &slow] {
            piece(body, 0, Duration::ZERO).await.expect("it stays");
        }
        assert_eq!(held(&arrivals)[0], (160 * KIB, 0));
        drop((fast, slow, new));
        empty(&arrivals);
    }

    #[tokio::test(start_paused = true)]
    async fn no_body_leaves_if_that_makes_too_little_room() {
        let arrivals = Arrivals::new(200 * KIB, 0);
        let fast = arrived(&arrivals, 160 * KIB, Duration::ZERO).await;
        let slow = arrived(&arrivals, 40 * KIB, Duration::from_secs(2)).await;
        let mut new = begin(&arrivals);
        let mut room = Box::pin(new.hold(100 * KIB));
        assert!(tokio::time::timeout(AGAIN * 5, room.as_mut()).await.is_err());
        piece(&slow, 0, Duration::ZERO).await.expect("it stays");
        drop(fast);
        room.await.expect("room");
        piece(&slow, 0, Duration::ZERO).await.expect("it stays");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_is_slow_before_its_next_piece_and_the_slowest_may_be_the_one_that_asks() {
        let arrivals = Arrivals::new(256 * KIB, 0);
        let stalled = arrived(&arrivals, 200 * KIB, Duration::ZERO).await;
        let mut new = begin(&arrivals);
        let begun = Instant::now();
        let (room, ()) = tokio::join!(new.hold(100 * KIB), leaves(stalled));
        room.expect("room");
        assert!(begun.elapsed() <= LINGER * 3, "{:?}", begun.elapsed());
        piece(&new, 1, Duration::from_secs(1)).await.expect("a piece");
        let fast = arrived(&arrivals, 150 * KIB, Duration::ZERO).await;
        assert_eq!(new.hold(120 * KIB).await.expect_err("it is the slowest").code, ErrorCode::Overloaded);
        drop((fast, new));
        empty(&arrivals);
    }

    #[tokio::test(start_paused = true)]
    async fn megabytes_that_came_fast_do_not_excuse_a_long_stall() {
        const MIB: usize = KIB * KIB;
        let arrivals = Arrivals::new(0, 128 * MIB);
        let stalled = arrived(&arrivals, 100 * MIB, Duration::ZERO).await;
        let mut new = begin(&arrivals);
        let begun = Instant::now();
        let (room, ()) = tokio::join!(new.hold(100 * MIB), leaves(stalled));
        room.expect("room");
        assert!(begun.elapsed() <= STALL + AGAIN * 2, "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_all_wait_for_memory_do_not_wait_for_ever() {
        let arrivals = Arrivals::new(200 * KIB, 0);
        let mut first = arrived(&arrivals, 100 * KIB, Duration::ZERO).await;
        let mut last = arrived(&arrivals, 100 * KIB, Duration::ZERO).await;
        let begun = Instant::now();
        let (one, other) = tokio::join!(first.hold(120 * KIB), async {
            let refused = last.hold(120 * KIB).await;
            drop(last);
            refused
        });
        one.expect("room");
        assert_eq!(other.expect_err("it came last").code, ErrorCode::Overloaded);
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn complete_bodies_are_waited_for_and_not_longer_than_allowed_in_all() {
        let arrivals = Arrivals::new(100 * KIB, 0);
        let complete = arrived(&arrivals, 100 * KIB, Duration::from_secs(5)).await;
        complete.complete();
        let mut new = arrivals.begin(RequestPermit::new(None, None), Duration::from_secs(3));
        let begun = Instant::now();
        for _ in 0..2 {
            let refused = new.hold(50 * KIB).await.expect_err("no room");
            assert_eq!(refused.code, ErrorCode::Overloaded);
            assert_eq!(begun.elapsed().as_secs(), 3);
            assert_eq!(new.queue(), Duration::ZERO);
        }
        drop(complete);
        new.hold(50 * KIB).await.expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_complete_before_it_left_stays_and_another_one_leaves() {
        let arrivals = Arrivals::new(200 * KIB, 0);
        let slow = arrived(&arrivals, 100 * KIB, Duration::from_secs(1)).await;
        let slowest = arrived(&arrivals, 100 * KIB, Duration::from_secs(2)).await;
        let mut new = begin(&arrivals);
        let mut room = Box::pin(new.hold(50 * KIB));
        assert!(room.as_mut().now_or_never().is_none());
        slowest.complete();
        let (room, ()) = tokio::join!(room, leaves(slow));
        room.expect("room");
        drop((slowest, new));
        empty(&arrivals);
    }

    #[tokio::test(start_paused = true)]
    async fn small_bodies_do_not_wait_for_large_ones() {
        let arrivals = Arrivals::new(400 * KIB, 400 * KIB);
        let complete = arrived(&arrivals, 400 * KIB, Duration::ZERO).await;
        complete.complete();
        let mut growing = arrived(&arrivals, 250 * KIB, Duration::ZERO).await;
        let begun = Instant::now();
        let (refused, small) = tokio::join!(
            async {
                let refused = growing.hold(300 * KIB).await;
                drop(growing);
                refused
            },
            arrived(&arrivals, 250 * KIB, Duration::ZERO)
        );
        assert_eq!(refused.expect_err("a small one needs its memory").code, ErrorCode::Overloaded);
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        drop(complete);
        let mut grown = arrived(&arrivals, 150 * KIB, Duration::ZERO).await;
        grown.hold(300 * KIB).await.expect("room");
        assert_eq!(held(&arrivals), [(250 * KIB, 0), (300 * KIB, 0)]);
        drop((small, grown));
        empty(&arrivals);
    }
}
