//! JSON bodies, read completely within limits of size, memory and time.
//!
//! A body that arrives fast takes a permit for large bodies as soon as it is known to be one: four
//! of them are in memory at once. A slow body takes that permit only when it has arrived. Until
//! then its bytes count against the memory that all slow bodies share.

use crate::app::App;
use crate::http::body::is_stall;
use crate::http::media_type;
use crate::http::permit::RequestPermit;
use crate::problem::ApiError;
use axum::body::HttpBody as _;
use axum::extract::{FromRequest, Request};
use futures::StreamExt as _;
use pfr_schema::ErrorCode;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

/// Bytes above which a body is a large one.
const SMALL_BODY: usize = 256 << 10;
/// Bytes of a body that any request may hold.
const FREE: usize = 32 << 10;
/// A body is slow if the time spent waiting for its client exceeds this…
const LINGER: Duration = Duration::from_millis(100);
/// …plus the time that its bytes take at this rate, in bytes per second.
const FAST: f64 = (4 << 20) as f64;
/// A piece is waited for at least for this long.
const LEAST: Duration = Duration::from_millis(10);
/// Bytes that a slow body reserves at a time.
const STEP: usize = 256 << 10;

/// A JSON body as an extractor. A large one holds its permit until it is dropped.
pub(crate) struct JsonBody<T> {
    pub(crate) value: T,
    _permit: Option<OwnedSemaphorePermit>,
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        media_type::check(&request, "application/json")?;
        let CompleteBody { bytes, permit, .. } = read_within(request, app, app.max_json_bytes).await?;
        let value = if bytes.len() <= SMALL_BODY {
            parse(&bytes)?
        } else {
            // A hundred thousand digests take tens of milliseconds: too long for a thread that
            // moves the bytes of other requests.
            pfr_service::task::spawn_blocking(move || parse(&bytes)).await.map_err(|e| ApiError::internal(e.to_string()))??
        };
        Ok(Self { value, _permit: permit })
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // The length was checked while the body arrived.
    pfr_schema::json::parse("request body", bytes, u64::MAX).map_err(|error| ApiError::invalid(error.to_string()))
}

/// A body that has arrived.
pub(crate) struct CompleteBody {
    pub(crate) bytes: Vec<u8>,
    /// The permit to hold a large body.
    permit: Option<OwnedSemaphorePermit>,
    _slow: Option<OwnedSemaphorePermit>,
}

/// Reads a body of at most `limit` bytes. While it waits for memory, the request has no permit.
///
/// # Errors
/// `too_large`, `timeout`, `overloaded`, `invalid_request`.
pub(crate) async fn read_within(request: Request, app: &App, limit: usize) -> Result<CompleteBody, ApiError> {
    let (mut parts, body) = request.into_parts();
    let own = parts
        .extensions
        .remove::<RequestPermit>()
        .ok_or_else(|| ApiError::internal("the request has no `RequestPermit` extension".to_owned()))?;
    let hint = body.size_hint();
    if hint.lower() > limit as u64 {
        return Err(too_large(hint.lower(), limit));
    }
    // A body of unknown length may be a large one.
    let large = hint.upper().is_none_or(|bytes| bytes > SMALL_BODY as u64);
    let mut stream = body.into_data_stream();
    let (mut bytes, mut permit, mut slow) = (Vec::new(), None, None::<OwnedSemaphorePermit>);
    let mut waited = Duration::ZERO;
    loop {
        let is_slow = slow.is_some() || bytes.len() <= FREE;
        let fast_enough = LINGER + Duration::from_secs_f64(bytes.len() as f64 / FAST);
        let patience = if is_slow { app.json_time } else { fast_enough.min(app.json_time) };
        let (begun, queued) = (Instant::now(), own.queued());
        let received = tokio::time::timeout(patience.saturating_sub(waited).max(LEAST), stream.next()).await;
        // Without the time in which the bytes were there, and the registry was busy.
        waited += begun.elapsed().saturating_sub(own.queued().saturating_sub(queued));
        let Ok(received) = received else {
            if waited >= app.json_time {
                return Err(ApiError::stalled());
            }
            if waited >= patience {
                own.give_back();
                (slow, permit) = (Some(room(app, bytes.len().max(STEP), permit.is_some()).await?), None);
            }
            continue;
        };
        let Some(piece) = received else { break };
        let piece = piece.map_err(|error| {
            if is_stall(&error) { ApiError::stalled() } else { ApiError::invalid(format!("the request body ended early: {error}")) }
        })?;
        if bytes.len() + piece.len() > limit {
            return Err(too_large((bytes.len() + piece.len()) as u64, limit));
        }
        bytes.extend_from_slice(&piece);
        if bytes.len() <= FREE {
            continue;
        }
        let is_late = waited > LINGER + Duration::from_secs_f64(bytes.len() as f64 / FAST);
        match &mut slow {
            Some(slow) => {
                let lacking = bytes.len().div_ceil(1 << 10).saturating_sub(slow.num_permits());
                if lacking > 0 {
                    slow.merge(own.without(room(app, (lacking << 10).max(STEP), false)).await?);
                }
            }
            None if is_late => {
                let room = room(app, bytes.len().max(STEP), permit.is_some());
                (slow, permit) = (Some(own.without(room).await?), None);
            }
            None if large && permit.is_none() => permit = Some(own.without(app.large_body()).await?),
            None => {}
        }
    }
    if bytes.len() > SMALL_BODY && permit.is_none() {
        permit = Some(own.without(app.large_body()).await?);
    }
    Ok(CompleteBody { bytes, permit, _slow: slow })
}

/// A permit to hold this many bytes of a slow body. One that `has_turn` among the large bodies, for
/// which others wait, does not wait for it: it has the room at once, or is refused.
async fn room(app: &App, bytes: usize, has_turn: bool) -> Result<OwnedSemaphorePermit, ApiError> {
    let limit = if has_turn { Duration::ZERO } else { app.queue };
    let kib = u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX);
    let leave = Arc::clone(&app.slow_bodies).acquire_many_owned(kib);
    match tokio::time::timeout(limit, leave).await {
        Ok(leave) => leave.map_err(|e| ApiError::internal(e.to_string())),
        Err(_) => {
            let detail = "this request body comes slowly, and slow ones hold as much memory as they may; try again in a moment";
            Err(ApiError::new(ErrorCode::Overloaded, detail))
        }
    }
}

fn too_large(found: u64, limit: usize) -> ApiError {
    ApiError::new(ErrorCode::TooLarge, format!("the request body has {found} bytes or more, the limit is {limit}"))
}
