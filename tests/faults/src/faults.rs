//! The faults between a replica and its storage and database, and how often they occur.

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::sync::Arc;

/// A fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection is reset, and the call has no effect.
    Reset,
    /// The call fails and has no effect.
    Before,
    /// The call has its effect and fails: its answer is lost.
    After,
    /// A write fails and leaves a part of its bytes.
    Torn,
    /// No space left.
    Full,
}

#[derive(Debug)]
struct State {
    random: StdRng,
    /// Probability that a call fails.
    rate: f64,
    /// Whether writes fail because no space is left.
    full: bool,
    /// Faults so far.
    injected: u64,
}

/// The faults around one replica. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Mutex<State>>);

impl Faults {
    /// Calls fail with probability `rate`.
    #[must_use]
    pub fn new(seed: u64, rate: f64) -> Self {
        Self(Arc::new(Mutex::new(State { random: StdRng::seed_from_u64(seed), rate, full: false, injected: 0 })))
    }

    /// Sets how often calls fail.
    pub fn set(&self, rate: f64, full: bool) {
        let mut state = self.0.lock();
        (state.rate, state.full) = (rate, full);
    }

    /// Faults so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.0.lock().injected
    }

    /// The fault of the next call; none if it succeeds.
    pub(crate) fn draw(&self, writes: bool) -> Option<Fault> {
        let mut state = self.0.lock();
        let fault = if writes && state.full {
            Some(Fault::Full)
        } else {
            let rate = state.rate;
            state.random.random_bool(rate).then(|| match state.random.random_range(0..4) {
                0 => Fault::Reset,
                1 => Fault::Before,
                2 if writes => Fault::Torn,
                _ => Fault::After,
            })
        };
        state.injected += u64::from(fault.is_some());
        fault
    }

    /// The latency of a call: the number of steps for which other tasks may go first.
    pub(crate) fn latency(&self) -> u32 {
        let mut state = self.0.lock();
        if state.random.random_bool(0.1) { state.random.random_range(1..6) } else { 0 }
    }

    /// A number below `below`.
    pub(crate) fn below(&self, below: usize) -> usize {
        self.0.lock().random.random_range(0..below.max(1))
    }
}
