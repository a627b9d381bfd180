//! Background tasks: what they do, and their pauses.

use super::Answer;
use crate::auth::{Access, Admin, AllRepositories};
use crate::failures;
use crate::http::json::JsonBody;
use crate::http::path::{Path, TaskName, unknown_task};
use crate::problem::ApiError;
use axum::Json;
use pfr_schema::api;

/// The longest pause, in seconds: a forgotten pause must end.
const LONGEST: u64 = 30 * 86_400;

/// Lists background tasks
///
/// When each ran, how that ended, and when it runs next. Runs and times are those of the replica
/// that answers; pauses are the same in all.
#[utoipa::path(
    get, path = "/v1/tasks", operation_id = "list_tasks", tag = "operations",
    responses((status = 200, description = "All tasks", body = api::TaskList), failures::Listing),
)]
pub(crate) async fn list(Access { domain, .. }: Access<Admin, AllRepositories>) -> Answer<Json<api::TaskList>> {
    Ok(Json(api::TaskList { tasks: domain.schedule.list().await? }))
}

/// Pauses a background task
///
/// In all replicas, and also after restarts, until the pause ends or is ended. A run that is under
/// way stops; the next one continues from there. Requests such as `POST /v1/gc` are not paused.
#[utoipa::path(
    post, path = "/v1/tasks/{task}/pause", operation_id = "pause_task", tag = "operations",
    params(("task" = String, Path, description = "Its name")),
    request_body(content = api::PauseRequest, example = json!({"seconds": 3600})),
    responses((status = 200, description = "The task", body = api::TaskInfo), failures::Pausing),
)]
pub(crate) async fn pause(
    Access { domain, .. }: Access<Admin, AllRepositories>,
    Path(TaskName(name)): Path<TaskName>,
    JsonBody { value: request, .. }: JsonBody<api::PauseRequest>,
) -> Answer<Json<api::TaskInfo>> {
    if !(1..=LONGEST).contains(&request.seconds) {
        return Err(ApiError::invalid(format!("expected a pause of 1 to {LONGEST} seconds, found {}", request.seconds)));
    }
    let until = domain.store.options().clock.now().saturating_add(request.seconds * 1000);
    domain.schedule.pause(&name, until).await?.map(Json).ok_or_else(|| unknown_task(&name))
}

/// Ends the pause of a background task
///
/// A run that was due in the pause starts now. A task that is not paused stays as it is.
#[utoipa::path(
    post, path = "/v1/tasks/{task}/resume", operation_id = "resume_task", tag = "operations",
    params(("task" = String, Path, description = "Its name")),
    responses((status = 200, description = "The task", body = api::TaskInfo), failures::Pausing),
)]
pub(crate) async fn resume(
    Access { domain, .. }: Access<Admin, AllRepositories>,
    Path(TaskName(name)): Path<TaskName>,
) -> Answer<Json<api::TaskInfo>> {
    domain.schedule.resume(&name).await?.map(Json).ok_or_else(|| unknown_task(&name))
}
