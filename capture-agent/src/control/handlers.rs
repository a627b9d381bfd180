//! What each path does.

use crate::error::few;
use crate::{Agent, Error};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use pfr_schema::agent::{
    Drain, DrainRequest, EngineInfo, Engines, Fits, Job, JobRequest, Jobs, Outline, Pushes, RestoreRecord, RestoreReport, RestoreRequest,
    Restores, SaveInfo, Sequences, SnapshotReport, SnapshotRequest,
};
use pfr_service::problem::ApiError;
use serde::Deserialize;
use serde::de::DeserializeOwned;

type Answer<T> = Result<Json<T>, ApiError>;

/// Reads a body and ignores its content type: `curl -d` sends another one.
fn read<T: DeserializeOwned>(body: &Bytes) -> Result<T, Error> {
    // The control socket limits its length.
    pfr_schema::json::parse("request body", body, u64::MAX).map_err(|e| Error::Invalid(e.to_string()))
}

pub(super) async fn engines(State(agent): State<Agent>) -> Json<Engines> {
    Json(Engines { engines: agent.all_engines() })
}

pub(super) async fn engine(State(agent): State<Agent>, Path(name): Path<String>) -> Answer<EngineInfo> {
    Ok(Json(info(&agent, name)?))
}

fn info(agent: &Agent, name: String) -> Result<EngineInfo, Error> {
    let engines = agent.all_engines();
    if let Some(info) = engines.iter().find(|info| info.engine == name) {
        return Ok(info.clone());
    }
    let known = few(engines.iter().map(|info| info.engine.as_str()));
    Err(Error::EngineUnknown { engine: name, known })
}

pub(super) async fn snapshot(State(agent): State<Agent>, Path(name): Path<String>, body: Bytes) -> Answer<SnapshotReport> {
    let request: SnapshotRequest = read(&body)?;
    let report = agent.snapshot(&name, request).await?;
    agent.rate().note(report.bytes_moved, report.total_seconds);
    Ok(Json(report))
}

pub(super) async fn restore(State(agent): State<Agent>, Path(name): Path<String>, body: Bytes) -> Answer<RestoreReport> {
    let request: RestoreRequest = read(&body)?;
    Ok(Json(agent.restore(&name, request).await?))
}

/// What `GET /v1/restores` and `GET /v1/engines/{engine}/restores` may ask for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Newest {
    /// Records at most; all of them if left out.
    limit: Option<usize>,
}

impl Newest {
    fn limit(&self) -> usize {
        self.limit.unwrap_or(usize::MAX)
    }
}

/// The answer with these records, of which those of engines that have left are marked.
fn marked(agent: &Agent, mut restores: Vec<RestoreRecord>) -> Json<Restores> {
    let engines = agent.all_engines();
    for record in &mut restores {
        record.gone = engines.iter().all(|info| info.engine != record.engine);
    }
    Json(Restores { restores })
}

pub(super) async fn all_restores(State(agent): State<Agent>, Query(newest): Query<Newest>) -> Json<Restores> {
    marked(&agent, agent.records().newest(newest.limit()))
}

pub(super) async fn restores(State(agent): State<Agent>, Path(name): Path<String>, Query(newest): Query<Newest>) -> Answer<Restores> {
    // An engine that has left is still remembered.
    if let Some(restores) = agent.records().list(&name, newest.limit()) {
        return Ok(marked(&agent, restores));
    }
    info(&agent, name)?;
    Ok(Json(Restores::default()))
}

pub(super) async fn sequences(State(agent): State<Agent>, Path(name): Path<String>) -> Answer<Sequences> {
    Ok(Json(Sequences { sequences: agent.sequences(&name).await?, saves: agent.saves().of(&name) }))
}

pub(super) async fn save(State(agent): State<Agent>, Path(ticket): Path<String>) -> Answer<SaveInfo> {
    let unknown = || Error::SaveUnknown { ticket: ticket.clone() };
    Ok(Json(agent.saves().get(&ticket).ok_or_else(unknown)?))
}

pub(super) async fn pushes(State(agent): State<Agent>) -> Json<Pushes> {
    Json(Pushes { pushes: agent.pushes().list() })
}

pub(super) async fn drain(State(agent): State<Agent>, body: Bytes) -> Answer<Drain> {
    let request: DrainRequest = read(&body)?;
    Ok(Json(agent.drain(request).await?))
}

pub(super) async fn check(State(agent): State<Agent>, Path(name): Path<String>, body: Bytes) -> Answer<Fits> {
    let outline: Outline = read(&body)?;
    Ok(Json(agent.check(&name, &outline)?))
}

pub(super) async fn begin(State(agent): State<Agent>, body: Bytes) -> Answer<Job> {
    let request: JobRequest = read(&body)?;
    Ok(Json(agent.begin(request).await?))
}

pub(super) async fn jobs(State(agent): State<Agent>) -> Json<Jobs> {
    Json(Jobs { jobs: agent.jobs().list() })
}

pub(super) async fn job(State(agent): State<Agent>, Path(id): Path<String>) -> Answer<Job> {
    Ok(Json(agent.jobs().get(&id)?))
}

pub(super) async fn cancel(State(agent): State<Agent>, Path(id): Path<String>) -> Answer<Job> {
    Ok(Json(agent.jobs().cancel(&id).await?))
}

pub(super) async fn ready(State(agent): State<Agent>) -> Result<&'static str, ApiError> {
    agent.store().ready().await.map_err(Error::from)?;
    Ok("ok\n")
}
