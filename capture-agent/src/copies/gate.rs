//! Protects the blocks that a restore writes into: they are not released under a copy.

use super::claims::{Claim, Claims};
use crate::memory::Location;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// Owns the guard that keeps the blocks alive. Copies register here with [`Gate::enter`];
/// cancelling the restore closes the gate. The guard is dropped when the gate is closed and the
/// last copy has ended. Dropping the gate closes it.
#[derive(Debug)]
pub(crate) struct Gate<T>(Arc<Inner<T>>);

#[derive(Debug)]
struct Inner<T> {
    state: Mutex<State<T>>,
    let_go: Condvar,
}

#[derive(Debug)]
struct State<T> {
    held: Option<T>,
    claim: Option<Claim>,
    copies: usize,
    closed: bool,
    let_go: bool,
}

impl<T> Gate<T> {
    pub fn new(held: T) -> Self {
        let state = State { held: Some(held), claim: None, copies: 0, closed: false, let_go: false };
        Self(Arc::new(Inner { state: Mutex::new(state), let_go: Condvar::new() }))
    }

    /// Registers a copy; `None` once the gate is closed.
    pub fn enter(&self) -> Option<Pass<T>> {
        let mut state = self.0.state.lock();
        if state.closed {
            return None;
        }
        state.copies += 1;
        Some(Pass(Arc::clone(&self.0)))
    }

    /// Refuses new copies, and drops the guard when no copy is in flight. Does not wait.
    pub fn close(&self) {
        self.0.close();
    }

    /// Closes, and waits until the guard was dropped.
    pub fn close_and_wait(&self) {
        self.handle().close_and_wait();
    }

    /// A handle that can close this gate while another task owns it.
    pub fn handle(&self) -> Handle<T> {
        Handle(Arc::clone(&self.0))
    }

    /// Whether copies are refused.
    pub fn is_closed(&self) -> bool {
        self.0.state.lock().closed
    }

    /// Whether the guard still lives.
    pub fn is_holding(&self) -> bool {
        self.handle().is_holding()
    }

    /// Closes, and returns the guard; `None` under a copy.
    pub fn take(&self) -> Option<T> {
        let mut state = self.0.state.lock();
        state.closed = true;
        let held = if state.copies == 0 { state.held.take() } else { None };
        if held.is_some() {
            state.claim = None;
            state.let_go = true;
        }
        held
    }

    /// Reserves the blocks at these locations for this restore until the guard is dropped.
    ///
    /// # Errors
    /// The position of the first that another restore writes into. Nothing is reserved then.
    pub fn claim(&self, claims: &Arc<Claims>, blocks: Vec<Location>) -> Result<(), usize> {
        let claim = claims.claim(blocks)?;
        self.0.state.lock().claim = Some(claim);
        Ok(())
    }
}

impl<T> Drop for Gate<T> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Closes a gate that another task owns.
#[derive(Debug)]
pub(crate) struct Handle<T>(Arc<Inner<T>>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Handle<T> {
    /// As [`Gate::close_and_wait`].
    pub fn close_and_wait(&self) {
        self.0.close();
        let mut state = self.0.state.lock();
        while !state.let_go {
            self.0.let_go.wait(&mut state);
        }
    }

    /// As [`Gate::is_holding`].
    pub fn is_holding(&self) -> bool {
        !self.0.state.lock().let_go
    }
}

impl<T> Inner<T> {
    fn close(self: &Arc<Self>) {
        self.state.lock().closed = true;
        self.settle();
    }

    fn settle(self: &Arc<Self>) {
        let (held, claim) = {
            let mut state = self.state.lock();
            if !state.closed || state.copies > 0 || state.held.is_none() {
                return;
            }
            (state.held.take(), state.claim.take())
        };
        // Wakes the waiter even if the drop of the guard panics.
        let _told = LetGo(self);
        // Release the claim before the engine may reuse the blocks.
        drop(claim);
        drop(held);
    }
}

struct LetGo<'a, T>(&'a Inner<T>);

impl<T> Drop for LetGo<'_, T> {
    fn drop(&mut self) {
        self.0.state.lock().let_go = true;
        self.0.let_go.notify_all();
    }
}

/// A copy is in flight.
#[derive(Debug)]
pub(crate) struct Pass<T>(Arc<Inner<T>>);

impl<T> Drop for Pass<T> {
    fn drop(&mut self) {
        self.0.state.lock().copies -= 1;
        self.0.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct Flag(Arc<AtomicBool>);

    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn gate() -> (Gate<Flag>, impl Fn() -> bool) {
        let gone = Arc::new(AtomicBool::new(false));
        (Gate::new(Flag(Arc::clone(&gone))), move || gone.load(Ordering::SeqCst))
    }

    #[test]
    fn what_is_held_outlives_every_copy_and_no_other_begins() {
        let (gate, gone) = gate();
        let (one, two) = (gate.enter().expect("open"), gate.enter().expect("open"));
        drop(one);
        gate.close();
        assert!(!gone() && gate.is_holding() && gate.enter().is_none() && gate.take().is_none());
        drop(two);
        assert!(gone() && !gate.is_holding());
        gate.close_and_wait();
    }

    #[test]
    fn a_dropped_gate_lets_go_after_the_copy_also_if_that_panics() {
        let (gate, gone) = gate();
        let pass = gate.enter().expect("open");
        drop(gate);
        assert!(!gone());
        let copy = std::thread::spawn(move || {
            let _pass = pass;
            panic!("asked to panic");
        });
        assert!(copy.join().is_err());
        assert!(gone());
    }

    #[test]
    fn what_is_taken_is_not_dropped() {
        let (gate, gone) = gate();
        let held = gate.take().expect("no copy");
        drop(gate);
        assert!(!gone());
        drop(held);
        assert!(gone());
    }
}
