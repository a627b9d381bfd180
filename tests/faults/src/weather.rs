//! The faults between a replica and its storage and database, and how often they occur.

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::sync::Arc;

/// A fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection is reset before anything happened.
    Reset,
    /// An error, and nothing happened.
    Before,
    /// An error, although it happened: the answer was lost.
    After,
    /// A write left a part of its bytes behind, and an error.
    Torn,
    /// No space left.
    Full,
}

#[derive(Debug)]
struct State {
    random: StdRng,
    /// Probability that a call fails.
    rate: f64,
    /// Whether writes find no space.
    full: bool,
    /// Faults so far.
    struck: u64,
}

/// The weather around one replica. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Weather(Arc<Mutex<State>>);

impl Weather {
    /// Calls fail with probability `rate`.
    #[must_use]
    pub fn new(seed: u64, rate: f64) -> Self {
        Self(Arc::new(Mutex::new(State { random: StdRng::seed_from_u64(seed), rate, full: false, struck: 0 })))
    }

    /// Sets how often calls fail.
    pub fn set(&self, rate: f64, full: bool) {
        let mut state = self.0.lock();
        (state.rate, state.full) = (rate, full);
    }

    /// Faults so far.
    #[must_use]
    pub fn struck(&self) -> u64 {
        self.0.lock().struck
    }

    /// What happens to the next call.
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
        state.struck += u64::from(fault.is_some());
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
