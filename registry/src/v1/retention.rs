//! Retention policies: what a domain deletes by itself, and which tags stay where they are.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories};
use crate::failures;
use crate::http::json::JsonBody;
use crate::problem::ApiError;
use axum::Json;
use axum::extract::State;
use pfr_schema::api;

/// Shows the retention policies
#[utoipa::path(
    get, path = "/v1/retention", operation_id = "get_retention", tag = "operations",
    responses((status = 200, description = "The policies", body = api::RetentionPolicies), failures::Listing),
)]
pub(crate) async fn get(Access { domain, .. }: Access<Admin, AllRepositories>) -> Answer<Json<api::RetentionPolicies>> {
    Ok(Json(domain.store.metadata().retention().await?.policies))
}

/// Sets the retention policies
///
/// All at once. When this is answered, nothing is deleted any more by those before. The background
/// task `retention` follows them from its next run on; immutable tags are so at once.
#[utoipa::path(
    put, path = "/v1/retention", operation_id = "set_retention", tag = "operations",
    request_body(content = api::RetentionPolicies, example = json!({"policies": [
        {"name": "forks", "repositories": "team/*", "tags": ["try-*"], "untagged": true, "max_age_seconds": 604_800},
        {"name": "releases", "repositories": "*", "immutable_tags": ["v*"]}
    ]})),
    responses((status = 200, description = "The policies", body = api::RetentionPolicies), failures::Setting),
)]
pub(crate) async fn put(
    Access { domain, trail, .. }: Access<Admin, AllRepositories>,
    JsonBody { value: policies, .. }: JsonBody<api::RetentionPolicies>,
) -> Answer<Json<api::RetentionPolicies>> {
    policies.check().map_err(|error| ApiError::invalid(error.to_string()))?;
    domain.store.metadata().set_retention(policies.clone(), Some(trail.change(200, None))).await?;
    tracing::info!(domain = %domain.name, policies = policies.policies.len(), "retention policies set");
    Ok(Json(policies))
}

/// Runs the retention policies now
///
/// As the background task does. A dry run deletes nothing, and says what a run would delete.
#[utoipa::path(
    post, path = "/v1/retention/run", operation_id = "run_retention", tag = "operations",
    request_body(content = api::RetentionRequest, example = json!({"dry_run": true})),
    responses((status = 200, description = "What was deleted, or would be", body = api::RetentionReport), failures::Collecting),
)]
pub(crate) async fn run(
    Access { domain, trail, .. }: Access<Admin, AllRepositories>,
    State(app): State<App>,
    JsonBody { value: request, .. }: JsonBody<api::RetentionRequest>,
) -> Answer<Json<api::RetentionReport>> {
    // It counts what the deletions would free.
    let _place = if request.dry_run { Some(app.statistics(&domain).await?) } else { None };
    Ok(Json(domain.retention.run(request.dry_run, trail.change(200, None), &domain.collector.requests).await?))
}
