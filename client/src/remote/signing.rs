//! Endpoints of signatures and signing policies.

use super::Remote;
use super::read::page;
use crate::boxed;
use crate::error::Result;
use pfr_schema::{Digest, RepositoryName, api};
use reqwest::Method;

impl Remote {
    /// Adds signatures to a snapshot, and returns all that it has then. Those that it has already
    /// are left out.
    ///
    /// # Errors
    /// `snapshot_unknown`; `invalid_document` for one that is for another snapshot; `not_found`
    /// from a registry of an older version.
    #[boxed]
    pub async fn sign(&self, repository: &RepositoryName, snapshot: &Digest, request: &api::SignRequest) -> Result<api::Signatures> {
        let url = self.repository_path(repository, &["snapshots", &snapshot.to_string(), "signatures"]);
        self.json(self.with_json(Method::POST, url, request)?).await
    }

    /// Manifests with signatures of a repository, oldest first: at most `limit`, from the one after
    /// `after`.
    ///
    /// # Errors
    /// `repository_unknown`; `not_found` from a registry of an older version.
    #[boxed]
    pub async fn signature_list(&self, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Result<api::SignatureList> {
        self.get(page(self.repository_path(repository, &["signatures"]), after, limit)).await
    }

    /// The signing policies of the domain.
    #[boxed]
    pub async fn signing(&self) -> Result<api::SigningPolicies> {
        self.get(self.path(&["signing"])).await
    }

    /// Sets all signing policies of the domain.
    #[boxed]
    pub async fn set_signing(&self, policies: &api::SigningPolicies) -> Result<api::SigningPolicies> {
        self.json(self.with_json(Method::PUT, self.path(&["signing"]), policies)?).await
    }
}
