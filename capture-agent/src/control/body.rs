//! Reads the body of a request completely before anything else: a caller that still sends would not
//! read a refusal.

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use pfr_schema::ErrorCode;
use pfr_service::problem::ApiError;

/// Bytes of a request's body.
const LIMIT: usize = 1 << 20;
/// Bytes beyond the limit that are read and dropped, so that the sender gets the error. After them
/// the connection is closed.
const PASSED_OVER: usize = 64 << 20;

/// Hands the request on with its body in memory, or refuses it.
pub(super) async fn middleware(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let (mut pieces, mut whole, mut length) = (body.into_data_stream(), Vec::new(), 0_usize);
    while let Some(piece) = pieces.next().await {
        let Ok(piece) = piece else {
            return ApiError::new(ErrorCode::InvalidRequest, "the request's body did not come whole").into_response();
        };
        length = length.saturating_add(piece.len());
        if length <= LIMIT {
            whole.extend_from_slice(&piece);
        } else if length > PASSED_OVER {
            break;
        }
    }
    if length > LIMIT {
        return ApiError::new(ErrorCode::TooLarge, format!("the request's body has more than {LIMIT} bytes")).into_response();
    }
    next.run(Request::from_parts(parts, Body::from(whole))).await
}
