//! Protects the blocks that a restore writes into: they are not released under a copy, and two
//! restores never write into the same block.

use super::place::{Place, Places};
use crate::error::{Error, Result};
use crate::memory::Location;
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
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

    /// Reserves the places for this restore until the guard is dropped.
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

/// Where restores write.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<HashSet<Spot>>);

/// Where a page begins on this machine. An engine that connects again, or describes one memory
/// twice, has two mappings of the same bytes: two mappings of a block are one spot.
type Spot = Location;

fn spot(place: &Place) -> Spot {
    let begin = place.page.spans.first().map_or(0, |span| span.offset);
    let Location { object, offset } = place.memory.location();
    Location { object, offset: offset.saturating_add(begin) }
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

    use crate::memory::{Available, Page, PageMemory, Ring, ShmMemory, Span};
    use pfr_schema::Digest;
    use std::os::fd::OwnedFd;

    /// A place at `offset` of a memory.
    fn place(memory: &Arc<dyn PageMemory>, offset: u64) -> Places {
        let page = Page { spans: vec![Span { offset, bytes: 16 }] };
        Places(vec![Place::page(Digest::sha256(b""), Arc::clone(memory), page, 0, ("main".into(), 0, 0))])
    }

    #[test]
    fn two_restores_do_not_write_into_one_block_through_two_mappings_of_it() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("its length");
        let map = |offset| {
            let fd: OwnedFd = file.try_clone().expect("a descriptor").into();
            ShmMemory::map(fd, offset, 1024, Ring::new(4096), Available::system()).expect("a mapping")
        };
        let (one, two, later) = (map(0), map(0), map(512));
        let claims = Arc::new(Claims::default());
        let claim = claims.claim(&place(&one, 512)).expect("free");
        assert!(claims.claim(&place(&two, 512)).is_err(), "the same block through a second mapping");
        assert!(claims.claim(&place(&later, 0)).is_err(), "the same block through a mapping that begins later");
        assert!(claims.claim(&place(&two, 0)).is_ok(), "another block");
        drop(claim);
        assert!(claims.claim(&place(&later, 0)).is_ok(), "free again");
    }

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
