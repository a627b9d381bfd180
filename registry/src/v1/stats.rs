//! Statistics: how much snapshots share, and what takes up room.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories, Pull};
use crate::failures;
use axum::Json;
use axum::extract::State;
use pfr_schema::{RepositoryName, api};

/// Statistics of everything
#[utoipa::path(
    get, path = "/v1/stats", operation_id = "stats", tag = "read",
    responses((status = 200, description = "Logical, unique, stored bytes; what each snapshot costs", body = api::Stats), failures::Listing),
)]
pub(crate) async fn all(Access { domain, .. }: Access<Pull, AllRepositories>, State(app): State<App>) -> Answer<Json<api::Stats>> {
    let _permit = app.documents().await?;
    Ok(Json(domain.store.stats(None).await?))
}

/// Shows what takes up room
///
/// Bytes that snapshots hold, bytes that a collection frees now or later and until when, and bytes
/// that only compaction gives back. `POST /v1/gc` frees them.
#[utoipa::path(
    get, path = "/v1/usage", operation_id = "usage", tag = "operations",
    responses((status = 200, description = "In bytes on storage", body = api::Usage), failures::Listing),
)]
pub(crate) async fn usage(Access { domain, .. }: Access<Admin, AllRepositories>, State(app): State<App>) -> Answer<Json<api::Usage>> {
    let _permit = app.documents().await?;
    Ok(Json(domain.collector.usage().await?))
}

/// Statistics of a repository
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/stats", operation_id = "repository_stats", tag = "read",
    params(("repo" = RepositoryName, Path, description = "Repository")),
    responses((status = 200, description = "Logical, unique, stored bytes; what each snapshot costs", body = api::Stats), failures::Reading),
)]
pub(crate) async fn of_repository(Access { to: repository, domain, .. }: Access<Pull>, State(app): State<App>) -> Answer<Json<api::Stats>> {
    let _permit = app.documents().await?;
    Ok(Json(domain.store.stats(Some(&repository)).await?))
}
