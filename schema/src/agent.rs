//! Requests and answers of the capture agent's control interface: HTTP with JSON over a Unix
//! socket, errors as [`crate::api::Problem`]. `docs/capture.md` lists the paths.

use crate::checkpoint::Form;
use crate::digest::Digest;
use crate::engine::{Taking, Verb};
use crate::error::ErrorCode;
use crate::snapshot::Exactness;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// An engine on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// Its name.
    pub engine: String,
    /// Whether it can be captured or restored into; otherwise what is missing.
    pub state: EngineState,
    /// What it serves.
    pub verbs: Vec<Verb>,
    /// Ranks.
    pub world: u32,
    /// Its engine configuration.
    pub deployment: BTreeMap<String, Value>,
    /// Digest of the engine configuration.
    pub fingerprint: Digest,
    /// Names of its groups.
    pub groups: Vec<String>,
    /// Bytes of memory mapped.
    pub mapped_bytes: u64,
    /// Snapshots taken since it registered.
    pub snapshots: u64,
    /// Restores since it registered; of an engine that asks for state, those that a request took.
    pub restores: u64,
    /// What lies ready for its requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub staged: Vec<StagedInfo>,
    /// What became of requests that came to no state in particular, by number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outcomes: BTreeMap<Taking, u64>,
}

/// A snapshot that lies ready for requests of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagedInfo {
    /// Names it between agent and engine.
    pub restore: String,
    /// The snapshot.
    pub digest: Digest,
    /// Tokens with state.
    pub boundary: u64,
    /// Whether all of it is verified.
    pub ready: bool,
    /// What became of the requests that it was ready for, by number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outcomes: BTreeMap<Taking, u64>,
}

/// Whether an engine can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum EngineState {
    /// Ready.
    Ready {},
    /// A capture or restore is running.
    Busy {
        /// The operation that is running.
        with: String,
    },
    /// Members are missing.
    Incomplete {
        /// The missing members.
        missing: String,
    },
}

/// Answer to `GET /v1/engines`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Engines {
    /// By name.
    pub engines: Vec<EngineInfo>,
}

/// What becomes of a snapshot after it lies in the local store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Push {
    /// It is pushed in the background; the push survives restarts of the agent.
    #[default]
    Background,
    /// The answer comes when it is pushed.
    Wait,
    /// It stays here.
    Never,
}

/// Body of `POST /v1/engines/{engine}/snapshots`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// Which sequence; may be left out if there is just one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<String>,
    /// Where it goes: `[http://host[:port]/]repository[:tag]`. Without a host the agent's registry.
    pub reference: String,
    /// The agent whose state it is, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Labels for the manifest.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Refuse with `not_exact` if something that decides the next token is not recorded.
    #[serde(default)]
    pub exact: bool,
    /// Pushing.
    #[serde(default)]
    pub push: Push,
    /// Highest logits to record of the step at the boundary; 0 for none. Default 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oracle: Option<u32>,
}

/// What a snapshot did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// The snapshot.
    pub digest: Digest,
    /// `repository[:tag]` in the local store.
    pub reference: String,
    /// The engine.
    pub engine: String,
    /// The sequence.
    pub sequence: String,
    /// Tokens with state.
    pub boundary: u64,
    /// Tokens, those chosen and not computed included.
    pub tokens: u64,
    /// Pages, over all groups and ranks.
    pub pages: u64,
    /// Raw bytes of pages and state tensors.
    pub bytes_resident: u64,
    /// Raw bytes that left the engine's memory.
    pub bytes_moved: u64,
    /// Raw bytes that the local store did not have.
    pub bytes_new: u64,
    /// Of these, bytes of state tensors.
    pub bytes_state: u64,
    /// How long the engine stood still, in seconds.
    pub pause_seconds: f64,
    /// From the request to the commit in the local store, in seconds.
    pub total_seconds: f64,
    /// How faithful.
    pub exactness: Exactness,
    /// What was not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrecorded: Vec<String>,
    /// Whether the logits of the step at the boundary are in it.
    pub oracle: bool,
    /// The snapshot it follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Digest>,
    /// The push, unless it stays here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<PushJob>,
}

/// A push in the background.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PushJob {
    /// Its id.
    pub id: String,
    /// The snapshot.
    pub digest: Digest,
    /// Where it goes.
    pub reference: String,
    /// How far it is.
    pub state: PushState,
    /// Tries so far.
    pub attempts: u32,
    /// Why the last one failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What kind of failure that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<ErrorCode>,
    /// Bytes of frames sent, when done.
    #[serde(default)]
    pub bytes_sent: u64,
}

/// How far a push is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PushState {
    /// Not begun, or to be tried again.
    Waiting,
    /// Under way.
    Running,
    /// The registry has it.
    Done,
    /// Refused for good.
    Failed,
}

/// Answer to `GET /v1/pushes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pushes {
    /// Oldest first.
    pub pushes: Vec<PushJob>,
}

/// Body of `POST /v1/engines/{engine}/restores`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreRequest {
    /// What: `[http://host[:port]/]repository[:tag[~N]|@digest]`.
    pub reference: String,
    /// Take it from the local store only.
    #[serde(default)]
    pub local: bool,
    /// Cut the state anew if only the ranks of the engine differ. The state is equal then; the
    /// engine continues with other sums, which may differ in low-order bits.
    #[serde(default)]
    pub reshard: bool,
}

/// What a restore did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestoreReport {
    /// The snapshot.
    pub digest: Digest,
    /// The engine.
    pub engine: String,
    /// The new sequence, of an engine that takes one at any time; else the next request with these
    /// tokens resumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<String>,
    /// Tokens with state.
    pub boundary: u64,
    /// Tokens, those chosen and not computed included.
    pub tokens: u64,
    /// Pages.
    pub pages: u64,
    /// Bytes of frames fetched from the registry.
    pub bytes_pulled: u64,
    /// Raw bytes written to the engine's memory.
    pub bytes_written: u64,
    /// State tensors whose value was recomputed.
    pub values_computed: u64,
    /// State tensors whose value is only attested.
    pub values_attested: u64,
    /// State tensors that the engine holds in another form than the snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub converted: Vec<Converted>,
    /// How the state was cut anew, if the engine has other ranks than the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resharded: Option<Resharded>,
    /// Whether the first step's logits were compared (and equal).
    pub oracle: bool,
    /// Wall time in seconds.
    pub total_seconds: f64,
}

/// A state tensor that was converted to the form of the engine's slot. Its value hash is the same
/// in both: a tensor for which this cannot be shown is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Converted {
    /// Its name.
    pub state: String,
    /// The rank that has it.
    pub rank: u32,
    /// The form of the payload.
    pub from: Form,
    /// The form of the live slot.
    pub to: Form,
}

/// State that was cut anew for other ranks. The values are equal: each blob was verified before,
/// the result in the engine's memory. The logits of the next step are not compared, because sums
/// over other ranks differ in low-order bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resharded {
    /// What differs between the engine configurations, such as `tp`.
    pub differs: Vec<String>,
    /// Ranks of the snapshot.
    pub from: u32,
    /// Ranks of the engine.
    pub to: u32,
    /// Pages that were put together from others. The rest is as it was.
    pub pages: u64,
    /// State tensors that were put together from others.
    pub states: u64,
}

/// Body of `POST /v1/drain`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// Repository under which each engine's sequences get a repository of their own:
    /// `<repository>/<engine>`, tag = sequence.
    pub repository: String,
    /// Only say what would be done.
    #[serde(default)]
    pub plan_only: bool,
    /// How long to wait for the pushes, all together, once everything is captured, in seconds; a
    /// day at most. Default 600. What the registry does not have by then is listed in `failed` with
    /// code `timeout`: it lies in the agent's store, and its push goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_seconds: Option<u64>,
}

/// Answer to `POST /v1/drain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drain {
    /// What there is to do.
    pub plan: Vec<DrainItem>,
    /// What the registry has now; empty if only the plan was asked for.
    pub done: Vec<SnapshotReport>,
    /// What could not be captured, or was not pushed (in time).
    pub failed: Vec<DrainFailure>,
    /// Raw bytes to move at most (what the store has already is not moved).
    pub bytes: u64,
    /// Seconds to capture them at the rate of the last captures, without the pushes; absent before
    /// the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
    /// Tokens that would have to be computed again otherwise.
    pub recompute_tokens: u64,
}

/// One sequence to be drained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrainItem {
    /// The engine.
    pub engine: String,
    /// The sequence.
    pub sequence: String,
    /// Where it goes.
    pub reference: String,
    /// Tokens with state.
    pub boundary: u64,
    /// Raw bytes of pages and state.
    pub bytes: u64,
}

/// One sequence that could not be drained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrainFailure {
    /// The engine.
    pub engine: String,
    /// The sequence.
    pub sequence: String,
    /// The error.
    pub problem: crate::api::Problem,
}
