//! Snapshots: list, show, delete. [`super::inspect`] looks deeper.

use super::{Answer, record_conflict};
use crate::app::App;
use crate::auth::{Access, Delete, Pull};
use crate::failures;
use crate::http::conditions::{etag, expected_etag};
use crate::http::once::once;
use crate::http::path::Path;
use crate::http::query::{Paging, Query};
use crate::problem::ApiError;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use pfr_schema::{RepositoryName, Selector, api};
use pfr_store::NameChange;

/// Lists snapshots, newest first
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/snapshots", operation_id = "list_snapshots", tag = "read",
    params(("repo" = RepositoryName, Path, description = "Repository"), Paging),
    responses((status = 200, description = "One page", body = api::SnapshotList), failures::Reading),
)]
pub(crate) async fn list(
    Access { to: repository, domain, .. }: Access<Pull>,
    Query(paging): Query<Paging>,
) -> Answer<Json<api::SnapshotList>> {
    let (after, limit) = paging.checked()?;
    let page = domain.store.snapshots(&repository, after, limit).await?;
    Ok(Json(api::SnapshotList { snapshots: page.rows.into_iter().map(Into::into).collect(), next: page.next }))
}

/// Shows a snapshot: manifest, configuration, page trees
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/snapshots/{ref}", operation_id = "get_snapshot", tag = "read",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("ref" = Selector, Path, description = "`tag`, `tag~N` (N parents up) or a digest, which may be cut short to at least 6 hex digits"),
    ),
    responses(
        (status = 200, description = "The snapshot", body = api::SnapshotDetail, headers(("ETag" = String, description = "Changes with the snapshot's tags"))),
        failures::Reading,
    ),
)]
pub(crate) async fn get(
    Access { to: repository, domain, .. }: Access<Pull>,
    State(app): State<App>,
    Path(selector): Path<Selector>,
) -> Answer<([(HeaderName, HeaderValue); 1], Json<api::SnapshotDetail>)> {
    let digest = domain.store.resolve(&repository, &selector).await?;
    let _permit = app.documents().await?;
    let detail = domain.store.detail(&repository, &digest).await?;
    let tagged = [(header::ETAG, etag(&api::snapshot_etag(&detail.summary.digest, &detail.summary.tags)))];
    Ok((tagged, Json(detail)))
}

/// Deletes a snapshot and the tags that point at it
///
/// By digest only: a tag may move between looking and deleting. Blobs that only this snapshot
/// reached become garbage. With `If-Match`, a snapshot whose tags are not those of that ETag stays.
#[utoipa::path(
    delete, path = "/v1/repositories/{repo}/snapshots/{ref}", operation_id = "delete_snapshot", tag = "write",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("ref" = Selector, Path, description = "A digest, which may be cut short"),
        ("If-Match" = Option<String>, Header, description = "Only if the snapshot has this ETag: then its tags have not changed"),
        ("Idempotency-Key" = Option<String>, Header, description = "The same request with the same key again is answered as the first was"),
    ),
    responses((status = 204, description = "Deleted"), failures::Tagging),
)]
pub(crate) async fn delete(
    Access { to: repository, domain, trail, .. }: Access<Delete>,
    Path(selector): Path<Selector>,
    headers: HeaderMap,
) -> Answer<StatusCode> {
    let digest = match selector {
        Selector::Digest(digest) => digest,
        Selector::Prefix(_) => domain.store.resolve(&repository, &selector).await?,
        Selector::Tag { .. } => {
            return Err(ApiError::invalid(format!(
                "snapshots are deleted by digest, not as {selector}; to delete a tag use …/tags/{{tag}}"
            )));
        }
    };
    let etag = expected_etag(&headers)?;
    let once = once(&headers, &("delete_snapshot", digest, etag))?;
    let store = domain.store.audited(trail.change(204, None));
    store.change_names(&repository, NameChange::DeleteSnapshot { snapshot: digest, etag }, once).await.map_err(record_conflict)?;
    Ok(StatusCode::NO_CONTENT)
}
