//! Jobs of the capture agent: work that lasts longer than a request. `docs/capture.md` lists the
//! paths.

use super::{Drain, DrainRequest};
use crate::api::Problem;
use crate::digest::Digest;
use serde::{Deserialize, Serialize};

/// Body of `POST /v1/jobs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum JobRequest {
    /// Pull snapshots ahead of the restores that need them.
    Warm(WarmRequest),
    /// Capture and push everything on this host.
    Drain(DrainRequest),
}

impl JobRequest {
    /// The name of its kind, as in JSON.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Warm(_) => "warm",
            Self::Drain(_) => "drain",
        }
    }
}

/// The request of a warm job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmRequest {
    /// References, 1 to 64. In the repository and in the tag each `*` stands for any characters,
    /// `/` included. Without a tag, `latest`.
    pub references: Vec<String>,
    /// Of each repository, so many snapshots that were pushed last, instead of a tag; at most 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<u32>,
    /// Only report the plan.
    #[serde(default, alias = "plan")]
    pub plan_only: bool,
    /// Leave out snapshots that do not fit this engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Seconds for which eviction leaves the snapshots alone; 0: it may take them at once. Default
    /// a day, at most 30 days.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_seconds: Option<u64>,
    /// Raw bytes to fetch at most: a snapshot that does not fit is left out. Default: none; with a
    /// `max-store-size`, half of it, less what earlier jobs keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// Bytes of frames a second at most, at least 65,536. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Tokens that an engine computes in a second: only with them the plan says how long computing
    /// would take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_second: Option<f64>,
}

/// A job; answer to `POST /v1/jobs` and `GET /v1/jobs/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its id. A plan has one too, and is not listed.
    pub id: String,
    /// The request that began it.
    pub request: JobRequest,
    /// How far it is.
    pub state: JobState,
    /// Milliseconds since 1970, UTC, of its begin.
    pub started_at: u64,
    /// The same of its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<u64>,
    /// Raw bytes that were fetched, or captured.
    #[serde(default)]
    pub bytes_done: u64,
    /// Raw bytes to fetch or capture; 0 until known.
    #[serde(default)]
    pub bytes_total: u64,
    /// Bytes a second since it began to move any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Seconds that the rest takes at this rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<f64>,
    /// The reason why it waits now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The first failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Problem>,
    /// Plan and results of a warm job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<Warm>,
    /// Plan and results of a drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    /// It was only planned, and is not listed.
    Planned,
    /// Under way.
    Running,
    /// Everything was done.
    Done,
    /// It has ended, and something failed.
    Failed,
    /// It was cancelled. What was done until then stays.
    Cancelled,
    /// The agent ended before it. The same request again does only the rest.
    Interrupted,
}

impl JobState {
    /// Whether it goes on.
    #[must_use]
    pub fn is_open(self) -> bool {
        self == Self::Running
    }

    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Interrupted => "interrupted",
        }
    }
}

/// Answer to `GET /v1/jobs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Jobs {
    /// Oldest first.
    pub jobs: Vec<Job>,
}

/// Plan and results of a warm job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Warm {
    /// The snapshots, in the order in which they are fetched.
    pub items: Vec<WarmItem>,
    /// Raw bytes to fetch: what the agent's store lacks.
    pub bytes: u64,
    /// Seconds to fetch them at the rate of the last pulls, or at the limit if that is less; absent
    /// if neither is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
    /// Tokens that would have to be computed again otherwise.
    pub recompute_tokens: u64,
    /// Seconds that this takes; absent if the request does not say how fast an engine computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute_seconds: Option<f64>,
}

/// One snapshot of a warm job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WarmItem {
    /// The snapshot, or the pattern that nothing matches.
    pub reference: String,
    /// Its digest, once looked up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Tokens with state, if it says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary: Option<u64>,
    /// Raw bytes that the agent's store lacked, and that no snapshot before it in the list brings.
    #[serde(default)]
    pub bytes: u64,
    /// Raw bytes of everything that it lists.
    #[serde(default)]
    pub bytes_total: u64,
    /// Bytes of frames that were fetched; of tries that were cut, raw bytes.
    #[serde(default)]
    pub bytes_received: u64,
    /// How far it is.
    pub state: WarmState,
    /// Milliseconds since 1970, UTC: eviction leaves it alone until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_ends_at: Option<u64>,
    /// Why it failed or was left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// How far one snapshot of a warm job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarmState {
    /// To be fetched.
    Planned,
    /// Being fetched.
    Running,
    /// It lies in the agent's store.
    Done,
    /// It was left out.
    Skipped,
    /// It could not be fetched.
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(value: &Value) -> Result<JobRequest, serde_json::Error> {
        serde_json::from_value(value.clone())
    }

    #[test]
    fn a_request_names_its_kind_and_unknown_fields_are_refused() {
        let warm = read(&json!({"kind": "warm", "references": ["team/*:latest"], "plan": true})).unwrap();
        let JobRequest::Warm(request) = &warm else { panic!("{warm:?}") };
        assert!(request.plan_only && request.references == ["team/*:latest"] && warm.kind() == "warm");
        assert_eq!(read(&serde_json::to_value(&warm).unwrap()).unwrap(), warm);
        let drain = read(&json!({"kind": "drain", "repository": "team/evacuated", "plan_only": true})).unwrap();
        assert!(matches!(&drain, JobRequest::Drain(request) if request.plan_only) && drain.kind() == "drain");
        for wrong in [
            json!({"references": ["a"]}),
            json!({"kind": "warmth", "references": ["a"]}),
            json!({"kind": "warm", "references": ["a"], "repository": "a"}),
            json!({"kind": "warm"}),
            json!({"kind": "drain", "references": ["a"]}),
        ] {
            assert!(read(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_name_of_a_state_is_that_in_json() {
        for state in [JobState::Planned, JobState::Running, JobState::Done, JobState::Failed, JobState::Cancelled, JobState::Interrupted] {
            assert_eq!(json!(state), json!(state.name()));
        }
    }
}
