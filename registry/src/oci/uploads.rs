//! Uploads of blobs: at once, in chunks, or without bytes from another repository.
//!
//! The state of an upload is in the store: any replica takes the next chunk.

use super::address::{Address, digest};
use super::{Answer, CONTENT_DIGEST, digest_value, value};
use crate::auth::{Access, Caller, Push};
use crate::domains::Domain;
use crate::http::body::{self, Stalls};
use crate::http::path::Path;
use crate::http::query::Query;
use crate::metrics::BYTES_RECEIVED;
use crate::problem::ApiError;
use axum::body::HttpBody as _;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::{Digest, DomainName, RepositoryName};
use pfr_store::{BodyStream, Error, PushId};
use serde::Deserialize;
use std::sync::Arc;
use tracing::Instrument as _;

const UPLOAD_UUID: HeaderName = HeaderName::from_static("docker-upload-uuid");

/// What a new upload asks for.
#[derive(Deserialize)]
pub(crate) struct Begin {
    /// A blob that may be here already.
    mount: Option<String>,
    /// The repository that has it.
    from: Option<String>,
    /// The digest of the body.
    digest: Option<String>,
}

pub(crate) async fn begin(
    Access { to: repository, domain, caller, .. }: Access<Push>,
    address: Address,
    Query(asked): Query<Begin>,
    request: Request,
) -> Answer<Response> {
    if let Some(mount) = &asked.mount {
        let mount = digest(mount)?;
        let from = sources(&domain, &caller, &mount, asked.from.as_deref()).await?;
        if domain.store.mount_blob(&repository, mount, &from).await? {
            return Ok(created(&address, &mount));
        }
    } else if let Some(named) = &asked.digest {
        let named = digest(named)?;
        let upload = Upload::new(domain, repository, None);
        return match upload.complete(named, None, request).await? {
            Ok(()) => Ok(created(&address, &named)),
            Err(moved) => Err(ApiError::internal(moved.detail)),
        };
    }
    let upload = domain.store.open_push(&repository).await?;
    Ok(progress(StatusCode::ACCEPTED, &address, &upload.id, 0))
}

/// Repositories that a blob may be mounted from: the one that was named, or any that the caller
/// sees. One that it does not see is one that does not have it.
async fn sources(domain: &Domain, caller: &Caller, mount: &Digest, from: Option<&str>) -> Answer<Vec<RepositoryName>> {
    let mut places = match from {
        // Nothing is mounted from another domain.
        Some(name) => {
            let prefix = format!("{}/{}/", DomainName::FOLDER, domain.name);
            name.strip_prefix(&prefix).unwrap_or(name).parse().map_or_else(|_| Vec::new(), |name| vec![name])
        }
        None => domain.store.blob_places(*mount).await?,
    };
    places.retain(|place| caller.sees(place));
    Ok(places)
}

pub(crate) async fn append(
    Access { to: repository, domain, .. }: Access<Push>,
    Path(id): Path<PushId>,
    address: Address,
    request: Request,
) -> Answer<Response> {
    let begin_at = begins(request.headers(), request.body().size_hint().exact())?;
    let upload = Upload::new(domain, repository, Some(id.clone()));
    match upload.append(begin_at, request).await? {
        Ok(received) => Ok(progress(StatusCode::ACCEPTED, &address, &id, received)),
        Err(moved) => Ok(moved.response(&address, &id)),
    }
}

/// The end of an upload.
#[derive(Deserialize)]
pub(crate) struct End {
    digest: String,
}

pub(crate) async fn finish(
    Access { to: repository, domain, .. }: Access<Push>,
    Path(id): Path<PushId>,
    address: Address,
    Query(End { digest: named }): Query<End>,
    request: Request,
) -> Answer<Response> {
    let named = digest(&named)?;
    let begin_at = begins(request.headers(), request.body().size_hint().exact())?;
    let upload = Upload::new(domain, repository, Some(id.clone()));
    match upload.complete(named, begin_at, request).await? {
        Ok(()) => Ok(created(&address, &named)),
        Err(moved) => Ok(moved.response(&address, &id)),
    }
}

pub(crate) async fn status(
    Access { to: repository, domain, .. }: Access<Push>,
    Path(id): Path<PushId>,
    address: Address,
) -> Answer<Response> {
    let upload = domain.store.live_push(&repository, &id).await?;
    let received = domain.store.upload_received(&upload).await?;
    Ok(progress(StatusCode::NO_CONTENT, &address, &id, received))
}

pub(crate) async fn cancel(Access { to: repository, domain, .. }: Access<Push>, Path(id): Path<PushId>) -> Answer<StatusCode> {
    let upload = domain.store.live_push(&repository, &id).await?;
    domain.store.abort(&upload).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A chunk that is not the next one.
struct Moved {
    detail: String,
    received: u64,
}

impl Moved {
    fn response(self, address: &Address, id: &PushId) -> Response {
        let mut response = ApiError::invalid(self.detail).with_status(StatusCode::RANGE_NOT_SATISFIABLE).into_response();
        let headers = progress(StatusCode::ACCEPTED, address, id, self.received).headers().clone();
        response.headers_mut().extend(headers);
        response
    }
}

/// What one request does for an upload.
struct Upload {
    domain: Arc<Domain>,
    repository: RepositoryName,
    /// None: the body is all of it.
    id: Option<PushId>,
}

impl Upload {
    fn new(domain: Arc<Domain>, repository: RepositoryName, id: Option<PushId>) -> Self {
        Self { domain, repository, id }
    }

    /// Adds a chunk; the bytes that were received then.
    async fn append(self, begin_at: Option<u64>, request: Request) -> Answer<Result<u64, Moved>> {
        let (_, body, stalls) = taken(request);
        let work = async move {
            let Self { domain, repository, id } = self;
            let id = id.ok_or_else(|| Error::Internal("a chunk without an upload".into()))?;
            let upload = domain.store.live_push(&repository, &id).await?;
            domain.store.append_upload(&upload, begin_at, body).await
        };
        in_a_task(work, &stalls).await
    }

    /// Makes a blob of the upload and of the body.
    async fn complete(self, digest: Digest, begin_at: Option<u64>, request: Request) -> Answer<Result<(), Moved>> {
        let (size, body, stalls) = taken(request);
        let work = async move {
            let Self { domain, repository, id } = self;
            let (store, is_new) = (&domain.store, id.is_none());
            let upload = match id {
                Some(id) => store.live_push(&repository, &id).await?,
                None => store.open_push(&repository).await?.id,
            };
            let received = store.upload_received(&upload).await?;
            if let Some(begin_at) = begin_at.filter(|begin_at| *begin_at != received) {
                return Err(Error::UploadMoved { begin_at, received });
            }
            let done = match size {
                // The common case: one pass, no copy.
                Some(size) if received == 0 => match store.put_blob(&repository, digest, size, body).await {
                    Ok(()) => store.abort(&upload).await,
                    refused => refused,
                },
                Some(0) => store.finish_upload(&repository, &upload, digest).await,
                _ => store.finish_upload_with(&repository, &upload, digest, received, body).await,
            };
            if is_new && done.is_err() {
                // No client knows its address.
                drop(store.abort(&upload).await);
            }
            done
        };
        in_a_task(work, &stalls).await
    }
}

/// Takes the body out of a request: its length if it is known, its bytes, and whether its client
/// stalls.
fn taken(request: Request) -> (Option<u64>, BodyStream, Stalls) {
    let size = request.body().size_hint().exact();
    let received = metrics::counter!(BYTES_RECEIVED);
    let (bytes, stalls) = body::watched(request.into_body());
    let bytes = bytes.inspect_ok(move |bytes| received.increment(bytes.len() as u64)).map_err(|error| Error::Input(error.to_string()));
    (size, bytes.boxed(), stalls)
}

/// Does the work of a request in a task of its own: when its client goes away, what is half written
/// is taken back.
async fn in_a_task<T: Send + 'static>(
    work: impl Future<Output = pfr_store::Result<T>> + Send + 'static,
    stalls: &Stalls,
) -> Answer<Result<T, Moved>> {
    let done = pfr_service::task::spawn(work.in_current_span()).await.map_err(|panic| ApiError::internal(format!("uploading: {panic}")))?;
    match done {
        Ok(done) => Ok(Ok(done)),
        Err(error) => match error {
            Error::UploadMoved { received, .. } => Ok(Err(Moved { detail: error.to_string(), received })),
            error => Err(stalls.explain(error)),
        },
    }
}

/// Where a chunk says that it begins: `Content-Range: 0-1023`.
fn begins(headers: &HeaderMap, size: Option<u64>) -> Answer<Option<u64>> {
    let Some(text) = headers.get(header::CONTENT_RANGE) else { return Ok(None) };
    let range = text.to_str().ok().and_then(|text| {
        let (from, to) = text.trim().trim_start_matches("bytes ").split('/').next()?.split_once('-')?;
        Some((from.parse::<u64>().ok()?, to.parse::<u64>().ok()?))
    });
    let invalid = || ApiError::invalid("expected Content-Range: <first byte>-<last byte>, of as many bytes as the body has");
    let (from, to) = range.filter(|(from, to)| from <= to).ok_or_else(invalid)?;
    if size.is_some_and(|size| size.checked_sub(1) != Some(to - from)) {
        return Err(invalid());
    }
    Ok(Some(from))
}

/// The state of an upload.
fn progress(status: StatusCode, address: &Address, id: &PushId, received: u64) -> Response {
    let headers = [
        (header::LOCATION, value(&address.of("blobs/uploads", id))),
        (header::RANGE, value(&format!("0-{}", received.saturating_sub(1)))),
        (UPLOAD_UUID, value(&id.0)),
    ];
    (status, headers).into_response()
}

/// A blob that the repository has now.
fn created(address: &Address, digest: &Digest) -> Response {
    let headers = [(header::LOCATION, value(&address.of("blobs", digest))), (CONTENT_DIGEST, digest_value(digest))];
    (StatusCode::CREATED, headers).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_says_where_it_begins_and_is_as_long_as_it_says() {
        let found = |text: &str, size| {
            let headers = HeaderMap::from_iter([(header::CONTENT_RANGE, text.parse().unwrap())]);
            begins(&headers, size).ok()
        };
        assert_eq!(begins(&HeaderMap::new(), Some(5)).ok(), Some(None));
        assert_eq!(found("0-4", Some(5)), Some(Some(0)));
        assert_eq!(found("bytes 10-14/20", Some(5)), Some(Some(10)));
        assert_eq!(found("10-14", None), Some(Some(10)));
        for (text, size) in
            [("0-4", Some(4)), ("4-0", None), ("x", None), ("0-", None), ("0-0", Some(0)), ("0-18446744073709551615", Some(5))]
        {
            assert_eq!(found(text, size), None, "{text}");
        }
    }
}
