//! A repository of any registry that speaks the OCI Distribution API.
//!
//! `request` sends and tries again, `auth` answers challenges, `upload` sends blobs. Nothing that
//! the registry says is believed: manifests and packs are read by digest and verified by their
//! reader, and a redirect or an upload address on another host never gets the credentials.

mod address;
mod auth;
mod request;
mod upload;

pub(super) use address::SCHEME;
pub use address::{Address, Named};
pub use auth::Login;

use super::layout::{Layout, failed};
use super::spool::{Spool, Written};
use crate::error::{Error, Result};
use crate::remote::RemoteOptions;
use crate::remote::pace::Pace;
use bytes::{Buf as _, Bytes};
use futures::future::{BoxFuture, FutureExt as _};
use futures::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use pfr_schema::export::Entry;
use pfr_schema::snapshot::MAX_BYTES;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Tag, media_type};
use reqwest::StatusCode;
use reqwest::header::{ACCEPT, CONTENT_TYPE, LINK, RANGE};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Tags of a repository that an export looks at, for packs that need not be sent again, and those
/// of a page.
const TAGS: usize = 100;
/// Tags of a repository that an import looks at, at most.
const MOST: usize = 10_000;
/// Manifests that are read at a time.
const AT_ONCE: usize = 8;
/// Bytes of a blob after which earlier failures no longer count: a few bytes for each answer would
/// never end.
const PROGRESS: u64 = 64 << 10;
/// Bytes of a list of tags at most.
const LIST: usize = 1 << 20;

/// A repository.
#[derive(Clone, Debug)]
pub(crate) struct Registry(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    address: Address,
    /// Whether it takes an export.
    writes: bool,
    name: String,
    http: request::Http,
}

#[derive(Deserialize)]
struct TagList {
    #[serde(default)]
    tags: Option<Vec<String>>,
}

impl Registry {
    /// The repository at `address`, to be read, or to take an export. Nothing is sent yet.
    pub fn at(address: Address, writes: bool, options: &RemoteOptions, login: Option<Login>) -> Result<Self> {
        // A token service may refuse a reader that asks for more.
        let actions = if writes { "pull,push" } else { "pull" };
        let http = request::Http::new(&address, actions, options, login)?;
        Ok(Self(Arc::new(Shared { name: address.to_string(), address, writes, http })))
    }

    fn http(&self) -> &request::Http {
        &self.0.http
    }

    fn failed(&self, code: ErrorCode, reason: impl Into<String>) -> Error {
        failed(&self.0.name, code, reason)
    }

    /// A manifest, by tag or digest; none if there is none.
    async fn find(&self, reference: &str, most: u64) -> Result<Option<Bytes>> {
        let url = self.http().url(&["manifests", reference]);
        let get = |client: &reqwest::Client| client.get(url.clone()).header(ACCEPT, media_type::OCI_MANIFEST);
        let response = self.http().send(&get).await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(None),
            status if status.is_success() => self.http().read(response, usize::try_from(most).unwrap_or(usize::MAX)).await.map(Some),
            _ => Err(self.http().refusal(response).await),
        }
    }

    /// An entry for a manifest that is here.
    async fn entry(&self, reference: &str, tag: Option<&Tag>) -> Result<Option<Entry>> {
        let Some(bytes) = self.find(reference, MAX_BYTES).await? else { return Ok(None) };
        let annotations = tag.map(|tag| (pfr_schema::export::REF_NAME.to_owned(), tag.to_string())).into_iter().collect();
        let digest = Digest::sha256(&bytes);
        let (size, media_type) = (bytes.len() as u64, media_type::OCI_MANIFEST.to_owned());
        Ok(Some(Entry { media_type, digest, size, artifact_type: None, annotations, others: Default::default() }))
    }

    /// The first tags of the repository, at least `enough` if it has so many.
    async fn tags(&self, enough: usize) -> Result<Vec<Tag>> {
        let (mut seen, mut last) = (BTreeSet::new(), None::<String>);
        loop {
            let mut url = self.http().url(&["tags", "list"]);
            url.query_pairs_mut().append_pair("n", &TAGS.to_string());
            if let Some(last) = &last {
                url.query_pairs_mut().append_pair("last", last);
            }
            let response = self.http().send(&|client| client.get(url.clone())).await?;
            match response.status() {
                StatusCode::NOT_FOUND => break,
                status if status.is_success() => {}
                _ => return Err(self.http().refusal(response).await),
            }
            let goes_on = response.headers().contains_key(LINK);
            let bytes = self.http().read(response, LIST).await?;
            let list: TagList = pfr_schema::json::parse("list of tags", &bytes, LIST as u64)
                .map_err(|error| self.failed(ErrorCode::InvalidDocument, error.to_string()))?;
            let (page, before) = (list.tags.unwrap_or_default(), seen.len());
            let is_full = page.len() >= TAGS;
            last = page.last().cloned();
            seen.extend(page);
            // A registry that knows no pages sends the same ones again.
            if seen.len() == before || seen.len() >= enough || !(goes_on || is_full) {
                break;
            }
        }
        Ok(seen.iter().filter_map(|tag| tag.parse().ok()).collect())
    }

    /// The tags whose manifests are looked at: for an import all, for an export the first ones, of
    /// which it needs none.
    async fn looked_at(&self, named: Option<&Tag>) -> Result<Vec<Tag>> {
        if !self.0.writes {
            return match named {
                Some(tag) => Ok(vec![tag.clone()]),
                None => {
                    let tags = self.tags(MOST + 1).await?;
                    let too_many = || self.failed(ErrorCode::TooLarge, format!("it has more than {MOST} tags; add one to its address"));
                    if tags.len() > MOST { Err(too_many()) } else { Ok(tags) }
                }
            };
        }
        let mut tags = match self.tags(TAGS).await {
            Err(error) if named.is_some() => {
                tracing::debug!(%error, "the tags of the repository cannot be listed");
                Vec::new()
            }
            tags => tags?,
        };
        tags.retain(|tag| Some(tag) != named);
        tags.truncate(TAGS);
        tags.extend(named.cloned());
        Ok(tags)
    }

    /// The manifests of tags, or the one of a digest.
    async fn listed(&self) -> Result<Vec<Entry>> {
        let named = match &self.0.address.named {
            Some(Named::Digest(digest)) => {
                return match self.entry(&digest.to_string(), None).await? {
                    Some(entry) if entry.digest != *digest => {
                        Err(self.failed(ErrorCode::DigestMismatch, format!("it sent {} for {digest}", entry.digest)))
                    }
                    entry => Ok(entry.into_iter().collect()),
                };
            }
            Some(Named::Tag(tag)) => Some(tag),
            None => None,
        };
        let registry = self.clone();
        let found = stream::iter(self.looked_at(named).await?).map(move |tag| {
            let registry = registry.clone();
            async move {
                match registry.entry(tag.as_str(), Some(&tag)).await {
                    Err(error) if registry.0.writes && !error.retryable() && error.code() != ErrorCode::Unauthorized => {
                        tracing::debug!(%error, %tag, "the manifest of a tag cannot be read");
                        Ok(None)
                    }
                    entry => entry,
                }
            }
        });
        let found: Vec<Option<Entry>> = found.buffered(AT_ONCE).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }
}

impl Layout for Registry {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn entries(&self) -> BoxFuture<'_, Result<Vec<Entry>>> {
        self.listed().boxed()
    }

    fn manifest<'a>(&'a self, entry: &'a Entry, most: u64) -> BoxFuture<'a, Result<Bytes>> {
        async move {
            let missing = || self.failed(ErrorCode::NotFound, format!("the manifest {} is not there any more", entry.digest));
            self.find(&entry.digest.to_string(), most).await?.ok_or_else(missing)
        }
        .boxed()
    }

    fn read(&self, digest: Digest, range: Range<u64>) -> BoxStream<'static, Result<Bytes>> {
        if range.is_empty() {
            return stream::empty().boxed();
        }
        let part = Part { registry: self.clone(), digest, at: range.start, end: range.end, open: None, failures: 0, gained: 0 };
        stream::try_unfold(part, |mut part| async move { Ok::<_, Error>(part.next().await?.map(|piece| (piece, part))) }).boxed()
    }

    fn spool(&self) -> Result<Spool> {
        Spool::hidden()
    }

    fn put(&self, blob: Written) -> BoxFuture<'_, Result<bool>> {
        async move { upload::put(self.http(), blob).await }.boxed()
    }

    fn publish<'a>(&'a self, manifest: &'a Document, entry: Entry) -> BoxFuture<'a, Result<()>> {
        async move {
            let named = match &self.0.address.named {
                Some(Named::Tag(tag)) => Some(tag.clone()),
                _ => entry.tag(),
            };
            let named = named.map_or_else(|| manifest.digest.to_string(), |tag| tag.to_string());
            let url = self.http().url(&["manifests", &named]);
            let body: Bytes = manifest.bytes.clone().into();
            let put = |client: &reqwest::Client| client.put(url.clone()).header(CONTENT_TYPE, media_type::OCI_MANIFEST).body(body.clone());
            let response = self.http().send(&put).await?;
            if !response.status().is_success() {
                return Err(self.http().refusal(response).await);
            }
            let said = response.headers().get("docker-content-digest").and_then(|value| value.to_str().ok());
            if said.is_some_and(|said| said != manifest.digest.to_string()) {
                let said: String = said.unwrap_or_default().chars().take(100).collect();
                return Err(self.failed(ErrorCode::DigestMismatch, format!("it stored {} as {said:?}", manifest.digest)));
            }
            Ok(())
        }
        .boxed()
    }

    fn finish(&self) -> BoxFuture<'_, Result<()>> {
        async { Ok(()) }.boxed()
    }
}

/// A range of a blob, asked for again from where an answer was cut.
struct Part {
    registry: Registry,
    digest: Digest,
    at: u64,
    end: u64,
    open: Option<Answer>,
    failures: u32,
    /// Bytes since the last failure.
    gained: u64,
}

struct Answer {
    response: reqwest::Response,
    pace: Pace,
    /// Bytes before the range that still come.
    skip: u64,
}

impl Part {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        while self.at < self.end {
            if self.open.is_none() {
                self.open = Some(ask(&self.registry, &self.digest, self.at..self.end).await?);
            }
            let Some(Answer { response, pace, skip }) = &mut self.open else { continue };
            let piece = match pace.next(response.chunk()).await {
                Ok(Ok(Some(piece))) => Ok(piece),
                Ok(Ok(None)) => Err("its answer ends too early".to_owned()),
                Ok(Err(error)) => Err(crate::remote::reason(&error)),
                Err(slow) => Err(slow.to_string()),
            };
            let mut piece = match piece {
                Ok(piece) => piece,
                Err(reason) => {
                    (self.open, self.gained) = (None, 0);
                    self.failures += 1;
                    let error = self.registry.failed(ErrorCode::Unavailable, format!("{}: {reason}", self.digest));
                    self.registry.http().wait(self.failures, (error, None)).await?;
                    continue;
                }
            };
            let skipped = (*skip).min(piece.len() as u64);
            *skip -= skipped;
            piece.advance(usize::try_from(skipped).unwrap_or_default());
            // Bytes behind the range are not read.
            piece.truncate(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
            if !piece.is_empty() {
                self.at += piece.len() as u64;
                self.gained += piece.len() as u64;
                if self.gained >= PROGRESS {
                    self.failures = 0;
                }
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }
}

/// Asks for a range of a blob.
async fn ask(registry: &Registry, digest: &Digest, range: Range<u64>) -> Result<Answer> {
    let http = registry.http();
    let url = http.url(&["blobs", &digest.to_string()]);
    let asked = format!("bytes={}-{}", range.start, range.end - 1);
    let response = http.send(&|client| client.get(url.clone()).header(RANGE, asked.as_str())).await?;
    let skip = match response.status() {
        StatusCode::PARTIAL_CONTENT => 0,
        // A registry without ranges sends everything.
        StatusCode::OK => range.start,
        StatusCode::NOT_FOUND => return Err(registry.failed(ErrorCode::MissingBlobs, format!("its blob {digest} is not there"))),
        StatusCode::RANGE_NOT_SATISFIABLE => {
            return Err(registry.failed(ErrorCode::Truncated, format!("its blob {digest} is shorter than its manifest says")));
        }
        _ => return Err(http.refusal(response).await),
    };
    Ok(Answer { response, pace: Pace::new(http.options()), skip })
}
