//! Endpoints of collection and of background tasks.

use super::Remote;
use super::read::page;
use super::send::PROOF_TIMEOUT;
use crate::error::Result;
use pfr_schema::api;
use reqwest::Method;

impl Remote {
    /// Starts a collection in the registry; the report has its id. A dry run is answered when it has ended.
    ///
    /// # Errors
    /// `overloaded` if one that was asked for is running.
    pub async fn start_gc(&self, request: &api::GcRequest) -> Result<api::GcReport> {
        let build = self.with_json(Method::POST, self.path(&["gc"]), request)?;
        let response = self.send(PROOF_TIMEOUT, build).await?;
        let bytes = self.read(response, 1 << 20).await?;
        self.parse(&bytes)
    }

    /// A collection, as far as it is.
    ///
    /// # Errors
    /// `not_found`.
    pub async fn gc_run(&self, run: &str) -> Result<api::GcReport> {
        self.get(self.path(&["gc", run])).await
    }

    /// Collections, newest first.
    ///
    /// # Errors
    /// [`crate::Error::Registry`], [`crate::Error::Unreachable`].
    pub async fn gc_runs(&self, after: Option<&str>, limit: usize) -> Result<api::GcRuns> {
        self.get(page(self.path(&["gc"]), after, limit)).await
    }

    /// What takes up room in the registry, and until when.
    ///
    /// # Errors
    /// [`crate::Error::Registry`], [`crate::Error::Unreachable`].
    pub async fn usage(&self) -> Result<api::Usage> {
        self.get(self.path(&["usage"])).await
    }

    /// The background tasks of the registry.
    ///
    /// # Errors
    /// [`crate::Error::Registry`], [`crate::Error::Unreachable`].
    pub async fn tasks(&self) -> Result<api::TaskList> {
        self.get(self.path(&["tasks"])).await
    }

    /// Pauses a background task, in all replicas.
    ///
    /// # Errors
    /// `not_found`.
    pub async fn pause_task(&self, task: &str, request: &api::PauseRequest) -> Result<api::TaskInfo> {
        self.json(self.with_json(Method::POST, self.path(&["tasks", task, "pause"]), request)?).await
    }

    /// Ends the pause of a background task.
    ///
    /// # Errors
    /// `not_found`.
    pub async fn resume_task(&self, task: &str) -> Result<api::TaskInfo> {
        let url = self.path(&["tasks", task, "resume"]);
        self.json(|| self.client.post(url.clone())).await
    }
}
