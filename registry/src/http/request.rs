//! The outermost layer: request id, host, origin, permit, panics, problems, observation.

use crate::app::App;
use crate::audit::{Ending, Trail};
use crate::auth::{KnownCaller, challenges};
use crate::http::connections::{Connection, NoPlace};
use crate::http::host::Hosts;
use crate::http::observe::{Observation, Observed};
use crate::http::permit::{RequestPermit, wait_for};
use crate::http::{address, base, body, host, same_origin, traced};
use crate::oci;
use crate::problem::ApiError;
use crate::rates::Throttled;
use crate::ui::Browser;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::FutureExt as _;
use pfr_schema::ErrorCode;
use pfr_service::problem;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument as _, Span};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Routes that must answer however busy the registry is.
const EXEMPT: [&str; 3] = ["/livez", "/readyz", "/metrics"];
/// How long their answers may take: such a request may hold one of the few places in the reserve.
/// The handlers wait for the store for less, and the rest is for the check of a token. Prometheus
/// waits for 10 seconds.
const EXEMPT_LIMIT: Duration = Duration::from_secs(8);
/// The route of reports of agents, which come every few seconds from each host: their lines are for
/// debugging only, unless the registry fails.
const REPORTS: &str = "/v1/agents/{agent}";
/// Routes that answer whatever host is named: their answer tells nothing.
const PROBES: [&str; 2] = ["/livez", "/readyz"];
/// Streams of frames and of blobs have their own permits, so that they and other requests do not
/// wait for each other.
const STREAMS: [&str; 5] = [
    "/v1/repositories/{repo}/pushes/{id}/frames",
    "/v1/repositories/{repo}/frames",
    "/v2/{repo}/blobs/uploads",
    "/v2/{repo}/blobs/uploads/{id}",
    "/v2/{repo}/blobs/{digest}",
];

/// Whether a route, which is its path, must answer however busy the registry is.
pub(crate) fn is_exempt(route: &str) -> bool {
    EXEMPT.contains(&route)
}

pub(crate) async fn middleware(State(app): State<App>, request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let route = request.extensions().get::<MatchedPath>().map_or("unmatched", MatchedPath::as_str).to_owned();
    let span = if is_exempt(&route) {
        Span::none()
    } else {
        let path = base::path_of(request.uri(), request.extensions());
        traced::span_of(&request, &route, path, &id, app.continues_traces)
    };
    answer(app, request, next, id, route).instrument(span).await
}

async fn answer(app: App, request: Request, next: Next, id: String, route: String) -> Response {
    let exempt = is_exempt(&route);
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    let named = match PROBES.contains(&route.as_str()) {
        true => host::check(&request, &Hosts::Any),
        false => host::check(&request, &app.hosts),
    };
    let is_proper = named.and_then(|()| same_origin::check(request.method(), request.headers()));
    let admitted = match is_proper {
        Err(failure) => Err(failure),
        Ok(()) if exempt => Ok(None),
        Ok(()) if request.extensions().get::<NoPlace>().is_some() => Err(ApiError::new(ErrorCode::Overloaded, FULL)),
        Ok(()) => {
            let permits = if STREAMS.contains(&route.as_str()) { &app.stream_permits } else { &app.request_permits };
            wait_for(permits, app.queue, BUSY).await.map(|permit| Some((Arc::clone(permits), permit)))
        }
    };
    let (permit, refused) = match admitted {
        Ok(permit) => (RequestPermit::new(permit, connection), None),
        Err(failure) => (RequestPermit::new(None, connection), Some(failure)),
    };
    // A client that waits for "100 Continue" has sent nothing that must be drained.
    let waits = request.headers().contains_key(header::EXPECT);
    let method = request.method().clone();
    let path = base::path_of(request.uri(), request.extensions()).to_owned();
    let reader = Reader::of(&request, app.has_tls);
    let from = address::source(request.extensions(), request.headers(), app.proxies);

    let (mut parts, body) = request.into_parts();
    let throttled = Throttled::default();
    let (body, lease) = body::lease(body, app.pace, permit.clone(), throttled.clone());
    let caller = KnownCaller::default();
    let trail = Trail::new(&app.audit, &method, &route, &id, from, caller.clone());
    parts.extensions.insert(caller.clone());
    parts.extensions.insert(trail.clone());
    parts.extensions.insert(permit.clone());
    if STREAMS.contains(&route.as_str()) {
        parts.extensions.insert(throttled.clone());
    }
    let quiet = exempt || (method == Method::PUT && route == REPORTS);
    let mut observation = Observation::new(id, method, path, route, quiet, lease, permit.clone(), caller);
    let answering = async {
        let response = if let Some(failure) = refused {
            drop(body);
            // The browser of a user: the audit log has whose token another site tried to use.
            if let Some(gate) = app.gate.as_ref().filter(|_| failure.code == ErrorCode::Denied) {
                gate.identify(&parts).await;
            }
            failure.into_response()
        } else {
            let answering = next.run(Request::from_parts(parts, body));
            AssertUnwindSafe(answering).catch_unwind().await.unwrap_or_else(|panic| panicked(&*panic).into_response())
        };
        let ending = Ending::of(&response);
        trail.close(&app.domains, ending).await;
        response
    };
    let response = match exempt {
        // The record of a refusal is written all the same, in a task of its own.
        true => tokio::time::timeout(EXEMPT_LIMIT, answering).await.unwrap_or_else(|_| late().into_response()),
        false => answering.await,
    };
    // The rest is sending the answer, which takes as long as the client takes.
    permit.end();
    let mut response = explain(response, &mut observation, &reader);
    let refused = response.status().is_client_error() || response.status().is_server_error();
    if refused && (!waits || observation.lease.received() > 0) {
        observation.lease.drain().await;
    }
    if let Ok(value) = HeaderValue::from_str(&observation.id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    observation.answered(response.status());
    let (head, body) = response.into_parts();
    let body = Observed::new(body, &head.headers, observation, throttled);
    Response::from_parts(head, Body::new(body))
}

/// What reads the answer to a request.
enum Reader {
    Browser(Browser),
    /// A program that knows the OCI API.
    Oci,
    Other,
}

impl Reader {
    fn of(request: &Request, has_tls: bool) -> Self {
        if oci::is_oci(request.uri().path()) {
            return Self::Oci;
        }
        Browser::of(request, has_tls).map_or(Self::Other, Self::Browser)
    }
}

/// Turns every failure into a problem, also those that no handler made: 404 and 405 of the router,
/// rejections of extractors. A browser gets a page, and a program that knows the OCI API its
/// errors.
fn explain(mut response: Response, observation: &mut Observation, reader: &Reader) -> Response {
    let Some(failure) = problem::of_response(&mut response, &observation.method, &observation.path) else { return response };
    observation.failed(failure.code, failure.cause.clone());
    let code = failure.code;
    let mut answer = match reader {
        Reader::Browser(browser) => browser.problem(&failure, observation),
        Reader::Oci => oci::response_to(failure, observation.route(), &observation.id),
        Reader::Other => failure.into_problem(&observation.id),
    };
    let headers = answer.headers_mut();
    if code == ErrorCode::Unauthorized && !matches!(reader, Reader::Oci) {
        headers.extend(challenges());
    }
    for name in [header::ALLOW, header::ETAG, header::LOCATION, header::RANGE, header::CONTENT_RANGE] {
        if let Some(value) = response.headers_mut().remove(&name) {
            headers.insert(name, value);
        }
    }
    answer
}

const FULL: &str = "the registry has as many connections as it may, and works for all of them; try again in a moment";
const BUSY: &str = "the registry serves as many requests as it may; try again in a moment";

fn late() -> ApiError {
    let detail = "the registry's database, or the issuer of the token, does not answer; this says nothing about the token, try again";
    ApiError::new(ErrorCode::Unavailable, detail).because(format!("no answer within {EXEMPT_LIMIT:?}"))
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> ApiError {
    let message = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    ApiError::internal(format!("panic: {}", message.unwrap_or("without a message")))
}

/// The client's id if it is harmless in headers and logs, or else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let sane = |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok()).filter(sane);
    given.map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned)
}
