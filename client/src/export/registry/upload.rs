//! Uploads of blobs: not of those that are there, in one request, and from where it was cut.

use super::request::{Http, retry_after};
use crate::error::{Error, Result};
use crate::export::spool::{Body, Written, pieces};
use futures::TryStreamExt as _;
use pfr_schema::{Digest, ErrorCode};
use reqwest::header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, RANGE};
use reqwest::{Method, Response, StatusCode, Url};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const OCTETS: &str = "application/octet-stream";

/// A blob on its way.
struct Upload<'a> {
    http: &'a Http,
    file: Arc<File>,
    digest: Digest,
    size: u64,
    /// Where the registry takes the next bytes, if it has begun an upload.
    session: Option<Url>,
}

/// A failed try, and when the registry asks for the next one.
type Fault = (Error, Option<Duration>);

/// Stores a blob; returns whether the registry lacked it.
pub(super) async fn put(http: &Http, blob: Written) -> Result<bool> {
    let url = http.url(&["blobs", &blob.digest.to_string()]);
    let head = http.send(&|client| client.head(url.clone())).await?;
    match head.status() {
        StatusCode::NOT_FOUND => {}
        status if status.is_success() => {
            let length = head.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
            return match length {
                Some(found) if found != blob.size => {
                    let reason = format!("it says that {} has {found} bytes, and it has {}", blob.digest, blob.size);
                    Err(http.failed(ErrorCode::LengthMismatch, reason))
                }
                _ => Ok(false),
            };
        }
        _ => return Err(http.refusal(head).await),
    }
    let Body::Hidden(file) = blob.body else { return Err(Error::Internal("a blob for a registry is elsewhere".into())) };
    let mut upload = Upload { http, file, digest: blob.digest, size: blob.size, session: None };
    let mut failures = 0;
    loop {
        let Err(fault) = upload.attempt().await else { return Ok(true) };
        failures += 1;
        http.wait(failures, fault).await?;
    }
}

impl Upload<'_> {
    async fn attempt(&mut self) -> std::result::Result<(), Fault> {
        let received = match self.session.take() {
            Some(url) => self.received(url).await?,
            None => 0,
        };
        let (location, stored) = match self.session.take() {
            Some(location) if received > 0 => {
                let range = format!("{received}-{}", self.size - 1);
                let answer = self.send(Method::PATCH, location, received, Some(range)).await?;
                let location = self.http.location(&answer).map_err(once)?;
                self.session = Some(location.clone());
                (location, self.size)
            }
            _ => {
                let location = self.begin().await?;
                self.session = Some(location.clone());
                (location, 0)
            }
        };
        let mut location = location;
        location.query_pairs_mut().append_pair("digest", &self.digest.to_string());
        let answer = self.send(Method::PUT, location, stored, None).await?;
        let said = answer.headers().get("docker-content-digest").and_then(|value| value.to_str().ok());
        match said {
            Some(said) if said != self.digest.to_string() => {
                let said: String = said.chars().take(100).collect();
                Err(once(self.http.failed(ErrorCode::DigestMismatch, format!("it stored {} as {said:?}", self.digest))))
            }
            _ => Ok(()),
        }
    }

    /// Begins an upload; returns where its bytes go.
    async fn begin(&self) -> std::result::Result<Url, Fault> {
        // The path of uploads ends with a slash.
        let url = self.http.url(&["blobs", "uploads", ""]);
        let answer = self.http.send(&|client| client.post(url.clone()).header(CONTENT_LENGTH, 0_u64)).await.map_err(once)?;
        if answer.status() != StatusCode::ACCEPTED {
            return Err(once(self.http.refusal(answer).await));
        }
        self.http.location(&answer).map_err(once)
    }

    /// Bytes that an upload has received before it was cut; its address is kept if it goes on.
    async fn received(&mut self, url: Url) -> std::result::Result<u64, Fault> {
        let answer = self.http.send(&|client| client.get(url.clone())).await.map_err(once)?;
        if answer.status() != StatusCode::NO_CONTENT {
            return Ok(0);
        }
        let range = answer.headers().get(RANGE).and_then(|value| value.to_str().ok());
        let last = range.and_then(|range| range.trim_start_matches("bytes=").strip_prefix("0-")?.parse::<u64>().ok());
        // An upload without bytes says `0-0`, as one with one byte does: it begins again.
        match last {
            Some(last) if last > 0 && last < self.size - 1 => {
                self.session = Some(self.http.location(&answer).unwrap_or(url));
                Ok(last + 1)
            }
            _ => Ok(0),
        }
    }

    /// Sends the bytes from `from` on.
    async fn send(&self, method: Method, url: Url, from: u64, range: Option<String>) -> std::result::Result<Response, Fault> {
        let moved = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&moved);
        let body = pieces(Arc::clone(&self.file), PathBuf::from("a temporary file"), from..self.size)
            .inspect_ok(move |piece| {
                count.fetch_add(piece.len() as u64, Ordering::Relaxed);
            })
            .map_err(|error| std::io::Error::other(error.to_string()));
        let request = self.http.client().request(method, url);
        let mut request = request.header(CONTENT_TYPE, OCTETS).header(CONTENT_LENGTH, self.size - from);
        if let Some(range) = range {
            request = request.header(CONTENT_RANGE, range);
        }
        let request = match from < self.size {
            true => request.body(reqwest::Body::wrap_stream(body)),
            false => request,
        };
        let request = request.build().map_err(|error| once(self.http.unreachable(&error)))?;
        let answer = self.http.execute(request, Some(&moved)).await.map_err(once)?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let is_refused = answer.status() == StatusCode::UNAUTHORIZED;
        if is_refused && self.http.answer(self.http.challenges(&answer)).await.map_err(once)? {
            return Err((self.http.failed(ErrorCode::Unavailable, "its token ended during the upload"), None));
        }
        let wait = retry_after(answer.headers());
        Err((self.http.refusal(answer).await, wait))
    }
}

/// A fault without a time for the next try.
fn once(error: Error) -> Fault {
    (error, None)
}
