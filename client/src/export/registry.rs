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
use futures::stream::{self, BoxStream, StreamExt as _};
use pfr_schema::export::Entry;
use pfr_schema::snapshot::MAX_BYTES;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Tag, media_type};
use reqwest::StatusCode;
use reqwest::header::{ACCEPT, CONTENT_TYPE, RANGE};
use serde::Deserialize;
use std::ops::Range;
use std::sync::Arc;

/// Tags of a repository that are looked at, for packs that need not be sent again.
const TAGS: usize = 100;
/// Bytes of a list of tags at most.
const LIST: usize = 1 << 20;

/// A repository.
#[derive(Clone, Debug)]
pub(crate) struct Registry(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    address: Address,
    name: String,
    http: request::Http,
}

#[derive(Deserialize)]
struct TagList {
    #[serde(default)]
    tags: Option<Vec<String>>,
}

impl Registry {
    /// The repository at `address`. Nothing is sent yet.
    pub fn at(address: Address, options: &RemoteOptions, login: Option<Login>) -> Result<Self> {
        let http = request::Http::new(&address, options, login)?;
        Ok(Self(Arc::new(Shared { name: address.to_string(), address, http })))
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

    /// The first tags of the repository.
    async fn tags(&self) -> Result<Vec<Tag>> {
        let mut url = self.http().url(&["tags", "list"]);
        url.query_pairs_mut().append_pair("n", &TAGS.to_string());
        let response = self.http().send(&|client| client.get(url.clone())).await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(Vec::new()),
            status if status.is_success() => {
                let bytes = self.http().read(response, LIST).await?;
                let list: TagList = pfr_schema::json::parse("list of tags", &bytes, LIST as u64)
                    .map_err(|error| self.failed(ErrorCode::InvalidDocument, error.to_string()))?;
                Ok(list.tags.unwrap_or_default().iter().take(TAGS).filter_map(|tag| tag.parse().ok()).collect())
            }
            _ => Err(self.http().refusal(response).await),
        }
    }

    /// The manifest that the address names, which must be there; without a name, those of all tags.
    async fn listed(&self) -> Result<Vec<Entry>> {
        let tags = match &self.0.address.named {
            Some(Named::Digest(digest)) => {
                return match self.entry(&digest.to_string(), None).await? {
                    Some(entry) if entry.digest != *digest => {
                        Err(self.failed(ErrorCode::DigestMismatch, format!("it sent {} for {digest}", entry.digest)))
                    }
                    entry => Ok(entry.into_iter().collect()),
                };
            }
            Some(Named::Tag(tag)) => vec![tag.clone()],
            None => self.tags().await?,
        };
        let mut entries = Vec::new();
        for tag in tags {
            entries.extend(self.entry(tag.as_str(), Some(&tag)).await?);
        }
        Ok(entries)
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
        let part = Part { registry: self.clone(), digest, at: range.start, end: range.end, open: None, failures: 0 };
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
                    self.open = None;
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
                self.failures = 0;
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
