//! A request's permit among those that the registry works on at once. A request that waits for its
//! client, or for memory that other requests hold, gives its permit back.

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
use tokio::time::Instant;

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
    /// Since when it waits for a permit, after its client has sent something.
    since: Option<Instant>,
    /// How long it has waited for permits before.
    queued: Duration,
    /// The handler is done.
    over: bool,
}

impl Held {
    /// It waits for no permit any more.
    fn leave_queue(&mut self) {
        self.waiting = None;
        if let Some(since) = self.since.take() {
            self.queued += since.elapsed();
        }
    }
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

    /// Waits for `room`. If it is not there at once, the request gives its permit back meanwhile,
    /// and takes one again afterwards, unless there is no room.
    pub(crate) async fn without<T, E>(&self, room: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let mut room = pin!(room);
        if let Poll::Ready(room) = futures::poll!(room.as_mut()) {
            return room;
        }
        self.give_back();
        let room = room.await?;
        poll_fn(|cx| self.poll_return(cx)).await;
        Ok(room)
    }

    /// Gives the permit back, and the place in the queue for one. The queue hands permits to
    /// requests that do not ask at the moment, and such a permit would stay unused.
    pub(crate) fn give_back(&self) {
        let mut held = self.held();
        held.permit = None;
        held.leave_queue();
    }

    /// How long the request has waited for permits since it was admitted: the registry was busy,
    /// and not its client slow.
    pub(crate) fn queued(&self) -> Duration {
        let held = self.held();
        held.queued + held.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The client has sent something. Ready when the request has a permit again.
    pub(crate) fn poll_return(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut held = self.held();
        if let Some(permits) = &self.0.permits
            && held.permit.is_none()
            && !held.over
        {
            held.since.get_or_insert_with(Instant::now);
            let waiting = held.waiting.get_or_insert_with(|| Arc::clone(permits).acquire_owned().boxed());
            let permit = ready!(waiting.poll_unpin(cx));
            held.leave_queue();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_that_waits_for_room_has_no_permit_and_no_place_in_the_queue() {
        let permits = Arc::new(Semaphore::new(1));
        let first = Arc::clone(&permits).acquire_owned().await.expect("open");
        let own = RequestPermit::new(Some((Arc::clone(&permits), first)), None);
        own.leave();
        let other = Arc::clone(&permits).acquire_owned().await.expect("open");
        // Its client has sent something: it waits for a permit.
        assert!(futures::poll!(poll_fn(|cx| own.poll_return(cx))).is_pending());
        tokio::time::sleep(Duration::from_millis(20)).await;
        let (send, room) = tokio::sync::oneshot::channel();
        let mut waiting = pin!(own.without(room));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        assert!(own.queued() >= Duration::from_millis(20));
        drop(other);
        assert_eq!(permits.available_permits(), 1, "a third request may have the permit");
        send.send(7).expect("it waits");
        assert_eq!(waiting.await, Ok(7));
        assert_eq!(permits.available_permits(), 0, "it has a permit again");
        own.leave();
        assert_eq!(own.without(async { Err::<(), _>("none") }).await, Err("none"));
        let (send, room) = tokio::sync::oneshot::channel::<()>();
        drop(send);
        assert!(own.without(room).await.is_err());
        assert_eq!(permits.available_permits(), 1, "a refusal needs no permit");
    }
}
