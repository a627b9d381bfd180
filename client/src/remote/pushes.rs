//! Endpoints of a push session.

use super::backoff::Tries;
use super::{BoxFrames, Remote};
use crate::boxed;
use crate::error::Result;
use pfr_schema::api;
use pfr_schema::{ErrorCode, RepositoryName};
use reqwest::Method;
use std::time::Duration;

/// Makes a stream of frames with an end mark; called once for each try.
pub trait FrameSource: Fn() -> BoxFrames + Send + Sync {}
impl<F: Fn() -> BoxFrames + Send + Sync> FrameSource for F {}

/// The answer to a question for missing blobs: positions in the concatenated groups, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Blobs that the registry lacks.
    pub lacking: Vec<usize>,
    /// Blobs that other sessions are about to send.
    pub coming: Vec<usize>,
    /// When to ask about those again.
    pub wait: Option<Duration>,
}

/// Bytes of an answer at most: the ranges of a hundred thousand missing digests.
const ANSWER: usize = 16 << 20;

impl Remote {
    /// Opens a push session. A session whose answer was lost holds nothing and expires.
    ///
    /// # Errors
    /// [`crate::Error::Registry`], [`crate::Error::Unreachable`]; so for every method here.
    #[boxed]
    pub async fn open_push(&self, repository: &RepositoryName) -> Result<api::Push> {
        let url = self.repository_path(repository, &["pushes"]);
        self.json(|| self.client.post(url.clone())).await
    }

    /// Asks which blobs the registry lacks. The others are leased to the session.
    ///
    /// # Errors
    /// `push_unknown`.
    #[boxed]
    pub async fn missing(&self, repository: &RepositoryName, push: &str, request: &api::MissingRequest) -> Result<Missing> {
        let url = self.repository_path(repository, &["pushes", push, "missing"]);
        let asked: usize = request.groups.iter().map(|g| g.digests.len()).sum();
        let answer: api::MissingResponse = self.json(self.with_json(Method::POST, url, request)?).await?;
        let lacking = self.positions(answer.missing, asked)?;
        let coming = self.positions(answer.coming, asked)?;
        Ok(Missing { lacking, coming, wait: answer.wait_ms.map(Duration::from_millis) })
    }

    /// Ranges of positions, one by one.
    fn positions(&self, ranges: Vec<(u64, u64)>, asked: usize) -> Result<Vec<usize>> {
        let mut positions = Vec::new();
        for (start, count) in ranges {
            let end = start.checked_add(count).and_then(|end| usize::try_from(end).ok()).filter(|end| *end <= asked);
            let start = usize::try_from(start).unwrap_or(usize::MAX);
            match end {
                Some(end) if positions.last().is_none_or(|last| *last < start) => positions.extend(start..end),
                _ => return Err(self.protocol(format!("it names positions {start}+{count} of {asked} digests it was asked about"))),
            }
        }
        Ok(positions)
    }

    /// Uploads frames; returns when they are durable. `frames` is called again for every try:
    /// frames are content-addressed, so a try may send what an earlier one left behind.
    ///
    /// # Errors
    /// `digest_mismatch`, `corrupt_frame`, `missing_blobs`, `push_unknown`; an error of the stream
    /// itself, unchanged.
    pub async fn put_frames(&self, repository: &RepositoryName, push: &str, frames: impl FrameSource) -> Result<api::FramesStored> {
        let url = self.repository_path(repository, &["pushes", push, "frames"]);
        let mut tries = Tries::of(self);
        loop {
            let response = self.upload(url.clone(), &frames).await?;
            match self.read(response, ANSWER).await {
                Ok(bytes) => return self.parse(&bytes),
                Err(error) => tries.again(error, None).await?,
            }
        }
    }

    /// Makes an uploaded manifest visible. If an answer is lost, the registry answers the repeated
    /// request as it answered the first.
    ///
    /// # Errors
    /// `tag_moved`, `push_unknown`, `missing_blobs`.
    #[boxed]
    pub async fn commit(&self, repository: &RepositoryName, push: &str, request: &api::CommitRequest) -> Result<api::Committed> {
        let url = self.repository_path(repository, &["pushes", push, "commit"]);
        self.json(self.with_json(Method::POST, url, request)?).await
    }

    /// Ends a session without a commit. Ending one that is over is no error.
    ///
    /// # Errors
    /// [`crate::Error::Unreachable`].
    #[boxed]
    pub async fn abort(&self, repository: &RepositoryName, push: &str) -> Result<()> {
        let url = self.repository_path(repository, &["pushes", push]);
        match self.request(|| self.client.delete(url.clone())).await {
            Err(error) if error.code() == ErrorCode::PushUnknown => Ok(()),
            other => other.map(|_| ()),
        }
    }
}
