//! Request bodies: leased to the handler, timed while the client sends, and drained after a
//! refusal.
//!
//! A server that answers and closes while the client still sends makes the kernel reset the
//! connection, and the client sees "broken pipe" instead of the answer. So the handler gets a lease
//! of the body. After a refusal, the rest of the body is read and discarded, within limits.

use crate::http::permit::RequestPermit;
use crate::http::timeout::{ClientTimeout, Pace};
use crate::problem::ApiError;
use crate::rates::{Direction, Flow, Throttled};
use axum::body::{Body, Bytes, HttpBody};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use hyper::body::{Frame, SizeHint};
use pfr_store::Error;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// Most bytes read after a refusal: two requests' worth of frames.
const DRAIN_BYTES: u64 = 128 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// The client stopped sending in the middle of a body.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the client stopped sending the request body")]
pub(crate) struct Stalled;

/// Whether an error of a body is a stall.
pub(crate) fn is_stall(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |e| e.source()).any(<dyn std::error::Error>::is::<Stalled>)
}

/// The innermost reason of an error of a body: the outer ones say only that there was one.
pub(crate) fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    std::iter::successors(Some(error), |e| e.source()).last().unwrap_or(error).to_string()
}

/// Whether the client of a body stalled. The store sees that its input ended early, but not why.
#[derive(Clone, Default)]
pub(crate) struct Stalls(Arc<AtomicBool>);

impl Stalls {
    /// The failure of a request whose body the store took.
    pub(crate) fn explain(&self, error: Error) -> ApiError {
        match error {
            Error::Input(_) if self.0.load(Ordering::Relaxed) => ApiError::stalled(),
            error => error.into(),
        }
    }
}

/// The bytes of a body for the store.
pub(crate) fn watched(body: Body) -> (impl Stream<Item = Result<Bytes, axum::Error>> + Send + Unpin + 'static, Stalls) {
    let stalls = Stalls::default();
    let seen = stalls.clone();
    (body.into_data_stream().inspect_err(move |error| seen.0.store(is_stall(error), Ordering::Relaxed)), stalls)
}

/// The state of a leased body, and the body itself once the handler has dropped it.
#[derive(Default)]
pub(crate) struct BodyLease {
    received: AtomicU64,
    returned: Mutex<Option<Body>>,
}

impl BodyLease {
    /// Body bytes received so far.
    pub(crate) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Reads the bytes that the handler left, so that the client reads the answer.
    pub(crate) async fn drain(&self) {
        let Some(body) = self.returned.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        if body.is_end_stream() {
            return;
        }
        let mut left = DRAIN_BYTES;
        let mut stream = body.into_data_stream();
        let reading = async {
            while let Some(Ok(bytes)) = stream.next().await {
                left = left.saturating_sub(bytes.len() as u64);
                if left == 0 {
                    break;
                }
            }
        };
        // A client that still sends after that is not interested in the answer.
        let _ = tokio::time::timeout(DRAIN_TIME, reading).await;
    }
}

/// A request body that is leased to a handler.
pub(crate) struct LeasedBody {
    body: Option<Body>,
    timeout: ClientTimeout,
    permit: RequestPermit,
    /// A frame that arrived while the request had no permit.
    pending: Option<Frame<Bytes>>,
    /// How fast it may come.
    flow: Flow,
    lease: Arc<BodyLease>,
}

/// Leases `body` to a handler. The body returns to the [`BodyLease`] when the handler drops it.
/// While the client is waited for, or is to wait, the request leaves its `permit`.
pub(crate) fn lease(body: Body, pace: Pace, permit: RequestPermit, throttled: Throttled) -> (Body, Arc<BodyLease>) {
    let lease = Arc::new(BodyLease::default());
    let (timeout, flow) = (ClientTimeout::new(pace), Flow::of(throttled, Direction::Up));
    let leased = LeasedBody { body: Some(body), timeout, permit, pending: None, flow, lease: Arc::clone(&lease) };
    (Body::new(leased), lease)
}

impl HttpBody for LeasedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if this.pending.is_some() {
            ready!(this.permit.poll_return(cx));
            return Poll::Ready(this.pending.take().map(Ok));
        }
        let Some(body) = &mut this.body else {
            ready!(this.permit.poll_return(cx));
            return Poll::Ready(None);
        };
        // Its client is not asked for more meanwhile, and so is not late.
        if this.flow.poll_ready(cx).is_pending() {
            this.permit.leave();
            return Poll::Pending;
        }
        match Pin::new(body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                this.lease.received.fetch_add(bytes as u64, Ordering::Relaxed);
                this.timeout.moved(bytes);
                this.flow.moved(bytes);
                this.pending = Some(frame);
                ready!(this.permit.poll_return(cx));
                Poll::Ready(this.pending.take().map(Ok))
            }
            Poll::Ready(Some(Err(error))) => {
                this.body = None;
                Poll::Ready(Some(Err(error)))
            }
            Poll::Ready(None) => {
                this.body = None;
                ready!(this.permit.poll_return(cx));
                Poll::Ready(None)
            }
            Poll::Pending => {
                this.permit.leave();
                ready!(this.timeout.poll_expired(cx));
                this.body = None;
                Poll::Ready(Some(Err(axum::Error::new(Stalled))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pending.is_none() && self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for LeasedBody {
    fn drop(&mut self) {
        *self.lease.returned.lock().unwrap_or_else(PoisonError::into_inner) = self.body.take();
    }
}
