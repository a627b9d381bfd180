//! Places for downloads at full speed, and the memory that a download holds.

use crate::error::Result;
use bytes::Bytes;
use parking_lot::Mutex;
use pfr_service::task::Task;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Time for which a client may leave a piece unread before its download may lose its place.
const LINGER: Duration = Duration::from_millis(250);
/// Time after which any download may lose its place to another.
const SLICE: Duration = Duration::from_secs(1);

/// The places for downloads at full speed.
#[derive(Debug)]
pub(crate) struct Outputs {
    places: Arc<Semaphore>,
    /// Large pieces that may be on their way to clients.
    large: Arc<Semaphore>,
    holders: Mutex<Vec<Weak<Mutex<Hold>>>>,
}

impl Outputs {
    pub(crate) fn new(count: usize) -> Self {
        let permits = |count| Arc::new(Semaphore::new(count));
        Self { places: permits(count.max(1)), large: permits(2 * count.max(1)), holders: Mutex::default() }
    }

    /// A permit for a large piece, to be kept until the piece was sent.
    pub(super) fn take_large(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.large).try_acquire_owned().ok()
    }

    /// A place for `own`. If none is free, takes one from a download that does not need it.
    pub(super) fn take(&self, own: &Arc<Mutex<Hold>>) -> Option<OwnedSemaphorePermit> {
        let take = || Arc::clone(&self.places).try_acquire_owned().ok();
        let place = take().or_else(|| {
            // A locked hold is in use by its reader, so it is not idle.
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

/// A position in a download.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct At {
    pub extent: usize,
    pub offset: u64,
}

/// The pieces of one read.
pub(super) type Pieces = Vec<(At, Bytes)>;

/// The memory of a download, apart from the piece that is being sent to the client.
#[derive(Debug)]
pub(super) struct Hold {
    pub place: Option<OwnedSemaphorePermit>,
    /// When the place was taken.
    pub taken: Instant,
    /// When a piece was handed out; none while the client waits for the next one.
    pub handed: Option<Instant>,
    pub ready: VecDeque<(At, Bytes)>,
    pub reading: VecDeque<(At, Task<Result<Pieces>>)>,
    /// The position of the next read.
    pub next: At,
}

impl Default for Hold {
    fn default() -> Self {
        let (ready, reading) = (VecDeque::new(), VecDeque::new());
        Self { place: None, taken: Instant::now(), handed: None, ready, reading, next: At::default() }
    }
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
