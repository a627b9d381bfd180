//! What each path does.

use super::State as Shared;
use crate::Error;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use pfr_schema::agent::{Drain, DrainRequest, EngineInfo, Engines, Pushes, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest};
use pfr_service::problem::Failure;
use serde::de::DeserializeOwned;

type Answer<T> = Result<Json<T>, Failure>;

/// Reads a body and ignores its content type: `curl -d` sends another one.
fn read<T: DeserializeOwned>(body: &Bytes) -> Result<T, Error> {
    // The control socket limits how long it is.
    pfr_schema::json::parse("request body", body, u64::MAX).map_err(|e| Error::Invalid(e.to_string()))
}

pub(super) async fn engines(State(shared): State<Shared>) -> Json<Engines> {
    Json(Engines { engines: shared.agent.engines().list() })
}

pub(super) async fn engine(State(shared): State<Shared>, Path(name): Path<String>) -> Answer<EngineInfo> {
    let engines = shared.agent.engines();
    if let Some(info) = engines.list().into_iter().find(|info| info.engine == name) {
        return Ok(Json(info));
    }
    let known: Vec<String> = engines.list().into_iter().map(|info| info.engine).collect();
    let known = if known.is_empty() { "none".into() } else { known.join(", ") };
    Err(Error::EngineUnknown { engine: name, known }.into())
}

pub(super) async fn snapshot(State(shared): State<Shared>, Path(name): Path<String>, body: Bytes) -> Answer<SnapshotReport> {
    let request: SnapshotRequest = read(&body)?;
    let report = shared.agent.snapshot(&name, request).await?;
    shared.agent.rate().note(&report);
    Ok(Json(report))
}

pub(super) async fn restore(State(shared): State<Shared>, Path(name): Path<String>, body: Bytes) -> Answer<RestoreReport> {
    let request: RestoreRequest = read(&body)?;
    Ok(Json(shared.agent.restore(&name, request).await?))
}

pub(super) async fn pushes(State(shared): State<Shared>) -> Json<Pushes> {
    Json(Pushes { pushes: shared.agent.pushes().list() })
}

pub(super) async fn drain(State(shared): State<Shared>, body: Bytes) -> Answer<Drain> {
    let request: DrainRequest = read(&body)?;
    Ok(Json(shared.agent.drain(request).await?))
}

pub(super) async fn ready(State(shared): State<Shared>) -> Result<&'static str, Failure> {
    shared.agent.store().ready().await.map_err(Error::from)?;
    Ok("ok\n")
}
