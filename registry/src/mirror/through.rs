//! Pull-through in front of the handlers: before one reads, what it is asked for is fetched. Handlers know nothing of it.

use super::upstream::{self, Upstream};
use crate::handlers::inspect::Depth;
use crate::http::extract::Segment as _;
use crate::http::seat::wait_for;
use crate::http::sending::OneByOne;
use crate::problem::Failure;
use crate::telemetry::metrics::BYTES_SENT;
use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts as _, MatchedPath, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::TryStreamExt as _;
use pfr_client::Remote;
use pfr_schema::media_type::FRAMES;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

const SNAPSHOT: &str = "/v1/repositories/{repo}/snapshots/{ref}";
const LINEAGE: &str = "/v1/repositories/{repo}/snapshots/{ref}/lineage";
const TAG: &str = "/v1/repositories/{repo}/tags/{tag}";
const SNAPSHOTS: &str = "/v1/repositories/{repo}/snapshots";
const TAGS: &str = "/v1/repositories/{repo}/tags";

/// How long a download that is passed on waits for its turn.
const QUEUE: Duration = Duration::from_secs(30);

/// What a request's path names where only the upstream knows it, by segment.
#[derive(Clone, Default)]
pub(crate) struct Meant(Vec<(&'static str, String)>);

impl Meant {
    /// What to read instead of a segment.
    pub(crate) fn of(&self, segment: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| *name == segment).map(|(_, text)| text.as_str())
    }
}

/// Who may be asked for what a request names, for handlers that learn only from a body what that is.
#[derive(Clone)]
pub(crate) struct Asking {
    remote: Remote,
    turns: Arc<Semaphore>,
}

pub(crate) async fn middleware(State(upstream): State<Arc<Upstream>>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let via = upstream::via(&parts.headers);
    if let Some(remote) = upstream.asked_via(&via) {
        parts.extensions.insert(Asking { remote, turns: Arc::clone(&upstream.passed) });
    }
    match before(&upstream, &mut parts, &via).await {
        Ok(None) => next.run(Request::from_parts(parts, body)).await,
        Ok(Some(answer)) => answer,
        Err(failure) => failure.into_response(),
    }
}

/// Fetches what the request is about, or answers it.
async fn before(upstream: &Arc<Upstream>, parts: &mut Parts, via: &str) -> Result<Option<Response>, Failure> {
    let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str).to_owned();
    let reads = parts.method == Method::GET || (parts.method == Method::POST && route.ends_with("/verify"));
    if !reads || !route.starts_with("/v1/repositories/{repo}/") {
        return Ok(None);
    }
    // What cannot be parsed is the handler's to refuse.
    let Ok(segments) = RawPathParams::from_request_parts(parts, &()).await else { return Ok(None) };
    let segment = |name: &str| segments.iter().find(|(found, _)| *found == name).map(|(_, text)| text.to_owned());
    let Some(Ok(repository)) = segment("repo").map(|text| RepositoryName::parse(&text)) else { return Ok(None) };
    if route == SNAPSHOTS || route == TAGS {
        return list(upstream, &repository, &route, &parts.uri, via).await;
    }
    if route == TAG {
        if let Some(Ok(tag)) = segment("tag").map(|text| Tag::parse(&text)) {
            upstream.ensure(&repository, &Selector::Tag { tag, back: 0 }, via).await?;
        }
    } else if route.starts_with(SNAPSHOT) {
        let mut meant = Meant::default();
        for name in ["ref", "other"] {
            if let Some(Ok(selector)) = segment(name).map(|text| Selector::parse(&text))
                && let Some(digest) = upstream.ensure(&repository, &selector, via).await?
            {
                meant.0.push((name, digest.to_string()));
            }
        }
        if route == LINEAGE
            && let Some(text) = meant.of("ref").map(ToOwned::to_owned).or_else(|| segment("ref"))
            && let Ok(selector) = Selector::parse(&text)
            && let Ok(axum::extract::Query(depth)) = axum::extract::Query::<Depth>::try_from_uri(&parts.uri)
            && let Ok(limit) = depth.checked()
            && let Some(lineage) = upstream.lineage(&repository, &selector, limit, via).await
        {
            return Ok(Some(Json(lineage).into_response()));
        }
        parts.extensions.insert(meant);
    }
    Ok(None)
}

/// The upstream's list of a repository of which nothing is here. Of others, what is here is listed.
async fn list(
    upstream: &Arc<Upstream>,
    repository: &RepositoryName,
    route: &str,
    uri: &Uri,
    via: &str,
) -> Result<Option<Response>, Failure> {
    let absent = matches!(upstream.store.tags(repository, None, 1).await, Err(error) if error.code() == ErrorCode::RepositoryUnknown);
    let Some(remote) = upstream.asked_via(via).filter(|_| absent) else { return Ok(None) };
    let Ok(axum::extract::Query(paging)) = axum::extract::Query::<crate::http::extract::Paging>::try_from_uri(uri) else {
        return Ok(None);
    };
    let (after, limit) = paging.checked()?;
    let fail = |error| upstream::failure(&error);
    Ok(Some(match route {
        TAGS => Json(remote.tags(repository, after.as_deref(), limit).await.map_err(fail)?).into_response(),
        _ => Json(remote.snapshots(repository, after.as_deref(), limit).await.map_err(fail)?).into_response(),
    }))
}

impl Asking {
    /// Frames of blobs that are not here, passed through and not kept: only who asks for a snapshot has it stored. The reader verifies them.
    pub(crate) async fn frames(&self, repository: &RepositoryName, digests: Vec<Digest>) -> Result<Response, Failure> {
        let frames = self.remote.frames(repository, digests).await.map_err(|error| upstream::failure(&error))?;
        // Only now that the upstream has begun to answer: registries that ask each other must not wait for each other's turns.
        let turn = wait_for(&self.turns, QUEUE, "the registry passes on as many downloads as it may; try again in a moment").await?;
        let sent = metrics::counter!(BYTES_SENT);
        let frames = frames.map_err(unavailable).inspect_ok(move |bytes| {
            let _ = &turn;
            sent.increment(bytes.len() as u64);
        });
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(FRAMES));
        Ok((headers, Body::from_stream(OneByOne::new(frames))).into_response())
    }
}

/// That the upstream's answer was cut is no bug here, and no damage.
fn unavailable(error: pfr_client::Error) -> pfr_store::Error {
    pfr_store::Error::Unavailable { what: "upstream registry", reason: error.to_string() }
}
