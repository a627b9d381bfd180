//! Waits between two attempts.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;
use std::time::Duration;

/// Exponential backoff with jitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
}

impl Backoff {
    /// Waits that double from `first` up to `longest`.
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest }
    }

    /// The wait after `failures` failures in a row. It lies between half of the full wait and the
    /// full wait: clients that failed together do not come back together.
    #[must_use]
    pub fn wait(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(30);
        let full = self.first.saturating_mul(1 << doublings).min(self.longest);
        full.mul_f64(jitter(0.5..1.0))
    }
}

/// A random number in `range`. The keys of the standard hasher are random enough for a wait, and
/// cost no dependency.
#[must_use]
pub fn jitter(range: Range<f64>) -> f64 {
    let random = RandomState::new().build_hasher().finish() as u32;
    range.start + (range.end - range.start) * f64::from(random) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_half_of_each_is_random() {
        let (first, longest) = (Duration::from_millis(200), Duration::from_secs(10));
        let backoff = Backoff::new(first, longest);
        for (failures, full) in [(0, 200), (1, 200), (2, 400), (3, 800), (6, 6_400), (7, 10_000), (u32::MAX, 10_000)] {
            let full = Duration::from_millis(full);
            let waits: Vec<Duration> = (0..100).map(|_| backoff.wait(failures)).collect();
            assert!(waits.iter().all(|wait| *wait >= full / 2 && *wait <= full), "{failures}: {waits:?}");
            assert!(waits.iter().any(|wait| *wait != waits[0]), "{failures}: no jitter");
        }
    }
}
