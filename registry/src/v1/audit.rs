//! The audit log.

use super::Answer;
use crate::auth::{Access, Admin, AllRepositories};
use crate::failures;
use crate::http::query::{Paging, Query};
use axum::Json;
use pfr_schema::{RepositoryName, api};
use pfr_store::AuditFilter;
use serde::Deserialize;

/// The latest moment: the end of the year 9999.
const LATEST: u64 = 253_402_300_799_999;

/// Which records, and in which order.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// Where to go on: `next` of the page before.
    #[param(max_length = 1024)]
    after: Option<String>,
    /// Most records, 1 to 1,000.
    #[param(default = 100, minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Only records about this repository.
    #[param(value_type = Option<String>, max_length = 255)]
    repository: Option<RepositoryName>,
    /// Only records of requests with the access token of this id, or with the token of an issuer
    /// about this subject: as `token` in the records.
    #[param(max_length = 1024)]
    token: Option<String>,
    /// Only records of this time and later, in milliseconds since 1970, UTC.
    #[param(minimum = 0, maximum = 253_402_300_799_999_u64)]
    since: Option<u64>,
    /// Only records before this time.
    #[param(minimum = 0, maximum = 253_402_300_799_999_u64)]
    until: Option<u64>,
    /// `newest` first or `oldest` first. A reader that follows the log asks for the oldest first:
    /// then none appears between two that it has read.
    #[param(inline)]
    order: Order,
}

/// The order of records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Order {
    /// The newest first.
    #[default]
    Newest,
    /// The oldest first.
    Oldest,
}

/// Lists the audit log of a domain
///
/// Every change of names, domains, tokens and quotas, work that was begun, changes that failed, and
/// requests that were refused for lack of permission. What is about the registry is in the log of
/// the domain `default`, and shown only to callers that operate the registry.
#[utoipa::path(
    get, path = "/v1/audit", operation_id = "list_audit", tag = "operations",
    params(AuditQuery),
    responses((status = 200, description = "One page", body = api::AuditList), failures::Listing),
)]
pub(crate) async fn list(
    Access { domain, caller, .. }: Access<Admin, AllRepositories>,
    Query(query): Query<AuditQuery>,
) -> Answer<Json<api::AuditList>> {
    let AuditQuery { after, limit, repository, token, since, until, order } = query;
    let (after, limit) = Paging::new(after, limit).checked()?;
    let filter = AuditFilter {
        repository,
        token,
        since: since.map(|at| at.min(LATEST)),
        until: until.map(|at| at.min(LATEST)),
        with_registry: domain.name.is_default() && caller.operates_registry(),
        oldest_first: order == Order::Oldest,
    };
    let page = domain.store.metadata().audit_records(filter, after, limit).await?;
    Ok(Json(api::AuditList { records: page.rows, next: page.next }))
}
