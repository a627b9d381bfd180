//! Endpoints of collection, of retention and of background tasks.

use super::Remote;
use super::read::page;
use crate::boxed;

use crate::error::Result;
use pfr_schema::api;
use reqwest::Method;

impl Remote {
    /// Starts a collection in the registry; the report has its id. A dry run is answered when it
    /// has ended.
    ///
    /// # Errors
    /// `overloaded` if a requested collection is running.
    #[boxed]
    pub async fn start_gc(&self, request: &api::GcRequest) -> Result<api::GcReport> {
        self.proof(self.with_json(Method::POST, self.path(&["gc"]), request)?).await
    }

    /// The report of a collection, up to now if it still runs.
    ///
    /// # Errors
    /// `not_found`.
    #[boxed]
    pub async fn gc_run(&self, run: &str) -> Result<api::GcReport> {
        self.get(self.path(&["gc", run])).await
    }

    /// Collections, newest first.
    #[boxed]
    pub async fn gc_runs(&self, after: Option<&str>, limit: usize) -> Result<api::GcRuns> {
        self.get(page(self.path(&["gc"]), after, limit)).await
    }

    /// What takes up room in the registry, and until when.
    #[boxed]
    pub async fn usage(&self) -> Result<api::Usage> {
        self.get(self.path(&["usage"])).await
    }

    /// The retention policies of the domain.
    #[boxed]
    pub async fn retention(&self) -> Result<api::RetentionPolicies> {
        self.get(self.path(&["retention"])).await
    }

    /// Sets all retention policies of the domain.
    #[boxed]
    pub async fn set_retention(&self, policies: &api::RetentionPolicies) -> Result<api::RetentionPolicies> {
        self.json(self.with_json(Method::PUT, self.path(&["retention"]), policies)?).await
    }

    /// Deletes what the retention policies say; answered when that is done.
    #[boxed]
    pub async fn run_retention(&self, request: &api::RetentionRequest) -> Result<api::RetentionReport> {
        self.proof(self.with_json(Method::POST, self.path(&["retention", "run"]), request)?).await
    }

    /// The background tasks of the registry.
    #[boxed]
    pub async fn tasks(&self) -> Result<api::TaskList> {
        self.get(self.path(&["tasks"])).await
    }

    /// Pauses a background task, in all replicas.
    ///
    /// # Errors
    /// `not_found`.
    #[boxed]
    pub async fn pause_task(&self, task: &str, request: &api::PauseRequest) -> Result<api::TaskInfo> {
        self.json(self.with_json(Method::POST, self.path(&["tasks", task, "pause"]), request)?).await
    }

    /// Ends the pause of a background task.
    ///
    /// # Errors
    /// `not_found`.
    #[boxed]
    pub async fn resume_task(&self, task: &str) -> Result<api::TaskInfo> {
        let url = self.path(&["tasks", task, "resume"]);
        self.json(|| self.client.post(url.clone())).await
    }
}
