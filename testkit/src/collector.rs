//! A collector of traces on loopback: it reads OTLP over HTTP, as protobuf, and keeps every span.

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use prost::Message as _;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a collector does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// It takes the spans.
    Take,
    /// It reads the request and never answers.
    Hang,
    /// It answers each request with 503.
    Refuse,
}

/// A span as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The attribute `service.name` of the process that made the span.
    pub service: String,
    /// The attribute `process.pid` of the same process.
    pub process: String,
    /// The id of the trace, in hexadecimal digits.
    pub trace: String,
    /// The id of the span, in hexadecimal digits.
    pub id: String,
    /// The id of the parent span; empty for the first span of a trace.
    pub parent: String,
    /// The name of the span.
    pub name: String,
    /// The kind of the span: 1 internal, 2 server, 3 client.
    pub kind: i32,
    /// The attributes of the span, as text.
    pub attributes: BTreeMap<String, String>,
    /// The start of the span, in nanoseconds since 1970.
    pub start: u64,
    /// The end of the span, in nanoseconds since 1970.
    pub end: u64,
}

#[derive(Default)]
struct Seen {
    spans: Vec<Span>,
    /// The request line and the headers of each request, in lower case.
    heads: Vec<String>,
    /// The bodies of all requests.
    bytes: Vec<u8>,
}

/// A running collector; it serves until the process ends.
pub struct Collector {
    /// The base URL of the collector.
    pub url: String,
    seen: Arc<Mutex<Seen>>,
}

impl Collector {
    /// Serves on a free port of 127.0.0.1.
    #[must_use]
    pub fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let inside = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let seen = Arc::clone(&inside);
                std::thread::spawn(move || serve(&stream, manner, &seen));
            }
        });
        Self { url, seen }
    }

    /// Every span so far.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        self.seen.lock().unwrap().spans.clone()
    }

    /// The request lines and headers of all requests so far, in lower case.
    #[must_use]
    pub fn heads(&self) -> Vec<String> {
        self.seen.lock().unwrap().heads.clone()
    }

    /// Whether these bytes are in any body that arrived.
    #[must_use]
    pub fn has_seen(&self, bytes: &str) -> bool {
        self.seen.lock().unwrap().bytes.windows(bytes.len()).any(|window| window == bytes.as_bytes())
    }
}

/// Serves one connection until it ends.
fn serve(stream: &TcpStream, manner: Manner, seen: &Mutex<Seen>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if !matches!(reader.read_line(&mut head), Ok(1..)) {
                return;
            }
        }
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
        let mut body = vec![0; length.trim().parse().unwrap()];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        {
            let mut seen = seen.lock().unwrap();
            seen.heads.push(head);
            seen.bytes.extend_from_slice(&body);
            if manner == Manner::Take {
                let request = ExportTraceServiceRequest::decode(&*body).expect("a request of OTLP");
                seen.spans.extend(spans_of(request));
            }
        }
        let answer = match manner {
            Manner::Take => "HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n",
            Manner::Refuse => "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
            Manner::Hang => {
                std::thread::sleep(Duration::from_secs(3600));
                return;
            }
        };
        let mut writer = stream;
        if writer.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn spans_of(request: ExportTraceServiceRequest) -> Vec<Span> {
    let mut spans = Vec::new();
    for of_process in request.resource_spans {
        let resource = of_process.resource.map(|resource| texts(resource.attributes)).unwrap_or_default();
        let of_resource = |name: &str| resource.get(name).cloned().unwrap_or_default();
        for span in of_process.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            spans.push(Span {
                service: of_resource("service.name"),
                process: of_resource("process.pid"),
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                name: span.name,
                kind: span.kind,
                attributes: texts(span.attributes),
                start: span.start_time_unix_nano,
                end: span.end_time_unix_nano,
            });
        }
    }
    spans
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    attributes.into_iter().map(|attribute| (attribute.key, attribute.value.map(text).unwrap_or_default())).collect()
}

fn text(value: AnyValue) -> String {
    match value.value {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(is)) => is.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
