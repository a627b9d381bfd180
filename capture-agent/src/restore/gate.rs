//! Blocks that a restore writes into: what holds them is not let go under a copy, and no two restores write into the same.

use super::write::{Place, Places};
use crate::error::{Error, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::sync::Arc;

/// Holds what keeps the blocks: each copy passes through it, and whoever gives the restore up closes it. What is held is dropped
/// once it is closed and the last copy has ended. Dropping the gate closes it.
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

    /// Lets a copy begin; `None` once the gate is closed.
    pub fn enter(&self) -> Option<Pass<T>> {
        let mut state = self.0.state.lock();
        if state.closed {
            return None;
        }
        state.copies += 1;
        Some(Pass(Arc::clone(&self.0)))
    }

    /// No copy begins any more; what is held is dropped as soon as none is in flight. Does not wait.
    pub fn close(&self) {
        self.0.state.lock().closed = true;
        self.0.settle();
    }

    /// Closes, and waits until what was held is gone.
    pub fn close_and_wait(&self) {
        self.close();
        let mut state = self.0.state.lock();
        while !state.let_go {
            self.0.let_go.wait(&mut state);
        }
    }

    /// Whether something is held.
    pub fn is_holding(&self) -> bool {
        !self.0.state.lock().let_go
    }

    /// Closes, and gives back what is held; `None` under a copy.
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

    /// Keeps the places for this restore alone, as long as something is held.
    ///
    /// # Errors
    /// [`Error::Invalid`] if another restore writes into one of them.
    pub(super) fn claim(&self, claims: &Arc<Claims>, places: &Places) -> Result<()> {
        let claim = claims.claim(places)?;
        self.0.state.lock().claim = Some(claim);
        Ok(())
    }
}

impl<T> Drop for Gate<T> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<T> Inner<T> {
    fn settle(self: &Arc<Self>) {
        let (held, claim) = {
            let mut state = self.state.lock();
            if !state.closed || state.copies > 0 || state.held.is_none() {
                return;
            }
            (state.held.take(), state.claim.take())
        };
        // Also if the drop of what is held panics: somebody may wait.
        let _told = LetGo(self);
        // Before the blocks are free for others.
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

/// Where restores write.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<HashSet<Spot>>);

/// A memory, and where a page in it begins.
type Spot = (usize, u64);

fn spot(place: &Place) -> Spot {
    let begin = place.page.spans.first().map_or(0, |span| span.offset);
    (Arc::as_ptr(&place.memory).cast::<()>() as usize, begin)
}

impl Claims {
    fn claim(self: &Arc<Self>, places: &Places) -> Result<Claim> {
        let spots: Vec<Spot> = places.0.iter().map(spot).collect();
        let mut taken = self.0.lock();
        if let Some((place, _)) = places.0.iter().zip(&spots).find(|(_, spot)| taken.contains(spot)) {
            return Err(Error::Invalid(format!("{}: another restore is writing into this block", place.describe())));
        }
        taken.extend(&spots);
        drop(taken);
        Ok(Claim { claims: Arc::clone(self), spots })
    }
}

/// Places of one restore.
#[derive(Debug)]
struct Claim {
    claims: Arc<Claims>,
    spots: Vec<Spot>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut taken = self.claims.0.lock();
        for spot in &self.spots {
            taken.remove(spot);
        }
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
