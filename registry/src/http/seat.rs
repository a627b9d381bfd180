//! A request's permit among those that the registry works on at once. A request that waits for its
//! client gives its permit back.

use crate::http::line::{Line, State};
use crate::problem::Failure;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use pfr_schema::ErrorCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Waits for a permit, at most for `limit`.
///
/// # Errors
/// `overloaded`.
pub(crate) async fn wait_for(semaphore: &Arc<Semaphore>, limit: Duration, words: &'static str) -> Result<OwnedSemaphorePermit, Failure> {
    if let Ok(permit) = Arc::clone(semaphore).try_acquire_owned() {
        return Ok(permit);
    }
    match tokio::time::timeout(limit, Arc::clone(semaphore).acquire_owned()).await {
        Ok(permit) => permit.map_err(|e| Failure::internal(e.to_string())),
        Err(_) => Err(Failure::new(ErrorCode::Overloaded, words)),
    }
}

/// The permit of one request. Clones belong to the same request.
#[derive(Clone)]
pub(crate) struct Seat(Arc<Shared>);

struct Shared {
    /// None for requests that need no permit.
    places: Option<Arc<Semaphore>>,
    line: Option<Arc<Line>>,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    permit: Option<OwnedSemaphorePermit>,
    waiting: Option<BoxFuture<'static, Result<OwnedSemaphorePermit, AcquireError>>>,
    /// The handler is done.
    over: bool,
}

impl Seat {
    pub(crate) fn new(places: Option<(Arc<Semaphore>, OwnedSemaphorePermit)>, line: Option<Arc<Line>>) -> Self {
        let (places, permit) = places.unzip();
        Self(Arc::new(Shared { places, line, taken: Mutex::new(Taken { permit, ..Taken::default() }) }))
    }

    /// The client is waited for: another request may have the permit.
    pub(crate) fn leave(&self) {
        self.is(State::Waiting);
        self.taken().permit = None;
    }

    /// The client has sent something. Ready when the request has a permit again.
    pub(crate) fn poll_return(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut taken = self.taken();
        if let Some(places) = &self.0.places
            && taken.permit.is_none()
            && !taken.over
        {
            let waiting = taken.waiting.get_or_insert_with(|| Arc::clone(places).acquire_owned().boxed());
            let permit = ready!(waiting.poll_unpin(cx));
            taken.waiting = None;
            taken.permit = permit.ok();
        }
        drop(taken);
        self.is(State::Working);
        Poll::Ready(())
    }

    /// The answer is complete, and only sending it is left.
    pub(crate) fn end(&self) {
        let mut taken = self.taken();
        *taken = Taken { over: true, ..Taken::default() };
    }

    /// Sets what the request's connection does.
    pub(crate) fn is(&self, state: State) {
        if let Some(line) = &self.0.line {
            line.is(state);
        }
    }

    fn taken(&self) -> std::sync::MutexGuard<'_, Taken> {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
