//! Memory that the senders of bytes share while a program waits for them.
//!
//! No slow sender keeps a fast one waiting. If the memory is spent, the slowest sender gives up its
//! part.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A sender is slow if the time spent waiting for it exceeds this…
const LINGER: Duration = Duration::from_millis(100);
/// …plus the time that its bytes take at this rate, in bytes per second.
const FAST: f64 = (4 << 20) as f64;
/// It is slow too if nothing has come from it for this long.
const STALL: Duration = Duration::from_secs(1);
/// A part that waits for memory looks again after this time: others have become slow.
const AGAIN: Duration = Duration::from_millis(20);
/// After a look at all parts that found none to be given up, the next one is not before this time.
const BETWEEN_SEARCHES: Duration = Duration::from_millis(10);

/// How fast a sender is. Clones belong to the same sender.
#[derive(Clone)]
pub struct Pace(Arc<(Box<Busy>, Mutex<Sent>)>);

/// The time for which the program has kept the sender waiting, since it began.
type Busy = dyn Fn() -> Duration + Send + Sync;

#[derive(Default)]
struct Sent {
    bytes: u64,
    /// How long it was waited for, up to the last piece.
    waited: Duration,
    /// When the present wait for it began, and how long it had been kept waiting by then.
    since: Option<(Instant, Duration)>,
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

    /// The wait is over, and has brought so many bytes.
    pub fn received(&self, bytes: usize) {
        let waits = self.waits();
        let mut sent = self.sent();
        sent.waited += waits;
        sent.since = None;
        sent.bytes += bytes as u64;
    }

    /// How long the sender has been waited for.
    #[must_use]
    pub fn waited(&self) -> Duration {
        let waits = self.waits();
        self.sent().waited + waits
    }

    /// How long it has been waited for since its last piece.
    fn waits(&self) -> Duration {
        let Some((begun, before)) = self.sent().since else { return Duration::ZERO };
        begun.elapsed().saturating_sub((self.0.0)().saturating_sub(before))
    }

    /// Bytes per second, if that is slow.
    fn slow_rate(&self) -> Option<f64> {
        let (waits, waited, bytes) = (self.waits(), self.waited(), self.sent().bytes as f64);
        let is_slow = waits >= STALL || waited > LINGER + Duration::from_secs_f64(bytes / FAST);
        is_slow.then(|| bytes / waited.as_secs_f64())
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
    /// Bytes of those that must be given up and have not been yet.
    leaving: usize,
    /// The last search for parts that must be given up, if it found none.
    searched: Option<Instant>,
}

struct Taken {
    pace: Pace,
    held: usize,
    /// Bytes that it waits for.
    wanted: usize,
    /// Its sender is not waited for any more.
    is_complete: bool,
    /// It waits for something else, and may have to go meanwhile.
    is_spare: bool,
    is_leaving: bool,
    leave: Arc<Notify>,
}

/// Why memory was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The sender is the slowest, and others need its memory.
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
    /// So many bytes for all senders together. One sender alone may hold more.
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
    /// Bytes that are missing for so many more. One part alone always has room.
    fn missing(&self, more: usize, limit: usize) -> usize {
        if self.held == 0 { 0 } else { (self.held + more).saturating_sub(limit) }
    }

    /// Takes memory so that a part has `bytes` bytes, or sees to it that there will be some.
    fn hold(&mut self, id: u64, bytes: usize, limit: usize) -> Step {
        let Some(part) = self.all.get(&id).filter(|part| !part.is_leaving) else { return Step::Leave };
        let more = bytes.saturating_sub(part.held);
        let is_there = self.missing(more, limit) == 0;
        if let Some(part) = self.all.get_mut(&id) {
            part.wanted = if is_there { 0 } else { more };
            part.held += if is_there { more } else { 0 };
        }
        if is_there {
            self.held += more;
            return Step::Held;
        }
        self.make_room(more, limit);
        if self.all.get(&id).is_some_and(|part| part.is_leaving) { Step::Leave } else { Step::Wait }
    }

    /// Has parts given up if that makes room for `more` bytes: the slowest ones, then spare ones,
    /// the last first. If all wait for memory, none would ever go on: then the last one.
    fn make_room(&mut self, more: usize, limit: usize) {
        if self.searched.is_some_and(|searched| searched.elapsed() < BETWEEN_SEARCHES) {
            return;
        }
        let missing = self.missing(more, limit).saturating_sub(self.leaving);
        if missing == 0 {
            return;
        }
        let (mut slow, mut spare, mut last, mut all_wait) = (Vec::new(), Vec::new(), None, self.leaving == 0);
        for (&id, part) in self.all.iter().rev().filter(|(_, part)| part.held > 0 && !part.is_leaving) {
            last.get_or_insert(id);
            all_wait &= part.wanted > 0 && self.missing(part.wanted, limit) > 0;
            match part.pace.slow_rate().filter(|_| !part.is_complete) {
                Some(rate) => slow.push((rate, id)),
                None if part.is_spare => spare.push(id),
                None => {}
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
        self.searched = enough.is_empty().then(Instant::now);
        for id in enough {
            if let Some(part) = self.all.get_mut(&id) {
                part.is_leaving = true;
                self.leaving += part.held;
                part.leave.notify_one();
            }
        }
    }

    /// A part need not be given up any more.
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
            let step = self.memory.parts().hold(self.id, bytes, self.memory.limit);
            let left = limit.saturating_sub(begun.elapsed());
            match step {
                Step::Held => return Ok(()),
                Step::Leave => return Err(Refused::Slow),
                Step::Wait if left.is_zero() => {
                    self.with(|part| part.wanted = 0);
                    return Err(Refused::Spent);
                }
                Step::Wait => {}
            }
            tokio::select! {
                () = self.must_leave() => return Err(Refused::Slow),
                () = freed => {}
                () = tokio::time::sleep(AGAIN.min(left)) => {}
            }
        }
    }

    /// Completes when the part must be dropped: its sender is the slowest, and others need its
    /// memory.
    pub async fn must_leave(&self) {
        while !self.with(|part| part.is_leaving).unwrap_or(true) {
            self.leave.notified().await;
        }
    }

    /// The sender is not waited for any more, and the part is given back soon. So it stays.
    pub fn complete(&self) {
        let mut parts = self.memory.parts();
        parts.keep(self.id);
        if let Some(part) = parts.all.get_mut(&self.id) {
            part.is_complete = true;
        }
    }

    /// It waits for something else, and may have to go meanwhile.
    pub fn spare(&self) {
        self.with(|part| part.is_spare = true);
    }

    /// Gives all bytes back; more may be taken later.
    pub fn release(&self) {
        let mut parts = self.memory.parts();
        parts.keep(self.id);
        let Some(part) = parts.all.get_mut(&self.id) else { return };
        part.is_complete = false;
        let held = std::mem::take(&mut part.held);
        parts.held -= held;
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

    /// Drops a part when it must be.
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
        let spent = new.hold(20, Duration::ZERO).await.expect_err("it waits until the memory is given back");
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
        let fast = part(&memory, 80, Duration::ZERO).await;
        assert_eq!(new.hold(30, QUEUE).await, Err(Refused::Slow));
        drop((fast, new));
        empty(&memory);
    }

    #[tokio::test(start_paused = true)]
    async fn megabytes_that_came_fast_do_not_excuse_a_long_stall() {
        let memory = SharedMemory::new(128 << 20);
        let stalled = part(&memory, 100 << 20, Duration::ZERO).await;
        stalled.1.wait();
        let (new, begun) = (memory.part(&Pace::default()), Instant::now());
        let (room, ()) = tokio::join!(new.hold(100 << 20, QUEUE), leaves(stalled));
        room.expect("room");
        assert!((STALL..=STALL + AGAIN * 2).contains(&begun.elapsed()), "{:?}", begun.elapsed());
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
        assert!(pace.slow_rate().is_some());
        *busy.lock().unwrap() += STALL * 2;
        assert_eq!((pace.slow_rate(), pace.waited()), (None, Duration::ZERO));
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
        complete.release();
        new.hold(100, Duration::ZERO).await.expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_complete_before_it_left_stays_and_another_one_leaves() {
        let memory = SharedMemory::new(100);
        let slow = part(&memory, 50, Duration::from_secs(1)).await;
        let slowest = part(&memory, 50, Duration::from_secs(2)).await;
        let new = memory.part(&Pace::default());
        assert_eq!(new.hold(20, Duration::ZERO).await, Err(Refused::Spent));
        slowest.0.complete();
        let (room, ()) = tokio::join!(new.hold(20, QUEUE), leaves(slow));
        room.expect("room");
        stays(&slowest.0).await;
        drop((slowest, new));
        empty(&memory);
    }
}
