//! Sending one request, again if need be, and reading its answer.

use super::{Remote, backoff};
use crate::error::{Error, Result};
use bytes::{Bytes, BytesMut};
use pfr_schema::api::Problem;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{RequestBuilder, Response};
use serde::de::DeserializeOwned;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes of a JSON answer at most. The largest honest one is a snapshot's detail with its page trees.
const ANSWER: usize = 192 << 20;
/// Bytes of a problem document at most.
const PROBLEM: usize = 1 << 20;
/// How long a registry may take to read and hash a whole snapshot.
pub(super) const PROOF_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

impl Remote {
    /// Sends what `build` makes until it succeeds or there is no use.
    pub(super) async fn send(&self, idle: Duration, build: impl Fn() -> RequestBuilder) -> Result<Response> {
        let mut failures = 0;
        loop {
            self.round_trips.fetch_add(1, Ordering::Relaxed);
            let (error, retry_after) = match tokio::time::timeout(idle, self.dressed(build()).send()).await {
                Err(_) => (self.silent(idle, failures + 1), None),
                Ok(Err(error)) => (self.unreachable(&error, failures + 1), None),
                Ok(Ok(response)) if response.status().is_success() => return Ok(response),
                Ok(Ok(response)) => self.refusal(response).await,
            };
            failures += 1;
            match backoff::after(&error, retry_after, failures, self.options.retries, self.options.longest_wait) {
                None => return Err(error),
                Some(wait) => {
                    tracing::debug!(%error, wait_ms = wait.as_millis(), failures, "trying again");
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    fn dressed(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.via {
            Some(via) => request.header(super::VIA, &**via),
            None => request,
        }
    }

    /// [`Self::send`], without a time limit of its own.
    pub(super) async fn request(&self, build: impl Fn() -> RequestBuilder) -> Result<Response> {
        self.send(self.options.idle_timeout, build).await
    }

    /// [`Self::request`], the answer as JSON. A cut answer is asked for again.
    pub(super) async fn json<T: DeserializeOwned>(&self, build: impl Fn() -> RequestBuilder) -> Result<T> {
        let bytes = self.body(build).await?;
        self.parse(&bytes)
    }

    /// [`Self::request`], the answer whole.
    pub(super) async fn body(&self, build: impl Fn() -> RequestBuilder) -> Result<Bytes> {
        self.send_whole(ANSWER, build).await
    }

    /// [`Self::send`], the answer whole. One that is cut counts as lost: the request is sent again.
    pub(super) async fn send_whole(&self, limit: usize, build: impl Fn() -> RequestBuilder) -> Result<Bytes> {
        let mut failures = 0;
        loop {
            let response = self.send(self.options.idle_timeout, &build).await?;
            match self.read(response, limit).await {
                Err(error) if error.retryable() && failures < self.options.retries => {
                    failures += 1;
                    tokio::time::sleep(backoff::wait(failures)).await;
                }
                result => return result,
            }
        }
    }

    pub(super) fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        serde_json::from_slice(bytes).map_err(|e| self.protocol(format!("its answer does not parse: {e}")))
    }

    /// Reads an answer whole, as long as it comes and stays below `limit`.
    pub(super) async fn read(&self, mut response: Response, limit: usize) -> Result<Bytes> {
        let idle = self.options.idle_timeout;
        let mut whole = BytesMut::new();
        loop {
            let piece = match tokio::time::timeout(idle, response.chunk()).await {
                Err(_) => return Err(self.cut(format!("no byte for {} seconds", idle.as_secs()))),
                Ok(Err(error)) => return Err(self.cut(words(&error))),
                Ok(Ok(None)) => return Ok(whole.freeze()),
                Ok(Ok(Some(piece))) => piece,
            };
            if whole.len() + piece.len() > limit {
                return Err(self.protocol(format!("its answer is longer than {limit} bytes")));
            }
            whole.extend_from_slice(&piece);
        }
    }

    /// What a refusal says, and when to try again if it says so.
    pub(super) async fn refusal(&self, response: Response) -> (Error, Option<Duration>) {
        let status = response.status().as_u16();
        let url = response.url().to_string();
        let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok());
        let retry_after = header(RETRY_AFTER).and_then(|v| v.parse().ok()).map(Duration::from_secs);
        let is_problem = header(CONTENT_TYPE).is_some_and(|t| t.starts_with("application/problem+json"));
        let body = self.read(response, PROBLEM).await.unwrap_or_default();
        let error = match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) if is_problem => Error::Registry { problem: Box::new(problem) },
            _ => Error::Foreign { url, status, said: String::from_utf8_lossy(&body).chars().take(200).collect() },
        };
        (error, retry_after)
    }

    pub(super) fn unreachable(&self, error: &reqwest::Error, attempts: u32) -> Error {
        Error::Unreachable { url: self.url().to_owned(), reason: words(error), attempts }
    }

    pub(super) fn silent(&self, idle: Duration, attempts: u32) -> Error {
        Error::Unreachable { url: self.url().to_owned(), reason: format!("no byte moved for {} seconds", idle.as_secs()), attempts }
    }

    pub(crate) fn cut(&self, reason: String) -> Error {
        Error::Cut { url: self.url().to_owned(), reason }
    }

    pub(crate) fn protocol(&self, reason: String) -> Error {
        Error::Protocol { url: self.url().to_owned(), reason }
    }
}

/// An HTTP error in its innermost words: the outer ones repeat the URL.
pub(super) fn words(error: &reqwest::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
