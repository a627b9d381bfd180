//! Requests to a registry: sent, authorized, redirected, tried again.

use super::address::Address;
use super::auth::{Challenge, Login, TokenAnswer};
use crate::error::{Error, Result};
use crate::export::layout::failed;
use crate::remote::pace::Pace;
use crate::remote::{RemoteOptions, extra_roots, reason};
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use pfr_schema::{ErrorCode, RepositoryName};
use pfr_service::{Backoff, Secret};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::{Client, Method, Request, RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The waits between two tries.
const WAITS: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
/// Redirects of one request at most.
const REDIRECTS: u32 = 5;
/// Bytes of an error, and of the answer of a token service, at most.
const SHORT: usize = 64 << 10;

/// A connection to one repository of a registry.
#[derive(Debug)]
pub(super) struct Http {
    client: Client,
    base: Url,
    repository: RepositoryName,
    /// What its tokens are to permit there.
    actions: &'static str,
    name: String,
    options: RemoteOptions,
    login: Option<Login>,
    /// The last credentials or token that the registry got, in answer to its challenge.
    authorization: Mutex<Option<HeaderValue>>,
}

/// An error as the API gives it.
#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    errors: Vec<Reason>,
}

#[derive(Deserialize)]
struct Reason {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl Http {
    pub fn new(address: &Address, actions: &'static str, options: &RemoteOptions, login: Option<Login>) -> Result<Self> {
        // Fails if a provider is installed already. Any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let name = address.to_string();
        let client = Client::builder()
            .tls_certs_merge(extra_roots(options.extra_roots.as_deref())?)
            .user_agent(concat!("pf/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(options.connect_timeout)
            .redirect(reqwest::redirect::Policy::none())
            .pool_idle_timeout(Duration::from_secs(30))
            .no_proxy()
            .tcp_nodelay(true)
            .build()
            .map_err(|error| failed(&name, ErrorCode::InvalidRequest, format!("TLS cannot be set up: {}", reason(&error))))?;
        let (base, repository) = (address.base.clone(), address.repository.clone());
        Ok(Self { client, base, repository, actions, name, options: options.clone(), login, authorization: Mutex::default() })
    }

    pub fn options(&self) -> &RemoteOptions {
        &self.options
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    pub fn failed(&self, code: ErrorCode, reason: impl Into<String>) -> Error {
        failed(&self.name, code, reason)
    }

    /// `/v2/REPOSITORY/…`.
    pub fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.base.clone();
        // The scheme is one that has a path.
        if let Ok(mut path) = url.path_segments_mut() {
            path.clear().push("v2").extend(self.repository.as_str().split('/')).extend(segments);
        }
        url
    }

    /// The address that an answer to a request to `url` names. A request over https is not
    /// continued over http.
    pub fn location(&self, response: &Response) -> Result<Url> {
        let said = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
        let url = said.and_then(|said| response.url().join(said).ok()).filter(|url| url.username().is_empty() && url.password().is_none());
        let url = url.ok_or_else(|| self.failed(ErrorCode::InvalidDocument, "it names no valid address to go on at"))?;
        let is_safe = url.scheme() == "https" || (url.scheme() == "http" && self.base.scheme() == "http");
        if is_safe { Ok(url) } else { Err(self.failed(ErrorCode::InvalidDocument, format!("it goes on over {}, not https", url.scheme()))) }
    }

    /// Sends what `build` makes, again if need be, and returns the answer, which may be a refusal.
    pub async fn send(&self, build: &(dyn Fn(&Client) -> RequestBuilder + Sync)) -> Result<Response> {
        let (mut failures, mut challenges) = (0, 0);
        loop {
            let request = build(&self.client).build().map_err(|error| self.unreachable(&error))?;
            let error = match self.follow(request).await {
                Ok(response) if response.status() == StatusCode::UNAUTHORIZED && challenges == 0 => {
                    match self.answer(self.challenges(&response)).await {
                        Ok(true) => {
                            challenges += 1;
                            continue;
                        }
                        Ok(false) => return Ok(response),
                        // The token service may be busy.
                        Err(error) => (error, None),
                    }
                }
                Ok(response) if !passes(response.status()) => return Ok(response),
                Ok(response) => {
                    let wait = retry_after(response.headers());
                    (self.refusal(response).await, wait)
                }
                Err(error) => (error, None),
            };
            failures += 1;
            self.wait(failures, error).await?;
        }
    }

    /// Waits before the next try.
    ///
    /// # Errors
    /// The same error, if there is to be no other try.
    pub async fn wait(&self, failures: u32, (error, asked): (Error, Option<Duration>)) -> Result<()> {
        let wait = asked.unwrap_or_default().max(WAITS.wait(failures));
        if !error.retryable() || failures > self.options.retries || wait > self.options.longest_wait {
            return Err(error);
        }
        tracing::debug!(%error, failures, "request to a registry failed, retrying");
        tokio::time::sleep(wait).await;
        Ok(())
    }

    /// Sends a request, and goes where the answer to a read redirects to.
    async fn follow(&self, mut request: Request) -> Result<Response> {
        for _ in 0..=REDIRECTS {
            let (method, headers) = (request.method().clone(), request.headers().clone());
            let response = self.execute(request, None).await?;
            let is_elsewhere = response.status().is_redirection() && response.status() != StatusCode::NOT_MODIFIED;
            if !is_elsewhere || !matches!(method, Method::GET | Method::HEAD) {
                return Ok(response);
            }
            request = Request::new(method, self.location(&response)?);
            *request.headers_mut() = headers;
        }
        Err(self.failed(ErrorCode::InvalidDocument, format!("it redirects more than {REDIRECTS} times")))
    }

    /// Sends one request. Only the registry itself gets the credentials. The request is given up
    /// when nothing has moved for a while: no answer came, nor were bytes of the body read, as
    /// `moved` counts them.
    pub async fn execute(&self, mut request: Request, moved: Option<&AtomicU64>) -> Result<Response> {
        let is_ours = request.url().origin() == self.base.origin();
        request.headers_mut().remove(AUTHORIZATION);
        if let Some(value) = self.authorization.lock().clone().filter(|_| is_ours) {
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let sending = self.client.execute(request);
        tokio::pin!(sending);
        let idle = self.options.idle_timeout;
        let mut before = 0;
        loop {
            match tokio::time::timeout(idle, &mut sending).await {
                Ok(answer) => return answer.map_err(|error| self.unreachable(&error)),
                Err(_) => {
                    let now = moved.map_or(0, |moved| moved.load(Ordering::Relaxed));
                    if now == before {
                        return Err(self.failed(ErrorCode::Unavailable, format!("no byte moved for {} seconds", idle.as_secs())));
                    }
                    before = now;
                }
            }
        }
    }

    /// The challenge of an answer. Only the registry itself may ask for credentials.
    pub fn challenges(&self, response: &Response) -> Vec<Challenge> {
        if response.url().origin() != self.base.origin() {
            return Vec::new();
        }
        let asked = response.headers().get_all(WWW_AUTHENTICATE).iter();
        asked.filter_map(|value| Challenge::parse(value.to_str().ok()?)).collect()
    }

    /// Answers challenges; returns whether there is something to answer.
    pub async fn answer(&self, asked: Vec<Challenge>) -> Result<bool> {
        let scope = format!("repository:{}:{}", self.repository, self.actions);
        if let Some(url) = asked.iter().find_map(|challenge| challenge.token_url(&self.base, &scope)) {
            let token = self.token(url).await?;
            return self.authorize(&format!("Bearer {}", token.expose()));
        }
        match &self.login {
            Some(login) if asked.contains(&Challenge::Basic) => {
                use base64::Engine as _;
                let pair = format!("{}:{}", login.user, login.password.expose());
                self.authorize(&format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair)))
            }
            _ => Ok(false),
        }
    }

    fn authorize(&self, text: &str) -> Result<bool> {
        let unfit = |_| self.failed(ErrorCode::Unauthorized, "the credentials have characters that no header can carry");
        let mut value = HeaderValue::from_str(text).map_err(unfit)?;
        value.set_sensitive(true);
        *self.authorization.lock() = Some(value);
        Ok(true)
    }

    /// A token of the token service; without credentials, the one that any client gets.
    async fn token(&self, url: Url) -> Result<Secret> {
        let host = url.host_str().unwrap_or_default().to_owned();
        let mut request = self.client.get(url);
        if let Some(login) = &self.login {
            request = request.basic_auth(&login.user, Some(login.password.expose()));
        }
        let sent = tokio::time::timeout(self.options.idle_timeout, request.send()).await;
        let sent = sent.map_err(|_| self.failed(ErrorCode::Unavailable, format!("its token service {host} does not answer")))?;
        let response =
            sent.map_err(|error| self.failed(ErrorCode::Unavailable, format!("its token service {host}: {}", reason(&error))))?;
        let status = response.status();
        if !status.is_success() {
            let code = if passes(status) { ErrorCode::Unavailable } else { ErrorCode::Unauthorized };
            return Err(self.failed(code, format!("its token service {host} refused: {status}")));
        }
        let answer = self.read(response, SHORT).await?;
        let token = serde_json::from_slice::<TokenAnswer>(&answer).ok().and_then(TokenAnswer::token);
        token.ok_or_else(|| self.failed(ErrorCode::InvalidDocument, format!("its token service {host} sent no token")))
    }

    /// A complete answer of at most `limit` bytes.
    pub async fn read(&self, mut response: Response, limit: usize) -> Result<Bytes> {
        let mut pace = Pace::of_document(&self.options);
        let mut whole = BytesMut::new();
        loop {
            match pace.next(response.chunk()).await {
                Err(slow) => return Err(self.failed(ErrorCode::Unavailable, slow.to_string())),
                Ok(Err(error)) => return Err(self.unreachable(&error)),
                Ok(Ok(None)) => return Ok(whole.freeze()),
                Ok(Ok(Some(piece))) if whole.len() + piece.len() > limit => {
                    return Err(self.failed(ErrorCode::TooLarge, format!("its answer is longer than {limit} bytes")));
                }
                Ok(Ok(Some(piece))) => whole.extend_from_slice(&piece),
            }
        }
    }

    /// The error of a refusal, in the registry's words.
    pub async fn refusal(&self, response: Response) -> Error {
        let status = response.status();
        let body = self.read(response, SHORT).await.unwrap_or_default();
        let said = serde_json::from_slice::<Refusal>(&body).ok().and_then(|refusal| refusal.errors.into_iter().next());
        let said = said.map(|said| format!(" ({}: {})", said.code, said.message)).unwrap_or_default();
        let said: String = said.chars().filter(|c| !c.is_control()).take(300).collect();
        let code = match status.as_u16() {
            401 => ErrorCode::Unauthorized,
            403 => ErrorCode::Denied,
            404 => ErrorCode::NotFound,
            413 => ErrorCode::TooLarge,
            429 => ErrorCode::RateLimited,
            507 => ErrorCode::StorageFull,
            _ if passes(status) => ErrorCode::Unavailable,
            _ => ErrorCode::InvalidRequest,
        };
        self.failed(code, format!("it answered {status}{said}"))
    }

    pub fn unreachable(&self, error: &reqwest::Error) -> Error {
        self.failed(ErrorCode::Unavailable, format!("it does not answer: {}", reason(error)))
    }
}

/// Whether a refusal may be over at the next try.
fn passes(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

/// How long a registry asks to wait.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}
