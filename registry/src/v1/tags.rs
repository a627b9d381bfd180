//! Tags: names that move, by compare-and-swap if the request says so.

use super::{Answer, changed_before, record_conflict, resolve};
use crate::auth::{Access, Delete, Pull, Push};
use crate::failures;
use crate::http::conditions::{etag, expected, not_modified};
use crate::http::json::JsonBody;
use crate::http::once::once;
use crate::http::path::Path;
use crate::http::query::{Paging, Query};
use axum::Json;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use pfr_schema::{RepositoryName, Tag, api};
use pfr_store::{NameChange, TagMove};

/// Lists tags by name
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/tags", operation_id = "list_tags", tag = "read",
    params(("repo" = RepositoryName, Path, description = "Repository"), Paging),
    responses((status = 200, description = "One page", body = api::TagList), failures::Reading),
)]
pub(crate) async fn list(Access { to: repository, domain, .. }: Access<Pull>, Query(paging): Query<Paging>) -> Answer<Json<api::TagList>> {
    let (after, limit) = paging.checked()?;
    let page = domain.store.tags(&repository, after, limit).await?;
    Ok(Json(api::TagList { tags: page.rows.into_iter().map(api::TagInfo::from).collect(), next: page.next }))
}

/// Shows a tag
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/tags/{tag}", operation_id = "get_tag", tag = "read",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("tag" = Tag, Path, description = "Tag"),
        ("If-None-Match" = Option<String>, Header, description = "The ETag that the reader has"),
    ),
    responses(
        (status = 200, description = "Where it points", body = api::TagInfo, headers(("ETag" = String, description = "The snapshot's digest in quotes"))),
        (status = 304, description = "It points where the reader knows"),
        failures::Reading,
    ),
)]
pub(crate) async fn get(Access { to: repository, domain, .. }: Access<Pull>, Path(tag): Path<Tag>, headers: HeaderMap) -> Answer<Response> {
    let row = domain.store.tag(&repository, &tag).await?;
    let tagged = [(header::ETAG, etag(&row.digest))];
    if not_modified(&headers, &row.digest) {
        return Ok((StatusCode::NOT_MODIFIED, tagged).into_response());
    }
    Ok((tagged, Json(api::TagInfo::from(row))).into_response())
}

/// Points a tag at a snapshot
///
/// `If-Match: "<digest>"`, `If-None-Match: *` and `if_tag_is` in the body say the same: move it
/// only from that state.
#[utoipa::path(
    put, path = "/v1/repositories/{repo}/tags/{tag}", operation_id = "put_tag", tag = "write",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("tag" = Tag, Path, description = "Tag"),
        ("If-Match" = Option<String>, Header, description = "Only if the tag has this ETag"),
        ("If-None-Match" = Option<String>, Header, description = "`*`: only if the tag does not exist"),
        ("Idempotency-Key" = Option<String>, Header, description = "The same request with the same key again is answered as the first was"),
    ),
    request_body(content = api::TagRequest, example = json!({"snapshot": "latest~1"})),
    responses(
        (status = 200, description = "It points there", body = api::TagInfo, headers(("ETag" = String, description = "The snapshot's digest in quotes"))),
        failures::Tagging,
    ),
)]
pub(crate) async fn put(
    Access { to: repository, domain, trail, .. }: Access<Push>,
    Path(tag): Path<Tag>,
    headers: HeaderMap,
    JsonBody { value: request, .. }: JsonBody<api::TagRequest>,
) -> Answer<Response> {
    let expected = expected(&headers, request.if_tag_is)?;
    let once = once(&headers, &("put_tag", &tag, &request.snapshot, expected))?;
    let digest = match changed_before(&domain.store, &repository, once.as_ref()).await? {
        Some(digest) => digest,
        None => {
            let snapshot = resolve(&domain.store, &repository, &request.snapshot, &trail).await?;
            let change = NameChange::PutTags { snapshot, moves: vec![TagMove { tag: tag.clone(), expected }] };
            let store = domain.store.audited(trail.change(200, None));
            store.change_names(&repository, change, once).await.map_err(record_conflict)?;
            snapshot
        }
    };
    // Another request may have moved the tag since. The answer is about this move.
    let updated_at = match domain.store.tag(&repository, &tag).await {
        Ok(row) if row.digest == digest => row.updated_at,
        _ => domain.store.options().clock.now(),
    };
    Ok(([(header::ETAG, etag(&digest))], Json(api::TagInfo { name: tag, digest, updated_at })).into_response())
}

/// Deletes a tag
///
/// Its snapshot stays.
#[utoipa::path(
    delete, path = "/v1/repositories/{repo}/tags/{tag}", operation_id = "delete_tag", tag = "write",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("tag" = Tag, Path, description = "Tag"),
        ("If-Match" = Option<String>, Header, description = "Only if the tag has this ETag"),
        ("Idempotency-Key" = Option<String>, Header, description = "The same request with the same key again is answered as the first was"),
    ),
    responses((status = 204, description = "Deleted"), failures::Tagging),
)]
pub(crate) async fn delete(
    Access { to: repository, domain, trail, .. }: Access<Delete>,
    Path(tag): Path<Tag>,
    headers: HeaderMap,
) -> Answer<StatusCode> {
    let expected = expected(&headers, None)?;
    let once = once(&headers, &("delete_tag", &tag, expected))?;
    let store = domain.store.audited(trail.change(204, None));
    store.change_names(&repository, NameChange::DeleteTag { tag, expected }, once).await.map_err(record_conflict)?;
    Ok(StatusCode::NO_CONTENT)
}
