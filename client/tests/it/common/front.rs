//! A front between client and registry that loses answers, refuses, cuts and lies, by a rule.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::stream;
use pfr_schema::ErrorCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A request, as a rule sees it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    /// Bytes of the body.
    pub bytes: usize,
}

/// What happens to a request.
pub enum Fate {
    /// It is passed on.
    Pass,
    /// It is refused and never reaches the registry.
    Refuse(ErrorCode),
    /// It reaches the registry and the answer is lost: a gateway answers for it.
    LoseAnswer,
    /// The answer is cut after so many bytes of its body.
    Cut(usize),
    /// It waits here for a permit, and is then passed on.
    Hold(Arc<tokio::sync::Semaphore>),
    /// It is passed on as one for another path.
    Redirect(String),
    /// The answer's body is changed.
    Lie(fn(Vec<u8>) -> Vec<u8>),
}

type Rule = Box<dyn FnMut(&Seen) -> Fate + Send>;

#[derive(Clone)]
struct Inside {
    registry: String,
    client: reqwest::Client,
    rule: Arc<Mutex<Rule>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

/// A running front.
pub struct Front {
    pub url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Front {
    /// Every request so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub async fn start(registry: &str, rule: impl FnMut(&Seen) -> Fate + Send + 'static) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        // Asks for a TLS provider though it speaks none.
        drop(super::remote(registry));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let inside = Inside { registry: registry.to_owned(), client, rule: Arc::new(Mutex::new(Box::new(rule))), seen: Arc::clone(&seen) };
        let service = Router::new().fallback(forward).with_state(inside);
        tokio::spawn(async move { axum::serve(listener, service).await });
        Self { url, seen }
    }
}

async fn forward(State(inside): State<Inside>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    let path = parts.uri.path_and_query().unwrap().to_string();
    let seen = Seen { method: parts.method.to_string(), path: path.clone(), bytes: body.len() };
    inside.seen.lock().unwrap().push(seen.clone());
    let fate = (inside.rule.lock().unwrap())(&seen);
    if let Fate::Refuse(code) = fate {
        let problem = format!(
            r#"{{"type":"x","title":"x","status":{},"detail":"by rule","code":"{code}","retryable":{}}}"#,
            code.status(),
            code.retryable()
        );
        let status = StatusCode::from_u16(code.status()).unwrap();
        return (status, [("content-type", "application/problem+json")], problem).into_response();
    }
    if let Fate::Hold(gate) = &fate {
        gate.acquire().await.unwrap().forget();
    }
    let path = if let Fate::Redirect(path) = &fate { path } else { &path };
    let url = format!("{}{path}", inside.registry);
    let answer = inside.client.request(parts.method, url).headers(parts.headers).body(body).send().await.unwrap();
    let status = answer.status();
    let content_type = answer.headers().get("content-type").cloned();
    let mut body = answer.bytes().await.unwrap().to_vec();
    let body = match fate {
        Fate::LoseAnswer => return (StatusCode::BAD_GATEWAY, "the answer is lost").into_response(),
        Fate::Cut(after) if body.len() > after => {
            body.truncate(after);
            let pieces: Vec<Result<Bytes, std::io::Error>> = vec![Ok(body.into()), Err(std::io::Error::other("cut"))];
            Body::from_stream(stream::iter(pieces))
        }
        Fate::Lie(change) => change(body).into(),
        _ => body.into(),
    };
    let mut response = Response::builder().status(status);
    if let Some(content_type) = content_type {
        response = response.header("content-type", content_type);
    }
    response.body(body).unwrap()
}

/// A rule that gives `fate` to the first `times` requests that `matches`.
pub fn first(times: usize, matches: fn(&Seen) -> bool, fate: fn() -> Fate) -> impl FnMut(&Seen) -> Fate + Send + 'static {
    let count = AtomicUsize::new(0);
    move |seen| if matches(seen) && count.fetch_add(1, Ordering::Relaxed) < times { fate() } else { Fate::Pass }
}
