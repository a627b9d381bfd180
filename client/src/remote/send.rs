//! Sending one request, again if need be, and reading its answer.

use super::Remote;
use super::backoff::Tries;
use super::pace::Pace;
use super::traced;
use crate::boxed;
use crate::error::{Error, Result};
use crate::slot::Slot;
use crate::tokens::server_of;
use bytes::{Bytes, BytesMut};
use pfr_schema::api::Problem;
use pfr_schema::{FormatError, json};
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{RequestBuilder, Response};
use serde::de::DeserializeOwned;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Bytes of a JSON answer at most. The largest honest ones are the detail of a snapshot with its
/// page trees, and the report of a scrub that found very many damaged blobs.
const ANSWER: usize = 192 << 20;
/// Bytes of a problem document at most.
const PROBLEM: usize = 1 << 20;
/// How long a registry may take to read and hash a snapshot.
const PROOF_TIMEOUT: Duration = Duration::from_secs(6 * 3600);
/// How long a registry may take to count what snapshots share: it reads no page.
const COUNT_TIMEOUT: Duration = Duration::from_secs(900);

/// How long the head of an answer is waited for.
#[derive(Clone, Copy)]
enum Patience {
    /// So long: the registry has the answer at hand.
    Idle(Duration),
    /// At most so long, and only while the registry is alive: it works on the answer.
    Work(Duration),
}

/// Makes a request, for each try anew. Sending is compiled once, and not once for each request.
type Build<'a> = dyn Fn() -> RequestBuilder + Send + Sync + 'a;

impl Remote {
    /// Sends what `build` makes until a try succeeds or fails for good.
    #[boxed]
    async fn send(&self, patience: Patience, build: &Build<'_>) -> Result<Response> {
        let mut tries = Tries::of(self);
        loop {
            self.round_trips.fetch_add(1, Ordering::Relaxed);
            let attempt = tries.failures() + 1;
            let request = match &self.via {
                Some(via) => build().header(super::VIA, &**via),
                None => build(),
            };
            let sent = tokio::select! {
                sent = traced::send(request, attempt) => Ok(sent),
                reason = self.runs_out(patience) => Err(reason),
            };
            let (error, retry_after) = match sent {
                Err(reason) => (Error::Unreachable { url: self.url().to_owned(), reason, attempts: attempt }, None),
                Ok(Err(error)) => {
                    if took_request(&error) {
                        tries.cut();
                    }
                    (self.unreachable(&error, attempt), None)
                }
                Ok(Ok(response)) if response.status().is_success() && !is_web_page(&response) => {
                    self.answered();
                    return Ok(response);
                }
                Ok(Ok(response)) => self.refusal(response).await,
            };
            tries.again(error, retry_after).await?;
        }
    }

    /// Completes when an answer is not waited for any longer, and says why.
    async fn runs_out(&self, patience: Patience) -> String {
        match patience {
            Patience::Idle(limit) => {
                sleep(limit).await;
                no_byte(limit)
            }
            Patience::Work(limit) => match timeout(limit, self.falls_silent()).await {
                Ok(silence) => format!("no answer yet, and none to /livez for {} seconds", silence.as_secs()),
                Err(_) => format!("no answer within {} minutes", limit.as_secs() / 60),
            },
        }
    }

    /// Completes when the registry has given no sign of life for as long as other answers may take,
    /// and returns that time. One that works for hours says nothing meanwhile, like one that hangs:
    /// only a second request tells them apart.
    async fn falls_silent(&self) -> Duration {
        let limit = self.options.idle_timeout;
        let (mut heard, mut missed) = (Instant::now(), 0_u32);
        // One look that was missed shows nothing: this machine may have stood still meanwhile.
        while heard.elapsed() < limit || missed < 2 {
            sleep(limit / 4).await;
            if self.is_alive(limit / 4).await {
                (heard, missed) = (Instant::now(), 0);
            } else {
                missed += 1;
            }
        }
        limit
    }

    /// Whether the registry answers anything within `limit`. What a gateway says of a registry that
    /// does not answer is no sign of life.
    async fn is_alive(&self, limit: Duration) -> bool {
        let livez = format!("{}/livez", server_of(self.url()));
        match timeout(limit, self.send_once(self.client.get(livez))).await {
            Ok(Err(error)) => matches!(error, Error::Registry { .. }) || !error.retryable(),
            Ok(Ok(())) => true,
            Err(_) => false,
        }
    }

    /// Sends a request once, outside of any trace and without a time limit.
    pub(super) async fn send_once(&self, request: RequestBuilder) -> Result<()> {
        self.round_trips.fetch_add(1, Ordering::Relaxed);
        match request.send().await {
            Err(error) => Err(self.unreachable(&error, 1)),
            Ok(response) if response.status().is_success() && !is_web_page(&response) => Ok(()),
            Ok(response) => Err(self.refusal(response).await.0),
        }
    }

    /// [`Self::send`] with the usual time limit.
    pub(super) async fn request(&self, build: impl Fn() -> RequestBuilder + Send + Sync) -> Result<Response> {
        self.send(Patience::Idle(self.options.idle_timeout), &build).await
    }

    /// [`Self::body`], parsed.
    pub(super) async fn json<T: DeserializeOwned>(&self, build: impl Fn() -> RequestBuilder + Send + Sync) -> Result<T> {
        self.parse(&self.body(build).await?)
    }

    /// [`Self::send`] for an answer that takes the registry hours, parsed.
    pub(super) async fn proof<T: DeserializeOwned>(&self, build: impl Fn() -> RequestBuilder + Send + Sync) -> Result<T> {
        self.patiently(PROOF_TIMEOUT, build).await
    }

    /// [`Self::send`] for an answer that takes the registry minutes, parsed.
    pub(super) async fn count<T: DeserializeOwned>(&self, build: impl Fn() -> RequestBuilder + Send + Sync) -> Result<T> {
        self.patiently(COUNT_TIMEOUT, build).await
    }

    async fn patiently<T: DeserializeOwned>(&self, limit: Duration, build: impl Fn() -> RequestBuilder + Send + Sync) -> Result<T> {
        let response = self.send(Patience::Work(limit), &build).await?;
        self.parse(&self.read(response, ANSWER).await?)
    }

    /// [`Self::request`] and its complete answer. If the answer is cut, the request is sent again.
    pub(super) async fn body(&self, build: impl Fn() -> RequestBuilder + Send + Sync) -> Result<Bytes> {
        self.whole(&build).await
    }

    #[boxed]
    async fn whole(&self, build: &Build<'_>) -> Result<Bytes> {
        let mut tries = Tries::of(self);
        loop {
            let response = self.send(Patience::Idle(self.options.idle_timeout), build).await?;
            match self.read(response, ANSWER).await {
                Ok(bytes) => return Ok(bytes),
                Err(error) => tries.again(error, None).await?,
            }
        }
    }

    pub(super) fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        json::parse("answer", bytes, bytes.len() as u64).map_err(|e| self.protocol(format!("its answer does not parse: {e}")))
    }

    /// Reads a complete answer, if it comes soon enough and stays below `limit` bytes.
    pub(super) async fn read(&self, mut response: Response, limit: usize) -> Result<Bytes> {
        let mut pace = Pace::of_document(&self.options);
        let mut whole = BytesMut::new();
        loop {
            let piece = match pace.next(response.chunk()).await {
                Err(slow) => return Err(self.slow(slow)),
                Ok(Err(error)) => return Err(self.cut(reason(&error))),
                Ok(Ok(None)) => return Ok(whole.freeze()),
                Ok(Ok(Some(piece))) => piece,
            };
            if whole.len() + piece.len() > limit {
                return Err(self.protocol(format!("its answer is longer than {limit} bytes")));
            }
            whole.extend_from_slice(&piece);
        }
    }

    /// The error of a refusal, and when to try again if the refusal says so.
    pub(super) async fn refusal(&self, response: Response) -> (Error, Option<Duration>) {
        let status = response.status().as_u16();
        let url = response.url().to_string();
        let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok());
        let retry_after = header(RETRY_AFTER).and_then(|v| v.parse().ok()).map(Duration::from_secs);
        let content_type = header(CONTENT_TYPE).unwrap_or_default().to_owned();
        let body = self.read(response, PROBLEM).await.unwrap_or_default();
        let error = match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) if content_type.starts_with("application/problem+json") => {
                self.refused(problem.retryable);
                Error::Registry { problem: Box::new(problem) }
            }
            _ => {
                let error = Error::Foreign { url, status, found: describe(&content_type, &body) };
                // A gateway in front of the registry says that it is away.
                if error.retryable() {
                    self.heard();
                }
                error
            }
        };
        (error, retry_after)
    }

    pub(super) fn unreachable(&self, error: &reqwest::Error, attempts: u32) -> Error {
        let unreachable = || Error::Unreachable { url: self.url().to_owned(), reason: reason(error), attempts };
        self.untrusted(error).unwrap_or_else(unreachable)
    }

    pub(super) fn silent(&self, idle: Duration, attempts: u32) -> Error {
        Error::Unreachable { url: self.url().to_owned(), reason: no_byte(idle), attempts }
    }

    pub(crate) fn cut(&self, reason: String) -> Error {
        Error::Cut { url: self.url().to_owned(), reason }
    }

    /// The error of a stream from this registry that the store refused.
    pub(crate) fn received(&self, slot: &Slot, error: pfr_store::Error) -> Error {
        match (slot.take(), error) {
            (Some(error), _) => error,
            (None, pfr_store::Error::Frame { digest, source, .. }) => Error::Received { digest, source },
            (None, pfr_store::Error::Format(source @ FormatError::Truncated { .. })) => self.cut(source.to_string()),
            (None, other) => Error::Store(other),
        }
    }

    pub(crate) fn protocol(&self, reason: String) -> Error {
        Error::Protocol { url: self.url().to_owned(), reason }
    }
}

/// Whether a request that failed was on a connection, and the connection was cut. An answer that is
/// not HTTP comes from another server.
fn took_request(error: &reqwest::Error) -> bool {
    let errors = || std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source());
    let ended =
        |error: &(dyn std::error::Error + 'static)| error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message);
    error.is_request() && !error.is_connect() && errors().any(|error| error.is::<std::io::Error>() || ended(error))
}

fn no_byte(idle: Duration) -> String {
    format!("no byte moved for {} seconds", idle.as_secs())
}

/// Whether an answer is a web page. No registry gives one.
fn is_web_page(response: &Response) -> bool {
    response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().to_ascii_lowercase().starts_with(b"text/html"))
}

/// Describes an answer that does not belong to the protocol, in one short line.
fn describe(content_type: &str, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(1000)]);
    let text = text.trim();
    if text.is_empty() {
        return "nothing".into();
    }
    if content_type.to_ascii_lowercase().contains("html") || text.starts_with('<') {
        return "a web page".into();
    }
    if text.contains(|c: char| c == char::REPLACEMENT_CHARACTER || (c.is_control() && !c.is_whitespace())) {
        return format!("{} bytes that are no text", body.len());
    }
    let line: String = text.lines().next().unwrap_or_default().chars().take(120).collect();
    format!("{line:?}")
}

/// The innermost reason of an HTTP error: the outer ones repeat the URL.
#[must_use]
pub fn reason(error: &reqwest::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
