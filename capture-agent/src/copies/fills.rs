//! The fills (copies of pages into blocks) of an engine, by name. An engine that waits no longer
//! for a fill gives it up, and has its blocks back.

use super::gate::Handle;
use crate::error::{Error, Result};
use parking_lot::Mutex;
use std::collections::{HashSet, VecDeque};

/// How many names of given-up fills are remembered. The request for such a fill may still be on its
/// way through a socket. A connector has far fewer unsent requests than this.
const MAX_GIVEN_UP: usize = 1 << 16;
/// The longest name of a fill, in bytes.
const MAX_NAME: usize = 64;

/// The fills of one engine.
#[derive(Debug, Default)]
pub(crate) struct Fills(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    running: Vec<Running>,
    given_up: HashSet<String>,
    /// The same names, the oldest first.
    order: VecDeque<String>,
}

#[derive(Debug)]
struct Running {
    name: Option<String>,
    rank: u32,
    copies: Handle<()>,
}

impl Fills {
    /// Registers a running fill of a rank. Its copies pass the gate of `copies`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the engine gave up a fill of this name: its blocks may hold something
    /// else by now.
    pub fn begin(&self, name: Option<&str>, rank: u32, copies: Handle<()>) -> Result<()> {
        if let Some(name) = name.filter(|name| !(1..=MAX_NAME).contains(&name.len())) {
            return Err(Error::Invalid(format!("a fill's name has 1 to {MAX_NAME} bytes, found {}", name.len())));
        }
        let mut state = self.0.lock();
        if let Some(name) = name.filter(|name| state.given_up.contains(*name)) {
            return Err(Error::Invalid(format!("the engine gave up fill {name:?} before it came")));
        }
        state.running.retain(|other| other.copies.is_holding());
        state.running.push(Running { name: name.map(Into::into), rank, copies });
        Ok(())
    }

    /// Refuses fills of this name from now on, and returns the gates of those that run. The engine
    /// may use its blocks again as soon as these gates are closed and no copy is inside.
    pub fn give_up(&self, name: &str) -> Vec<Handle<()>> {
        if !(1..=MAX_NAME).contains(&name.len()) {
            // No fill of such a name begins.
            return Vec::new();
        }
        let mut state = self.0.lock();
        if state.given_up.insert(name.into()) {
            state.order.push_back(name.into());
        }
        if state.order.len() > MAX_GIVEN_UP
            && let Some(oldest) = state.order.pop_front()
        {
            state.given_up.remove(&oldest);
        }
        let running = state.running.iter().filter(|fill| fill.name.as_deref() == Some(name));
        running.map(|fill| fill.copies.clone()).collect()
    }

    /// Whether the engine gave up a fill of this name.
    pub fn was_given_up(&self, name: &str) -> bool {
        self.0.lock().given_up.contains(name)
    }

    /// The gates of a rank's running fills.
    pub fn of_rank(&self, rank: u32) -> Vec<Handle<()>> {
        self.0.lock().running.iter().filter(|fill| fill.rank == rank).map(|fill| fill.copies.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::gate::Gate;
    use super::*;

    #[test]
    fn a_fill_that_was_given_up_writes_nothing_more_and_does_not_begin_later() {
        let fills = Fills::default();
        let (gate, other) = (Gate::new(()), Gate::new(()));
        fills.begin(Some("a-1"), 0, gate.handle()).expect("new");
        fills.begin(Some("a-2"), 1, other.handle()).expect("new");
        let copy = gate.enter().expect("open");
        let running = fills.give_up("a-1");
        assert_eq!(running.len(), 1);
        let waiting = std::thread::spawn(move || running.iter().for_each(Handle::close_and_wait));
        while gate.enter().is_some() {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished(), "the copy in flight is waited for");
        drop(copy);
        waiting.join().expect("it ends with the copy");
        // Another rank's call that comes after it.
        assert!(fills.begin(Some("a-1"), 1, Gate::new(()).handle()).is_err());
        assert!(other.enter().is_some(), "others go on");
        assert_eq!(fills.of_rank(1).len(), 1);
    }

    #[test]
    fn names_are_short_and_remembered_in_bounds() {
        let fills = Fills::default();
        for name in [String::new(), "x".repeat(65)] {
            assert!(fills.begin(Some(&name), 0, Gate::new(()).handle()).is_err());
            fills.give_up(&name);
            assert!(!fills.was_given_up(&name), "no memory is spent on it");
        }
        for number in 0..=MAX_GIVEN_UP {
            fills.give_up(&number.to_string());
        }
        let state = fills.0.lock();
        assert_eq!((state.given_up.len(), state.order.len()), (MAX_GIVEN_UP, MAX_GIVEN_UP));
        assert!(!state.given_up.contains("0"));
    }
}
