//! Forks: many tags on one snapshot at once. Only metadata change, whatever the size of the
//! snapshot.

use super::{Answer, changed_before, record_conflict, resolve};
use crate::auth::{Access, Push};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::once::once;
use axum::Json;
use axum::http::{HeaderMap, StatusCode};
use pfr_schema::{RepositoryName, api};
use pfr_store::NameChange;

/// Forks a snapshot
///
/// Makes tags `<prefix>-1` to `<prefix>-<count>`, all or none: if one of them exists, nothing
/// changes.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/forks", operation_id = "fork", tag = "write",
    params(
        ("repo" = RepositoryName, Path, description = "Repository"),
        ("Idempotency-Key" = Option<String>, Header, description = "The same request with the same key again is answered as the first was"),
    ),
    request_body(content = api::ForkRequest, example = json!({"snapshot": "latest", "count": 8, "prefix": "try"})),
    responses((status = 201, description = "The new tags", body = api::Forked), failures::Tagging),
)]
pub(crate) async fn fork(
    Access { to: repository, domain, trail, .. }: Access<Push>,
    headers: HeaderMap,
    JsonBody { value: request, .. }: JsonBody<api::ForkRequest>,
) -> Answer<(StatusCode, Json<api::Forked>)> {
    let once = once(&headers, &("fork", &request))?;
    let before = changed_before(&domain.store, &repository, once.as_ref()).await?;
    let digest = match before {
        Some(digest) => digest,
        None => resolve(&domain.store, &repository, &request.snapshot, &trail).await?,
    };
    let (change, tags) = NameChange::fork(digest, &request.prefix, request.count)?;
    if before.is_none() {
        domain.store.audited(trail.change(201, None)).change_names(&repository, change, once).await.map_err(record_conflict)?;
    }
    Ok((StatusCode::CREATED, Json(api::Forked { digest, tags })))
}
