//! Content types of request bodies.

use crate::problem::ApiError;
use axum::extract::Request;
use axum::http::header;

/// Refuses a body whose content type is not `expected`.
pub(crate) fn check(request: &Request, expected: &str) -> Result<(), ApiError> {
    let given = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case(expected) {
        return Ok(());
    }
    let found = if given.is_empty() { "none".to_owned() } else { format!("{:?}", given.chars().take(100).collect::<String>()) };
    Err(ApiError::invalid(format!("expected content-type {expected}, found {found}")))
}
