//! Endpoints that read.

use super::Remote;
use crate::boxed;

use crate::error::{Error, Result};
use bytes::Bytes;
use pfr_schema::{Digest, RepositoryName, Selector, api};
use reqwest::{Method, Url};

/// Appends `after` and `limit`.
pub(super) fn page(mut url: Url, after: Option<&str>, limit: usize) -> Url {
    url.query_pairs_mut().append_pair("limit", &limit.to_string());
    if let Some(after) = after {
        url.query_pairs_mut().append_pair("after", after);
    }
    url
}

impl Remote {
    pub(super) async fn get<T: serde::de::DeserializeOwned>(&self, url: Url) -> Result<T> {
        self.json(|| self.client.get(url.clone())).await
    }

    /// Repositories by name; `after` is the cursor of the page before.
    ///
    /// # Errors
    /// [`crate::Error::Registry`], [`crate::Error::Unreachable`]; so for every method here.
    #[boxed]
    pub async fn repositories(&self, after: Option<&str>, limit: usize) -> Result<api::RepositoryList> {
        self.get(page(self.path(&["repositories"]), after, limit)).await
    }

    /// Snapshots of a repository, newest first.
    ///
    /// # Errors
    /// `repository_unknown`.
    #[boxed]
    pub async fn snapshots(&self, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Result<api::SnapshotList> {
        self.get(page(self.repository_path(repository, &["snapshots"]), after, limit)).await
    }

    /// One snapshot with its manifest, configuration and page trees. Nothing in the answer is
    /// verified.
    ///
    /// # Errors
    /// `repository_unknown`, `tag_unknown`, `snapshot_unknown`.
    #[boxed]
    pub async fn snapshot(&self, repository: &RepositoryName, selector: &Selector) -> Result<api::SnapshotDetail> {
        self.get(self.repository_path(repository, &["snapshots", &selector.to_string()])).await
    }

    /// A snapshot and its ancestors, at most `limit`.
    ///
    /// # Errors
    /// `repository_unknown`, `tag_unknown`, `snapshot_unknown`.
    #[boxed]
    pub async fn lineage(&self, repository: &RepositoryName, selector: &Selector, limit: usize) -> Result<api::Lineage> {
        let url = self.repository_path(repository, &["snapshots", &selector.to_string(), "lineage"]);
        self.get(page(url, None, limit)).await
    }

    /// The flat page manifest of one group and rank, as its canonical bytes. Group and rank may be
    /// left out if there is only one page tree.
    ///
    /// # Errors
    /// `snapshot_unknown`; `invalid_request` if the snapshot has several page trees and none is
    /// named.
    #[boxed]
    pub async fn page_manifest(
        &self,
        repository: &RepositoryName,
        selector: &Selector,
        group: Option<&str>,
        rank: Option<u32>,
    ) -> Result<Bytes> {
        let mut url = self.repository_path(repository, &["snapshots", &selector.to_string(), "page-manifest"]);
        if let Some(group) = group {
            url.query_pairs_mut().append_pair("group", group);
        }
        if let Some(rank) = rank {
            url.query_pairs_mut().append_pair("rank", &rank.to_string());
        }
        self.body(|| self.client.get(url.clone())).await
    }

    /// The difference of two snapshots of a repository.
    ///
    /// # Errors
    /// `snapshot_unknown`.
    #[boxed]
    pub async fn diff(&self, repository: &RepositoryName, a: &Selector, b: &Selector) -> Result<api::Diff> {
        self.get(self.repository_path(repository, &["snapshots", &a.to_string(), "diff", &b.to_string()])).await
    }

    /// Makes the registry read and hash everything that a snapshot reaches. This may take hours.
    ///
    /// # Errors
    /// `corrupt_store`, with the first blob whose bytes do not have its digest.
    #[boxed]
    pub async fn verify(&self, repository: &RepositoryName, snapshot: &Digest) -> Result<api::Verified> {
        let url = self.repository_path(repository, &["snapshots", &snapshot.to_string(), "verify"]);
        self.proof(|| self.client.post(url.clone())).await
    }

    /// The snapshot of a repository with the longest prefix of these tokens, and why others cannot
    /// be resumed.
    ///
    /// # Errors
    /// `repository_unknown`, `too_large`.
    #[boxed]
    pub async fn match_prefix(&self, repository: &RepositoryName, request: &api::MatchRequest) -> Result<api::MatchResponse> {
        let url = self.repository_path(repository, &["match"]);
        self.json(|| self.client.post(url.clone()).json(request)).await
    }

    /// How much the snapshots of a repository, or of the whole domain, share.
    ///
    /// # Errors
    /// `repository_unknown`.
    #[boxed]
    pub async fn stats(&self, repository: Option<&RepositoryName>) -> Result<api::Stats> {
        self.get(match repository {
            Some(repository) => self.repository_path(repository, &["stats"]),
            None => self.path(&["stats"]),
        })
        .await
    }

    /// The same of some snapshots: those of an agent, or, of a repository, one and those that
    /// descend from it, or those that meet both. Without a repository `below` does not count.
    ///
    /// # Errors
    /// `repository_unknown`, `snapshot_unknown`, `tag_unknown`. [`Error::Older`] from a registry
    /// that answers with the statistics of all snapshots.
    #[boxed]
    pub async fn stats_of(&self, repository: Option<&RepositoryName>, below: Option<&Selector>, agent: Option<&str>) -> Result<api::Stats> {
        let (mut url, below) = match repository {
            Some(repository) => (self.repository_path(repository, &["stats"]), below),
            None => (self.path(&["stats"]), None),
        };
        if let Some(below) = below {
            url.query_pairs_mut().append_pair("below", &below.to_string());
        }
        if let Some(agent) = agent {
            url.query_pairs_mut().append_pair("agent", agent);
        }
        // The first question about agents may read many configurations.
        let stats: api::Stats = self.count(|| self.client.get(url.clone())).await?;
        // An older version ignores parameters that it does not know.
        let ignored = [("below", below.is_some() && stats.below.is_none()), ("agent", agent.is_some() && stats.agent.is_none())];
        match ignored.into_iter().find(|(_, ignored)| *ignored) {
            None => Ok(stats),
            Some((parameter, _)) => {
                let all = repository.map_or_else(|| "all repositories".to_owned(), |repository| format!("the whole of {repository}"));
                let reason = format!("has answered for {all}: it does not know the parameter `{parameter}`");
                Err(Error::Older { url: self.url().to_owned(), reason })
            }
        }
    }

    /// What a deletion of snapshots, all together, would free. This may take minutes.
    ///
    /// # Errors
    /// `too_large`; `not_found` from registries of an older version.
    #[boxed]
    pub async fn freed(&self, request: &api::FreedRequest) -> Result<api::Freed> {
        self.count(self.with_json(Method::POST, self.path(&["freed"]), request)?).await
    }
}
