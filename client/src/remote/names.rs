//! Endpoints that name and delete.

use super::Remote;
use super::read::page;
use super::send::Failed;
use crate::error::{Error, Result};
use pfr_schema::api::{self, TagState};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use reqwest::header::{CONTENT_TYPE, IF_MATCH, IF_NONE_MATCH};
use reqwest::{Method, RequestBuilder, Response, Url};
use serde::Serialize;

/// Bytes of an answer about names at most: ten thousand forks.
const ANSWER: usize = 16 << 20;

impl Remote {
    pub(super) fn with_json<T: Serialize>(&self, method: Method, url: Url, body: &T) -> Result<impl Fn() -> RequestBuilder + use<'_, T>> {
        let bytes = bytes::Bytes::from(serde_json::to_vec(body).map_err(|e| Error::Internal(e.to_string()))?);
        Ok(move || self.client.request(method.clone(), url.clone()).header(CONTENT_TYPE, "application/json").body(bytes.clone()))
    }

    async fn send_idle(&self, build: impl Fn() -> RequestBuilder) -> std::result::Result<Response, Failed> {
        self.send(self.options.idle_timeout, build).await
    }

    /// Deletes a snapshot and the tags that point at it.
    ///
    /// # Errors
    /// `snapshot_unknown`.
    pub async fn delete_snapshot(&self, repository: &RepositoryName, snapshot: &Digest) -> Result<()> {
        let url = self.repository_path(repository, &["snapshots", &snapshot.to_string()]);
        let sent = self.send_idle(|| self.client.delete(url.clone())).await;
        gone(sent).map_err(|failed| failed.error)
    }

    /// Tags by name.
    ///
    /// # Errors
    /// `repository_unknown`.
    pub async fn tags(&self, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Result<api::TagList> {
        self.get(page(self.repository_path(repository, &["tags"]), after, limit)).await
    }

    /// One tag.
    ///
    /// # Errors
    /// `repository_unknown`, `tag_unknown`.
    pub async fn tag(&self, repository: &RepositoryName, tag: &Tag) -> Result<api::TagInfo> {
        self.get(self.repository_path(repository, &["tags", tag.as_str()])).await
    }

    /// Points a tag at a snapshot of the same repository.
    ///
    /// # Errors
    /// `snapshot_unknown`, `tag_moved`.
    pub async fn put_tag(&self, repository: &RepositoryName, tag: &Tag, request: &api::TagRequest) -> Result<api::TagInfo> {
        let url = self.repository_path(repository, &["tags", tag.as_str()]);
        match self.send_whole(ANSWER, self.with_json(Method::PUT, url, request)?).await {
            Ok(bytes) => self.parse(&bytes),
            Err(Failed { error, again }) => {
                // A first try whose answer was lost has moved the tag to where we wanted it.
                if again && error.code() == ErrorCode::TagMoved {
                    let found = match self.tag(repository, tag).await {
                        // Not our doing, and not there: it is elsewhere than it was said to be.
                        Err(unknown) if unknown.code() == ErrorCode::TagUnknown => return Err(error),
                        found => found?,
                    };
                    let wanted: Selector = request.snapshot.parse().map_err(|_| Error::Internal("a selector was refused late".into()))?;
                    if self.snapshot(repository, &wanted).await?.summary.digest == found.digest {
                        return Ok(found);
                    }
                }
                Err(error)
            }
        }
    }

    /// Deletes a tag, if given only from this state.
    ///
    /// # Errors
    /// `tag_unknown`, `tag_moved`.
    pub async fn delete_tag(&self, repository: &RepositoryName, tag: &Tag, expected: Option<TagState>) -> Result<()> {
        let url = self.repository_path(repository, &["tags", tag.as_str()]);
        let build = || {
            let request = self.client.delete(url.clone());
            match expected {
                None => request,
                Some(TagState::At(digest)) => request.header(IF_MATCH, format!("\"{digest}\"")),
                Some(TagState::Absent) => request.header(IF_NONE_MATCH, "*"),
            }
        };
        match gone(self.send_idle(build).await) {
            // To a demand for a state, a tag that is gone has moved.
            Err(Failed { error, again: true }) if error.code() == ErrorCode::TagMoved => match self.tag(repository, tag).await {
                Err(unknown) if unknown.code() == ErrorCode::TagUnknown => Ok(()),
                _ => Err(error),
            },
            result => result.map_err(|failed| failed.error),
        }
    }

    /// Makes tags that point at one snapshot. No bytes move.
    ///
    /// # Errors
    /// `snapshot_unknown`; `tag_moved` if one of the tags exists.
    pub async fn fork(&self, repository: &RepositoryName, request: &api::ForkRequest) -> Result<api::Forked> {
        let url = self.repository_path(repository, &["forks"]);
        match self.send_whole(ANSWER, self.with_json(Method::POST, url, request)?).await {
            Ok(bytes) => self.parse(&bytes),
            Err(Failed { error, again }) => {
                if again
                    && error.code() == ErrorCode::TagMoved
                    && let Some(forked) = self.made_before(repository, request).await?
                {
                    return Ok(forked);
                }
                Err(error)
            }
        }
    }

    /// The forks of a request whose answer was lost, if all of them are there and point where they should.
    async fn made_before(&self, repository: &RepositoryName, request: &api::ForkRequest) -> Result<Option<api::Forked>> {
        let wanted: Selector = request.snapshot.parse().map_err(|_| Error::Internal("a selector was refused late".into()))?;
        let digest = self.snapshot(repository, &wanted).await?.summary.digest;
        let mut tags = Vec::new();
        for i in 1..=request.count {
            let tag: Tag = format!("{}-{i}", request.prefix).parse().map_err(|_| Error::Internal("a tag was refused late".into()))?;
            match self.tag(repository, &tag).await {
                Ok(found) if found.digest == digest => tags.push(tag),
                Err(error) if error.code() != ErrorCode::TagUnknown => return Err(error),
                _ => return Ok(None),
            }
        }
        Ok(Some(api::Forked { digest, tags }))
    }
}

/// A deletion that finds nothing after a lost answer has done its work before; the repository may have gone with its last snapshot.
fn gone(result: std::result::Result<Response, Failed>) -> std::result::Result<(), Failed> {
    match result {
        Ok(_) => Ok(()),
        Err(Failed { error: Error::Registry { problem }, again: true }) if problem.status == 404 => Ok(()),
        Err(failed) => Err(failed),
    }
}
