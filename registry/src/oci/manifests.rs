//! Manifests and indexes, by tag and by digest. Those of snapshots can be read, tagged and deleted.

use super::address::Address;
use super::{Answer, CONTENT_DIGEST, digest_value, keep_inert, value};
use crate::app::App;
use crate::auth::{Access, Delete, Pull, Push};
use crate::http::conditions::{etag, not_modified};
use crate::http::json::read_within;
use crate::http::path::Path;
use crate::http::permit::RequestPermit;
use crate::http::query::Query;
use crate::problem::ApiError;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use pfr_schema::snapshot::MAX_BYTES;
use pfr_schema::{Digest, ErrorCode, Image, RepositoryName, Tag};
use pfr_store::{Error, ManifestName, ManifestRow, Store};
use std::collections::HashSet;
use tokio::sync::OwnedSemaphorePermit;

const SUBJECT: HeaderName = HeaderName::from_static("oci-subject");
const TAGGED: HeaderName = HeaderName::from_static("oci-tag");
/// Tags in one request.
const TAGS: usize = 100;
/// Bytes above which a manifest is read with a permit, and counts against a budget until it is
/// sent.
const SMALL: u64 = 64 << 10;

/// A manifest of a repository.
///
/// # Errors
/// One that does not exist; also if there is no such repository.
async fn find(store: &Store, repository: &RepositoryName, name: ManifestName) -> Answer<ManifestRow> {
    let found = store.find_manifest(repository, name.clone()).await?;
    let unknown = || match name {
        ManifestName::Tag(tag) => Error::TagUnknown { repository: repository.clone(), tag },
        ManifestName::Digest(digest) => Error::SnapshotUnknown { repository: repository.clone(), snapshot: digest.to_string() },
    };
    Ok(found.ok_or_else(unknown)?)
}

pub(crate) async fn get(
    Access { to: repository, domain, .. }: Access<Pull>,
    Path(name): Path<ManifestName>,
    State(app): State<App>,
    Extension(own): Extension<RequestPermit>,
    method: Method,
    headers: HeaderMap,
) -> Answer<Response> {
    let ManifestRow { digest, size, .. } = find(&domain.store, &repository, name).await?;
    let named = [(CONTENT_DIGEST, digest_value(&digest)), (header::ETAG, etag(&digest))];
    if not_modified(&headers, &digest) {
        return Ok((StatusCode::NOT_MODIFIED, named).into_response());
    }
    let is_large = size > SMALL;
    // Its client may take it slowly. So it counts against a budget of its own: readers of other
    // documents do not wait for it.
    let (_permit, room) = match is_large {
        true if method == Method::GET => {
            let [permit, room] = app.sent_manifest(&own, size).await?;
            (Some(permit), Some(room))
        }
        true => (Some(app.documents().await?), None),
        false => (None, None),
    };
    let (bytes, image) = match domain.store.read_image(&digest).await {
        // As a damaged blob: the push that asks so heals it.
        Err(Error::Corrupt { .. }) if method == Method::HEAD => {
            return Err(Error::SnapshotUnknown { repository, snapshot: digest.to_string() }.into());
        }
        read => read?,
    };
    let body = if method == Method::GET { Body::from(Bytes::from_owner(Kept { bytes, _room: room })) } else { Body::empty() };
    let mut response = (named, body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, value(&image.media_type));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    keep_inert(headers);
    Ok(response)
}

/// A manifest that is being sent, and the room that it takes until then.
struct Kept {
    bytes: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

pub(crate) async fn put(
    Access { to: repository, domain, trail, .. }: Access<Push>,
    Path(name): Path<ManifestName>,
    State(app): State<App>,
    address: Address,
    request: Request,
) -> Answer<Response> {
    let (named, tags) = match name {
        ManifestName::Tag(tag) => (None, vec![tag]),
        ManifestName::Digest(digest) => (Some(digest), tags_of(&request)?),
    };
    let said = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = read_within(request, &app, usize::try_from(MAX_BYTES).unwrap_or(usize::MAX)).await?;
    let image = Image::describe(&body.bytes, &domain.store.options().limits)?;
    if let Some(said) = said.as_deref().and_then(|said| said.split(';').next()).map(str::trim)
        && !said.is_empty()
        && said != image.media_type
    {
        let detail = format!("the manifest is a {}, and its content-type says {said:?}", image.media_type);
        return Err(ApiError::new(ErrorCode::InvalidDocument, detail));
    }
    let store = domain.store.audited(trail.change(201, None));
    let digest = store.put_image(&repository, body.bytes, named, tags.clone()).await?;
    let mut response = StatusCode::CREATED.into_response();
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, value(&address.of("manifests", digest)));
    headers.insert(CONTENT_DIGEST, digest_value(&digest));
    if let Some(subject) = &image.subject {
        headers.insert(SUBJECT, digest_value(subject));
    }
    if named.is_some() && !tags.is_empty() {
        headers.insert(TAGGED, value(&tags.iter().map(Tag::as_str).collect::<Vec<_>>().join(", ")));
    }
    Ok(response)
}

/// The tags that a push by digest is to get: `?tag=a&tag=b`.
fn tags_of(request: &Request) -> Answer<Vec<Tag>> {
    let Query(pairs) = Query::<Vec<(String, String)>>::of(request.uri())?;
    let mut tags: Vec<Tag> = pairs.iter().filter(|(name, _)| name == "tag").map(|(_, tag)| tag.parse()).collect::<Result<_, _>>()?;
    let mut seen = HashSet::new();
    tags.retain(|tag| seen.insert(tag.clone()));
    if tags.len() > TAGS {
        let failure = ApiError::invalid(format!("{} tags in one request, the limit is {TAGS}", tags.len()));
        return Err(failure.with_status(StatusCode::URI_TOO_LONG));
    }
    Ok(tags)
}

pub(crate) async fn delete(
    Access { to: repository, domain, trail, .. }: Access<Delete>,
    Path(name): Path<ManifestName>,
) -> Answer<StatusCode> {
    let store = domain.store.audited(trail.change(202, None));
    match name {
        ManifestName::Tag(tag) => store.delete_tag(&repository, &tag, None).await?,
        ManifestName::Digest(digest) => store.delete_snapshot(&repository, &digest).await?,
    }
    Ok(StatusCode::ACCEPTED)
}

/// What a list of manifests says of one; none if it was deleted meanwhile.
pub(super) async fn describe(store: &Store, digest: Digest, size: u64) -> Answer<Option<serde_json::Value>> {
    let image = match store.read_image(&digest).await {
        Ok((_, image)) => image,
        Err(Error::BlobUnknown { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut descriptor = serde_json::json!({"mediaType": image.media_type, "digest": digest, "size": size});
    if let Some(artifact_type) = image.artifact_type {
        descriptor["artifactType"] = artifact_type.into();
    }
    if !image.annotations.is_empty() {
        descriptor["annotations"] = image.annotations.into_iter().collect();
    }
    Ok(Some(descriptor))
}
