//! An HTTP proxy between a client and a registry. A rule decides for each request whether it is
//! passed on, refused, held or redirected, and whether its answer is lost, cut or changed.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use futures::stream;
use pfr_schema::api::{FramesRequest, Problem};
use pfr_schema::{Digest, ErrorCode};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};
use tokio::sync::Semaphore;

/// A request, as a rule sees it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// The body.
    pub body: Bytes,
}

impl Seen {
    /// The digests that are asked for, if this asks for frames.
    #[must_use]
    pub fn asked(&self) -> Option<Vec<Digest>> {
        let asks = self.method == "POST" && self.path.ends_with("/frames");
        let request: Option<FramesRequest> = serde_json::from_slice(&self.body).ok();
        request.filter(|_| asks).map(|request| request.digests)
    }

    /// Whether this asks for pages, and not for the nodes that list them.
    #[must_use]
    pub fn asks_for_pages(&self) -> bool {
        self.asked().is_some_and(|digests| digests.len() > 10)
    }
}

/// What happens to a request.
pub enum Fate {
    /// It is passed on.
    Pass,
    /// It is refused and never reaches the registry.
    Refuse(ErrorCode),
    /// It waits for a permit, and is then passed on.
    Hold(Arc<Semaphore>),
    /// It is passed on as one for another path.
    Redirect(String),
    /// It is passed on with another value of this header.
    With(&'static str, &'static str),
    /// The registry serves it and the answer is lost: a gateway answers for it.
    LoseAnswer,
    /// The answer is cut after so many bytes of its body.
    Cut(usize),
    /// The answer's body is changed.
    Change(Box<dyn FnOnce(Vec<u8>) -> Vec<u8> + Send>),
    /// The answer is replaced: status, content type, body.
    Instead(u16, &'static str, Vec<u8>),
    /// The answer's body is these bytes again and again, without end.
    Endless(Vec<u8>),
}

impl Fate {
    /// The answer's body is changed.
    pub fn change(change: impl FnOnce(Vec<u8>) -> Vec<u8> + Send + 'static) -> Self {
        Self::Change(Box::new(change))
    }
}

type Rule = Box<dyn FnMut(&Seen) -> Fate + Send>;

#[derive(Clone)]
struct Inside {
    registry: String,
    client: reqwest::Client,
    rule: Arc<Mutex<Rule>>,
    log: Arc<Mutex<Log>>,
}

#[derive(Default)]
struct Log {
    seen: Vec<Seen>,
    /// Requests that were not simply passed on.
    struck: usize,
}

/// A running front.
pub struct Front {
    /// Its base URL.
    pub url: String,
    log: Arc<Mutex<Log>>,
}

impl Front {
    /// Serves on 127.0.0.1 until the process ends.
    pub fn start(registry: &str, rule: impl FnMut(&Seen) -> Fate + Send + 'static) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST.into(), registry, rule)
    }

    /// Serves on an address until the process ends. It has a thread of its own, so that a test may
    /// block.
    pub fn start_at(address: IpAddr, registry: &str, rule: impl FnMut(&Seen) -> Fate + Send + 'static) -> Self {
        // The HTTP client needs a TLS provider, although it uses no TLS here.
        drop(rustls::crypto::ring::default_provider().install_default());
        let listener = TcpListener::bind((address, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let log = Arc::new(Mutex::new(Log::default()));
        let inside = Inside { registry: registry.to_owned(), client, rule: Arc::new(Mutex::new(Box::new(rule))), log: Arc::clone(&log) };
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                axum::serve(listener, Router::new().fallback(forward).with_state(inside)).await.unwrap();
            });
        });
        Self { url, log }
    }

    /// Every request so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.log.lock().unwrap().seen.clone()
    }

    /// How many requests were not simply passed on.
    #[must_use]
    pub fn struck(&self) -> usize {
        self.log.lock().unwrap().struck
    }
}

async fn forward(State(inside): State<Inside>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    // The client may disconnect in the middle.
    let Ok(body) = to_bytes(body, usize::MAX).await else { return StatusCode::BAD_REQUEST.into_response() };
    let path = parts.uri.path_and_query().unwrap().to_string();
    let seen = Seen { method: parts.method.to_string(), path: path.clone(), body: body.clone() };
    let fate = (inside.rule.lock().unwrap())(&seen);
    {
        let mut log = inside.log.lock().unwrap();
        log.struck += usize::from(!matches!(fate, Fate::Pass));
        log.seen.push(seen);
    }
    match &fate {
        Fate::Refuse(code) => return refusal(*code),
        Fate::Hold(gate) => gate.acquire().await.unwrap().forget(),
        _ => {}
    }
    let path = if let Fate::Redirect(path) = &fate { path } else { &path };
    let mut headers = parts.headers;
    if let Fate::With(name, value) = &fate {
        headers.insert(*name, HeaderValue::from_static(value));
    }
    let answer = inside.client.request(parts.method, format!("{}{path}", inside.registry)).headers(headers).body(body);
    let Ok(answer) = answer.send().await else { return StatusCode::BAD_GATEWAY.into_response() };
    let (status, content_type) = (answer.status(), answer.headers().get(header::CONTENT_TYPE).cloned());
    let id = answer.headers().get("x-request-id").cloned();
    let Ok(body) = answer.bytes().await else { return StatusCode::BAD_GATEWAY.into_response() };
    let (status, content_type, body) = match fate {
        Fate::LoseAnswer => return (StatusCode::BAD_GATEWAY, "the answer is lost").into_response(),
        Fate::Instead(status, kind, bytes) => {
            (StatusCode::from_u16(status).unwrap(), Some(HeaderValue::from_static(kind)), Body::from(bytes))
        }
        Fate::Cut(after) if after < body.len() => (status, content_type, cut(body.slice(..after))),
        Fate::Change(change) => (status, content_type, change(body.to_vec()).into()),
        Fate::Endless(piece) => {
            let piece = Bytes::from(piece);
            (status, content_type, Body::from_stream(stream::repeat_with(move || Ok::<_, Infallible>(piece.clone()))))
        }
        _ => (status, content_type, body.into()),
    };
    let named = [(header::CONTENT_TYPE, content_type), (HeaderName::from_static("x-request-id"), id)];
    let headers: HeaderMap = named.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    (status, headers, body).into_response()
}

fn refusal(code: ErrorCode) -> Response {
    let status = StatusCode::from_u16(code.status()).unwrap();
    let problem = serde_json::to_vec(&Problem::new(code, "by rule")).unwrap();
    (status, [(header::CONTENT_TYPE, "application/problem+json")], problem).into_response()
}

/// A body that ends in an error after `piece`.
fn cut(piece: Bytes) -> Body {
    let cut = async {
        // Lets the server send the piece before it learns of the cut.
        tokio::task::yield_now().await;
        Err(std::io::Error::other("cut"))
    };
    Body::from_stream(stream::iter([Ok(piece)]).chain(stream::once(cut)))
}

/// A rule that gives `fate` to the first `times` requests that `matches`.
pub fn first(times: usize, matches: fn(&Seen) -> bool, fate: fn() -> Fate) -> impl FnMut(&Seen) -> Fate + Send + 'static {
    let mut left = times;
    move |seen| {
        if left == 0 || !matches(seen) {
            return Fate::Pass;
        }
        left -= 1;
        fate()
    }
}
