//! Requests and answers of the capture agent's control interface: HTTP with JSON over a Unix
//! socket, errors as [`crate::api::Problem`]. `docs/capture.md` lists the paths.

mod jobs;
mod outline;
mod restores;

pub use jobs::{Job, JobRequest, JobState, Jobs, Warm, WarmItem, WarmRequest, WarmState};
pub use outline::{Difference, Fits, Outline, TreeOutline};
pub use restores::{RestoreOutcome, RestoreRecord, Restores};

use crate::checkpoint::Form;
use crate::digest::Digest;
use crate::engine::{SequenceInfo, Taking, Verb};
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
    /// How many ranks there are.
    pub world: u32,
    /// Its engine configuration.
    pub deployment: BTreeMap<String, Value>,
    /// Digest of the engine configuration.
    pub fingerprint: Digest,
    /// Names of its groups.
    pub groups: Vec<String>,
    /// Bytes of the engine's memory that the agent has mapped.
    pub mapped_bytes: u64,
    /// Snapshots taken since it registered.
    pub snapshots: u64,
    /// Restores since it registered. For an engine that asks when a request comes: those that a
    /// request took.
    pub restores: u64,
    /// Snapshots that lie ready for its requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub staged: Vec<StagedInfo>,
    /// Restores under way whose pages come from a registry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restoring: Vec<RestoringInfo>,
    /// Outcomes of requests that belong to no particular snapshot, each with its count.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outcomes: BTreeMap<Taking, u64>,
}

/// How far a restore is whose pages come from a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoringInfo {
    /// The snapshot, as it was asked for.
    pub reference: String,
    /// The snapshot.
    pub digest: Digest,
    /// Raw bytes that the engine needs and the agent's store lacks.
    pub bytes_total: u64,
    /// Those of them that have come and were verified.
    pub bytes_verified: u64,
}

/// A snapshot that lies ready for requests of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagedInfo {
    /// Its name in the messages between agent and engine.
    pub restore: String,
    /// The snapshot.
    pub digest: Digest,
    /// Tokens with state.
    pub boundary: u64,
    /// Whether all of it is verified.
    pub ready: bool,
    /// Outcomes of the requests that it was ready for, each with its count.
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
    /// Sorted by name.
    pub engines: Vec<EngineInfo>,
}

/// Whether a snapshot is pushed once it is in the local store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Push {
    /// It is pushed in the background; the push survives restarts of the agent.
    #[default]
    Background,
    /// The request is answered when the push has ended, or waits for another token, or for room in
    /// a quota.
    Wait,
    /// It is not pushed.
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
    /// Whether it is pushed, and how.
    #[serde(default)]
    pub push: Push,
    /// How many of the highest logits to record of the step at the boundary; 0 for none. Default 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oracle: Option<u32>,
    /// The snapshot that it follows: a digest, or a reference in the agent's store. Default: the
    /// one that the sequence was last captured as or restored from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

/// Answer to `GET /v1/engines/{engine}/sequences`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sequences {
    /// What can be captured now.
    pub sequences: Vec<SequenceInfo>,
    /// The last saves that requests of this engine asked for, oldest first.
    pub saves: Vec<SaveInfo>,
}

/// A save that a request of an engine asked for; answer to `GET /v1/saves/{ticket}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveInfo {
    /// Its name, as the response to the request says.
    pub ticket: String,
    /// The engine.
    pub engine: String,
    /// The sequence.
    pub sequence: String,
    /// Where it goes.
    pub reference: String,
    /// How far it is.
    pub state: SaveState,
    /// The snapshot, once saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Tokens with state, once saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary: Option<u64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What kind of failure that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<ErrorCode>,
    /// Its push, as `GET /v1/pushes` lists it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<String>,
}

/// How far a save is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SaveState {
    /// Waiting, or under way.
    Pending,
    /// It lies in the agent's store.
    Saved,
    /// Nothing was stored under its name.
    Failed,
}

/// Report of a capture.
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
    /// All tokens, also those that are chosen and not yet computed.
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
    /// Bytes in which the local store holds what is new.
    #[serde(default)]
    pub bytes_stored: u64,
    /// How long the engine was paused, in seconds.
    pub pause_seconds: f64,
    /// From the request to the commit in the local store, in seconds.
    pub total_seconds: f64,
    /// How faithful a restore of it is.
    pub exactness: Exactness,
    /// What decides the next token and was not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrecorded: Vec<String>,
    /// Whether the logits of the step at the boundary are in it.
    pub oracle: bool,
    /// The snapshot it follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Digest>,
    /// The push; absent if it is not pushed.
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
    /// It failed, and is not tried again.
    Failed,
}

impl PushJob {
    /// Whether it is not tried again.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.state, PushState::Done | PushState::Failed)
    }

    /// Whether it waits for another token, or for room in a quota: a user has to provide these.
    #[must_use]
    pub fn needs_user(&self) -> bool {
        self.state == PushState::Waiting && matches!(self.code, Some(ErrorCode::Unauthorized | ErrorCode::QuotaExceeded))
    }
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
    /// The snapshot: `[http://host[:port]/]repository[:tag[~N]|@digest]`.
    pub reference: String,
    /// Take it from the local store only.
    #[serde(default)]
    pub local: bool,
    /// Add nothing to the agent's store: what it lacks passes from the registry to the engine. Only
    /// for engines that take a sequence at any time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_store: bool,
    /// The slot of a `llama-server` to restore into; an empty one if left out. Other engines name
    /// the sequence themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<String>,
    /// Cut the state anew if only the ranks of the engine differ. The state is equal then; the
    /// engine continues with other sums, which may differ in low-order bits.
    #[serde(default)]
    pub reshard: bool,
    /// The token position to resume at, before the end of the snapshot: a multiple of the tokens of
    /// a page, if nothing but pages of full attention is in it. Only for engines that take a
    /// sequence at any time; requests of others find the position by themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<u64>,
}

/// Report of a restore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestoreReport {
    /// The snapshot.
    pub digest: Digest,
    /// The engine.
    pub engine: String,
    /// The new sequence, if the engine takes one at any time. Absent for other engines: there the
    /// next request with these tokens resumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<String>,
    /// Tokens with state.
    pub boundary: u64,
    /// Whether that is only the beginning of the snapshot: the request gave a position.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partly: bool,
    /// All tokens, also those that are chosen and not yet computed.
    pub tokens: u64,
    /// Pages.
    pub pages: u64,
    /// Bytes of frames fetched from the registry.
    pub bytes_pulled: u64,
    /// Whether the snapshot is in the agent's store.
    #[serde(default)]
    pub in_store: Stored,
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

/// Whether a snapshot that was restored is in the agent's store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stored {
    /// It is complete there.
    #[default]
    Here,
    /// It is completed there in the background: the engine has its state already.
    Behind,
    /// Nothing was added: the request said so.
    Not,
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

/// Body of `POST /v1/drain`, and of a job of this kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// Repository under which each engine's sequences get a repository of their own:
    /// `<repository>/<engine>`, tag = sequence.
    pub repository: String,
    /// Only report the plan.
    #[serde(default, alias = "plan")]
    pub plan_only: bool,
    /// How many seconds the drain may take in all: for engines that do not list their sequences and
    /// for captures (5 at least for each of the two), and for pushes; a day at most. If left out,
    /// 600 for the pushes, once everything is captured. A sequence that is not captured by then,
    /// and a snapshot whose push takes longer, are listed in `failed` with code `timeout`. Nothing
    /// is stored of the first. The second is in the agent's store, and its push goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_seconds: Option<u64>,
    /// Tokens that an engine computes in a second: only with them the plan says how long computing
    /// would take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_second: Option<f64>,
}

/// Answer to `POST /v1/drain`, and the result of a job of this kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// Seconds that this takes; absent if the request does not say how fast an engine computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute_seconds: Option<f64>,
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
