//! Reports of capture agents: what the hosts of a fleet have and do.

use super::Answer;
use crate::auth::{Access, Admin, AllRepositories, Caller, Push, SomeRepositories};
use crate::domains::Domain;
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::path::Path;
use crate::http::query::{Paging, Query};
use crate::problem::ApiError;
use axum::Json;
use axum::http::StatusCode;
use pfr_schema::{AgentName, ErrorCode, api};
use pfr_store::{Error, Page};

/// Agents in an answer, whatever its limit. A report may have some hundred KiB, and a caller with
/// `push` may fill all of them.
const AT_ONCE: usize = 100;

/// Lists agents by name, each with its last report
///
/// An agent that has not reported for a day is forgotten, and one that has not for three hours
/// makes room for a new one. References and notes of jobs are shown to callers that see all
/// repositories.
#[utoipa::path(
    get, path = "/v1/agents", operation_id = "list_agents", tag = "operations",
    params(Paging),
    responses((status = 200, description = "One page", body = api::AgentList), failures::Listing),
)]
pub(crate) async fn list(
    Access { domain, caller, .. }: Access<Admin, AllRepositories>,
    Query(paging): Query<Paging>,
) -> Answer<Json<api::AgentList>> {
    let (after, limit) = paging.checked()?;
    let page = seen(&domain, &caller, after, limit).await?;
    Ok(Json(api::AgentList { agents: page.rows, next: page.next }))
}

/// Agents of a domain, at most `limit` and at most [`AT_ONCE`]. References and notes of jobs name
/// repositories, so they are left out for a caller that does not see all of them.
pub(crate) async fn seen(domain: &Domain, caller: &Caller, after: Option<String>, limit: usize) -> Answer<Page<api::AgentInfo>> {
    let mut page = domain.store.metadata().agents(after, limit.min(AT_ONCE)).await?;
    if !caller.sees_everything() {
        for job in page.rows.iter_mut().flat_map(|agent| &mut agent.report.jobs) {
            (job.about, job.note) = (None, None);
        }
    }
    Ok(page)
}

/// Takes the report of an agent
///
/// It replaces the last report of this agent. A token that may push to any repository of the domain
/// may report, under any name: the list says which token it was. Unknown fields are ignored. If the
/// domain has as many agents as it may, a new one takes the place of the one that has been silent
/// for longest, if that is more than three hours; otherwise it is refused with `too_large`.
#[utoipa::path(
    put, path = "/v1/agents/{agent}", operation_id = "report_agent", tag = "operations",
    params(("agent" = AgentName, Path, description = "Its name: that of its host")),
    request_body(content = api::AgentReport),
    responses((status = 204, description = "It is kept"), failures::Setting),
)]
pub(crate) async fn report(
    Access { domain, caller, .. }: Access<Push, SomeRepositories>,
    Path(name): Path<AgentName>,
    JsonBody { value: report, .. }: JsonBody<api::AgentReport>,
) -> Answer<StatusCode> {
    report.check().map_err(|error| ApiError::invalid(error.to_string()))?;
    let kept = domain.store.metadata().report_agent(name.clone(), caller.label().map(str::to_owned), report).await;
    match &kept {
        Err(Error::Full(reason)) if domain.reports.is_news(true) => {
            tracing::warn!(domain = %domain.name, reason, "the disk is nearly full: reports of agents are refused");
        }
        Err(error) if error.code() == ErrorCode::TooLarge && domain.reports.is_first(&name) => {
            tracing::warn!(domain = %domain.name, agent = %name, %error, "report of an agent refused; logged once until one is kept");
        }
        Ok(()) => {
            domain.reports.kept(&name);
            if domain.reports.is_news(false) {
                tracing::info!(domain = %domain.name, "reports of agents are kept again");
            }
        }
        Err(_) => {}
    }
    kept?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forgets an agent
///
/// Its last report is deleted. An agent that still runs is there again after its next report: to
/// keep it away, revoke its token.
#[utoipa::path(
    delete, path = "/v1/agents/{agent}", operation_id = "forget_agent", tag = "operations",
    params(("agent" = AgentName, Path, description = "Its name")),
    responses((status = 204, description = "It is forgotten"), failures::Forgetting),
)]
pub(crate) async fn forget(
    Access { domain, trail, .. }: Access<Admin, AllRepositories>,
    Path(name): Path<AgentName>,
) -> Answer<StatusCode> {
    if !domain.store.metadata().forget_agent(name.clone(), Some(trail.change(204, None))).await? {
        return Err(ApiError::new(ErrorCode::NotFound, format!("no agent {name} has reported; GET /v1/agents lists them")));
    }
    tracing::info!(domain = %domain.name, agent = %name, "agent forgotten");
    Ok(StatusCode::NO_CONTENT)
}
