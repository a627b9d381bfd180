//! The one middleware: id, place among the requests served at once, panics, problems, observation.

use crate::app::App;
use crate::http::body;
use crate::http::observe::{Observation, Observed};
use crate::problem::Failure;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::FutureExt as _;
use pfr_schema::ErrorCode;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Must answer however busy the registry is.
const EXEMPT: [&str; 3] = ["/livez", "/readyz", "/metrics"];

pub(crate) async fn middleware(State(app): State<App>, request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let route = request.extensions().get::<MatchedPath>().map_or("unmatched", MatchedPath::as_str).to_owned();
    let exempt = EXEMPT.contains(&route.as_str());
    let place = if exempt { None } else { Arc::clone(&app.places).try_acquire_owned().ok() };
    let overloaded = !exempt && place.is_none();
    // A client that waits for "100 Continue" has not sent what it would have to be drained of.
    let waits = request.headers().contains_key(header::EXPECT);
    let method = request.method().clone();
    let path = request.uri().path().to_owned();

    let (parts, body) = request.into_parts();
    let (body, loan) = body::lend(body, app.body_idle);
    let mut observation = Observation::new(id, method, path, route, exempt, loan, place);
    let response = if overloaded {
        drop(body);
        overload().into_response()
    } else {
        let answering = next.run(Request::from_parts(parts, body));
        AssertUnwindSafe(answering).catch_unwind().await.unwrap_or_else(|panic| panicked(&*panic).into_response())
    };

    let mut response = explain(response, &mut observation);
    let refused = response.status().is_client_error() || response.status().is_server_error();
    if refused && (!waits || observation.loan.received() > 0) {
        observation.loan.drain().await;
    }
    if let Ok(value) = HeaderValue::from_str(&observation.id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    observation.answered(response.status());
    response.map(|body| Body::new(Observed::new(body, observation)))
}

/// Turns every failure into a problem, also those that handlers did not make: 404 and 405 of the router, rejections of extractors.
fn explain(mut response: Response, observation: &mut Observation) -> Response {
    let status = response.status();
    let failure = match response.extensions_mut().remove::<Failure>() {
        Some(failure) => failure,
        None if !status.is_client_error() && !status.is_server_error() => return response,
        None if status == StatusCode::METHOD_NOT_ALLOWED => {
            let allowed = response.headers().get(header::ALLOW).and_then(|v| v.to_str().ok()).unwrap_or("other methods");
            let detail = format!("{} does not allow {}, only {allowed}", observation.path, observation.method);
            Failure { status, ..Failure::invalid(detail) }
        }
        None if status == StatusCode::NOT_FOUND => Failure::new(ErrorCode::NotFound, "no such page"),
        None if status.is_client_error() => Failure::invalid(format!("the request was refused: {status}")),
        None => Failure::internal(format!("a response without a reason: {status}")),
    };
    observation.failed(failure.code, failure.cause.clone());
    let mut problem = failure.into_problem(&observation.id);
    for name in [header::ALLOW, header::ETAG] {
        if let Some(value) = response.headers_mut().remove(&name) {
            problem.headers_mut().insert(name, value);
        }
    }
    problem
}

fn overload() -> Failure {
    Failure::new(ErrorCode::Overloaded, "the registry serves as many requests as it may; try again in a moment")
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    let words = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Failure::internal(format!("panic: {}", words.unwrap_or("without words")))
}

/// The client's id where it is harmless in headers and logs, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let sane = |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok()).filter(sane);
    given.map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned)
}
