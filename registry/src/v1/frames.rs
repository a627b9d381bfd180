//! Frames in and out, streamed. Memory is bounded by the store's own windows.

use super::{Answer, check_count, must_exist};
use crate::app::App;
use crate::auth::{Access, Pull, Session};
use crate::failures;
use crate::http::body;
use crate::http::json::JsonBody;
use crate::http::media_type;
use crate::http::sending::OneByOne;
use crate::metrics::{BYTES_RECEIVED, BYTES_SENT, FRAMES_NEW, FRAMES_RECEIVED, RAW_RECEIVED};
use crate::problem::ApiError;
use crate::redirect;
use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use pfr_schema::codec::{CODECS_HEADER, Codecs};
use pfr_schema::media_type::{FRAME_LOCATIONS, FRAMES};
use pfr_schema::{Digest, ErrorCode, RepositoryName, api};
use pfr_store::Served;
use std::sync::Arc;
use tracing::Instrument as _;

/// Uploads frames
///
/// A stream of frames with its end mark; blobs before the nodes that list them. The answer comes
/// when all frames are verified, durable and indexed. If the upload fails, frames of packs that
/// were already complete stay stored: ask what is missing and send the rest.
#[utoipa::path(
    put, path = "/v1/repositories/{repo}/pushes/{id}/frames", operation_id = "put_frames", tag = "push",
    params(("repo" = RepositoryName, Path, description = "Repository"), ("id" = String, Path, description = "Push session")),
    request_body(content = inline(FrameStream), content_type = "application/vnd.pf.frames.v1", description = "Frames, see docs/formats.md"),
    responses((status = 200, description = "All of it is durable", body = api::FramesStored), failures::Uploading),
)]
pub(crate) async fn put(
    Session { domain, push, .. }: Session,
    State(app): State<App>,
    request: Request,
) -> Answer<Json<api::FramesStored>> {
    media_type::check(&request, FRAMES)?;
    let received = metrics::counter!(BYTES_RECEIVED);
    let (stream, stalls) = body::watched(request.into_body());
    let stream = stream.inspect_ok(move |bytes| received.increment(bytes.len() as u64));
    let upload = app.claims.upload(&push);
    let stream = upload.watch(stream);
    // In a task of its own: when a client goes away, this future is dropped, and the blobs that
    // came are kept all the same.
    let ingest = async move {
        let ingested = domain.store.ingest(&push, stream).await;
        if ingested.is_err() {
            upload.failed();
        }
        ingested
    };
    let ingested =
        pfr_service::task::spawn(ingest.in_current_span()).await.map_err(|panic| ApiError::internal(format!("uploading: {panic}")))?;
    let ingested = ingested.map_err(|error| stalls.explain(error))?;
    metrics::counter!(FRAMES_RECEIVED).increment(ingested.frames);
    metrics::counter!(RAW_RECEIVED).increment(ingested.raw_bytes);
    metrics::counter!(FRAMES_NEW).increment(ingested.new);
    Ok(Json(api::FramesStored { frames: ingested.frames, new: ingested.new, bytes: ingested.stored_bytes }))
}

/// Downloads frames
///
/// In the order of the request, with an end mark. A stream without its end mark was cut: ask again
/// for the frames that did not arrive. The reader verifies every frame against its digest. A client
/// that also accepts `application/vnd.pf.frame-locations.v1+json` may get the locations of the
/// frames instead. Frames in a codec that the header `pf-codecs` does not name are decoded: then
/// they are `raw`.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/frames", operation_id = "get_frames", tag = "read",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("pf-codecs" = Option<String>, Header, description = "Codecs that the client reads, comma-separated, besides `raw` and `zstd`"),
    ),
    request_body = api::FramesRequest,
    responses(
        (status = 200, description = "Frames, see docs/formats.md, or where they lie", content(
            (inline(FrameStream) = "application/vnd.pf.frames.v1"),
            (api::FrameLocations = "application/vnd.pf.frame-locations.v1+json"),
        )),
        failures::Fetching,
    ),
)]
pub(crate) async fn get(
    Access { to: repository, domain, caller, trail, .. }: Access<Pull>,
    State(app): State<App>,
    headers: HeaderMap,
    request: JsonBody<api::FramesRequest>,
) -> Answer<Response> {
    let (digests, codecs) = (&request.value.digests, codecs_of(&headers));
    check_count(&app, digests.len())?;
    let exists = must_exist(&domain.store, &repository).await;
    let exists = match exists {
        Ok(()) => caller.must_see(&domain, digests, &trail).await,
        refused => refused,
    };
    if exists.is_ok()
        && let Some(redirects) = &app.redirects
        && redirect::accepted(&headers)
        // A digest that the store lacks is not an error yet: the same is found out below.
        && let Ok(Some(locations)) = redirects.locations(&domain, digests, codecs).await
    {
        let kind = HeaderValue::from_static(FRAME_LOCATIONS);
        return Ok(([(header::CONTENT_TYPE, kind)], Json(locations)).into_response());
    }
    let located = match exists {
        Ok(()) => domain.store.serve(digests.clone(), codecs).await.map_err(ApiError::from),
        Err(failure) => Err(failure),
    };
    let Served { bytes, pieces: mut frames } = match located {
        // An upstream is asked with this registry's token. So only for a caller that may read
        // everything is it asked for blobs without a snapshot around them.
        Err(failure) if matches!(failure.code, ErrorCode::BlobUnknown | ErrorCode::RepositoryUnknown) && caller.sees_everything() => {
            let mut response = failure.into_response();
            response.extensions_mut().insert(UnservedFrames(Arc::new((repository, request, codecs))));
            return Ok(response);
        }
        located => located?,
    };
    drop(request);
    // Once the head is sent, an error can only cut the stream. An error at the start still gets a
    // complete answer.
    let first = frames.try_next().await?;
    let sent = metrics::counter!(BYTES_SENT);
    let frames = stream::iter(first.map(Ok)).chain(frames).inspect_ok(move |bytes| sent.increment(bytes.len() as u64));
    let mut response = Response::new(Body::from_stream(OneByOne::new(frames)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(FRAMES));
    // Without it each piece would be a chunk, and a client would read no more than one at a time.
    if let Some(bytes) = bytes {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
    }
    Ok(response)
}

/// The codecs that a client reads. A client of an older version does not say.
fn codecs_of(headers: &HeaderMap) -> Codecs {
    let values = headers.get_all(CODECS_HEADER).into_iter().filter_map(|value| value.to_str().ok());
    Codecs::named(values.flat_map(|value| value.split(',')))
}

/// A request for frames that the store does not have. It is attached to the response, so that a
/// layer in front of the handler can answer from another source. It keeps the permit of its body.
#[derive(Clone)]
pub(crate) struct UnservedFrames(Arc<(RepositoryName, JsonBody<api::FramesRequest>, Codecs)>);

impl UnservedFrames {
    /// The repository that the request names.
    pub(crate) fn repository(&self) -> &RepositoryName {
        &self.0.0
    }

    /// All digests of the request, in their order.
    pub(crate) fn digests(&self) -> Vec<Digest> {
        self.0.1.value.digests.clone()
    }

    /// The codecs that the client reads.
    pub(crate) fn codecs(&self) -> Codecs {
        self.0.2
    }
}

/// Frames, one after another, and an end mark.
#[derive(utoipa::ToSchema)]
#[schema(value_type = String, format = Binary)]
#[expect(dead_code, reason = "names the schema of a binary body")]
pub(crate) struct FrameStream(Vec<u8>);
