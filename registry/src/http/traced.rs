//! The span of a request, by OpenTelemetry's conventions: a step of its client's trace, if the
//! request names one and clients are trusted with that.

use axum::extract::Request;
use tracing::Span;
use tracing::field::Empty;

/// Bytes of a path that are recorded at most.
const PATH: usize = 512;

/// The span of a request, which begins a trace unless it `continues` that of its client. Its query
/// is not recorded.
pub(super) fn span_of(request: &Request, route: &str, path: &str, id: &str, continues: bool) -> Span {
    let method = known(request.method().as_str());
    let span = tracing::info_span!(
        "request",
        "otel.name" = Empty,
        "otel.kind" = "server",
        "http.request.method" = method,
        "http.route" = route,
        "url.path" = beginning(path),
        "pf.request_id" = id,
        "http.response.status_code" = Empty,
        "http.request.body.size" = Empty,
        "http.response.body.size" = Empty,
        "error.type" = Empty,
        "otel.status_code" = Empty,
    );
    if !span.is_disabled() {
        span.record("otel.name", format!("{method} {route}"));
        if continues {
            pfr_service::traces::adopt(&span, request.headers());
        }
    }
    span
}

/// The method, or `_OTHER` for one that HTTP does not define: a client may send any word.
pub(super) fn known(method: &str) -> &'static str {
    ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"].into_iter().find(|known| *known == method).unwrap_or("_OTHER")
}

fn beginning(path: &str) -> &str {
    &path[..path.floor_char_boundary(PATH)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_chooses_is_bounded() {
        assert_eq!((known("GET"), known("get"), known(&"X".repeat(9000))), ("GET", "_OTHER", "_OTHER"));
        assert_eq!(beginning("/v1/tags"), "/v1/tags");
        assert_eq!(beginning(&"é".repeat(9000)).len(), PATH);
        assert!(beginning(&format!("x{}", "é".repeat(9000))).len() < PATH);
    }
}
