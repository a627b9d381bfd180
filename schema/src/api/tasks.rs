//! Background tasks.

use serde::{Deserialize, Serialize};

api! {
    /// A background task of a registry; docs/operations.md lists them.
    pub struct TaskInfo {
        /// The task's name.
        pub name: String,
        /// The task's current state.
        pub state: TaskState,
        /// Approximate time from the end of a run to the start of the next; 0 if the task never
        /// starts by itself.
        pub interval_seconds: u64,
        /// Number of the task's runs that have ended since this process started.
        pub runs: u64,
        /// Number of these runs that failed.
        pub errors: u64,
        /// Total time of these runs.
        pub busy_seconds: f64,
        /// Start of the last run, in milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub started_at: Option<u64>,
        /// End of the last run that succeeded, in milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub succeeded_at: Option<u64>,
        /// Time that the last run took.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub last_seconds: Option<f64>,
        /// Why the last run failed. Absent if it succeeded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub error: Option<String>,
        /// When the next run is due, in milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next_run_at: Option<u64>,
        /// End of the pause, in milliseconds since 1970, if the task is paused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub pause_ends_at: Option<u64>,
    }

    /// The background tasks of a registry, as the replica that answers knows them.
    pub struct TaskList {
        /// The tasks. When several are due at the same time, they run in this order.
        pub tasks: Vec<TaskInfo>,
    }

    /// Asks for a pause of a background task.
    #[serde(deny_unknown_fields)]
    pub struct PauseRequest {
        /// Length of the pause, from 1 second to 30 days.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 2_592_000))]
        pub seconds: u64,
    }
}

/// The state of a background task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// The task waits for its next run.
    Idle,
    /// The task runs.
    Running,
    /// The task does not run before its pause ends.
    Paused,
    /// The task never starts by itself.
    Off,
}
