//! One request as operators see it: one log line and a few metrics. They are written when the
//! response body has ended or the client has left, which is why that happens in `Drop`.

use crate::auth::KnownCaller;
use crate::http::body::BodyLease;
use crate::http::connections::Activity;
use crate::http::permit::RequestPermit;
use crate::metrics as names;
use crate::rates::{Direction, Flow, Throttled};
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, Method, StatusCode, header};
use hyper::body::{Frame, SizeHint};
use pfr_schema::ErrorCode;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use tracing::Span;

/// A request in flight.
pub(crate) struct Observation {
    pub(crate) id: String,
    pub(crate) method: Method,
    pub(crate) path: String,
    /// The route's template, a label with few values.
    pub(crate) route: String,
    /// Whether its log line is only for debugging.
    pub(crate) quiet: bool,
    pub(crate) lease: Arc<BodyLease>,
    started: Instant,
    status: Option<StatusCode>,
    failure: Option<(ErrorCode, Option<String>)>,
    sent: u64,
    /// Whether the complete response was sent.
    complete: bool,
    /// Its permit among the requests that are worked on at once.
    permit: RequestPermit,
    /// Whose token the request carries, once that is known.
    pub(crate) caller: KnownCaller,
    /// Its step of a trace, which ends with it.
    span: Span,
}

impl Observation {
    #[expect(clippy::too_many_arguments, reason = "the parts of a request, each of its own type, and one caller")]
    pub(crate) fn new(
        id: String,
        method: Method,
        path: String,
        route: String,
        quiet: bool,
        lease: Arc<BodyLease>,
        permit: RequestPermit,
        caller: KnownCaller,
    ) -> Self {
        metrics::gauge!(names::IN_FLIGHT).increment(1.0);
        Self {
            id,
            method,
            path,
            route,
            quiet,
            lease,
            started: Instant::now(),
            status: None,
            failure: None,
            sent: 0,
            complete: false,
            permit,
            caller,
            span: Span::current(),
        }
    }

    /// Its route, as the router has it.
    pub(crate) fn route(&self) -> &str {
        &self.route
    }

    /// The request failed.
    pub(crate) fn failed(&mut self, code: ErrorCode, cause: Option<String>) {
        metrics::counter!(names::ERRORS, "code" => code.name()).increment(1);
        self.failure = Some((code, cause));
    }

    /// The response's head is known.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Records the outcome in the span.
    fn trace(&self, status: &str) {
        let size = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.span.record("http.request.body.size", size(self.lease.received())).record("http.response.body.size", size(self.sent));
        if let Some(status) = self.status {
            self.span.record("http.response.status_code", i64::from(status.as_u16()));
        }
        let code = self.failure.as_ref().map(|(code, _)| code.name());
        if let Some(kind) = code.or_else(|| (status == "cut").then_some(status)) {
            self.span.record("error.type", kind);
        }
        // A refusal is no error of the server.
        if status == "cut" || self.status.is_some_and(|status| status.is_server_error()) {
            self.span.record("otel.status_code", "ERROR");
        }
    }

    fn log(&self, status: &str) {
        let (code, cause) = self.failure.as_ref().map_or((None, None), |(code, cause)| (Some(code.name()), cause.as_deref()));
        let duration_ms = self.started.elapsed().as_secs_f64() * 1e3;
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    request_id = %self.id, token = self.caller.id(), method = %self.method, path = %self.path, status, code, cause,
                    bytes_in = self.lease.received(), bytes_out = self.sent, duration_ms, "request"
                )
            };
        }
        match (code, self.status) {
            (Some("internal" | "corrupt_store"), _) => line!(error),
            (_, None) => line!(warn),
            // A report of an agent: one line of its handler says it for all of them.
            (Some("storage_full"), _) if self.quiet => line!(debug),
            (_, Some(status)) if status.is_server_error() => line!(warn),
            _ if self.quiet => line!(debug),
            _ => line!(info),
        }
    }
}

impl Drop for Observation {
    fn drop(&mut self) {
        let status = match self.status {
            Some(status) if self.complete => status.as_str().to_owned(),
            _ => "cut".to_owned(),
        };
        let method = if matches!(self.method.as_str(), "GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE") {
            self.method.to_string()
        } else {
            "other".into()
        };
        self.permit.end();
        self.permit.set(Activity::Idle);
        metrics::gauge!(names::IN_FLIGHT).decrement(1.0);
        metrics::counter!(names::REQUESTS, "route" => self.route.clone(), "method" => method.clone(), "status" => status.clone())
            .increment(1);
        metrics::histogram!(names::DURATION, "route" => self.route.clone(), "method" => method).record(self.started.elapsed());
        self.trace(&status);
        self.log(&status);
    }
}

/// A response body that ends its request's observation.
pub(crate) struct Observed {
    body: Body,
    observation: Observation,
    expected: Option<u64>,
    /// How fast it may go.
    flow: Flow,
}

impl Observed {
    /// The body of a response with these headers.
    pub(crate) fn new(body: Body, headers: &HeaderMap, mut observation: Observation, throttled: Throttled) -> Self {
        // hyper asks a stream for as many bytes as its header says, and not for its end.
        let said = || headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok();
        let expected = body.size_hint().exact().or_else(said);
        // The answer to HEAD has no body, also where there is one that GET would be sent.
        observation.complete = expected == Some(0) || observation.method == Method::HEAD;
        Self { body, observation, expected, flow: Flow::of(throttled, Direction::Down) }
    }
}

impl HttpBody for Observed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        // Its client counts as one that is waited for: it must not keep its connection from others.
        if this.flow.poll_ready(cx).is_pending() {
            this.observation.permit.set(Activity::Waiting);
            return Poll::Pending;
        }
        this.observation.permit.set(Activity::Working);
        let polled = this.observation.span.in_scope(|| Pin::new(&mut this.body).poll_frame(cx));
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                this.flow.moved(bytes);
                this.observation.sent += bytes as u64;
                // hyper does not ask for the end of a body of known length.
                this.observation.complete |= this.expected == Some(this.observation.sent);
            }
            Poll::Ready(Some(Err(error))) => this.observation.failed(code_of(error), Some(error.to_string())),
            Poll::Ready(None) => this.observation.complete = true,
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The code of an error that cut a response short.
fn code_of(error: &axum::Error) -> ErrorCode {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<pfr_store::Error>() {
            return error.code();
        }
        cause = error.source();
    }
    ErrorCode::Internal
}
