//! What became of requests, told by the engine and counted by the agent.

use serde::{Deserialize, Serialize};

/// Arguments of [`super::ToAgent::Report`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// What happened since the last report.
    pub outcomes: Vec<Outcome>,
}

/// How often something happened to requests that a state lay ready for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The match, if it came to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<String>,
    /// What happened.
    pub what: Taking,
    /// How often.
    pub count: u64,
    /// Some of the requests that it happened to, 16 at most. An engine need not name any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<OutcomeRequest>,
}

/// A request of an [`Outcome`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeRequest {
    /// The engine's name for it.
    pub request: String,
    /// The fill of its blocks ([`super::Fill::fill`]), if it came to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<String>,
}

/// Outcome of a request while a state lies ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Taking {
    /// It resumes from the state.
    Taken,
    /// It resumes from the state. The first blocks were in the engine already, proven equal.
    TakenOnKept,
    /// The engine had computed its first blocks itself and differently. The state was loaded anew
    /// into blocks of its own.
    KeptDiffers,
    /// The engine has state for more tokens of the same prefix, and goes on from there.
    EngineHasMore,
    /// The agent did not answer in time: the engine computes the request.
    AgentSilent,
    /// The agent does not read what it is sent: the engine computes the request.
    AgentBusy,
    /// The state was on its way for too long: the engine computes the request.
    WaitedTooLong,
    /// The engine allocated blocks for another length: it computes the request.
    OtherLength,
    /// The blocks could not be filled: the engine computes the request.
    FillFailed,
    /// The blocks were not filled in time: the engine computes the request, in other blocks.
    FillLate,
    /// The request went away before it was filled.
    Gone,
    /// Besides: the first step of a request that took the state had the recorded logits.
    LogitsEqual,
    /// Besides: it had other logits. The engine does not compute as the captured one did.
    LogitsDiffer,
    /// Automatic mode: the engine had the beginning of the request in its own cache.
    HitEngine,
    /// Automatic mode: it resumes from a state that lay ready.
    HitMemory,
    /// Automatic mode: it resumes from a state of the agent's store.
    HitStore,
    /// Automatic mode: it resumes from a state of the registry.
    HitRegistry,
    /// Automatic mode: all of it is computed.
    Miss,
    /// Automatic mode: a turn was not saved, too many were in the last minute.
    SaveDroppedRate,
    /// Automatic mode: a turn was not saved, the agent was behind.
    SaveDroppedBehind,
    /// Automatic mode: a turn was not saved, the budget of bytes was used up.
    SaveDroppedBudget,
    /// Automatic mode: a turn was not saved, its request had no user for the template.
    SaveDroppedName,
    /// A turn was not saved, engine or agent refused: in automatic mode, or although its request
    /// asked for the save.
    SaveDroppedRefused,
}

impl Taking {
    /// Its name on the wire, in metrics and in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::TakenOnKept => "taken-on-kept",
            Self::KeptDiffers => "kept-differs",
            Self::EngineHasMore => "engine-has-more",
            Self::AgentSilent => "agent-silent",
            Self::AgentBusy => "agent-busy",
            Self::WaitedTooLong => "waited-too-long",
            Self::OtherLength => "other-length",
            Self::FillFailed => "fill-failed",
            Self::FillLate => "fill-late",
            Self::Gone => "gone",
            Self::LogitsEqual => "logits-equal",
            Self::LogitsDiffer => "logits-differ",
            Self::HitEngine => "hit-engine",
            Self::HitMemory => "hit-memory",
            Self::HitStore => "hit-store",
            Self::HitRegistry => "hit-registry",
            Self::Miss => "miss",
            Self::SaveDroppedRate => "save-dropped-rate",
            Self::SaveDroppedBehind => "save-dropped-behind",
            Self::SaveDroppedBudget => "save-dropped-budget",
            Self::SaveDroppedName => "save-dropped-name",
            Self::SaveDroppedRefused => "save-dropped-refused",
        }
    }

    /// Whether it counts what automatic mode did, or a save that was refused.
    #[must_use]
    pub const fn is_automatic(self) -> bool {
        use Taking::{
            HitEngine, HitMemory, HitRegistry, HitStore, Miss, SaveDroppedBehind, SaveDroppedBudget, SaveDroppedName, SaveDroppedRate,
            SaveDroppedRefused,
        };
        matches!(self, HitEngine | HitMemory | HitStore | HitRegistry | Miss)
            || matches!(self, SaveDroppedRate | SaveDroppedBehind | SaveDroppedBudget | SaveDroppedName | SaveDroppedRefused)
    }

    /// Whether the request resumes from the state.
    #[must_use]
    pub const fn is_taken(self) -> bool {
        matches!(self, Self::Taken | Self::TakenOnKept)
    }

    /// Whether something is wrong, or the state was not taken.
    #[must_use]
    pub const fn is_notable(self) -> bool {
        !self.is_taken() && !matches!(self, Self::LogitsEqual) && !self.is_automatic()
    }
}
