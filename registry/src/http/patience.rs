//! How long we wait for the other side to move bytes: the one clock behind every "client stalls" limit.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// Bytes that must move within the limit. A trickle of single bytes is a stall.
const LEAST: u64 = 16 << 10;

/// Sums up the time spent waiting for the other side; our own time (disk, hashing) does not count.
#[derive(Debug)]
pub(crate) struct Patience {
    limit: Duration,
    waited: Duration,
    moved: u64,
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    /// Waits `limit` for each [`LEAST`] bytes.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, waited: Duration::ZERO, moved: 0, since: None, timer: None }
    }

    /// The other side moved bytes.
    pub(crate) fn moved(&mut self, bytes: usize) {
        if let Some(since) = self.since.take() {
            self.waited += since.elapsed();
        }
        self.moved += bytes as u64;
        if self.moved >= LEAST {
            self.moved = 0;
            self.waited = Duration::ZERO;
        }
    }

    /// Nothing can move now; ready when that has been so for too long.
    pub(crate) fn poll_exhausted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.since.is_none() {
            let now = Instant::now();
            self.since = Some(now);
            let deadline = now + self.limit.saturating_sub(self.waited);
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

    const LIMIT: Duration = Duration::from_secs(10);

    /// Waits for the other side, which moves after `delay`; whether patience ran out first.
    async fn ran_out(patience: &mut Patience, delay: Duration) -> bool {
        let until = tokio::time::sleep(delay);
        tokio::select! {
            biased;
            () = until => false,
            () = poll_fn(|cx| patience.poll_exhausted(cx)) => true,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_trickle_is_a_stall_and_a_flow_is_not() {
        let mut patience = Patience::new(LIMIT);
        for _ in 0..100 {
            assert!(!ran_out(&mut patience, Duration::from_secs(9)).await, "16 KiB every 9 seconds is a flow");
            patience.moved(16 << 10);
        }
        assert!(!ran_out(&mut patience, Duration::from_secs(6)).await);
        patience.moved(1);
        assert!(ran_out(&mut patience, Duration::from_secs(6)).await, "one byte does not buy another limit");
    }

    #[tokio::test(start_paused = true)]
    async fn our_own_time_does_not_count() {
        let mut patience = Patience::new(LIMIT);
        assert!(!ran_out(&mut patience, Duration::from_secs(1)).await);
        patience.moved(1);
        tokio::time::advance(LIMIT * 10).await;
        assert!(!ran_out(&mut patience, Duration::from_secs(1)).await);
    }
}
