//! An engine is used by one capture or restore at a time.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Gives an engine to one capture or restore at a time. Those that wait get it in the order in
/// which they came. One that does not wait is refused as long as others are in line.
#[derive(Debug)]
pub(crate) struct Turns {
    one: Arc<Semaphore>,
    /// The name of the capture or restore that has the engine, or had it last.
    with: Mutex<String>,
}

/// The exclusive use of an engine until this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _permit: OwnedSemaphorePermit,
}

impl Default for Turns {
    fn default() -> Self {
        Self { one: Arc::new(Semaphore::new(1)), with: Mutex::new("another capture or restore".into()) }
    }
}

impl Turns {
    /// Takes the engine if it is free.
    ///
    /// # Errors
    /// The name of the capture or restore that has it.
    pub fn take(&self, with: &str) -> Result<Turn, String> {
        match Arc::clone(&self.one).try_acquire_owned() {
            Ok(permit) => Ok(self.begin(with, permit)),
            Err(_) => Err(self.with.lock().clone()),
        }
    }

    /// Waits in line for the engine, and takes it.
    ///
    /// # Errors
    /// The name of the capture or restore that has it at the deadline.
    pub async fn wait(&self, with: &str, deadline: Instant) -> Result<Turn, String> {
        match tokio::time::timeout_at(deadline.into(), Arc::clone(&self.one).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(self.begin(with, permit)),
            // The semaphore is never closed.
            Ok(Err(_)) | Err(_) => Err(self.with.lock().clone()),
        }
    }

    /// The name of the capture or restore that has the engine, if it is not free.
    pub fn holder(&self) -> Option<String> {
        (self.one.available_permits() == 0).then(|| self.with.lock().clone())
    }

    fn begin(&self, with: &str, permit: OwnedSemaphorePermit) -> Turn {
        with.clone_into(&mut self.with.lock());
        Turn { _permit: permit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(1)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn those_that_wait_come_in_their_order_and_before_those_that_do_not() {
        let turns = Turns::default();
        assert_eq!(turns.holder(), None);
        let first = turns.take("a restore").unwrap();
        let (mut second, mut third) = (Box::pin(turns.wait("the second", later())), Box::pin(turns.wait("the third", later())));
        assert!(futures::poll!(&mut second).is_pending() && futures::poll!(&mut third).is_pending());
        drop(first);
        assert!(turns.take("no wait").is_err() && turns.holder().is_some(), "it is overtaken");
        let second = second.await.unwrap();
        assert!(futures::poll!(&mut third).is_pending() && turns.holder().as_deref() == Some("the second"));
        drop(second);
        drop(third.await.unwrap());
        drop(turns.take("free").unwrap());
    }

    #[tokio::test]
    async fn what_has_the_engine_is_named_to_those_that_do_not_get_it() {
        let turns = Turns::default();
        let held = turns.take("a restore").unwrap();
        assert_eq!(turns.take("a snapshot").unwrap_err(), "a restore");
        assert_eq!(turns.wait("a snapshot", soon()).await.unwrap_err(), "a restore");
        drop(held);
        // A wait that was given up is no longer in line.
        drop(turns.take("a snapshot").unwrap());
    }
}
