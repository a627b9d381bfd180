//! Pull-through: a registry near its readers fetches what it lacks from an upstream, and keeps it.
//!
//! It is one layer in front of the handlers, which know nothing of it:
//!
//! ```text
//! a read of a snapshot or tag ─▶ access ─▶ tag as upstream, snapshot pulled into the store ─▶ handler
//! a look at a snapshot        ─▶ signatures that the upstream got since
//! frames that the store lacks ─▶ handler fails ─▶ the upstream's frames, passed on and not kept
//! ```
//!
//! Decision 24 says why it exists.

mod ancestors;
mod pulls;
mod signatures;
mod tags;
mod upstream;

use crate::app::App;
use crate::auth::{Access, Pull};
use crate::config::Config;
use crate::http::base;
use crate::http::path::Segment as _;
use crate::http::permit::wait_for;
use crate::http::query::{Depth, Paging, Query};
use crate::http::resolved::ResolvedRefs;
use crate::http::sending::OneByOne;
use crate::metrics::BYTES_SENT;
use crate::problem::ApiError;
use crate::v1::frames::UnservedFrames;
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
use pfr_store::Store;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use upstream::{Upstream, Via, failure, is_unknown};

const SNAPSHOT: &str = "/v1/repositories/{repo}/snapshots/{ref}";
const LINEAGE: &str = "/v1/repositories/{repo}/snapshots/{ref}/lineage";
const TAG: &str = "/v1/repositories/{repo}/tags/{tag}";
const SNAPSHOTS: &str = "/v1/repositories/{repo}/snapshots";
const TAGS: &str = "/v1/repositories/{repo}/tags";

/// Streams passed on at once; others wait. Each holds a piece or two, of a few hundred KiB.
const PASSED: usize = 64;
/// How long a download that is passed on waits for its permit.
const QUEUE: Duration = Duration::from_secs(30);

/// The layer's state.
pub(crate) struct PullThrough {
    upstream: Upstream,
    store: Store,
    pulls: Arc<pulls::Pulls>,
    signatures: Arc<signatures::Signatures>,
    tags: tags::Tags,
    passed: Arc<Semaphore>,
}

impl PullThrough {
    /// The layer, if the settings name an upstream. Nothing is sent yet.
    ///
    /// # Errors
    /// [`pfr_client::Error::Url`].
    pub(crate) fn of(config: &Config, store: &Store) -> Result<Option<Arc<Self>>, pfr_client::Error> {
        let Some(upstream) = Upstream::of(config)? else { return Ok(None) };
        let ttl = Duration::from_secs(config.upstream_ttl_seconds);
        let signatures = Arc::new(signatures::Signatures::new(store.clone(), ttl));
        let pulls = pulls::Pulls::new(store.clone(), Arc::clone(&signatures));
        let tags = tags::Tags::new(store.clone(), Arc::clone(&pulls), Arc::clone(&signatures), ttl);
        Ok(Some(Arc::new(Self { upstream, store: store.clone(), pulls, signatures, tags, passed: Arc::new(Semaphore::new(PASSED)) })))
    }

    /// Makes the snapshot of a selector available here, if the upstream has it. Returns its digest
    /// where only the upstream can resolve the selector.
    async fn ensure(
        &self,
        remote: &Remote,
        repository: &RepositoryName,
        selector: &Selector,
        via: &Via,
    ) -> Result<Option<Digest>, ApiError> {
        let (tag, back) = match selector {
            Selector::Digest(digest) => return self.pulls.snapshot(remote, repository, *digest, via).await.map(|()| None),
            Selector::Prefix(_) => return self.resolve_prefix(remote, repository, selector, via).await,
            Selector::Tag { tag, back } => (tag, *back),
        };
        self.tags.refresh(remote, repository, tag, via).await?;
        if back == 0 {
            return Ok(None);
        }
        let Ok(row) = self.store.tag(repository, tag).await else { return Ok(None) };
        let end = pfr_client::nth_ancestor(&self.store, remote, repository, row.digest, back).await.map_err(|error| match error {
            pfr_client::Error::Store(error) => ApiError::from(error),
            error => failure(&error),
        })?;
        let Some(end) = end else { return Ok(None) };
        self.pulls.snapshot(remote, repository, end, via).await?;
        Ok(Some(end))
    }

    /// Resolves a shortened digest: among the snapshots that are here, then among the upstream's.
    async fn resolve_prefix(
        &self,
        remote: &Remote,
        repository: &RepositoryName,
        selector: &Selector,
        via: &Via,
    ) -> Result<Option<Digest>, ApiError> {
        match self.store.resolve(repository, selector).await {
            Err(error) if matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => {}
            // The handler finds the same, and refuses an ambiguous digest.
            _ => return Ok(None),
        }
        let there = match remote.lineage(repository, selector, 1).await {
            Ok(lineage) => lineage.snapshots.into_iter().next().map(|snapshot| snapshot.digest),
            Err(error) if is_unknown(&error) => return Ok(None),
            Err(error) => return Err(failure(&error)),
        };
        let Some(digest) = there else { return Ok(None) };
        self.pulls.snapshot(remote, repository, digest, via).await?;
        Ok(Some(digest))
    }

    /// Fetches what a request is about, or answers the request.
    async fn before(&self, app: &App, remote: &Remote, parts: &mut Parts, via: &Via) -> Result<Option<Response>, ApiError> {
        let route = route(parts).to_owned();
        let reads = parts.method == Method::GET || (parts.method == Method::POST && route.ends_with("/verify"));
        if !reads || !route.starts_with("/v1/repositories/{repo}/") {
            return Ok(None);
        }
        // Nothing is fetched for a caller that may not read it.
        let Access { to: repository, .. } = Access::<Pull>::from_request_parts(parts, app).await?;
        if route == SNAPSHOTS || route == TAGS {
            return self.list(remote, &repository, &route, &parts.uri).await;
        }
        // The handler refuses what cannot be parsed.
        let Ok(segments) = RawPathParams::from_request_parts(parts, &()).await else { return Ok(None) };
        let segment = |name: &str| segments.iter().find(|(found, _)| *found == name).map(|(_, text)| text);
        if route == TAG {
            if let Some(Ok(tag)) = segment("tag").map(Tag::parse) {
                self.ensure(remote, &repository, &Selector::Tag { tag, back: 0 }, via).await?;
            }
        } else if route.starts_with(SNAPSHOT) {
            let mut resolved = ResolvedRefs::default();
            for name in ["ref", "other"] {
                if let Some(Ok(selector)) = segment(name).map(Selector::parse)
                    && let Some(digest) = self.ensure(remote, &repository, &selector, via).await?
                {
                    resolved.set(name, digest.to_string());
                }
            }
            if route == SNAPSHOT
                && let Some(text) = resolved.get("ref").or_else(|| segment("ref"))
                && let Ok(selector) = Selector::parse(text)
                && let Ok(digest) = self.store.resolve(&repository, &selector).await
            {
                self.signatures.refresh(remote, &repository, digest).await;
            }
            if route == LINEAGE
                && let Some(text) = resolved.get("ref").or_else(|| segment("ref"))
                && let Ok(selector) = Selector::parse(text)
                && let Ok(Query(depth)) = Query::<Depth>::of(&parts.uri)
                && let Ok(limit) = depth.checked()
                && let Some(lineage) = ancestors::lineage(&self.store, remote, &repository, &selector, limit).await
            {
                return Ok(Some(Json(lineage).into_response()));
            }
            parts.extensions.insert(resolved);
        }
        Ok(None)
    }

    /// The upstream's list, if nothing of the repository is here. Else the handler lists what is
    /// here.
    async fn list(&self, remote: &Remote, repository: &RepositoryName, route: &str, uri: &Uri) -> Result<Option<Response>, ApiError> {
        match self.store.tags(repository, None, 1).await {
            Err(error) if error.code() == ErrorCode::RepositoryUnknown => {}
            _ => return Ok(None),
        }
        let Ok(Query(paging)) = Query::<Paging>::of(uri) else { return Ok(None) };
        let (after, limit) = paging.checked()?;
        let fail = |error| failure(&error);
        Ok(Some(match route {
            TAGS => Json(remote.tags(repository, after.as_deref(), limit).await.map_err(fail)?).into_response(),
            _ => Json(remote.snapshots(repository, after.as_deref(), limit).await.map_err(fail)?).into_response(),
        }))
    }

    /// Frames of blobs that are not here, passed on and not kept: only a read of a snapshot stores
    /// it. The reader verifies them.
    async fn frames(&self, remote: &Remote, unserved: UnservedFrames) -> Result<Response, ApiError> {
        let frames = remote.frames(unserved.repository(), unserved.digests(), unserved.codecs()).await.map_err(|error| failure(&error))?;
        drop(unserved);
        // Only after the upstream has begun to answer: registries that ask each other must not wait
        // for each other's permits.
        let permit = wait_for(&self.passed, QUEUE, "the registry passes on as many downloads as it may; try again in a moment").await?;
        let sent = metrics::counter!(BYTES_SENT);
        let frames = frames.map_err(unavailable).inspect_ok(move |bytes| {
            let _ = &permit;
            sent.increment(bytes.len() as u64);
        });
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(FRAMES));
        Ok((headers, Body::from_stream(OneByOne::new(frames))).into_response())
    }
}

/// The layer.
pub(crate) async fn middleware(State((app, this)): State<(App, Arc<PullThrough>)>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let via = Via::of(&parts.headers);
    // The upstream's default domain is asked, for this one's.
    let Some(remote) = this.upstream.for_request(&via).filter(|_| base::is_default(&parts)) else {
        return next.run(Request::from_parts(parts, body)).await;
    };
    match this.before(&app, &remote, &mut parts, &via).await {
        Ok(None) => {}
        Ok(Some(answer)) => return answer,
        Err(failure) => return failure.into_response(),
    }
    let mut response = next.run(Request::from_parts(parts, body)).await;
    match response.extensions_mut().remove::<UnservedFrames>() {
        Some(unserved) => this.frames(&remote, unserved).await.unwrap_or_else(ApiError::into_response),
        None => response,
    }
}

fn route(parts: &Parts) -> &str {
    parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str)
}

/// An upstream whose answer was cut is neither a bug here nor damage.
fn unavailable(error: pfr_client::Error) -> pfr_store::Error {
    pfr_store::Error::Unavailable { what: "upstream registry", reason: error.to_string() }
}
