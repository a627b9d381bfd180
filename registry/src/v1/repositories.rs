//! The list of repositories.

use super::Answer;
use crate::auth::{Access, Pull, SomeRepositories};
use crate::failures;
use crate::http::query::{Paging, Query};
use axum::Json;
use pfr_schema::api;

/// Lists repositories by name
///
/// Those that the caller may pull.
#[utoipa::path(
    get, path = "/v1/repositories", operation_id = "list_repositories", tag = "read",
    params(Paging),
    responses((status = 200, description = "One page", body = api::RepositoryList), failures::Listing),
)]
pub(crate) async fn list(
    Access { domain, caller, .. }: Access<Pull, SomeRepositories>,
    Query(paging): Query<Paging>,
) -> Answer<Json<api::RepositoryList>> {
    let (after, limit) = paging.checked()?;
    let page = caller.repositories(&domain, after, limit).await?;
    Ok(Json(api::RepositoryList { repositories: page.rows, next: page.next }))
}
