//! Permits for work that holds memory. The holder of one can see whether others wait.

use crate::error::{Error, Result};
use crate::trace::Stage;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// A number of places. A caller that has one can ask whether others wait for one.
#[derive(Debug)]
pub(crate) struct Places {
    permits: Arc<Semaphore>,
    waiting: AtomicUsize,
    called: Notify,
}

impl Places {
    pub(crate) fn new(count: usize) -> Self {
        Self::over(Arc::new(Semaphore::new(count.max(1))))
    }

    /// Over a semaphore that others use as it is.
    pub(crate) fn over(permits: Arc<Semaphore>) -> Self {
        Self { permits, waiting: AtomicUsize::new(0), called: Notify::new() }
    }

    /// A place, if one is free and no other task waits for it.
    pub(crate) fn try_take(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }

    /// A place; first come, first served.
    ///
    /// # Errors
    /// [`Error::Overloaded`] with `words` if none is free within `limit`.
    pub(crate) async fn take(&self, limit: Duration, words: &'static str) -> Result<OwnedSemaphorePermit> {
        if let Some(place) = self.try_take() {
            return Ok(place);
        }
        let _waiting = (Waiting::begin(self), Stage::wait("wait for a place"));
        match tokio::time::timeout(limit, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(place) => place.map_err(Error::from),
            Err(_) => Err(Error::Overloaded(words)),
        }
    }

    /// Whether other work waits for a place.
    pub(crate) fn wanted(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Completes when another task waits for a place.
    pub(crate) async fn when_wanted(&self) {
        loop {
            let called = self.called.notified();
            if self.wanted() {
                return;
            }
            called.await;
        }
    }
}

/// Counts a caller that waits, until it is dropped.
struct Waiting<'a>(&'a Places);

impl<'a> Waiting<'a> {
    fn begin(places: &'a Places) -> Self {
        places.waiting.fetch_add(1, Ordering::SeqCst);
        places.called.notify_waiters();
        Self(places)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_caller_that_waits_is_told_of_and_refused_in_time() {
        let places = Places::new(1);
        let held = places.take(Duration::ZERO, "busy").await.unwrap();
        let (refused, ()) = tokio::join!(places.take(Duration::from_millis(20), "busy"), places.when_wanted());
        assert!(matches!(refused, Err(Error::Overloaded("busy"))));
        assert!(!places.wanted());
        let (taken, ()) = tokio::join!(places.take(Duration::from_secs(60), "busy"), async {
            places.when_wanted().await;
            drop(held);
        });
        assert!(taken.is_ok());
    }
}
