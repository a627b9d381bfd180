//! Verification of the complete store.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories};
use crate::failures;
use crate::http::query::Query;
use crate::problem::ApiError;
use axum::Json;
use axum::extract::State;
use pfr_schema::api::{self, LEAST_SCRUB_RATE};
use pfr_store::ScrubOptions;
use serde::Deserialize;

/// Options of a scrub.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub(crate) struct ScrubQuery {
    /// Decode and hash every blob, and not only compare checksums.
    full: bool,
    /// Bytes read per second at most, from 64 KiB to 1 TiB.
    #[param(minimum = 65536, maximum = 1_099_511_627_776_u64)]
    rate: Option<u64>,
}

/// The highest rate: a higher one is a mistake.
const HIGHEST_RATE: u64 = 1 << 40;

/// Reads every pack and names damaged blobs
///
/// Takes as long as reading the complete store; closing the connection stops it. One scrub runs at
/// a time. Damaged blobs are quarantined: `/v1/damaged` lists them.
#[utoipa::path(
    post, path = "/v1/scrub", operation_id = "scrub", tag = "operations",
    params(ScrubQuery),
    responses((status = 200, description = "What was read, and what is bad", body = api::ScrubReport), failures::Checking),
)]
pub(crate) async fn scrub(
    Access { domain, .. }: Access<Admin, AllRepositories>,
    State(app): State<App>,
    Query(query): Query<ScrubQuery>,
) -> Answer<Json<api::ScrubReport>> {
    if let Some(rate) = query.rate.filter(|rate| !(LEAST_SCRUB_RATE..=HIGHEST_RATE).contains(rate)) {
        return Err(ApiError::invalid(format!(
            "expected a rate of {LEAST_SCRUB_RATE} bytes a second or more, {HIGHEST_RATE} at most, found {rate}; leave it out for no limit"
        )));
    }
    let _permit = app.scrub()?;
    let options = ScrubOptions { full: query.full, bytes_per_second: query.rate };
    Ok(Json(domain.store.scrub(&options, &mut |_| ()).await?))
}

/// Lists blobs in quarantine, and the snapshots that reach them
#[utoipa::path(
    get, path = "/v1/damaged", operation_id = "damaged", tag = "operations",
    responses((status = 200, description = "All of them: pushing them again heals them", body = Vec<api::DamagedBlob>), failures::Checking),
)]
pub(crate) async fn damaged(
    Access { domain, .. }: Access<Admin, AllRepositories>,
    State(app): State<App>,
) -> Answer<Json<Vec<api::DamagedBlob>>> {
    let _permit = app.documents().await?;
    Ok(Json(domain.store.damaged().await?))
}
