//! The thread that sends spans to the collector: OTLP over HTTP, as protobuf.

use super::TraceError;
use super::queue::Queue;
use super::settings::Settings;
use crate::Backoff;
use bytes::Bytes;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanData;
use prost::Message as _;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode, Url};
use std::time::Duration;

/// How often one batch is sent at most.
const TRIES: u32 = 3;
/// Waits between two tries.
const WAITS: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(5));
/// The longest wait that a collector may ask for.
const LONGEST: Duration = Duration::from_secs(30);
/// Bytes of an answer that are read.
const ANSWER: usize = 64 << 10;

/// A collector of spans.
pub(super) struct Collector {
    client: Client,
    endpoint: Url,
    headers: HeaderMap,
    resource: ResourceAttributesWithSchema,
}

/// Why a batch was not taken.
struct Refusal {
    reason: String,
    /// The wait that was asked for, if another try may succeed.
    again: Option<Duration>,
}

impl Collector {
    pub(super) fn new(settings: &Settings, resource: &Resource) -> Result<Self, TraceError> {
        // Fails if a provider is installed already. Any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .user_agent(concat!("pf/", env!("CARGO_PKG_VERSION")))
            .timeout(settings.timeout)
            .tls_certs_merge(settings.roots.clone())
            // The headers are for this collector alone.
            .redirect(Policy::none())
            .no_proxy()
            .build()
            .map_err(|error| TraceError::new(settings.named_by, format!("TLS cannot be set up: {}", innermost(&error))))?;
        let mut headers = settings.headers.clone();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        Ok(Self { client, endpoint: settings.endpoint.clone(), headers, resource: resource.into() })
    }

    /// Sends batches until the program ends.
    pub(super) fn run(&self, queue: &Queue) {
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => self.send_all(queue, |body| runtime.block_on(self.send(body))),
            Err(error) => tracing::warn!(%error, "traces: no runtime for them, so none are sent"),
        }
        queue.end();
    }

    fn send_all(&self, queue: &Queue, send: impl Fn(Bytes) -> Result<u64, Refusal>) {
        let mut is_said = false;
        while let Some(batch) = queue.next() {
            let spans = batch.len() as u64;
            let body = self.body(batch);
            let (mut tries, mut reason) = (0, None);
            let lost = loop {
                tries += 1;
                match send(body.clone()) {
                    Ok(rejected) => break rejected.min(spans),
                    Err(refusal) => {
                        reason = Some(refusal.reason);
                        let wait = refusal.again.map(|asked| WAITS.wait(tries).max(asked).min(LONGEST));
                        if tries == TRIES || !wait.is_some_and(|wait| queue.pause(wait)) {
                            break spans;
                        }
                    }
                }
            };
            queue.lose(lost);
            if queue.dropped() > 0 && !is_said {
                is_said = true;
                let reason = reason.as_deref().unwrap_or("more spans ended than the collector took");
                tracing::warn!(reason, dropped = queue.dropped(), "traces: spans are dropped; this is said once, metrics count them");
            }
        }
    }

    fn body(&self, batch: Vec<SpanData>) -> Bytes {
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        ExportTraceServiceRequest { resource_spans }.encode_to_vec().into()
    }

    /// Sends one batch; returns how many of its spans the collector rejected.
    async fn send(&self, body: Bytes) -> Result<u64, Refusal> {
        let request = self.client.post(self.endpoint.clone()).headers(self.headers.clone()).body(body);
        let broken = |error: reqwest::Error| Refusal { reason: innermost(&error), again: Some(Duration::ZERO) };
        let answer = request.send().await.map_err(broken)?;
        let status = answer.status();
        if !status.is_success() {
            let again = is_passing(status).then(|| asked_wait(&answer));
            return Err(Refusal { reason: format!("the collector answered {}", status.as_u16()), again });
        }
        Ok(rejected(answer).await)
    }
}

/// Answers that ask for another try, as OTLP says.
fn is_passing(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 502 | 503 | 504)
}

fn asked_wait(answer: &Response) -> Duration {
    let asked = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    asked.map_or(Duration::ZERO, Duration::from_secs)
}

/// What the collector says that it rejected. An answer that cannot be read says nothing: the spans
/// were taken.
async fn rejected(mut answer: Response) -> u64 {
    let mut body = Vec::new();
    while let Ok(Some(piece)) = answer.chunk().await {
        if body.len() + piece.len() > ANSWER {
            return 0;
        }
        body.extend_from_slice(&piece);
    }
    let partial = ExportTraceServiceResponse::decode(&*body).ok().and_then(|answer| answer.partial_success);
    partial.map_or(0, |partial| u64::try_from(partial.rejected_spans).unwrap_or(0))
}

/// The innermost reason of an HTTP error: the outer ones repeat the URL.
fn innermost(error: &reqwest::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
