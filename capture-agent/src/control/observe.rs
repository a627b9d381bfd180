//! The middleware of each request: an id, panics as errors, the problem document, a log line and a
//! metric.

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::FutureExt as _;
use pfr_schema::ErrorCode;
use pfr_service::problem::{self, ApiError};
use std::panic::AssertUnwindSafe;
use std::time::Instant;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

pub(super) async fn middleware(request: Request, next: Next) -> Response {
    let id = uuid::Uuid::now_v7().to_string();
    let route = request.extensions().get::<MatchedPath>().map_or("unmatched", MatchedPath::as_str).to_owned();
    let span = span_of(&request, &route, &id);
    answer(request, next, id, route).instrument(span).await
}

/// The span of a request of the API: a step of the trace of its client.
fn span_of(request: &Request, route: &str, id: &str) -> Span {
    if !route.starts_with("/v1/") {
        return Span::none();
    }
    let method = request.method().as_str();
    let span = tracing::info_span!(
        "request",
        "otel.name" = Empty,
        "otel.kind" = "server",
        "http.request.method" = method,
        "http.route" = route,
        "pf.request_id" = id,
        "http.response.status_code" = Empty,
        "error.type" = Empty,
        "otel.status_code" = Empty,
    );
    if !span.is_disabled() {
        span.record("otel.name", format!("{method} {route}"));
        pfr_service::traces::adopt(&span, request.headers());
    }
    span
}

async fn answer(request: Request, next: Next, id: String, route: String) -> Response {
    let started = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let panicked = |_| ApiError::new(ErrorCode::Internal, "a bug in the agent; please report it with the request id").into_response();
    let response = AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(panicked);
    let (mut response, failure) = explain(response, &method, &path, &id);
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let status = response.status().as_u16();
    metrics::counter!(crate::metrics::REQUESTS, "route" => route, "status" => status.to_string()).increment(1);
    let seconds = started.elapsed().as_secs_f64();
    let span = Span::current();
    span.record("http.response.status_code", i64::from(status));
    if let Some(failure) = &failure {
        span.record("error.type", failure.code.name());
    }
    if status >= 500 {
        span.record("otel.status_code", "ERROR");
    }
    match failure {
        Some(failure) => {
            tracing::warn!(request = id, %method, path, status, seconds, code = %failure.code, detail = failure.detail, cause = failure.cause, "HTTP request failed");
        }
        None if path.starts_with("/v1/") => tracing::info!(request = id, %method, path, status, seconds, "HTTP request done"),
        None => tracing::debug!(request = id, %method, path, status, seconds, "HTTP request done"),
    }
    response
}

/// Turns every failure into a problem, also those of extractors.
fn explain(mut response: Response, method: &Method, path: &str, id: &str) -> (Response, Option<ApiError>) {
    let Some(failure) = problem::of_response(&mut response, method, path) else { return (response, None) };
    let mut problem = failure.clone().into_problem(id);
    if let Some(allowed) = response.headers_mut().remove(header::ALLOW) {
        problem.headers_mut().insert(header::ALLOW, allowed);
    }
    (problem, Some(failure))
}
