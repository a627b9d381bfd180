//! Errors as clients see them: `application/problem+json`, one shape for all servers.
//!
//! A handler returns an [`ApiError`]. As a response it is a status with the failure attached. The
//! middleware of the server knows the request's id: it takes the failure out by [`of_response`],
//! logs it and sends [`ApiError::into_problem`].

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pfr_schema::api::Problem;
use pfr_schema::{Digest, ErrorCode};

/// Media type of a problem.
pub const MEDIA_TYPE: &str = "application/problem+json";

/// Why a request was not done.
#[derive(Clone, Debug)]
pub struct ApiError {
    /// The kind, on which callers act.
    pub code: ErrorCode,
    /// For the caller: the cause and the remedy.
    pub detail: String,
    /// The first few blobs that are missing.
    pub missing: Vec<Digest>,
    /// For the log only: paths, the system's reasons.
    pub cause: Option<String>,
    /// The status. It is the code's, unless HTTP has a more exact one.
    pub status: StatusCode,
    /// When to try again, in seconds, if that is not the same for each problem with this code.
    pub retry_after: Option<u64>,
    /// The answer says that there is no such thing, because the caller may not see it.
    pub is_hidden: bool,
}

impl ApiError {
    /// A failure without a cause for the log.
    #[must_use]
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self { code, detail: detail.into(), missing: Vec::new(), cause: None, status, retry_after: None, is_hidden: false }
    }

    /// The same, with a cause for the log.
    #[must_use]
    pub fn because(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// The same, with a more exact status.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// The same, with a time in seconds after which to try again.
    #[must_use]
    pub fn with_retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The same for something that the caller may not see.
    #[must_use]
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// When to try again, in seconds: the value of `Retry-After`.
    #[must_use]
    pub fn retry_after(&self) -> Option<u64> {
        self.retry_after.or(match self.code {
            ErrorCode::Overloaded | ErrorCode::RateLimited => Some(1),
            ErrorCode::Unavailable => Some(5),
            ErrorCode::StorageFull => Some(60),
            _ => None,
        })
    }

    /// The response as sent.
    #[must_use]
    pub fn into_problem(self, request_id: &str) -> Response {
        let retry_after = self.retry_after();
        let Self { code, detail, missing, status, .. } = self;
        let request_id = Some(request_id.to_owned());
        let problem = Problem { status: status.as_u16(), missing, request_id, ..Problem::new(code, detail) };
        let mut response = (status, Json(problem)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Takes the failure out of a response. Refusals of the router and of extractors become failures,
/// too. `None` for a response that is no refusal.
pub fn of_response(response: &mut Response, method: &Method, path: &str) -> Option<ApiError> {
    let status = response.status();
    if let Some(failure) = response.extensions_mut().remove::<ApiError>() {
        return Some(failure);
    }
    if !status.is_client_error() && !status.is_server_error() {
        return None;
    }
    Some(match status {
        StatusCode::NOT_FOUND => ApiError::new(ErrorCode::NotFound, "no such page"),
        StatusCode::METHOD_NOT_ALLOWED => {
            let allowed = response.headers().get(header::ALLOW).and_then(|value| value.to_str().ok()).unwrap_or("other methods");
            let detail = format!("{path} does not allow {method}, only {allowed}");
            ApiError::new(ErrorCode::InvalidRequest, detail).with_status(status)
        }
        status if status.is_client_error() => ApiError::new(ErrorCode::InvalidRequest, format!("the request was refused: {status}")),
        status => ApiError::new(ErrorCode::Internal, "a bug in the server; please report it with the request id")
            .because(format!("a response without a reason: {status}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_comes_back_out_of_its_response() {
        let mut response = ApiError::new(ErrorCode::Overloaded, "busy").because("secret").into_response();
        let failure = of_response(&mut response, &Method::GET, "/x").unwrap();
        assert_eq!((failure.code, failure.cause.as_deref()), (ErrorCode::Overloaded, Some("secret")));
        let problem = failure.into_problem("id");
        assert_eq!(problem.status(), 503);
        assert_eq!(problem.headers()[header::RETRY_AFTER], "1");
        assert_eq!(problem.headers()[header::CONTENT_TYPE], MEDIA_TYPE);
    }

    #[test]
    fn a_problem_says_when_to_try_again() {
        let said = |failure: ApiError| {
            failure.into_problem("id").headers().get(header::RETRY_AFTER).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(said(ApiError::new(ErrorCode::RateLimited, "x")).as_deref(), Some("1"));
        assert_eq!(said(ApiError::new(ErrorCode::RateLimited, "x").with_retry_after(17)).as_deref(), Some("17"));
        assert_eq!(said(ApiError::new(ErrorCode::QuotaExceeded, "x")), None);
    }

    #[test]
    fn refusals_of_the_router_become_failures_and_answers_stay() {
        let of = |status: StatusCode| {
            of_response(&mut status.into_response(), &Method::PUT, "/x").map(|failure| (failure.code, failure.status.as_u16()))
        };
        assert_eq!(of(StatusCode::OK), None);
        assert_eq!(of(StatusCode::NOT_FOUND), Some((ErrorCode::NotFound, 404)));
        assert_eq!(of(StatusCode::METHOD_NOT_ALLOWED), Some((ErrorCode::InvalidRequest, 405)));
        assert_eq!(of(StatusCode::UNSUPPORTED_MEDIA_TYPE), Some((ErrorCode::InvalidRequest, 400)));
        assert_eq!(of(StatusCode::BAD_GATEWAY), Some((ErrorCode::Internal, 500)));
    }
}
