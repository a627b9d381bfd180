//! What goes wrong in the agent. Each variant says what, where and (by its code) what can be done.

use crate::memory::MemoryError;
use pfr_schema::api::Problem;
use pfr_schema::engine::CallError;
use pfr_schema::{ErrorCode, FormatError};
use pfr_service::problem;

/// Result of the agent's library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What goes wrong in the agent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request, a configuration or a registration that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// No such engine.
    #[error("no engine {engine:?} on this host; there are: {known}")]
    EngineUnknown {
        /// The name.
        engine: String,
        /// Names of those that are here.
        known: String,
    },
    /// No such sequence.
    #[error("engine {engine:?} has no sequence{}; it has: {known}", if sequence.is_empty() { " to capture".to_owned() } else { format!(" {sequence:?}") })]
    SequenceUnknown {
        /// The engine.
        engine: String,
        /// The name; empty if none was given.
        sequence: String,
        /// Names of those that are there.
        known: String,
    },
    /// A sequence must be named.
    #[error("engine {engine:?} has several sequences, name one: {known}")]
    SequenceAmbiguous {
        /// The engine.
        engine: String,
        /// Their names.
        known: String,
    },
    /// Another capture or restore is running.
    #[error("engine {engine:?} is busy with {with}")]
    Busy {
        /// The engine.
        engine: String,
        /// What runs.
        with: String,
    },
    /// Members of the engine are missing.
    #[error("engine {engine:?} is not complete: {missing}")]
    Incomplete {
        /// The engine.
        engine: String,
        /// What is missing.
        missing: String,
    },
    /// The engine does not do this.
    #[error("engine {engine:?} does not serve {verb}")]
    NotServed {
        /// The engine.
        engine: String,
        /// The verb.
        verb: &'static str,
    },
    /// The engine's connection ended, or it did not answer in time.
    #[error("engine {engine:?} is lost: {reason}")]
    Lost {
        /// The engine.
        engine: String,
        /// How.
        reason: String,
    },
    /// The engine answered with a failure.
    #[error("engine {engine:?} refused {call}: {}: {}", failure.code, failure.detail)]
    Refused {
        /// The engine.
        engine: String,
        /// The call.
        call: &'static str,
        /// Its answer.
        failure: CallError,
    },
    /// The engine broke the protocol, or described something impossible.
    #[error("engine {engine:?}: {reason}")]
    Protocol {
        /// The engine.
        engine: String,
        /// How.
        reason: String,
    },
    /// The engine's memory.
    #[error("memory: {0}")]
    Memory(#[from] MemoryError),
    /// Not enough of something; nothing was begun.
    #[error("not enough {what}: {needed} bytes needed, {free} free; nothing was begun")]
    NoRoom {
        /// Of what.
        what: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// Bytes changed between the first hash and the second.
    #[error("{what} changed while it was copied: the engine did not keep still")]
    TornCopy {
        /// Which bytes.
        what: String,
    },
    /// Exactness was asked for.
    #[error("the snapshot would not be exact, not recorded: {unrecorded}")]
    NotExact {
        /// What is not recorded.
        unrecorded: String,
    },
    /// Wrong number of pages.
    #[error("group {group:?} of rank {rank}: {found} pages, {expected} expected")]
    PageCount {
        /// The group.
        group: String,
        /// The rank.
        rank: u32,
        /// Pages that the boundary needs.
        expected: u64,
        /// Pages there are.
        found: u64,
    },
    /// Pages or tensors of another shape.
    #[error("{what}: the engine has {expected}, the snapshot {found}")]
    Geometry {
        /// Of what: group, rank, field.
        what: String,
        /// The engine's.
        expected: String,
        /// The snapshot's.
        found: String,
    },
    /// Another deployment.
    #[error("the snapshot is of another deployment.\n  engine:   {engine}\n  snapshot: {snapshot}\n  differs:  {differs}")]
    Fingerprint {
        /// The engine's deployment, as canonical JSON.
        engine: String,
        /// The snapshot's.
        snapshot: String,
        /// Keys that differ.
        differs: String,
    },
    /// Tokens, salt or adapter differ.
    #[error("prefix: {what}: {expected} expected, found {found}")]
    Prefix {
        /// What differs.
        what: &'static str,
        /// Expected.
        expected: String,
        /// Found.
        found: String,
    },
    /// A group is missing.
    #[error("group {group:?} of rank {rank} is missing in the {side}")]
    MissingGroup {
        /// The group.
        group: String,
        /// The rank.
        rank: u32,
        /// `snapshot` or `engine`.
        side: &'static str,
    },
    /// State is missing.
    #[error("state {tensor:?} of rank {rank} is missing in the {side}")]
    MissingState {
        /// The tensor.
        tensor: String,
        /// The rank.
        rank: u32,
        /// `snapshot` or `engine`.
        side: &'static str,
    },
    /// Other ranks.
    #[error("{what}: the engine has {expected}, the snapshot {found}")]
    Ranks {
        /// Of what.
        what: &'static str,
        /// The engine's.
        expected: u64,
        /// The snapshot's.
        found: u64,
    },
    /// Parts that lie at different boundaries.
    #[error("boundary of {what}: {expected} expected, found {found}")]
    Boundary {
        /// Of what.
        what: String,
        /// Expected.
        expected: u64,
        /// Found.
        found: u64,
    },
    /// The engine's memory does not hold what was written.
    #[error("{what} in the engine's memory hashes to {found}, the snapshot says {expected}")]
    Live {
        /// Which page or tensor.
        what: String,
        /// The snapshot's digest.
        expected: String,
        /// The digest of the bytes in memory.
        found: String,
    },
    /// Other logits.
    #[error("the logits of the first step after the restore differ from those that were recorded: {detail}")]
    Oracle {
        /// Which.
        detail: String,
    },
    /// A document or payload that is not what it should be.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The local store.
    #[error("local store: {0}")]
    Store(#[from] pfr_store::Error),
    /// The registry, or what it sent.
    #[error(transparent)]
    Client(#[from] pfr_client::Error),
    /// A file or socket.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// Something took longer than it may.
    #[error("{what} within {seconds} s")]
    Timeout {
        /// What did not happen.
        what: String,
        /// The time it had.
        seconds: u64,
    },
    /// A snapshot that lies in the local store was refused by the registry.
    #[error("{snapshot} lies in this host's store, but the registry refused it: {reason}")]
    PushRefused {
        /// The snapshot.
        snapshot: pfr_schema::Digest,
        /// What the registry said.
        reason: String,
        /// As which kind of failure.
        code: ErrorCode,
    },
    /// The agent's runtime has ended.
    #[error("the agent has ended")]
    Ended,
    /// A bug.
    #[error("internal: {0}")]
    Internal(String),
}

impl Error {
    /// Adds what was tried to a system error.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }

    /// The code under which it crosses the wire.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid(_) | Self::SequenceAmbiguous { .. } => ErrorCode::InvalidRequest,
            Self::EngineUnknown { .. } => ErrorCode::EngineUnknown,
            Self::SequenceUnknown { .. } => ErrorCode::SequenceUnknown,
            Self::Busy { .. } | Self::Incomplete { .. } | Self::NotServed { .. } => ErrorCode::EngineBusy,
            Self::Lost { .. } => ErrorCode::EngineLost,
            Self::Refused { .. } | Self::Protocol { .. } => ErrorCode::EngineRefused,
            Self::Memory(MemoryError::NoRoom { .. }) | Self::NoRoom { .. } => ErrorCode::NoRoom,
            Self::Memory(MemoryError::OutOfBounds { .. }) => ErrorCode::EngineRefused,
            Self::Memory(_) => ErrorCode::EngineLost,
            Self::TornCopy { .. } => ErrorCode::TornCopy,
            Self::NotExact { .. } => ErrorCode::NotExact,
            Self::PageCount { .. } => ErrorCode::PageCountMismatch,
            Self::Geometry { .. } => ErrorCode::GeometryMismatch,
            Self::Fingerprint { .. } => ErrorCode::FingerprintMismatch,
            Self::Prefix { .. } => ErrorCode::PrefixMismatch,
            Self::MissingGroup { .. } => ErrorCode::MissingGroup,
            Self::MissingState { .. } => ErrorCode::MissingState,
            Self::Ranks { .. } => ErrorCode::RankMismatch,
            Self::Boundary { .. } => ErrorCode::BoundaryMismatch,
            Self::Live { .. } => ErrorCode::LiveMismatch,
            Self::Oracle { .. } => ErrorCode::OracleMismatch,
            Self::Format(error) => error.code(),
            Self::Store(error) => error.local_code(),
            Self::Client(error) => error.code(),
            Self::Io { source, .. } => match ErrorCode::of_io(source.kind()) {
                Some(code @ (ErrorCode::StorageFull | ErrorCode::Denied)) => code,
                _ => ErrorCode::Unavailable,
            },
            Self::Timeout { .. } => ErrorCode::Timeout,
            Self::PushRefused { code, .. } => *code,
            Self::Ended => ErrorCode::Unavailable,
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    /// As it crosses the wire.
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem::new(self.code(), self.to_string())
    }
}

impl From<Error> for problem::Failure {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn a_full_disk_and_missing_permissions_are_told_from_what_cannot_be_reached() {
        let exit = |kind: ErrorKind| Error::io("cannot write the job")(kind.into()).problem().code.exit_code();
        assert_eq!([exit(ErrorKind::StorageFull), exit(ErrorKind::PermissionDenied), exit(ErrorKind::ConnectionRefused)], [8, 6, 7]);
        let store = |error| Error::Store(error).problem().code.exit_code();
        assert_eq!(store(pfr_store::Error::Full("packs".into())), 8);
        assert_eq!(store(pfr_store::Error::NotPermitted { what: "packs", reason: "no".into() }), 6);
        assert_eq!(store(pfr_store::Error::Unavailable { what: "packs", reason: "gone".into() }), 7);
    }
}
