//! Statistics: how much snapshots share, and what takes up room.

use super::{Answer, check_count};
use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories, Pull, SomeRepositories};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::query::Query;
use crate::problem::ApiError;
use axum::Json;
use axum::extract::State;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, api};
use pfr_store::StatsFilter;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Which snapshots of a domain statistics are about.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct DomainStatsQuery {
    /// Only snapshots whose configuration names this agent.
    #[param(min_length = 1, max_length = 255)]
    agent: Option<String>,
}

/// The id of an agent, as the document bounds it.
fn checked(agent: Option<String>) -> Answer<Option<String>> {
    if agent.as_ref().is_some_and(|agent| !(1..=255).contains(&agent.chars().count())) {
        return Err(ApiError::invalid("the parameter `agent` of the address must have 1 to 255 characters"));
    }
    Ok(agent)
}

/// Statistics of all repositories of a domain
///
/// With `agent` they are those of an agent's snapshots in all repositories, as if there were no
/// others; but `exclusive` is what deleting a snapshot frees in any case.
#[utoipa::path(
    get, path = "/v1/stats", operation_id = "stats", tag = "read",
    params(DomainStatsQuery),
    responses((status = 200, description = "Logical, unique, stored bytes; what each snapshot costs", body = api::Stats), failures::Listing),
)]
pub(crate) async fn all(
    Access { domain, .. }: Access<Pull, AllRepositories>,
    State(app): State<App>,
    Query(DomainStatsQuery { agent }): Query<DomainStatsQuery>,
) -> Answer<Json<api::Stats>> {
    let filter = StatsFilter { below: None, agent: checked(agent)? };
    let _place = app.statistics(&domain).await?;
    Ok(Json(domain.store.stats_of(None, &filter).await?))
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
    let _place = app.statistics(&domain).await?;
    Ok(Json(domain.collector.usage().await?))
}

/// Which snapshots statistics are about: those that meet every condition.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StatsQuery {
    /// Only this snapshot and those that descend from it: `tag`, `tag~N` or a digest, which may be
    /// cut short.
    #[param(value_type = Option<String>)]
    below: Option<Selector>,
    /// Only snapshots whose configuration names this agent.
    #[param(min_length = 1, max_length = 255)]
    agent: Option<String>,
}

/// Statistics of a repository
///
/// With `below` or `agent` they are those of some of its snapshots, as if there were no others; but
/// `exclusive` is what deleting a snapshot frees in any case.
#[utoipa::path(
    get, path = "/v1/repositories/{repo}/stats", operation_id = "repository_stats", tag = "read",
    params(("repo" = RepositoryName, Path, description = "Repository"), StatsQuery),
    responses((status = 200, description = "Logical, unique, stored bytes; what each snapshot costs", body = api::Stats), failures::Reading),
)]
pub(crate) async fn of_repository(
    Access { to: repository, domain, .. }: Access<Pull>,
    State(app): State<App>,
    Query(StatsQuery { below, agent }): Query<StatsQuery>,
) -> Answer<Json<api::Stats>> {
    let agent = checked(agent)?;
    let below = match below {
        Some(selector) => Some(domain.store.resolve(&repository, &selector).await?),
        None => None,
    };
    let _place = app.statistics(&domain).await?;
    Ok(Json(domain.store.stats_of(Some(&repository), &StatsFilter { below, agent }).await?))
}

/// What a deletion of snapshots would free
///
/// All together, with their tags and signatures: what only several of them hold is counted, too.
/// Snapshots that are not there, or that the caller may not pull, are left out. Nothing is deleted.
#[utoipa::path(
    post, path = "/v1/freed", operation_id = "freed", tag = "read",
    request_body(content = api::FreedRequest),
    responses((status = 200, description = "Raw and stored bytes", body = api::Freed), failures::Counting),
)]
pub(crate) async fn freed(
    Access { domain, caller, .. }: Access<Pull, SomeRepositories>,
    State(app): State<App>,
    JsonBody { value: request, .. }: JsonBody<api::FreedRequest>,
) -> Answer<Json<api::Freed>> {
    check_count(&app, request.repositories.iter().map(|of| of.snapshots.len()).sum())?;
    let mut snapshots: BTreeMap<RepositoryName, BTreeSet<Digest>> = BTreeMap::new();
    for of in request.repositories {
        if caller.sees(&of.repository) {
            snapshots.entry(of.repository).or_default().extend(of.snapshots);
        }
    }
    let _place = app.statistics(&domain).await?;
    let freed = domain.store.freed_by(&snapshots, &domain.collector.requests).await?;
    Ok(Json(freed.ok_or_else(|| ApiError::new(ErrorCode::Unavailable, "the registry stops"))?))
}
