//! How fast earlier work was: what to expect of the next.

use parking_lot::Mutex;

/// Weight of the last one in the running average.
const NEWEST: f64 = 0.3;

/// Bytes a second, averaged.
#[derive(Debug, Default)]
pub struct Rate(Mutex<Option<f64>>);

impl Rate {
    /// Takes a capture or a pull into account.
    pub fn note(&self, bytes: u64, seconds: f64) {
        // Work that moved no bytes has no rate.
        if bytes == 0 || seconds <= 0.0 {
            return;
        }
        let rate = bytes as f64 / seconds;
        let mut average = self.0.lock();
        *average = Some(average.map_or(rate, |average| average * (1.0 - NEWEST) + rate * NEWEST));
    }

    /// Bytes a second; `None` before the first.
    #[must_use]
    pub fn get(&self) -> Option<f64> {
        *self.0.lock()
    }

    /// Seconds for `bytes`; `None` before the first.
    #[must_use]
    pub fn seconds(&self, bytes: u64) -> Option<f64> {
        self.get().map(|rate| bytes as f64 / rate)
    }
}

/// Seconds that computing `tokens` takes, at the speed that a request states.
pub(crate) fn recompute(tokens: u64, tokens_per_second: Option<f64>) -> Option<f64> {
    tokens_per_second.filter(|speed| *speed > 0.0).map(|speed| tokens as f64 / speed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_before_the_first_measurement_and_without_a_speed() {
        let rate = Rate::default();
        assert_eq!((rate.seconds(10), recompute(10, None)), (None, None));
        rate.note(0, 1.0);
        rate.note(10, 0.0);
        assert_eq!(rate.seconds(10), None);
        rate.note(100, 2.0);
        assert_eq!((rate.seconds(100), recompute(100, Some(50.0))), (Some(2.0), Some(2.0)));
    }
}
