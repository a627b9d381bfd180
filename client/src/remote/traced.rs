//! Requests as spans of a trace, by OpenTelemetry's conventions. What a request carries besides its
//! address is never recorded: headers hold tokens, and queries hold signatures.

use reqwest::{Request, RequestBuilder, Response, Url};
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

/// Sends a request to a program of ours, which continues the trace. `attempt` is 1 for the first
/// try.
pub(crate) async fn send(request: RequestBuilder, attempt: u32) -> reqwest::Result<Response> {
    sent(request, attempt, true).await
}

/// Sends a request to a program of others, which is told nothing of the trace.
pub(crate) async fn send_elsewhere(request: RequestBuilder, attempt: u32) -> reqwest::Result<Response> {
    sent(request, attempt, false).await
}

async fn sent(request: RequestBuilder, attempt: u32, is_ours: bool) -> reqwest::Result<Response> {
    let (client, request) = request.build_split();
    let mut request = request?;
    let span = span_of(&request, attempt);
    let work = async {
        if is_ours {
            pfr_service::traces::inject(request.headers_mut());
        }
        let sent = client.execute(request).await;
        note(&sent);
        sent
    };
    work.instrument(span).await
}

fn span_of(request: &Request, attempt: u32) -> Span {
    let (method, url) = (request.method().as_str(), request.url());
    let span = tracing::info_span!(
        "request",
        "otel.name" = method,
        "otel.kind" = "client",
        "http.request.method" = method,
        "url.full" = Empty,
        "server.address" = Empty,
        "server.port" = Empty,
        "http.request.resend_count" = Empty,
        "http.response.status_code" = Empty,
        "pf.request_id" = Empty,
        "error.type" = Empty,
        "otel.status_code" = Empty,
    );
    if !span.is_disabled() {
        span.record("url.full", without_secrets(url)).record("server.address", url.host_str().unwrap_or_default());
        if let Some(port) = url.port_or_known_default() {
            span.record("server.port", i64::from(port));
        }
        if attempt > 1 {
            span.record("http.request.resend_count", i64::from(attempt - 1));
        }
    }
    span
}

/// Records an answer's head, or its lack, in the current span.
fn note(sent: &reqwest::Result<Response>) {
    let span = Span::current();
    if span.is_disabled() {
        return;
    }
    let failed = |kind: &str| {
        span.record("error.type", kind).record("otel.status_code", "ERROR");
    };
    match sent {
        Ok(answer) => {
            let status = answer.status();
            span.record("http.response.status_code", i64::from(status.as_u16()));
            if let Some(id) = answer.headers().get("x-request-id").and_then(|id| id.to_str().ok()).filter(|id| id.len() <= 128) {
                span.record("pf.request_id", id);
            }
            if status.is_client_error() || status.is_server_error() {
                failed(status.as_str());
            }
        }
        Err(error) if error.is_timeout() => failed("timeout"),
        Err(error) if error.is_connect() => failed("connect"),
        Err(_) => failed("cut"),
    }
}

/// Scheme, host, port and path.
fn without_secrets(url: &Url) -> &str {
    // `Remote::new` refuses a base URL with a user; a storage's URL may have one.
    if !url.username().is_empty() || url.password().is_some() {
        return url.path();
    }
    let text = url.as_str();
    text.split(['?', '#']).next().unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_url_has_no_user_and_no_query() {
        for (url, recorded) in [
            ("http://h:1/v1/repositories/a%2Fb/tags?after=x", "http://h:1/v1/repositories/a%2Fb/tags"),
            ("https://bucket/packs/1?X-Amz-Signature=hush", "https://bucket/packs/1"),
            ("https://user:hush@bucket/packs/1?x=hush#hush", "/packs/1"),
        ] {
            assert_eq!(without_secrets(&url.parse().unwrap()), recorded);
        }
    }
}
