//! The timeout behind every "client is too slow" limit.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// How slow a client may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// How long a client may lag behind the rate.
    pub(crate) grace: Duration,
    /// Bytes per second. With 0 there is no rate: each byte restarts the grace period.
    pub(crate) rate: u64,
}

/// Adds up how far the client lags behind its rate. Only time spent waiting for the client counts,
/// not the server's own (disk, hashing). A lead is not saved up, so the rate holds for the complete
/// body.
#[derive(Debug)]
pub(crate) struct ClientTimeout {
    pace: Pace,
    behind: Duration,
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl ClientTimeout {
    pub(crate) fn new(pace: Pace) -> Self {
        Self { pace, behind: Duration::ZERO, since: None, timer: None }
    }

    /// The client moved bytes.
    pub(crate) fn moved(&mut self, bytes: usize) {
        if let Some(since) = self.since.take() {
            self.behind += since.elapsed();
        }
        let paid = match self.pace.rate {
            0 if bytes > 0 => self.behind,
            0 => Duration::ZERO,
            rate => Duration::from_secs_f64(bytes as f64 / rate as f64),
        };
        self.behind = self.behind.saturating_sub(paid);
    }

    /// No byte can move now. Ready when the client lags too far behind.
    pub(crate) fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.since.is_none() {
            let now = Instant::now();
            self.since = Some(now);
            let deadline = now + self.pace.grace.saturating_sub(self.behind);
            match &mut self.timer {
                Some(timer) => timer.as_mut().reset(deadline),
                None => self.timer = Some(Box::pin(tokio::time::sleep_until(deadline))),
            }
        }
        self.timer.as_mut().map_or(Poll::Pending, |timer| timer.as_mut().poll(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;

    const PACE: Pace = Pace { grace: Duration::from_secs(10), rate: 16 << 10 };

    /// Waits for the client, which moves after `delay`. Returns whether it timed out first.
    async fn ran_out(timeout: &mut ClientTimeout, delay: Duration) -> bool {
        let until = tokio::time::sleep(delay);
        tokio::select! {
            biased;
            () = until => false,
            () = poll_fn(|cx| timeout.poll_expired(cx)) => true,
        }
    }

    /// The number of pieces, one every `delay`, that pass before the timeout, at most 1,000.
    async fn pieces(pace: Pace, bytes: usize, delay: Duration) -> usize {
        let mut timeout = ClientTimeout::new(pace);
        for passed in 0..1000 {
            if ran_out(&mut timeout, delay).await {
                return passed;
            }
            timeout.moved(bytes);
        }
        1000
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_keeps_its_rate_from_its_beginning_to_its_end() {
        let second = Duration::from_secs(1);
        assert_eq!(pieces(PACE, 16 << 10, second).await, 1000, "just fast enough");
        assert_eq!(pieces(PACE, 72 << 10, 4 * second).await, 1000, "in bursts, on average fast enough");
        assert_eq!(pieces(PACE, 8 << 10, second).await, 19, "half as fast is ten seconds behind after twenty");
        assert_eq!(pieces(PACE, 640, second).await, 10, "a trickle is a stall");
        assert_eq!(pieces(Pace { rate: 0, ..PACE }, 1, 9 * second).await, 1000, "no rate: each byte buys another limit");
        assert_eq!(pieces(Pace { rate: 0, ..PACE }, 1, 11 * second).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn being_ahead_is_not_saved_up_and_our_own_time_does_not_count() {
        let mut timeout = ClientTimeout::new(PACE);
        assert!(!ran_out(&mut timeout, Duration::from_secs(1)).await);
        timeout.moved(1 << 30);
        tokio::time::advance(PACE.grace * 10).await;
        assert!(!ran_out(&mut timeout, Duration::from_secs(9)).await);
        timeout.moved(1);
        assert!(ran_out(&mut timeout, Duration::from_secs(9)).await, "a fast beginning buys no slow end");
    }
}
