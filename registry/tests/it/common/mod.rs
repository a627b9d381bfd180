//! A real registry in this process, a real HTTP client, and snapshots to push.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod counted;
pub mod snapshot;
pub mod trouble;

use pfr_registry::{Config, Reloader, Server};
use pfr_schema::api::{self, Problem};
use pfr_schema::{AccessToken, Digest, ErrorCode, Kind, media_type};
use pfr_store::{AccessTokens, Domains, NewAccessToken, Store};
use pfr_testkit::tls::Authority;
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use snapshot::Snapshot;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The repository of most tests, as a path segment.
pub const REPO: &str = "team%2Fagent";

/// A registry that serves until it is dropped or stopped.
pub struct Registry {
    pub address: SocketAddr,
    /// Without a slash at the end.
    pub base: String,
    /// Has its certificate and its token issuers read again.
    pub reloader: Option<Reloader>,
    pub client: Client,
    pub store: Store,
    pub dir: TempDir,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<()>,
}

/// Settings for a test: a free port, nothing logged.
pub fn config(dir: &TempDir) -> Config {
    Config { data: dir.path().join("store"), listen: ([127, 0, 0, 1], 0).into(), ..Config::default() }
}

impl Registry {
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub async fn start_with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut config = config(&dir);
        change(&mut config);
        let server = Server::bind(config).await.expect("the registry starts");
        Self::serve(server, dir)
    }

    /// Over a store that the test has made.
    pub async fn start_over(store: Store) -> Self {
        Self::start_over_with(store, |_| {}).await
    }

    /// The same with other settings.
    pub async fn start_over_with(store: Store, change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut config = config(&dir);
        change(&mut config);
        let server = Server::bind_over(store, config).await.expect("the registry starts");
        Self::serve(server, dir)
    }

    /// Over the data directory of another one that has stopped, with these settings.
    pub async fn start_again(data: &Path, change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut config = Config { data: data.into(), ..config(&dir) };
        change(&mut config);
        Self::serve(Server::bind(config).await.expect("the registry starts"), dir)
    }

    /// The access tokens, as another process on the same database has them.
    pub fn tokens(&self) -> AccessTokens {
        Domains::new(self.store.clone(), None).access_tokens()
    }

    /// Makes a token for every domain.
    pub async fn token(&self, scopes: &[&str]) -> AccessToken {
        let scopes = scopes.iter().map(|scope| scope.parse().expect("a scope")).collect();
        let new = NewAccessToken { label: "test".into(), domain: None, scopes, expires_at: None };
        self.tokens().create(new).await.expect("a token").0
    }

    /// Sends a request with a token.
    pub async fn send_as(&self, token: &AccessToken, request: RequestBuilder) -> Response {
        request.bearer_auth(token.expose()).send().await.expect("an answer")
    }

    fn serve(server: Server, dir: TempDir) -> Self {
        // The client has no TLS here, but it asks for a provider all the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (stop, stopped) = oneshot::channel::<()>();
        let (address, store) = (server.local_addr(), server.store().clone());
        let (base, reloader) = (server.url(), server.reloader());
        let serving = tokio::spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            server.run(stopped).await.expect("the registry stops in order");
        });
        Self { address, base, reloader, client: client(&[]), store, dir, stop: Some(stop), serving }
    }

    /// Asks it to stop, as a signal does.
    pub fn begin_stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Waits until it has stopped.
    pub async fn stopped(mut self) {
        self.begin_stop();
        (&mut self.serving).await.expect("the server task ends");
    }

    /// The same, but its files stay until the returned folder is dropped.
    pub async fn stop_keeping_files(mut self) -> TempDir {
        self.begin_stop();
        (&mut self.serving).await.expect("the server task ends");
        self.dir
    }

    /// Whether it has stopped already.
    pub fn has_stopped(&self) -> bool {
        self.serving.is_finished()
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, self.url(path))
    }

    pub async fn get(&self, path: &str) -> Response {
        self.request(Method::GET, path).send().await.expect("an answer")
    }

    pub async fn post(&self, path: &str, body: &Value) -> Response {
        self.request(Method::POST, path).json(body).send().await.expect("an answer")
    }

    pub async fn put(&self, path: &str, body: &Value) -> Response {
        self.request(Method::PUT, path).json(body).send().await.expect("an answer")
    }

    pub async fn delete(&self, path: &str) -> Response {
        self.request(Method::DELETE, path).send().await.expect("an answer")
    }

    /// Opens a push session and gives its path.
    pub async fn open_push(&self, repo: &str) -> String {
        let push: api::Push = ok(self.post(&format!("/v1/repositories/{repo}/pushes"), &json!({})).await).await;
        format!("/v1/repositories/{repo}/pushes/{}", push.id)
    }

    pub async fn put_frames(&self, push: &str, body: Vec<u8>) -> Response {
        let request = self.request(Method::PUT, &format!("{push}/frames")).header("content-type", media_type::FRAMES);
        request.body(body).send().await.expect("an answer")
    }

    /// Pushes everything and commits it under `tag`.
    pub async fn push(&self, repo: &str, snapshot: &Snapshot, tag: Option<&str>) -> api::Committed {
        let push = self.open_push(repo).await;
        let _: api::FramesStored = ok(self.put_frames(&push, snapshot.stream()).await).await;
        ok(self.post(&format!("{push}/commit"), &json!({"manifest": snapshot.manifest, "tag": tag})).await).await
    }

    /// Downloads raw blobs.
    pub async fn fetch(&self, repo: &str, digests: &[Digest]) -> Vec<(Kind, Vec<u8>)> {
        let response = self.post(&format!("/v1/repositories/{repo}/frames"), &json!({"digests": digests})).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], media_type::FRAMES);
        snapshot::decode(response.bytes().await.expect("a whole body"))
    }
}

/// A client that trusts these authorities.
pub fn client(authorities: &[&Authority]) -> Client {
    let roots = authorities.iter().map(|authority| reqwest::Certificate::from_pem(authority.pem().as_bytes()).expect("a certificate"));
    Client::builder().no_proxy().tls_certs_only(roots).timeout(Duration::from_secs(60)).build().expect("a client")
}

/// A request that the registry is serving: it has asked for the body (100 Continue), and got
/// nothing of it yet.
pub async fn held_request(registry: &Registry, method: &str, path: &str, content_type: &str, length: usize) -> TcpStream {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n"
    );
    loop {
        let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
        stream.write_all(head.as_bytes()).await.expect("written");
        let mut answer = [0; 25];
        stream.read_exact(&mut answer).await.expect("an answer");
        match &answer {
            b"HTTP/1.1 100 Continue\r\n\r\n" => return stream,
            // The place of a request is free a moment after its answer is read.
            refused => assert!(refused.starts_with(b"HTTP/1.1 503"), "{}", String::from_utf8_lossy(refused)),
        }
    }
}

/// Scrapes until a line is there.
pub async fn until_metric(registry: &Registry, line: &str) {
    let repeat = async {
        while !registry.get("/metrics").await.text().await.expect("text").lines().any(|l| l == line) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), repeat).await.unwrap_or_else(|_| panic!("no {line:?} within 30 s"));
}

/// The JSON of a response that succeeded.
pub async fn ok<T: serde::de::DeserializeOwned>(response: Response) -> T {
    let (status, text) = (response.status(), response.text().await.expect("a body"));
    assert!(status.is_success(), "{status}: {text}");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
}

/// The problem of a response that failed, checked for what every problem must be.
pub async fn problem(response: Response) -> Problem {
    let (status, headers) = (response.status(), response.headers().clone());
    let text = response.text().await.expect("a body");
    assert!(!status.is_success(), "{status}: {text}");
    assert_eq!(headers["content-type"], "application/problem+json", "{status}: {text}");
    let problem: Problem = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"));
    assert_eq!(problem.status, status.as_u16(), "{text}");
    if status != StatusCode::METHOD_NOT_ALLOWED {
        assert_eq!(problem.status, problem.code.status(), "{text}");
    }
    assert_eq!(problem.retryable, problem.code.retryable(), "{text}");
    assert_eq!(problem.r#type, format!("urn:pf:problem:{}", problem.code));
    assert_eq!(problem.request_id.as_deref(), headers["x-request-id"].to_str().ok(), "{text}");
    assert!(!problem.title.is_empty() && !problem.detail.is_empty(), "{text}");
    problem
}

/// Asserts that a response is the problem with this code. Returns its detail.
pub async fn refused(response: Response, code: ErrorCode) -> String {
    let problem = problem(response).await;
    assert_eq!(problem.code, code, "{}", problem.detail);
    problem.detail
}
