//! The last restores into an engine, and what became of the states that lay ready for it.

use crate::digest::Digest;
use crate::engine::Taking;
use crate::error::ErrorCode;
use serde::{Deserialize, Serialize};

/// Answer to `GET /v1/restores` and `GET /v1/engines/{engine}/restores`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Restores {
    /// Newest first.
    pub restores: Vec<RestoreRecord>,
}

/// A restore, a fill of a request's blocks, or an outcome that the engine reported without one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestoreRecord {
    /// The engine.
    pub engine: String,
    /// Whether this engine has left, and none of its name has come since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gone: bool,
    /// Milliseconds since 1970, UTC, when the agent noted it.
    pub noted_at: u64,
    /// What became of it.
    pub outcome: RestoreOutcome,
    /// Why the engine did not take the state, as it said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Taking>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What kind of failure that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<ErrorCode>,
    /// The snapshot, as it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// The snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The name of the state in the messages between agent and engine, if it lay ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<String>,
    /// The new sequence, if the engine takes one at any time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<String>,
    /// The engine's name for the request, if it gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Requests that it stands for: more than one if the engine did not name them, 0 until it says
    /// anything.
    #[serde(default)]
    pub requests: u64,
    /// Tokens with state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<u64>,
    /// Pages, over all groups and ranks, that the engine had, found equal.
    #[serde(default)]
    pub pages_kept: u64,
    /// Pages, over all groups and ranks, that were written.
    #[serde(default)]
    pub pages_filled: u64,
    /// Raw bytes written to the engine's memory, state tensors too.
    #[serde(default)]
    pub bytes_written: u64,
    /// Bytes of frames fetched from the registry.
    #[serde(default)]
    pub bytes_pulled: u64,
    /// Wall time in seconds; of a fill, that of the slowest rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

/// What became of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestoreOutcome {
    /// The snapshot lies ready for requests of the engine.
    Ready,
    /// The blocks of a request are filled. The engine has not said yet what became of the request.
    Filled,
    /// A sequence or a request goes on from the end of the snapshot.
    Restored,
    /// A sequence or a request goes on from a position before the end of the snapshot.
    Partly,
    /// The engine did not take the state; `reason` says why.
    NotTaken,
    /// It failed, or the first step after it had other logits than those that were recorded.
    Failed,
}
