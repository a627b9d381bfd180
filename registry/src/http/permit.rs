//! A request's permit among those that the registry works on at once. A request that waits for its
//! client, or for memory that slow clients have, gives its permit back.

use crate::http::connections::{Activity, Connection};
use crate::problem::ApiError;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use pfr_schema::ErrorCode;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Waits for a permit, at most for `limit`.
///
/// # Errors
/// `overloaded`.
pub(crate) async fn wait_for(semaphore: &Arc<Semaphore>, limit: Duration, message: &'static str) -> Result<OwnedSemaphorePermit, ApiError> {
    if let Ok(permit) = Arc::clone(semaphore).try_acquire_owned() {
        return Ok(permit);
    }
    let waiting = tracing::info_span!("wait", "otel.name" = "wait for a permit");
    let waited = tokio::time::timeout(limit, Arc::clone(semaphore).acquire_owned()).await;
    drop(waiting);
    match waited {
        Ok(permit) => permit.map_err(|e| ApiError::internal(e.to_string())),
        Err(_) => Err(ApiError::new(ErrorCode::Overloaded, message)),
    }
}

/// The permit of one request. Clones belong to the same request.
#[derive(Clone)]
pub(crate) struct RequestPermit(Arc<Shared>);

struct Shared {
    /// None for requests that need no permit.
    permits: Option<Arc<Semaphore>>,
    connection: Option<Arc<Connection>>,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    permit: Option<OwnedSemaphorePermit>,
    waiting: Option<BoxFuture<'static, Result<OwnedSemaphorePermit, AcquireError>>>,
    /// The handler is done.
    over: bool,
}

impl RequestPermit {
    pub(crate) fn new(permits: Option<(Arc<Semaphore>, OwnedSemaphorePermit)>, connection: Option<Arc<Connection>>) -> Self {
        let (permits, permit) = permits.unzip();
        Self(Arc::new(Shared { permits, connection, held: Mutex::new(Held { permit, ..Held::default() }) }))
    }

    /// The client is waited for: another request may have the permit.
    pub(crate) fn leave(&self) {
        self.set(Activity::Waiting);
        self.held().permit = None;
    }

    /// Waits for `room` without the permit, unless `room` is there at once: another request may
    /// have the permit while this one waits for memory.
    pub(crate) async fn without<T>(&self, room: impl Future<Output = T>) -> T {
        let mut room = pin!(room);
        if let Poll::Ready(room) = futures::poll!(room.as_mut()) {
            return room;
        }
        self.held().permit = None;
        let room = room.await;
        poll_fn(|cx| self.poll_return(cx)).await;
        room
    }

    /// The client has sent something. Ready when the request has a permit again.
    pub(crate) fn poll_return(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut held = self.held();
        if let Some(permits) = &self.0.permits
            && held.permit.is_none()
            && !held.over
        {
            let waiting = held.waiting.get_or_insert_with(|| Arc::clone(permits).acquire_owned().boxed());
            let permit = ready!(waiting.poll_unpin(cx));
            held.waiting = None;
            held.permit = permit.ok();
        }
        drop(held);
        self.set(Activity::Working);
        Poll::Ready(())
    }

    /// The answer is complete, and only sending it is left.
    pub(crate) fn end(&self) {
        let mut held = self.held();
        *held = Held { over: true, ..Held::default() };
    }

    /// Sets what the request's connection does.
    pub(crate) fn set(&self, state: Activity) {
        if let Some(connection) = &self.0.connection {
            connection.set(state);
        }
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
