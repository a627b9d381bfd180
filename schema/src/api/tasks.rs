//! Background tasks.

use serde::{Deserialize, Serialize};

api! {
    /// A background task of a registry; docs/operations.md lists them.
    pub struct TaskInfo {
        /// Its name.
        pub name: String,
        /// What it does now.
        pub state: TaskState,
        /// Time from the end of a run to the start of the next, approximately; 0 if it never starts
        /// by itself.
        pub interval_seconds: u64,
        /// Runs of this process that ended.
        pub runs: u64,
        /// Of these, runs that failed.
        pub errors: u64,
        /// Time that runs of this process took, all together.
        pub busy_seconds: f64,
        /// Start of the last run, in milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub started_at: Option<u64>,
        /// End of the last run that succeeded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub succeeded_at: Option<u64>,
        /// Time that the last run took.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub last_seconds: Option<f64>,
        /// Why the last run failed; none once a run succeeded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub error: Option<String>,
        /// When the next run is due.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next_run_at: Option<u64>,
        /// End of its pause, if it is paused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub pause_ends_at: Option<u64>,
    }

    /// The background tasks of a registry, as the replica that answers knows them.
    pub struct TaskList {
        /// In the order in which tasks that are due together run.
        pub tasks: Vec<TaskInfo>,
    }

    /// Asks for a pause of a background task.
    #[serde(deny_unknown_fields)]
    pub struct PauseRequest {
        /// How long, from 1 second to 30 days.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 2_592_000))]
        pub seconds: u64,
    }
}

/// What a background task does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// It waits for its next run.
    Idle,
    /// It runs.
    Running,
    /// It does not run before its pause ends.
    Paused,
    /// It never starts by itself.
    Off,
}
