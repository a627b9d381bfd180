//! Failures in the words of the OCI specification: `{"errors":[{"code","message","detail"}]}`. The
//! code of the registry is in `detail`.

use crate::auth::basic_challenge;
use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use pfr_schema::ErrorCode;
use pfr_service::problem::ApiError;
use serde_json::json;

const API_VERSION: HeaderName = HeaderName::from_static("docker-distribution-api-version");

/// Whether a path is one of this API.
pub(crate) fn is_oci(path: &str) -> bool {
    path == "/v2" || path.starts_with("/v2/")
}

/// Marks an answer as one of this API.
pub(super) fn marked(mut response: Response) -> Response {
    response.headers_mut().insert(API_VERSION, HeaderValue::from_static("registry/2.0"));
    response
}

/// The response to a request to a route.
pub(crate) fn response_to(failure: ApiError, route: &str, request_id: &str) -> Response {
    let (code, status) = words(&failure, route);
    let retry_after = failure.retry_after();
    let mut detail = json!({"code": failure.code, "request_id": request_id});
    if !failure.missing.is_empty() {
        detail["missing"] = json!(failure.missing);
    }
    let errors = json!({"errors": [{"code": code, "message": failure.detail, "detail": detail}]});
    let mut response = marked((status, Json(errors)).into_response());
    if failure.code == ErrorCode::Unauthorized {
        // With a second one that names no token service, Docker would ask that.
        response.headers_mut().extend([basic_challenge()]);
    }
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// The code of the specification, and the status.
fn words(failure: &ApiError, route: &str) -> (&'static str, StatusCode) {
    use ErrorCode::*;
    let code = match failure.code {
        Unauthorized => "UNAUTHORIZED",
        Denied | QuotaExceeded | TagImmutable | SignatureRequired => "DENIED",
        RateLimited => "TOOMANYREQUESTS",
        RepositoryUnknown | DomainUnknown | NotFound => "NAME_UNKNOWN",
        SnapshotUnknown | TagUnknown => "MANIFEST_UNKNOWN",
        BlobUnknown => "BLOB_UNKNOWN",
        PushUnknown => "BLOB_UPLOAD_UNKNOWN",
        MissingBlobs => "MANIFEST_BLOB_UNKNOWN",
        InvalidName => "NAME_INVALID",
        InvalidDocument => "MANIFEST_INVALID",
        DigestMismatch => "DIGEST_INVALID",
        LengthMismatch | TooLarge => "SIZE_INVALID",
        CorruptFrame | Truncated => "BLOB_UPLOAD_INVALID",
        InvalidRequest if failure.status == StatusCode::METHOD_NOT_ALLOWED => "UNSUPPORTED",
        // Of such a list a parameter may be wrong, too.
        InvalidRequest if route.contains("/referrers/") && !failure.detail.starts_with("invalid digest") => "UNSUPPORTED",
        InvalidRequest if route.contains("{digest}") => "DIGEST_INVALID",
        InvalidRequest if route.contains("/uploads") => "BLOB_UPLOAD_INVALID",
        InvalidRequest if route.contains("{reference}") => "MANIFEST_INVALID",
        InvalidRequest => "UNSUPPORTED",
        code if code.retryable() => "UNAVAILABLE",
        _ => "UNKNOWN",
    };
    let status = match failure.code {
        MissingBlobs => StatusCode::NOT_FOUND,
        _ if failure.status == StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
        _ => failure.status,
    };
    (code, status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_has_the_code_and_the_status_of_the_specification() {
        let of = |code, route: &str| {
            let (code, status) = words(&ApiError::new(code, "x"), route);
            (code, status.as_u16())
        };
        let blob = "/v2/{repo}/blobs/{digest}";
        assert_eq!(of(ErrorCode::BlobUnknown, blob), ("BLOB_UNKNOWN", 404));
        assert_eq!(of(ErrorCode::InvalidRequest, blob), ("DIGEST_INVALID", 400));
        assert_eq!(of(ErrorCode::InvalidRequest, "/v2/{repo}/blobs/uploads/{id}"), ("BLOB_UPLOAD_INVALID", 400));
        assert_eq!(of(ErrorCode::DigestMismatch, ""), ("DIGEST_INVALID", 400));
        assert_eq!(of(ErrorCode::MissingBlobs, ""), ("MANIFEST_BLOB_UNKNOWN", 404));
        assert_eq!(of(ErrorCode::TooLarge, ""), ("SIZE_INVALID", 413));
        assert_eq!(of(ErrorCode::TagImmutable, blob), ("DENIED", 403));
        assert_eq!(of(ErrorCode::SignatureRequired, blob), ("DENIED", 403));
        assert_eq!(of(ErrorCode::Overloaded, ""), ("UNAVAILABLE", 503));
        assert_eq!(of(ErrorCode::Internal, ""), ("UNKNOWN", 500));
    }
}
