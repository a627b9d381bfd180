//! Statistics: how much snapshots share, and what takes up room.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories, Pull};
use crate::failures;
use axum::Json;
use axum::extract::State;
use pfr_schema::{RepositoryName, api};

/// Statistics of all repositories of a domain
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
/// Divides the bytes of the packs on storage by their use: blobs of snapshots, leased blobs,
/// garbage, dead space, packs in their grace period, unfinished packs. Says when leases and grace
/// periods end. `POST /v1/gc` runs a garbage collection.
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
