//! The state of each connection, so that the least needed one can be closed when another one
//! arrives.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;

/// What a connection does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    /// No request is in flight.
    Idle = 0,
    /// A request waits for its client to send or to receive bytes.
    Waiting = 1,
    /// The registry works for it.
    Working = 2,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Line {
    begun: Instant,
    state: AtomicUsize,
    /// The client does not receive written bytes.
    blocked: AtomicBool,
    /// Start of the current state, in milliseconds since `begun`.
    since: AtomicU64,
    /// Requests that hyper has read.
    requests: AtomicU64,
    close: Notify,
}

impl Line {
    fn new(begun: Instant) -> Self {
        let since = AtomicU64::new(millis(begun));
        Self {
            begun,
            state: AtomicUsize::new(State::Idle as usize),
            blocked: AtomicBool::new(false),
            since,
            requests: AtomicU64::new(0),
            close: Notify::new(),
        }
    }

    /// Sets what the connection does.
    pub(crate) fn is(&self, state: State) {
        if self.state.swap(state as usize, Ordering::Relaxed) != state as usize {
            self.since.store(millis(self.begun), Ordering::Relaxed);
        }
    }

    /// Sets whether the client receives written bytes.
    pub(crate) fn takes(&self, takes: bool) {
        if self.blocked.swap(!takes, Ordering::Relaxed) == takes {
            self.since.store(millis(self.begun), Ordering::Relaxed);
        }
    }

    /// Notes that a request was read.
    pub(crate) fn request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.is(State::Working);
    }

    /// Number of requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Completes when the connection is to be closed.
    pub(crate) async fn closed(&self) {
        self.close.notified().await;
    }

    fn state(&self) -> usize {
        match self.blocked.load(Ordering::Relaxed) {
            true => State::Waiting as usize,
            false => self.state.load(Ordering::Relaxed),
        }
    }
}

fn millis(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// All connections.
#[derive(Debug)]
pub(crate) struct Lines {
    begun: Instant,
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<Line>>>,
}

impl Default for Lines {
    fn default() -> Self {
        Self { begun: Instant::now(), next: AtomicU64::new(0), open: Mutex::default() }
    }
}

impl Lines {
    /// Adds a connection. It is removed when the returned value is dropped.
    pub(crate) fn open(self: &Arc<Self>) -> Opened {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let line = Arc::new(Line::new(self.begun));
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::clone(&line));
        Opened { id, line, lines: Arc::clone(self) }
    }

    /// Closes the connection that has been idle for longest. If none is idle, closes the one whose
    /// client has been waited for longest. Never closes a connection that the registry works for.
    pub(crate) fn make_room(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = |line: &Line| (line.state(), line.since.load(Ordering::Relaxed));
        let least = open.iter().filter(|(_, line)| line.state() != State::Working as usize).min_by_key(|(_, line)| rank(line));
        if let Some(id) = least.map(|(id, _)| *id)
            && let Some(line) = open.remove(&id)
        {
            line.close.notify_one();
        }
    }
}

/// An open connection.
pub(crate) struct Opened {
    id: u64,
    pub(crate) line: Arc<Line>,
    lines: Arc<Lines>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.lines.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[test]
    fn the_longest_idle_goes_first_then_the_slowest_and_never_one_at_work() {
        let lines = Arc::new(Lines::default());
        let set = |state, since| {
            let opened = lines.open();
            opened.line.is(state);
            opened.line.since.store(since, Ordering::Relaxed);
            opened
        };
        let open = [set(State::Working, 1), set(State::Waiting, 2), set(State::Idle, 9), set(State::Idle, 4), set(State::Waiting, 7)];
        let mut closed = Vec::new();
        for _ in 0..6 {
            lines.make_room();
            closed.extend((0..open.len()).filter(|i| open[*i].line.closed().now_or_never().is_some()));
        }
        assert_eq!(closed, [3, 2, 1, 4]);
    }
}
