//! Memory that the senders of bytes share while a program waits for them.
//!
//! If the memory is spent and a sender needs more, slower senders give up their parts, the slowest
//! first. So no slow sender keeps a faster one waiting.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A sender is slow if the program waited for its last bytes for longer than this…
const LINGER: Duration = Duration::from_millis(100);
/// …plus the time that they take at this rate, in bytes per second.
const FAST: f64 = (4 << 20) as f64;
/// The last bytes are about so many.
const RECENT: f64 = FAST;
/// It is slow too if nothing has come from it for this long.
const STALL: Duration = Duration::from_secs(1);
/// A part that waits for memory looks again after this time: others may have become slow.
const AGAIN: Duration = Duration::from_millis(20);
/// A search for parts to be given up that found none is repeated after this time.
const BETWEEN_SEARCHES: Duration = Duration::from_millis(10);

/// How fast a sender is. Clones belong to the same sender.
#[derive(Clone)]
pub struct Pace(Arc<(Box<Busy>, Mutex<Sent>)>);

/// The time for which the program has kept the sender waiting, since it began.
type Busy = dyn Fn() -> Duration + Send + Sync;

#[derive(Default)]
struct Sent {
    /// Bytes of the last pieces, at most about [`RECENT`].
    bytes: f64,
    /// How long the program waited for these.
    recent: Duration,
    /// How long it waited since the sender began.
    waited: Duration,
    /// How long it has waited since the last byte, in waits that are over.
    stalled: Duration,
    /// When the present wait began, and how long the sender had been kept waiting by then.
    since: Option<(Instant, Duration)>,
}

impl Sent {
    /// The length of the present wait, if the sender has been kept waiting for `busy` so far.
    fn waits(&self, busy: Duration) -> Duration {
        self.since.map_or(Duration::ZERO, |(begun, before)| begun.elapsed().saturating_sub(busy.saturating_sub(before)))
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self::without(|| Duration::ZERO)
    }
}

impl Pace {
    /// The pace of a sender that was kept waiting for `busy` so far. That time does not count.
    #[must_use]
    pub fn without(busy: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new((Box::new(busy), Mutex::default())))
    }

    /// The program begins to wait for the sender.
    pub fn wait(&self) {
        let busy = (self.0.0)();
        self.sent().since = Some((Instant::now(), busy));
    }

    /// The wait is over, and so many bytes have come.
    pub fn received(&self, bytes: usize) {
        let busy = (self.0.0)();
        let mut sent = self.sent();
        let waits = sent.waits(busy);
        sent.since = None;
        sent.waited += waits;
        sent.recent += waits;
        sent.stalled = if bytes == 0 { sent.stalled + waits } else { Duration::ZERO };
        sent.bytes += bytes as f64;
        // Speed of long ago says nothing about now.
        while sent.bytes > RECENT {
            sent.bytes /= 2.0;
            sent.recent /= 2;
        }
    }

    /// How long the program has waited for the sender.
    #[must_use]
    pub fn waited(&self) -> Duration {
        let busy = (self.0.0)();
        let sent = self.sent();
        sent.waited + sent.waits(busy)
    }

    /// How slow the sender is, if it is slow: the smaller, the slower.
    fn slowness(&self) -> Option<f64> {
        let busy = (self.0.0)();
        let sent = self.sent();
        let waits = sent.waits(busy);
        let (stalled, recent) = (sent.stalled + waits, sent.recent + waits);
        if stalled >= STALL {
            return Some(-stalled.as_secs_f64());
        }
        (recent > LINGER + Duration::from_secs_f64(sent.bytes / FAST)).then(|| sent.bytes / recent.as_secs_f64())
    }

    fn sent(&self) -> MutexGuard<'_, Sent> {
        self.0.1.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that many senders share.
pub struct SharedMemory {
    limit: usize,
    parts: Mutex<Parts>,
    freed: Notify,
}

#[derive(Default)]
struct Parts {
    next: u64,
    all: BTreeMap<u64, Taken>,
    /// Bytes of all of them.
    held: usize,
    /// Bytes that their senders must give up soon.
    leaving: usize,
    /// Bytes that parts wait for, all together.
    wanted: usize,
    /// The last search for parts to be given up, if it found none, and the bytes that it was for.
    searched: Option<(Instant, usize)>,
}

struct Taken {
    pace: Pace,
    held: usize,
    /// Bytes that it waits for.
    wanted: usize,
    /// Its sender has sent everything.
    is_complete: bool,
    /// Its sender waits for other memory, and must not keep others waiting for this.
    is_spare: bool,
    is_leaving: bool,
    leave: Arc<Notify>,
}

/// Why memory was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The sender was the slowest, or the last that waited, and others need its memory.
    Slow,
    /// There was no memory for long enough.
    Spent,
}

enum Step {
    Held,
    Wait,
    Leave,
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({})", self.limit)
    }
}

impl SharedMemory {
    /// Memory of `limit` bytes. A sender that is alone may hold more.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, parts: Mutex::default(), freed: Notify::new() })
    }

    /// A part of it for one sender, empty at first.
    #[must_use]
    pub fn part(self: &Arc<Self>, pace: &Pace) -> Part {
        let leave = Arc::new(Notify::new());
        let (pace, other) = (pace.clone(), Arc::clone(&leave));
        let taken = Taken { pace, held: 0, wanted: 0, is_complete: false, is_spare: false, is_leaving: false, leave: other };
        let mut parts = self.parts();
        let id = parts.next;
        parts.next += 1;
        parts.all.insert(id, taken);
        drop(parts);
        Part { memory: Arc::clone(self), id, leave }
    }

    /// Bytes that all parts hold.
    #[must_use]
    pub fn held(&self) -> usize {
        self.parts().held
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Parts {
    /// Bytes that are missing if a part that holds `held` wants `more`. One part alone always has
    /// room.
    fn missing(&self, held: usize, more: usize, limit: usize) -> usize {
        if self.held == held { 0 } else { (self.held + more).saturating_sub(limit) }
    }

    /// Takes memory so that a part has `bytes` bytes. If there is too little, and it `may_wait`,
    /// other parts may be given up.
    fn hold(&mut self, id: u64, bytes: usize, limit: usize, may_wait: bool) -> Step {
        let Some(part) = self.all.get_mut(&id).filter(|part| !part.is_leaving) else { return Step::Leave };
        self.wanted -= std::mem::take(&mut part.wanted);
        let (held, more) = (part.held, bytes.saturating_sub(part.held));
        let is_there = more == 0 || self.missing(held, more, limit) == 0;
        let Some(part) = self.all.get_mut(&id) else { return Step::Leave };
        if is_there {
            part.held += more;
            self.held += more;
            return Step::Held;
        }
        if may_wait {
            part.wanted = more;
            self.wanted += more;
            self.make_room(id, held, more, limit);
        }
        Step::Wait
    }

    /// Tells senders to give up their parts if that makes room for `more` bytes of part `id`:
    /// slower ones, the slowest first, then spare ones, the last first. If all wait for memory,
    /// none would ever go on: then the last one must go.
    fn make_room(&mut self, id: u64, held: usize, more: usize, limit: usize) {
        if self.searched.is_some_and(|(searched, bytes)| more >= bytes && searched.elapsed() < BETWEEN_SEARCHES) {
            return;
        }
        // Other parts may wait for what is given up already.
        let of_all = (self.held + self.wanted).saturating_sub(limit + self.leaving);
        let missing = self.missing(held, more, limit).min(of_all);
        if missing == 0 {
            return;
        }
        let slowness = |part: &Taken| part.pace.slowness().filter(|_| !part.is_complete);
        let own = self.all.get(&id).and_then(slowness).unwrap_or(f64::INFINITY);
        let (mut slow, mut spare, mut last, mut all_wait) = (Vec::new(), Vec::new(), None, self.leaving == 0);
        for (&other, part) in self.all.iter().rev().filter(|(_, part)| part.held > 0 && !part.is_leaving) {
            last.get_or_insert(other);
            all_wait &= part.wanted > 0 && self.missing(part.held, part.wanted, limit) > 0;
            match slowness(part) {
                _ if other == id => {}
                Some(slowness) if slowness < own => slow.push((slowness, other)),
                None if part.is_spare => spare.push(other),
                _ => {}
            }
        }
        slow.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let (mut bytes, mut enough) = (0, Vec::new());
        for id in slow.into_iter().map(|(_, id)| id).chain(spare) {
            if bytes < missing {
                bytes += self.all.get(&id).map_or(0, |part| part.held);
                enough.push(id);
            }
        }
        if bytes < missing {
            enough = last.filter(|_| all_wait).into_iter().collect();
        }
        self.searched = enough.is_empty().then(|| (Instant::now(), more));
        for id in enough {
            if let Some(part) = self.all.get_mut(&id) {
                part.is_leaving = true;
                self.leaving += part.held;
                part.leave.notify_one();
            }
        }
    }

    /// A part may stay after all.
    fn keep(&mut self, id: u64) {
        if let Some(part) = self.all.get_mut(&id).filter(|part| part.is_leaving) {
            part.is_leaving = false;
            self.leaving -= part.held;
        }
    }
}

/// The part of one sender. It is given back when it is dropped.
pub struct Part {
    memory: Arc<SharedMemory>,
    id: u64,
    leave: Arc<Notify>,
}

impl Part {
    /// Waits at most for `limit` until it has `bytes` bytes in all.
    ///
    /// # Errors
    /// [`Refused`]. After [`Refused::Slow`] the part must be dropped.
    pub async fn hold(&self, bytes: usize, limit: Duration) -> Result<(), Refused> {
        let begun = Instant::now();
        loop {
            let mut freed = pin!(self.memory.freed.notified());
            freed.as_mut().enable();
            let left = limit.saturating_sub(begun.elapsed());
            match self.memory.parts().hold(self.id, bytes, self.memory.limit, !left.is_zero()) {
                Step::Held => return Ok(()),
                Step::Leave => return Err(Refused::Slow),
                Step::Wait if left.is_zero() => return Err(Refused::Spent),
                Step::Wait => {}
            }
            tokio::select! {
                () = self.must_leave() => return Err(Refused::Slow),
                () = freed => {}
                () = tokio::time::sleep(AGAIN.min(left)) => {}
            }
        }
    }

    /// Takes what is missing to `bytes` bytes if it is there, and has no other part given up.
    #[must_use]
    pub fn try_hold(&self, bytes: usize) -> bool {
        matches!(self.memory.parts().hold(self.id, bytes, self.memory.limit, false), Step::Held)
    }

    /// Completes when the part must be dropped: its sender is the slowest, and others need its
    /// memory.
    pub async fn must_leave(&self) {
        while !self.with(|part| part.is_leaving).unwrap_or(true) {
            self.leave.notified().await;
        }
    }

    /// The sender has sent everything. So the part stays until it is dropped or released.
    pub fn complete(&self) {
        let mut parts = self.memory.parts();
        parts.keep(self.id);
        if let Some(part) = parts.all.get_mut(&self.id) {
            part.is_complete = true;
        }
    }

    /// The sender waits for other memory, and must not keep others waiting for this.
    pub fn spare(&self) {
        self.with(|part| part.is_spare = true);
    }

    /// Gives all bytes back; more may be taken later.
    pub fn release(&self) {
        let mut parts = self.memory.parts();
        parts.keep(self.id);
        let Some(part) = parts.all.get_mut(&self.id) else { return };
        part.is_complete = false;
        let (held, wanted) = (std::mem::take(&mut part.held), std::mem::take(&mut part.wanted));
        parts.held -= held;
        parts.wanted -= wanted;
        drop(parts);
        if held > 0 {
            self.memory.freed.notify_waiters();
        }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Taken) -> T) -> Option<T> {
        self.memory.parts().all.get_mut(&self.id).map(act)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.release();
        self.memory.parts().all.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUE: Duration = Duration::from_secs(60);

    /// A part of so many bytes, which came in `time`.
    async fn part(memory: &Arc<SharedMemory>, bytes: usize, time: Duration) -> (Part, Pace) {
        let pace = Pace::default();
        let part = memory.part(&pace);
        pace.wait();
        tokio::time::sleep(time).await;
        pace.received(bytes);
        part.hold(bytes, QUEUE).await.expect("room");
        (part, pace)
    }

    async fn stays(part: &Part) {
        assert!(tokio::time::timeout(AGAIN, part.must_leave()).await.is_err(), "it must leave");
    }

    /// Waits until a part must be dropped.
    async fn leaves((part, _): (Part, Pace)) {
        tokio::time::timeout(QUEUE, part.must_leave()).await.expect("it must leave");
    }

    fn empty(memory: &SharedMemory) {
        let parts = memory.parts();
        assert_eq!((parts.held, parts.leaving, parts.all.len()), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_slowest_makes_room_and_only_that_one() {
        let memory = SharedMemory::new(100);
        let (fast, slow) = (part(&memory, 30, Duration::ZERO).await, part(&memory, 30, Duration::from_secs(1)).await);
        let slowest = part(&memory, 30, Duration::from_secs(2)).await;
        let new = memory.part(&Pace::default());
        let spent = new.hold(20, AGAIN).await.expect_err("it waits until the memory is given back");
        assert_eq!(spent, Refused::Spent);
        leaves(slowest).await;
        new.hold(20, Duration::ZERO).await.expect("room");
        stays(&fast.0).await;
        stays(&slow.0).await;
        assert_eq!(memory.held(), 80);
        drop((fast, slow, new));
        empty(&memory);
    }

    #[tokio::test(start_paused = true)]
    async fn none_leaves_for_a_slower_one() {
        let memory = SharedMemory::new(100);
        let slow = part(&memory, 50, Duration::from_secs(1)).await;
        let slowest = part(&memory, 50, Duration::from_secs(3)).await;
        assert_eq!(slowest.0.hold(60, AGAIN * 5).await, Err(Refused::Spent));
        stays(&slow.0).await;
        let (room, ()) = tokio::join!(slow.0.hold(60, QUEUE), leaves(slowest));
        room.expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn none_leaves_if_that_makes_too_little_room() {
        let memory = SharedMemory::new(100);
        let (fast, slow) = (part(&memory, 80, Duration::ZERO).await, part(&memory, 20, Duration::from_secs(2)).await);
        let new = memory.part(&Pace::default());
        assert_eq!(new.hold(50, AGAIN * 5).await, Err(Refused::Spent));
        stays(&slow.0).await;
        drop(fast);
        new.hold(50, Duration::ZERO).await.expect("room");
        stays(&slow.0).await;
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_stalls_is_slow_before_its_next_piece_and_the_slowest_may_be_the_one_that_asks() {
        let memory = SharedMemory::new(100);
        let stalled = part(&memory, 90, Duration::ZERO).await;
        stalled.1.wait();
        let (pace, begun) = (Pace::default(), Instant::now());
        let new = memory.part(&pace);
        let (room, ()) = tokio::join!(new.hold(20, QUEUE), leaves(stalled));
        room.expect("room");
        assert!(begun.elapsed() <= LINGER + AGAIN * 2, "{:?}", begun.elapsed());
        pace.wait();
        tokio::time::sleep(Duration::from_secs(1)).await;
        pace.received(1);
        // No faster one leaves for it. But it leaves for a faster one while it waits.
        let (fast, _) = part(&memory, 80, Duration::ZERO).await;
        assert_eq!(new.hold(30, Duration::from_secs(1)).await, Err(Refused::Spent));
        stays(&fast).await;
        let (refused, room) = tokio::join!(
            async move {
                let refused = new.hold(30, QUEUE).await;
                drop(new);
                refused
            },
            fast.hold(100, QUEUE)
        );
        assert_eq!((refused, room), (Err(Refused::Slow), Ok(())));
        drop(fast);
        empty(&memory);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_one_that_asks_is_not_refused_for_the_sake_of_complete_ones() {
        let memory = SharedMemory::new(100);
        let ((complete, _), (slow, _)) = (part(&memory, 60, Duration::ZERO).await, part(&memory, 30, Duration::from_secs(1)).await);
        complete.complete();
        let (room, ()) = tokio::join!(slow.hold(50, QUEUE), async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(complete);
        });
        room.expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn megabytes_that_came_fast_do_not_excuse_a_long_stall() {
        let memory = SharedMemory::new(128 << 20);
        let stalled = part(&memory, 100 << 20, Duration::ZERO).await;
        stalled.1.wait();
        let (new, begun) = (memory.part(&Pace::default()), Instant::now());
        let (room, ()) = tokio::join!(new.hold(100 << 20, QUEUE), leaves(stalled));
        room.expect("room");
        assert!(begun.elapsed() <= STALL + AGAIN * 2, "{:?}", begun.elapsed());
        // Nor do they excuse looks that find nothing, or a byte now and then.
        for (bytes, longest) in [(0, 2), (1, 3)] {
            let pace = Pace::default();
            pace.received(300 << 20);
            let begun = Instant::now();
            while pace.slowness().is_none() {
                pace.wait();
                tokio::time::sleep(STALL - LINGER).await;
                pace.received(bytes);
            }
            assert!(begun.elapsed() <= STALL * longest, "{:?}", begun.elapsed());
            pace.wait();
            tokio::time::sleep(STALL - LINGER).await;
            pace.received(bytes);
            let comes_first = pace.slowness().is_some_and(|slowness| slowness < 0.0);
            assert_eq!(comes_first, bytes == 0, "one that sends nothing leaves before one that sends little");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_alone_may_hold_more() {
        let memory = SharedMemory::new(100);
        let (alone, _) = part(&memory, 60, Duration::ZERO).await;
        alone.hold(200, Duration::ZERO).await.expect("it is alone");
        let other = memory.part(&Pace::default());
        other.hold(0, Duration::ZERO).await.expect("nothing is asked for");
        assert!(!other.try_hold(1));
        assert_eq!(other.hold(1, AGAIN).await, Err(Refused::Spent));
        drop(alone);
        assert!(other.try_hold(1));
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_the_program_is_busy_makes_no_sender_slow() {
        let busy = Arc::new(Mutex::new(Duration::ZERO));
        let pace = Pace::without({
            let busy = Arc::clone(&busy);
            move || *busy.lock().unwrap()
        });
        pace.wait();
        tokio::time::sleep(STALL * 2).await;
        assert!(pace.slowness().is_some());
        *busy.lock().unwrap() += STALL * 2;
        assert_eq!((pace.slowness(), pace.waited()), (None, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_all_wait_for_memory_do_not_wait_for_ever() {
        let memory = SharedMemory::new(100);
        let ((first, _), (last, _)) = (part(&memory, 50, Duration::ZERO).await, part(&memory, 50, Duration::ZERO).await);
        let begun = Instant::now();
        let (one, other) = tokio::join!(first.hold(60, QUEUE), async move { last.hold(60, QUEUE).await });
        one.expect("room");
        assert_eq!(other, Err(Refused::Slow), "it came last");
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn complete_ones_are_waited_for_and_not_longer_than_allowed() {
        let memory = SharedMemory::new(100);
        let (complete, _) = part(&memory, 100, Duration::from_secs(5)).await;
        complete.complete();
        let (new, begun) = (memory.part(&Pace::default()), Instant::now());
        assert_eq!(new.hold(1, Duration::from_secs(3)).await, Err(Refused::Spent));
        assert_eq!(begun.elapsed().as_secs(), 3);
        stays(&complete).await;
        complete.release();
        new.hold(100, Duration::ZERO).await.expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_complete_before_it_left_stays_and_another_one_leaves() {
        let memory = SharedMemory::new(100);
        let slow = part(&memory, 50, Duration::from_secs(1)).await;
        let slowest = part(&memory, 50, Duration::from_secs(2)).await;
        let new = memory.part(&Pace::default());
        assert_eq!(new.hold(20, AGAIN / 2).await, Err(Refused::Spent));
        slowest.0.complete();
        let (room, ()) = tokio::join!(new.hold(20, QUEUE), leaves(slow));
        room.expect("room");
        stays(&slowest.0).await;
        drop((slowest, new));
        empty(&memory);
    }
}
