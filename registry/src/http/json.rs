//! JSON bodies, read completely within limits of size, memory and time.
//!
//! While they arrive they share the memory of [`Arrivals`](crate::http::arrivals). A large one that
//! is complete takes turns with others: four of them are parsed and worked on at once.

use crate::app::App;
use crate::http::arrivals::{Arrival, SMALL_BODY};
use crate::http::body::{innermost, is_stall};
use crate::http::media_type;
use crate::http::permit::RequestPermit;
use crate::problem::ApiError;
use axum::body::HttpBody as _;
use axum::extract::{FromRequest, Request};
use futures::StreamExt as _;
use pfr_schema::ErrorCode;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;

/// A JSON body as an extractor. A large one holds its permit until it is dropped.
pub(crate) struct JsonBody<T> {
    pub(crate) value: T,
    _permit: Option<OwnedSemaphorePermit>,
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        media_type::check(&request, "application/json")?;
        let CompleteBody { bytes, permit, arrival } = read_within(request, app, app.max_json_bytes).await?;
        let value = if bytes.len() <= SMALL_BODY {
            parse(&bytes)?
        } else {
            // A hundred thousand digests take tens of milliseconds: too long for a thread that
            // moves the bytes of other requests.
            pfr_service::task::spawn_blocking(move || parse(&bytes)).await.map_err(|e| ApiError::internal(e.to_string()))??
        };
        drop(arrival);
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
    /// The permit to work on a large body.
    permit: Option<OwnedSemaphorePermit>,
    /// The memory for its bytes.
    arrival: Arrival,
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
    let (least, most) = (body.size_hint().lower(), body.size_hint().upper());
    if least > limit as u64 {
        return Err(too_large(least, limit));
    }
    let most = most.map_or(limit, |most| usize::try_from(most).unwrap_or(limit).min(limit));
    let mut arrival = app.arrivals.begin(own.clone(), app.queue);
    let (mut stream, mut bytes) = (body.into_data_stream(), Vec::new());
    while let Some(piece) = arrival.next(app.json_time, stream.next()).await? {
        let piece = piece.map_err(|error| {
            if is_stall(&error) {
                ApiError::stalled()
            } else {
                ApiError::invalid(format!("the request body ended early: {}", innermost(&error)))
            }
        })?;
        let length = bytes.len() + piece.len();
        if length > limit {
            return Err(too_large(length as u64, limit));
        }
        if length > bytes.capacity() {
            // Its capacity counts. A small body takes no more than small ones may.
            let most = if length > SMALL_BODY { most } else { most.min(SMALL_BODY) };
            let capacity = length.max((bytes.capacity() * 2).min(most));
            own.without(arrival.hold(capacity)).await?;
            bytes.reserve_exact(capacity - bytes.len());
        }
        bytes.extend_from_slice(&piece);
    }
    arrival.complete();
    let permit = if bytes.len() > SMALL_BODY { Some(own.without(app.large_body(arrival.queue())).await?) } else { None };
    Ok(CompleteBody { bytes, permit, arrival })
}

fn too_large(found: u64, limit: usize) -> ApiError {
    ApiError::new(ErrorCode::TooLarge, format!("the request body has {found} bytes or more, the limit is {limit}"))
}
