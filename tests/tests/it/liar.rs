//! A front before a real registry that changes, swaps, stretches or loses its answers, by a rule.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use futures::stream;
use pfr_schema::Digest;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// A request, as a rule sees it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub body: Bytes,
}

impl Seen {
    /// The digests that are asked for, if this asks for frames.
    pub fn asked(&self) -> Option<Vec<Digest>> {
        let asks = self.method == "POST" && self.path.ends_with("/frames");
        let request: Option<pfr_schema::api::FramesRequest> = serde_json::from_slice(&self.body).ok();
        request.filter(|_| asks).map(|r| r.digests)
    }

    /// Whether this asks for pages rather than for what lists them.
    pub fn asks_for_pages(&self) -> bool {
        self.asked().is_some_and(|digests| digests.len() > 10)
    }
}

/// What becomes of an answer.
pub enum Fate {
    /// It is passed on.
    Pass,
    /// Its body is changed.
    Change(Box<dyn FnOnce(Vec<u8>) -> Vec<u8> + Send>),
    /// It is replaced.
    Instead(u16, &'static str, Vec<u8>),
    /// Its body is these bytes again and again, without end.
    Endless(Vec<u8>),
    /// It is cut after so many bytes of its body.
    Cut(usize),
    /// The registry did what was asked; the answer is lost.
    Lose,
}

type Rule = Box<dyn FnMut(&Seen) -> Fate + Send>;

#[derive(Clone)]
struct Inside {
    registry: String,
    client: reqwest::Client,
    rule: Arc<Mutex<Rule>>,
    lies: Arc<AtomicU32>,
}

/// A running front.
pub struct Liar {
    pub url: String,
    lies: Arc<AtomicU32>,
}

impl Liar {
    /// Serves until the process ends.
    pub fn before(registry: &str, rule: impl FnMut(&Seen) -> Fate + Send + 'static) -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        let listener = std::net::TcpListener::bind((pfr_tests::own_address(), 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let lies = Arc::new(AtomicU32::new(0));
        let inside = Inside { registry: registry.to_owned(), client, rule: Arc::new(Mutex::new(Box::new(rule))), lies: Arc::clone(&lies) };
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                axum::serve(listener, Router::new().fallback(forward).with_state(inside)).await.unwrap();
            });
        });
        Self { url, lies }
    }

    /// How often it has lied.
    pub fn lies(&self) -> u32 {
        self.lies.load(Ordering::SeqCst)
    }
}

async fn forward(State(inside): State<Inside>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    // The other side may leave in the middle.
    let Ok(body) = to_bytes(body, usize::MAX).await else { return StatusCode::BAD_REQUEST.into_response() };
    let path = parts.uri.path_and_query().unwrap().to_string();
    let fate = (inside.rule.lock().unwrap())(&Seen { method: parts.method.to_string(), path: path.clone(), body: body.clone() });
    if !matches!(fate, Fate::Pass) {
        inside.lies.fetch_add(1, Ordering::SeqCst);
    }
    let answer = inside.client.request(parts.method, format!("{}{path}", inside.registry)).headers(parts.headers).body(body).send().await;
    let Ok(answer) = answer else { return StatusCode::BAD_GATEWAY.into_response() };
    let mut status = answer.status();
    let mut content_type = answer.headers().get("content-type").cloned();
    let Ok(body) = answer.bytes().await else { return StatusCode::BAD_GATEWAY.into_response() };
    let body = match fate {
        Fate::Pass => Body::from(body),
        Fate::Change(change) => Body::from(change(body.to_vec())),
        Fate::Instead(code, kind, bytes) => {
            status = StatusCode::from_u16(code).unwrap();
            content_type = Some(kind.parse().unwrap());
            Body::from(bytes)
        }
        Fate::Endless(piece) => {
            let piece = Bytes::from(piece);
            Body::from_stream(stream::repeat_with(move || Ok::<_, Infallible>(piece.clone())))
        }
        Fate::Cut(after) => {
            let piece = body.slice(..after.min(body.len()));
            let cut = async {
                // Lets the server send what it has before it learns of the cut.
                tokio::task::yield_now().await;
                Err(std::io::Error::other("cut"))
            };
            Body::from_stream(stream::iter([Ok(piece)]).chain(stream::once(cut)))
        }
        Fate::Lose => return StatusCode::BAD_GATEWAY.into_response(),
    };
    let mut response = Response::builder().status(status);
    if let Some(content_type) = content_type {
        response = response.header("content-type", content_type);
    }
    response.body(body).unwrap()
}
