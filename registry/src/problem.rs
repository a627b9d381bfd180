//! Errors as clients see them: `application/problem+json`, one shape for all, nothing internal in it.
//!
//! A handler returns a [`Failure`]; as a response it is only a status with the failure attached. [`crate::http::request`] writes the
//! body, since only it knows the request's id, and logs [`Failure::cause`], which is never sent.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pfr_schema::api::Problem;
use pfr_schema::{Digest, ErrorCode, FormatError};
use pfr_store::Error;

/// Media type of a problem.
pub const MEDIA_TYPE: &str = "application/problem+json";
/// Of the blobs that are missing, at most this many are named.
const NAMED: usize = 100;

/// Why a request was not done.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What callers act on.
    pub code: ErrorCode,
    /// What happened, where, and what to do: for the caller.
    pub detail: String,
    /// Missing blobs, the first few.
    pub missing: Vec<Digest>,
    /// What only the operator may read: paths, the system's words.
    pub cause: Option<String>,
    /// The status, where HTTP has a more exact one than the code: 405.
    pub status: StatusCode,
}

impl Failure {
    /// A failure with nothing to hide.
    #[must_use]
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self { code, detail: detail.into(), missing: Vec::new(), cause: None, status }
    }

    /// The same, with words for the log.
    #[must_use]
    pub fn because(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// The request is malformed.
    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, detail)
    }

    /// A bug.
    pub(crate) fn internal(cause: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, "a bug in the registry; please report it with the request id").because(cause)
    }

    /// The client stopped sending.
    pub(crate) fn stalled() -> Self {
        Self::new(ErrorCode::Timeout, "the request body stopped coming; send it again, what was already stored is not sent twice")
    }

    /// The response as sent.
    pub(crate) fn into_problem(self, request_id: &str) -> Response {
        let status = self.status;
        let retry_after = retry_after(self.code);
        let problem = Problem {
            r#type: format!("urn:pf:problem:{}", self.code),
            title: self.code.title().into(),
            status: status.as_u16(),
            detail: self.detail,
            code: self.code,
            retryable: self.code.retryable(),
            missing: self.missing,
            request_id: Some(request_id.to_owned()),
        };
        let mut response = (status, Json(problem)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(seconds));
        }
        response
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = error.code();
        match error {
            Error::Unavailable { what, reason } | Error::NotPermitted { what, reason } => {
                Self::new(code, format!("the registry cannot reach its {what}; this says nothing about what it holds, try again"))
                    .because(reason)
            }
            Error::Full(reason) => {
                Self::new(code, "the registry's disk is full; once space is freed try again, nothing acknowledged is lost").because(reason)
            }
            Error::Corrupt { digest, reason } => {
                Self::new(code, format!("stored blob {digest} is damaged; push it again from a good copy to heal it")).because(reason)
            }
            Error::Internal(reason) => Self::internal(reason),
            Error::Missing { ref missing, .. } => {
                Self { missing: missing.iter().take(NAMED).copied().collect(), ..Self::new(code, error.to_string()) }
            }
            other => Self::new(code, other.to_string()),
        }
    }
}

/// When to try again, in seconds.
fn retry_after(code: ErrorCode) -> Option<&'static str> {
    match code {
        ErrorCode::Overloaded => Some("1"),
        ErrorCode::Unavailable => Some("5"),
        ErrorCode::StorageFull => Some("60"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_words_are_for_the_log_only() {
        let secret = "/var/lib/secret: Permission denied";
        let errors = [
            Error::Unavailable { what: "packs", reason: secret.into() },
            Error::NotPermitted { what: "packs", reason: secret.into() },
            Error::Full(secret.into()),
            Error::Internal(secret.into()),
            Error::Corrupt { digest: Digest::sha256(b"x"), reason: secret.into() },
        ];
        for error in errors {
            let code = error.code();
            let failure = Failure::from(error);
            assert_eq!(failure.code, code);
            assert!(!failure.detail.contains("secret"), "{code} tells {:?}", failure.detail);
            assert_eq!(failure.cause.as_deref(), Some(secret), "{code} loses its cause");
        }
    }

    #[test]
    fn unavailable_is_not_reported_as_missing() {
        let failure = Failure::from(Error::Unavailable { what: "metadata", reason: "locked".into() });
        assert_eq!((failure.status.as_u16(), failure.code.retryable()), (503, true));
    }
}
