//! Requests about tags, forks, and deletion of snapshots.

use super::Remote;
use super::read::page;
use crate::boxed;
use crate::error::{Error, Result};
use crate::tokens::TokenCheck;
use pfr_schema::api::{self, TagState};
use pfr_schema::{Digest, RepositoryName, Tag};
use reqwest::header::{CONTENT_TYPE, IF_MATCH, IF_NONE_MATCH};
use reqwest::{Method, RequestBuilder, Url};
use serde::Serialize;

impl Remote {
    pub(super) fn with_json<T: Serialize>(
        &self,
        method: Method,
        url: Url,
        body: &T,
    ) -> Result<impl Fn() -> RequestBuilder + Send + Sync + use<'_, T>> {
        let bytes = bytes::Bytes::from(serde_json::to_vec(body).map_err(|e| Error::Internal(e.to_string()))?);
        Ok(move || self.client.request(method.clone(), url.clone()).header(CONTENT_TYPE, "application/json").body(bytes.clone()))
    }

    /// Deletes a snapshot and the tags that point at it.
    ///
    /// # Errors
    /// `snapshot_unknown`.
    #[boxed]
    pub async fn delete_snapshot(&self, repository: &RepositoryName, snapshot: &Digest) -> Result<()> {
        let url = self.repository_path(repository, &["snapshots", &snapshot.to_string()]);
        let key = Key::new();
        self.request(|| key.on(self.client.delete(url.clone()))).await.map(|_| ())
    }

    /// Deletes a snapshot and its tags, if exactly these tags point at it.
    ///
    /// # Errors
    /// `snapshot_unknown`, `tag_moved`.
    #[boxed]
    pub async fn delete_snapshot_tagged(&self, repository: &RepositoryName, snapshot: &Digest, tags: &[Tag]) -> Result<()> {
        let url = self.repository_path(repository, &["snapshots", &snapshot.to_string()]);
        let (key, etag) = (Key::new(), format!("\"{}\"", api::snapshot_etag(snapshot, tags)));
        self.request(|| key.on(self.client.delete(url.clone())).header(IF_MATCH, &etag)).await.map(|_| ())
    }

    /// Lists tags in the order of their names: at most `limit`, from the one after `after`.
    ///
    /// # Errors
    /// `repository_unknown`.
    #[boxed]
    pub async fn tags(&self, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Result<api::TagList> {
        self.get(page(self.repository_path(repository, &["tags"]), after, limit)).await
    }

    /// Asks the registry about the token that this sends, or about having none.
    ///
    /// # Errors
    /// Those that say nothing about the token.
    #[boxed]
    pub async fn check_token(&self) -> Result<TokenCheck> {
        TokenCheck::of(self.get::<api::RepositoryList>(page(self.path(&["repositories"]), None, 1)).await)
    }

    /// Reads one tag.
    ///
    /// # Errors
    /// `repository_unknown`, `tag_unknown`.
    #[boxed]
    pub async fn tag(&self, repository: &RepositoryName, tag: &Tag) -> Result<api::TagInfo> {
        self.get(self.repository_path(repository, &["tags", tag.as_str()])).await
    }

    /// Points a tag at a snapshot of the same repository.
    ///
    /// # Errors
    /// `snapshot_unknown`, `tag_moved`.
    #[boxed]
    pub async fn put_tag(&self, repository: &RepositoryName, tag: &Tag, request: &api::TagRequest) -> Result<api::TagInfo> {
        let url = self.repository_path(repository, &["tags", tag.as_str()]);
        let (key, build) = (Key::new(), self.with_json(Method::PUT, url, request)?);
        self.json(|| key.on(build())).await
    }

    /// Deletes a tag. With `expected`, only if the tag is in that state.
    ///
    /// # Errors
    /// `tag_unknown`, `tag_moved`.
    #[boxed]
    pub async fn delete_tag(&self, repository: &RepositoryName, tag: &Tag, expected: Option<TagState>) -> Result<()> {
        let url = self.repository_path(repository, &["tags", tag.as_str()]);
        let key = Key::new();
        let build = || {
            let request = key.on(self.client.delete(url.clone()));
            match expected {
                None => request,
                Some(TagState::At(digest)) => request.header(IF_MATCH, format!("\"{digest}\"")),
                Some(TagState::Absent) => request.header(IF_NONE_MATCH, "*"),
            }
        };
        self.request(build).await.map(|_| ())
    }

    /// Makes tags that point at one snapshot. No bytes move.
    ///
    /// # Errors
    /// `snapshot_unknown`; `tag_moved` if one of the tags exists.
    #[boxed]
    pub async fn fork(&self, repository: &RepositoryName, request: &api::ForkRequest) -> Result<api::Forked> {
        let url = self.repository_path(repository, &["forks"]);
        let (key, build) = (Key::new(), self.with_json(Method::POST, url, request)?);
        self.json(|| key.on(build())).await
    }
}

/// An idempotency key: all attempts of one request carry the same. The registry makes the change
/// once for each key, and answers each attempt as it answered the first. So a client may repeat a
/// request whose answer was lost.
struct Key(String);

impl Key {
    fn new() -> Self {
        Self(uuid::Uuid::now_v7().to_string())
    }

    fn on(&self, request: RequestBuilder) -> RequestBuilder {
        request.header("Idempotency-Key", format!("\"{}\"", self.0))
    }
}
