//! Collections of garbage: starting one, and reading its report.

use super::Answer;
use crate::auth::{Access, Admin, AllRepositories};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::path::{CollectionId, Path, unknown_collection};
use crate::http::query::{Paging, Query};
use crate::problem::ApiError;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use pfr_schema::api;
use pfr_store::{GcPart, GcRun, GcTrigger};
use tokio::sync::oneshot;

/// Starts a collection
#[utoipa::path(
    post, path = "/v1/gc", operation_id = "start_gc", tag = "operations",
    request_body = api::GcRequest,
    responses(
        (status = 200, description = "A dry run, when it has ended", body = api::GcReport),
        (status = 202, description = "It runs; `/v1/gc/{run}` tells how far it is", body = api::GcReport),
        failures::Collecting,
    ),
)]
pub(crate) async fn start(Access { domain, .. }: Access<Admin, AllRepositories>, body: JsonBody<api::GcRequest>) -> Answer<Response> {
    let permit = domain.collection()?;
    let stopped = || ApiError::new(pfr_schema::ErrorCode::Unavailable, "the registry is stopping; try again");
    if body.value.dry_run {
        let collector = &domain.collector;
        let report = collector.run(GcTrigger::Request, GcPart::All, true, &collector.requests, |_| ()).await?;
        let report = report.ok_or_else(stopped)?;
        return Ok(Json(report).into_response());
    }
    let (first, first_report) = oneshot::channel();
    let collector = domain.collector.clone();
    let run = pfr_service::task::spawn(async move {
        let mut first = Some(first);
        let progress = |report: &api::GcReport| {
            if let Some(first) = first.take() {
                // The client may have left; the collection goes on.
                let _ = first.send(report.clone());
            }
        };
        let result = collector.run(GcTrigger::Request, GcPart::All, false, &collector.requests, progress).await;
        drop(permit);
        result
    });
    match first_report.await {
        Ok(report) => Ok((StatusCode::ACCEPTED, Json(report)).into_response()),
        // The run ended before its first report.
        Err(_) => {
            let report = run.await.map_err(|e| ApiError::internal(e.to_string()))??.ok_or_else(stopped)?;
            Ok((StatusCode::ACCEPTED, Json(report)).into_response())
        }
    }
}

/// Lists collections, newest first
#[utoipa::path(
    get, path = "/v1/gc", operation_id = "list_gc", tag = "operations",
    params(Paging),
    responses((status = 200, description = "One page. A scheduled run that found nothing is not in it", body = api::GcRuns), failures::Collecting),
)]
pub(crate) async fn list(Access { domain, .. }: Access<Admin, AllRepositories>, Query(paging): Query<Paging>) -> Answer<Json<api::GcRuns>> {
    let (after, limit) = paging.checked()?;
    let page = domain.store.metadata().gc_runs(after, limit).await?;
    let runs = page.rows.iter().map(report).collect::<Answer<_>>()?;
    Ok(Json(api::GcRuns { runs, next: page.next }))
}

/// Shows a collection
#[utoipa::path(
    get, path = "/v1/gc/{run}", operation_id = "get_gc", tag = "operations",
    params(("run" = String, Path, description = "Its id")),
    responses((status = 200, description = "Its report so far", body = api::GcReport), failures::Collected),
)]
pub(crate) async fn get(
    Access { domain, .. }: Access<Admin, AllRepositories>,
    Path(CollectionId(id)): Path<CollectionId>,
) -> Answer<Json<api::GcReport>> {
    let run = domain.store.gc_run(&id).await?.ok_or_else(|| unknown_collection(&id))?;
    report(&run).map(Json)
}

/// The report of a run, from its row.
pub(crate) fn report(run: &GcRun) -> Answer<api::GcReport> {
    serde_json::from_str(&run.report).map_err(|e| ApiError::internal(format!("the report of collection {}: {e}", run.id)))
}
