//! Errors of the registry as its clients see them. Nothing internal is in them.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use pfr_schema::{ErrorCode, FormatError};
use pfr_service::problem;
use pfr_store::Error;
use std::ops::Deref;

/// Of the blobs that are missing, at most this many are named.
const NAMED: usize = 100;

/// Why a request was not done: a [`problem::ApiError`] in the registry's words.
#[derive(Clone, Debug)]
pub struct ApiError(problem::ApiError);

impl ApiError {
    /// A failure without a cause for the log.
    #[must_use]
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Self(problem::ApiError::new(code, detail))
    }

    /// The same, with a cause for the log.
    #[must_use]
    pub fn because(self, cause: impl Into<String>) -> Self {
        Self(self.0.because(cause))
    }

    /// The same, with a more exact status.
    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self(self.0.with_status(status))
    }

    /// The same, with a time in seconds after which to try again.
    pub(crate) fn with_retry_after(self, seconds: u64) -> Self {
        Self(self.0.with_retry_after(seconds))
    }

    /// The same for something that the caller may not see: it is told as if it did not exist.
    pub(crate) fn hidden(self) -> Self {
        Self(self.0.hidden())
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
        Self::new(ErrorCode::Timeout, "the client stopped sending the request body; send it again without the blobs that are stored by now")
    }
}

impl Deref for ApiError {
    type Target = problem::ApiError;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.0.into_response()
    }
}

impl From<FormatError> for ApiError {
    fn from(error: FormatError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

impl From<Error> for ApiError {
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
            Error::Locked(reason) => {
                Self::new(code, "the registry has no key that opens this domain, or cannot use it; its log says why").because(reason)
            }
            Error::Internal(reason) => Self::internal(reason),
            Error::Missing { ref missing, .. } => {
                let missing = missing.iter().take(NAMED).copied().collect();
                Self(problem::ApiError { missing, ..problem::ApiError::new(code, error.to_string()) })
            }
            other => Self::new(code, other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Digest;

    #[test]
    fn the_systems_words_are_for_the_log_only() {
        let secret = "/var/lib/secret: Permission denied";
        let errors = [
            Error::Unavailable { what: "packs", reason: secret.into() },
            Error::NotPermitted { what: "packs", reason: secret.into() },
            Error::Full(secret.into()),
            Error::Locked(secret.into()),
            Error::Internal(secret.into()),
            Error::Corrupt { digest: Digest::sha256(b"x"), reason: secret.into() },
        ];
        for error in errors {
            let code = error.code();
            let failure = ApiError::from(error);
            assert_eq!(failure.code, code);
            assert!(!failure.detail.contains("secret"), "{code} tells {:?}", failure.detail);
            assert_eq!(failure.cause.as_deref(), Some(secret), "{code} loses its cause");
        }
    }

    #[test]
    fn unavailable_is_not_reported_as_missing() {
        let failure = ApiError::from(Error::Unavailable { what: "metadata", reason: "locked".into() });
        assert_eq!((failure.status.as_u16(), failure.code.retryable()), (503, true));
    }
}
