//! One bucket of a rate limit: the generic cell rate algorithm, which keeps a single time for each
//! subject.
//!
//! The crate `governor` has it too. Its stores of many subjects grow with them until they are
//! swept, and a stream of bytes needs a place in a queue rather than a yes or no: see decision 50.

use std::time::Duration;
use tokio::time::Instant;

/// The longest wait that a subject is told to make: its client must see that its stream moves.
/// Where so many streams share a rate that it does not suffice, they are a little faster.
const LONGEST: Duration = Duration::from_secs(30);

/// The longest burst: a year's worth is hardly a limit, and a moment so far away can be computed.
const LONGEST_BURST: Duration = Duration::from_secs(365 * 24 * 3600);

/// A number of units a second, and for how many seconds of it a subject may be ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    per_second: u64,
    burst: Duration,
}

impl Rate {
    /// None for 0, which is no limit.
    pub(super) fn new(per_second: u64, burst: Duration) -> Option<Self> {
        (per_second > 0).then_some(Self { per_second, burst: burst.min(LONGEST_BURST) })
    }

    pub(super) fn per_second(self) -> u64 {
        self.per_second
    }

    /// The time that so many units take.
    fn time(self, units: u64) -> Duration {
        Duration::from_secs_f64(units as f64 / self.per_second as f64)
    }
}

/// What a subject has used of a rate.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    /// When all that was used is paid; none if nothing was.
    paid: Option<Instant>,
}

impl Bucket {
    /// When all is paid that was used before and that is added now.
    fn with(self, rate: Rate, units: u64, now: Instant) -> Instant {
        self.paid.unwrap_or(now).max(now) + rate.time(units)
    }

    /// How long it is until one more unit may be used; none if it may be now.
    fn wait(self, rate: Rate, now: Instant) -> Option<Duration> {
        // One unit is always within the burst.
        let burst = rate.burst.max(rate.time(1));
        let early = self.with(rate, 1, now).saturating_duration_since(now).saturating_sub(burst);
        (!early.is_zero()).then_some(early)
    }

    /// Uses a unit.
    ///
    /// # Errors
    /// How long to wait; then nothing is used.
    pub(super) fn take(&mut self, rate: Rate, now: Instant) -> Result<(), Duration> {
        if let Some(wait) = self.wait(rate, now) {
            return Err(wait);
        }
        self.paid = Some(self.with(rate, 1, now));
        Ok(())
    }

    /// Uses units that cannot be refused any more. Returns how long their subject must wait before
    /// it uses more.
    pub(super) fn charge(&mut self, rate: Rate, units: u64, now: Instant) -> Duration {
        let paid = self.with(rate, units, now).min(now + rate.burst + LONGEST);
        self.paid = Some(paid);
        paid.saturating_duration_since(now).saturating_sub(rate.burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_rest_is_saved_up_to_the_burst_and_a_refusal_costs_nothing() {
        let rate = Rate::new(4, 3 * SECOND).unwrap();
        let mut bucket = Bucket::default();
        let mut taken = |most: usize| (0..most).filter(|_| bucket.take(rate, Instant::now()).is_ok()).count();
        assert_eq!(taken(100), 12);
        tokio::time::advance(SECOND / 4).await;
        assert_eq!(taken(100), 1);
        tokio::time::advance(3600 * SECOND).await;
        assert_eq!(taken(100), 12, "an hour of rest is worth no more than the burst");
        assert_eq!(bucket.wait(rate, Instant::now()), Some(SECOND / 4));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_burst_a_request_at_a_time_passes() {
        let rate = Rate::new(2, Duration::ZERO).unwrap();
        let mut bucket = Bucket::default();
        assert!(bucket.take(rate, Instant::now()).is_ok());
        assert_eq!(bucket.take(rate, Instant::now()), Err(SECOND / 2));
        tokio::time::advance(SECOND / 2).await;
        assert!(bucket.take(rate, Instant::now()).is_ok());
        assert!(Rate::new(0, SECOND).is_none(), "0 is no limit");
    }

    #[tokio::test(start_paused = true)]
    async fn no_burst_is_too_long() {
        let rate = Rate::new(1, Duration::from_secs(u64::MAX)).unwrap();
        let mut bucket = Bucket::default();
        assert_eq!(bucket.charge(rate, 1 << 20, Instant::now()), Duration::ZERO);
        assert!(bucket.take(rate, Instant::now()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_refused_is_waited_for() {
        let rate = Rate::new(100, SECOND).unwrap();
        let mut bucket = Bucket::default();
        assert_eq!(bucket.charge(rate, 100, Instant::now()), Duration::ZERO);
        assert_eq!(bucket.charge(rate, 300, Instant::now()), 3 * SECOND);
        assert_eq!(bucket.charge(rate, 100, Instant::now()), 4 * SECOND, "the next one waits for the one before");
        tokio::time::advance(4 * SECOND).await;
        assert_eq!(bucket.charge(rate, 50, Instant::now()), SECOND / 2);
        assert_eq!(bucket.charge(rate, 1 << 40, Instant::now()), LONGEST);
        tokio::time::advance(LONGEST).await;
        assert_eq!(bucket.charge(rate, 100, Instant::now()), SECOND, "a debt does not grow for ever");
    }
}
