//! Forks: many tags on one snapshot at once. Metadata only, whatever the snapshot's size.

use super::{Answer, counted, resolve};
use crate::app::App;
use crate::http::extract::{In, JsonBody};
use crate::routes::failures;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pfr_schema::{RepositoryName, api};

/// Forks a snapshot
///
/// Makes tags `<prefix>-1` to `<prefix>-<count>`, all or none: if one exists nothing happens.
#[utoipa::path(
    post, path = "/v1/repositories/{repo}/forks", operation_id = "fork", tag = "write",
    params(("repo" = RepositoryName, Path, description = "Repository")),
    request_body(content = api::ForkRequest, example = json!({"snapshot": "latest", "count": 8, "prefix": "try"})),
    responses((status = 201, description = "The new tags", body = api::Forked), failures::Tagging),
)]
pub(crate) async fn fork(
    State(app): State<App>,
    In(repository): In<RepositoryName>,
    JsonBody { value: request, .. }: JsonBody<api::ForkRequest>,
) -> Answer<(StatusCode, Json<api::Forked>)> {
    let digest = resolve(&app, &repository, &request.snapshot).await?;
    let tags = app.store.fork(&repository, digest, &request.prefix, request.count).await.map_err(counted)?;
    Ok((StatusCode::CREATED, Json(api::Forked { digest, tags })))
}
