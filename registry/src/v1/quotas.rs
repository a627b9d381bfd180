//! Quotas: how much a domain may hold. These requests belong to no domain, so they have no base
//! path: a domain does not set its own quota.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Admin, Catalogue};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::path::Path;
use crate::problem::ApiError;
use axum::Json;
use axum::extract::State;
use pfr_schema::{DomainName, api};

/// Shows the quota of a domain, and how much of it is used
#[utoipa::path(
    get, path = "/v1/domains/{domain}/quota", operation_id = "get_quota", tag = "operations",
    params(("domain" = DomainName, Path, description = "Its name")),
    responses((status = 200, description = "The quota, if it has one", body = api::DomainQuota), failures::Listing),
)]
pub(crate) async fn get(
    _: Access<Admin, Catalogue>,
    State(app): State<App>,
    Path(name): Path<DomainName>,
) -> Answer<Json<api::DomainQuota>> {
    let domain = app.domains.get(&name).await?;
    Ok(Json(api::DomainQuota { quota: domain.store.metadata().quota().await? }))
}

/// Sets the quota of a domain
///
/// All limits at once: one that is left out is none. A domain that holds more than its new quota
/// takes no pushes until something is deleted and collected; pulls and deletions go on. The first
/// quota of a domain counts what it holds, and its pushes wait for that.
#[utoipa::path(
    put, path = "/v1/domains/{domain}/quota", operation_id = "set_quota", tag = "operations",
    params(("domain" = DomainName, Path, description = "Its name")),
    request_body(content = api::QuotaLimits, example = json!({"bytes": 10737418240_u64, "snapshots": 100})),
    responses((status = 200, description = "The quota, if it has one", body = api::DomainQuota), failures::Setting),
)]
pub(crate) async fn put(
    Access { trail, .. }: Access<Admin, Catalogue>,
    State(app): State<App>,
    Path(name): Path<DomainName>,
    JsonBody { value: limits, .. }: JsonBody<api::QuotaLimits>,
) -> Answer<Json<api::DomainQuota>> {
    if limits.is_too_large() {
        return Err(ApiError::invalid(format!("a limit is {} at most; leave it out for no limit", api::QuotaLimits::MOST)));
    }
    let domain = app.domains.get(&name).await?;
    let mut entry = trail.change(200, None);
    // It concerns the domain, and is in its log.
    (entry.of_registry, entry.record.domain) = (false, Some(name.clone()));
    let quota = domain.store.metadata().set_quota(limits, Some(entry)).await?;
    tracing::info!(domain = %name, bytes = limits.bytes, objects = limits.objects, snapshots = limits.snapshots, "quota set");
    Ok(Json(api::DomainQuota { quota }))
}
