//! The minimum speed of an answer. A timeout for silence is not enough: a server that sends one
//! byte now and then would keep a reader waiting for ever.

use super::{Remote, RemoteOptions};
use crate::error::Error;
use bytes::Bytes;
use std::time::{Duration, Instant};

/// Why the client stops reading an answer.
#[derive(Debug)]
pub(crate) enum Slow {
    /// No byte arrived. The connection may be dead, so a retry on a new one may help.
    Silent(String),
    /// Too few bytes arrived. A retry would be no faster.
    Trickle(String),
}

impl std::fmt::Display for Slow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Silent(reason) | Self::Trickle(reason)) = self;
        f.write_str(reason)
    }
}

impl Remote {
    /// The error for an answer that is too slow.
    pub(super) fn slow(&self, slow: Slow) -> Error {
        match slow {
            Slow::Silent(reason) => self.cut(reason),
            Slow::Trickle(reason) => Error::TooSlow { url: self.url().to_owned(), reason },
        }
    }
}

/// Measures the speed of one answer. Only the time spent waiting for the next bytes counts: a slow
/// reader does not make the answer slow.
#[derive(Debug)]
pub(crate) struct Pace {
    window: Duration,
    /// Bytes that must arrive in each window of waiting.
    least: u64,
    waited: Duration,
    bytes: u64,
    end: Option<(Instant, Duration)>,
}

impl Pace {
    /// Measures an answer of any length.
    pub fn new(options: &RemoteOptions) -> Self {
        Self { window: options.idle_timeout, least: least(options), waited: Duration::ZERO, bytes: 0, end: None }
    }

    /// Measures an answer that must be complete within `answer_timeout`.
    pub fn of_document(options: &RemoteOptions) -> Self {
        Self { end: Some((Instant::now() + options.answer_timeout, options.answer_timeout)), ..Self::new(options) }
    }

    /// Waits for the next piece.
    ///
    /// # Errors
    /// [`Slow`] if the answer is too slow.
    pub async fn next<E>(&mut self, piece: impl Future<Output = Result<Option<Bytes>, E>>) -> Result<Result<Option<Bytes>, E>, Slow> {
        tokio::pin!(piece);
        loop {
            let start = Instant::now();
            let mut longest = self.window.saturating_sub(self.waited);
            if let Some((end, limit)) = self.end {
                let left = end.saturating_duration_since(start);
                if left.is_zero() {
                    return Err(Slow::Trickle(format!("it was not complete after {}", seconds(limit))));
                }
                longest = longest.min(left);
            }
            let waited = tokio::time::timeout(longest, &mut piece).await;
            self.waited += start.elapsed();
            if let Ok(Ok(Some(piece))) = &waited {
                self.bytes += piece.len() as u64;
            }
            if self.waited >= self.window {
                self.close_window()?;
            }
            if let Ok(piece) = waited {
                return Ok(piece);
            }
        }
    }

    fn close_window(&mut self) -> Result<(), Slow> {
        match self.bytes {
            0 => Err(Slow::Silent(format!("no byte arrived for {}", seconds(self.window)))),
            bytes if bytes < self.least => {
                let reason = format!("{bytes} bytes arrived in {}, expected at least {}", seconds(self.window), self.least);
                Err(Slow::Trickle(reason))
            }
            _ => {
                (self.waited, self.bytes) = (Duration::ZERO, 0);
                Ok(())
            }
        }
    }
}

/// Bytes that must arrive within `idle_timeout`.
pub(super) fn least(options: &RemoteOptions) -> u64 {
    (options.idle_timeout.as_secs_f64() * options.min_rate as f64) as u64
}

fn seconds(time: Duration) -> String {
    format!("{} seconds", (time.as_secs_f64() * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> RemoteOptions {
        RemoteOptions {
            idle_timeout: Duration::from_millis(200),
            answer_timeout: Duration::from_millis(300),
            min_rate: 5_000,
            ..RemoteOptions::default()
        }
    }

    async fn after(wait: u64, bytes: usize) -> Result<Option<Bytes>, ()> {
        tokio::time::sleep(Duration::from_millis(wait)).await;
        Ok(Some(vec![0; bytes].into()))
    }

    /// Reads up to 100 pieces of `bytes` bytes, one every 20 ms. Returns how many it read, and why
    /// it stopped.
    async fn read(mut pace: Pace, bytes: usize) -> (usize, Option<String>) {
        for pieces in 0..100 {
            match pace.next(after(20, bytes)).await {
                Ok(_) => {}
                Err(Slow::Trickle(reason)) => return (pieces, Some(reason)),
                Err(Slow::Silent(reason)) => panic!("{reason}"),
            }
        }
        (100, None)
    }

    #[tokio::test]
    async fn a_trickle_fails_and_a_steady_stream_does_not() {
        let (pieces, reason) = read(Pace::new(&options()), 1).await;
        assert!(pieces <= 11 && reason.unwrap().contains("expected at least 1000"), "{pieces}");
        assert_eq!(read(Pace::new(&options()), 4096).await, (100, None));
    }

    #[tokio::test]
    async fn a_document_must_be_complete_within_the_answer_timeout() {
        let (pieces, reason) = read(Pace::of_document(&options()), 4096).await;
        assert!(pieces <= 16 && reason.unwrap().contains("not complete"), "{pieces}");
    }

    #[tokio::test]
    async fn silence_fails_and_the_readers_own_time_does_not_count() {
        let mut pace = Pace::new(&RemoteOptions { min_rate: 0, ..options() });
        assert!(pace.next(after(10, 1)).await.unwrap().unwrap().is_some());
        tokio::time::sleep(Duration::from_millis(250)).await;
        assert!(pace.next(after(10, 1)).await.unwrap().unwrap().is_some(), "the reader waited only 20 ms for the answer");
        assert!(Pace::new(&options()).next(after(10_000, 1)).await.unwrap_err().to_string().contains("no byte arrived for 0.2 seconds"));
    }
}
