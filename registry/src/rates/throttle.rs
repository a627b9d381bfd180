//! How a stream of bytes is slowed down.

use super::{Key, Rates};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use tokio::time::Sleep;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the client.
    Up,
    /// To the client.
    Down,
}

impl Direction {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// The limits that a stream shares with others.
pub(super) struct Throttle {
    rates: Arc<Rates>,
    keys: Vec<Key>,
}

impl Throttle {
    pub(super) fn new(rates: Arc<Rates>, keys: Vec<Key>) -> Self {
        Self { rates, keys }
    }
}

/// The place for the limits of a stream: they are known once its caller is.
#[derive(Clone, Default)]
pub(crate) struct Throttled(Arc<OnceLock<Throttle>>);

impl Throttled {
    pub(super) fn set(&self, throttle: Throttle) {
        self.0.get_or_init(|| throttle);
    }
}

/// The flow of one body.
pub(crate) struct Flow {
    throttled: Throttled,
    direction: Direction,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Flow {
    /// A flow, and the place for its limits.
    #[cfg(test)]
    pub(super) fn new(direction: Direction) -> (Self, Throttled) {
        let throttled = Throttled::default();
        (Self::of(throttled.clone(), direction), throttled)
    }

    pub(crate) fn of(throttled: Throttled, direction: Direction) -> Self {
        Self { throttled, direction, waiting: None }
    }

    /// Ready when the next piece may move.
    pub(crate) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(waiting) = &mut self.waiting {
            ready!(waiting.as_mut().poll(cx));
            self.waiting = None;
        }
        Poll::Ready(())
    }

    /// A piece moved.
    pub(crate) fn moved(&mut self, bytes: usize) {
        let Some(throttle) = self.throttled.0.get() else { return };
        let wait = throttle.rates.moved(&throttle.keys, self.direction, bytes as u64);
        if !wait.is_zero() {
            self.waiting = Some(Box::pin(tokio::time::sleep(wait)));
        }
    }
}
