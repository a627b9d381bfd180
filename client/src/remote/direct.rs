//! Frames directly from the storage behind a registry, if the registry locates them there.
//!
//! The storage is trusted as little as the registry: its bytes pass the same checks. It never gets
//! the registry's token. A failure of the storage — an expired URL, a moved pack, the network — is
//! a cut stream: the caller asks the registry for the rest. After a few of those in a row the
//! registry is asked to send frames itself.

use super::backoff::WAITS;
use super::pace::Pace;
use super::send::reason;
use super::{BoxFrames, Remote, RemoteOptions, new_client, traced};
use crate::error::{Error, Result};
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use futures::stream;
use pfr_schema::frame::end_mark;
use pfr_schema::{Digest, api};
use reqwest::header::{HeaderMap, RANGE};
use reqwest::{Certificate, Client, StatusCode, Url};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Bytes of one request.
const PART: u64 = 4 << 20;
/// Requests in flight besides the one being handed on, for each stream.
const AHEAD: usize = 2;
/// Tries of one request that is cut or not answered.
const TRIES: u32 = 3;
/// The longest time for which a URL is taken as valid.
const EXPIRES: Duration = Duration::from_secs(24 * 60 * 60);
/// Failures in a row after which the storage is left alone.
const FAILURES: u32 = 3;

/// The way around the registry.
pub(super) struct Direct {
    /// Authorities of the user's own.
    roots: Vec<Certificate>,
    /// Clients without the token, for http and for https, made when the registry first sends there:
    /// most never do.
    http: OnceLock<Client>,
    https: OnceLock<Client>,
    failures: AtomicU32,
}

impl Direct {
    pub(super) fn new(roots: Vec<Certificate>) -> Self {
        Self { roots, http: OnceLock::new(), https: OnceLock::new(), failures: AtomicU32::new(0) }
    }

    fn client(&self, url: &Url, options: &RemoteOptions) -> reqwest::Result<Client> {
        let speaks_tls = url.scheme() == "https";
        let made = if speaks_tls { &self.https } else { &self.http };
        if let Some(client) = made.get() {
            return Ok(client.clone());
        }
        // The token is not sent to storage that the registry refers to.
        let client = new_client(options, HeaderMap::new(), &self.roots, speaks_tls)?;
        Ok(made.get_or_init(|| client).clone())
    }

    /// Whether the storage may be tried.
    pub(super) fn open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) < FAILURES
    }
}

/// One request's part of an extent.
struct Part {
    url: Url,
    range: Range<u64>,
    /// When the URL expires.
    expires: Instant,
}

/// Why a try failed.
enum Trouble {
    /// The storage answers, but not with these bytes.
    Refused(StatusCode),
    /// Nothing, or not all, came.
    Broken(String),
}

impl Remote {
    /// The frames of `digests`, fetched from the locations that the registry gave.
    pub(super) fn fetch_located(&self, locations: api::FrameLocations, digests: &[Digest]) -> Result<BoxFrames> {
        let named = locations.extents.iter().flat_map(|extent| &extent.digests);
        if !named.eq(digests) {
            return Err(self.protocol("it located other frames than were asked for".into()));
        }
        let expires = Instant::now() + Duration::from_secs(locations.expires_seconds).min(EXPIRES);
        let mut extents = Vec::new();
        for extent in locations.extents {
            let end = extent.offset.checked_add(extent.length).ok_or_else(|| self.protocol("a range without an end".into()))?;
            let url: Url = extent.url.parse().map_err(|_| self.protocol("a location that is no URL".into()))?;
            // A request over https is not continued over http.
            if url.scheme() != "https" && (url.scheme() != "http" || self.base.scheme() == "https") {
                self.direct.failures.store(FAILURES, Ordering::Relaxed);
                return Err(self.cut(format!("it sends to a storage over {}", url.scheme())));
            }
            extents.push((url, extent.offset..end));
        }
        // Made one after another, as they are fetched: a false length must not make billions of
        // parts.
        let parts = extents.into_iter().flat_map(move |(url, range)| {
            let starts = range.clone().step_by(usize::try_from(PART).unwrap_or(usize::MAX));
            starts.map(move |start| Part { url: url.clone(), range: start..range.end.min(start.saturating_add(PART)), expires })
        });
        let (remote, count) = (self.clone(), digests.len() as u64);
        let body = stream::iter(parts).map(move |part| remote.clone().part(part)).buffered(AHEAD);
        Ok(body.chain(stream::once(async move { Ok(Bytes::from(end_mark(count))) })).boxed())
    }

    async fn part(self, part: Part) -> Result<Bytes> {
        let len = usize::try_from(part.range.end - part.range.start).unwrap_or(usize::MAX);
        let mut got = BytesMut::with_capacity(len);
        let mut tries = 0;
        loop {
            tries += 1;
            let why = match self.rest(&part, &mut got).await {
                Ok(()) if got.len() == len => {
                    self.direct.failures.store(0, Ordering::Relaxed);
                    return Ok(got.freeze());
                }
                Ok(()) => "it ended early".to_owned(),
                Err(Trouble::Broken(why)) => why,
                Err(Trouble::Refused(status)) => {
                    // An expired URL is no failure of the storage: the registry gives another URL.
                    if Instant::now() < part.expires {
                        self.direct.failures.fetch_add(1, Ordering::Relaxed);
                    }
                    return Err(self.detour(&part, &format!("it answered {status}")));
                }
            };
            if tries == TRIES {
                self.direct.failures.fetch_add(1, Ordering::Relaxed);
                return Err(self.detour(&part, &why));
            }
            tokio::time::sleep(WAITS.wait(tries)).await;
        }
    }

    /// Appends what `got` lacks of a part.
    async fn rest(&self, part: &Part, got: &mut BytesMut) -> std::result::Result<(), Trouble> {
        self.round_trips.fetch_add(1, Ordering::Relaxed);
        let idle = self.options.idle_timeout;
        let mut pace = Pace::new(&self.options);
        let silent = |_| Trouble::Broken(format!("no byte arrived for {} seconds", idle.as_secs()));
        let broken = |error: reqwest::Error| Trouble::Broken(reason(&error));
        let (start, end) = (part.range.start + got.len() as u64, part.range.end);
        let client = self.direct.client(&part.url, &self.options).map_err(broken)?;
        let request = client.get(part.url.clone()).header(RANGE, format!("bytes={start}-{}", end - 1));
        let mut response = tokio::time::timeout(idle, traced::send_elsewhere(request, 1)).await.map_err(silent)?.map_err(broken)?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {}
            status if status.is_server_error() => return Err(Trouble::Broken(format!("it answered {status}"))),
            status => return Err(Trouble::Refused(status)),
        }
        while let Some(piece) = pace.next(response.chunk()).await.map_err(|slow| Trouble::Broken(slow.to_string()))?.map_err(broken)? {
            if got.len() as u64 + piece.len() as u64 > end - part.range.start {
                return Err(Trouble::Broken("it sent more than was asked for".into()));
            }
            got.extend_from_slice(&piece);
        }
        Ok(())
    }

    /// The error; the host of the storage is named, the rest of its URL is a secret.
    fn detour(&self, part: &Part, why: &str) -> Error {
        self.cut(format!("the storage at {} that it sent to: {why}", part.url.host_str().unwrap_or_default()))
    }
}
