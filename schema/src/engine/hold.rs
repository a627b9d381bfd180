//! Captures without a pause: the engine holds the blocks of a sequence while it runs. Its requests
//! ask for saves, and for snapshots to resume from.

use super::ask::{Match, MatchKeys};
use crate::agent::Push;
use crate::name::RepositoryName;
use serde::{Deserialize, Serialize};

/// Arguments of [`super::ToEngine::Hold`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldRequest {
    /// The sequence: its id, or the name that its request gave.
    pub sequence: String,
    /// Names this hold. No other hold of the engine has this name.
    pub hold: String,
    /// The ticket of the save that it is for. The engine need not keep the sequence for that save
    /// any more when this hold ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save: Option<String>,
}

/// Arguments of [`super::ToEngine::Release`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldName {
    /// The hold.
    pub hold: String,
}

/// Answer to [`super::ToEngine::Release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// Whether the engine held the blocks from its answer to [`super::ToEngine::Hold`] until this
    /// call. If not, another sequence may have written what was read meanwhile. The answer to a
    /// repeated call is that of the first.
    pub held: bool,
}

/// Answer to [`super::ToEngine::Sequences`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceList {
    /// Those that can be held now.
    pub sequences: Vec<SequenceInfo>,
}

/// A sequence that can be captured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceInfo {
    /// The engine's name for it.
    pub id: String,
    /// The name that its request gave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether it runs.
    pub state: SequenceState,
    /// Tokens, those chosen and not computed included.
    pub tokens: u64,
    /// Tokens with state.
    pub boundary: u64,
    /// Seconds for which the engine keeps the blocks of a request that has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_seconds: Option<f64>,
}

/// Whether a sequence runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SequenceState {
    /// It runs.
    Running,
    /// Its request has ended. The engine keeps its blocks for a time.
    Ended,
}

/// Arguments of [`super::ToAgent::Save`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Save {
    /// Names this save: 1 to 64 bytes. [`crate::agent::SaveInfo`] tells what became of it.
    pub ticket: String,
    /// The sequence, as in [`HoldRequest::sequence`].
    pub sequence: String,
    /// Where it goes, as in [`crate::agent::SnapshotRequest::reference`].
    pub reference: String,
    /// As in [`crate::agent::SnapshotRequest::parent`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Pushing. [`Push::Wait`] is as [`Push::Background`].
    #[serde(default)]
    pub push: Push,
    /// If no request asked for it. The agent may drop it then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub automatic: Option<Automatic>,
}

/// The bounds of saves that no request asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Automatic {
    /// Bytes a second that the automatic saves of this engine may add to the agent's store, on
    /// average over ten seconds. No bound if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// Answer to [`super::ToAgent::Save`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saving {
    /// Why it is not saved. Only of an automatic save.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<Dropped>,
}

/// Why an automatic save was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dropped {
    /// Too many saves or pushes wait.
    Behind,
    /// The budget of bytes is used up.
    Budget,
}

/// Arguments of [`super::ToAgent::Find`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Find {
    /// Names this search: 1 to 64 bytes, unique in the engine's life.
    pub name: String,
    /// Where to look. Given with the first call of this name, as are the following.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<RepositoryName>,
    /// Tokens that a state must save.
    #[serde(default)]
    pub least: u64,
    /// Milliseconds that the request waits.
    #[serde(default)]
    pub limit_ms: u64,
    /// The request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Match>,
}

/// Arguments of [`super::ToAgent::Resume`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// The snapshot, as in [`crate::agent::RestoreRequest::reference`].
    pub reference: String,
    /// Whether the request asks for the first time. Then the reference is resolved anew.
    pub first: bool,
    /// The request.
    pub request: MatchKeys,
}
