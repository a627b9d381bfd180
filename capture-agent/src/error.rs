//! What goes wrong in the agent. Each variant says what, where and (by its code) what can be done.

use crate::memory::MemoryError;
use pfr_schema::agent::Difference;
use pfr_schema::api::Problem;
use pfr_schema::engine::CallError;
use pfr_schema::{ErrorCode, FormatError};
use pfr_service::problem;
use std::fmt::Display;

/// Result of the agent's library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What goes wrong in the agent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages explain the fields")]
pub enum Error {
    /// A request, a configuration or a registration that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// No such engine.
    #[error("no engine {engine:?} on this host; there are: {known}")]
    EngineUnknown {
        engine: String,
        /// Names of those that are here.
        known: String,
    },
    /// No such sequence.
    #[error("engine {engine:?} has no sequence{}; it has: {known}", if sequence.is_empty() { " to capture".to_owned() } else { format!(" {sequence:?}") })]
    SequenceUnknown {
        engine: String,
        /// The name; empty if none was given.
        sequence: String,
        /// Names of those that are there.
        known: String,
    },
    /// No such save.
    #[error("no save {ticket:?} is remembered: the agent may have been started since, and the tag says what was saved")]
    SaveUnknown { ticket: String },
    /// No such job.
    #[error("there is no job {id:?}; those that ended a week ago, or before a hundred others, are forgotten")]
    JobUnknown { id: String },
    /// As many jobs as may be are under way.
    #[error("{open} jobs are under way; cancel one, or wait until one has ended")]
    TooManyJobs { open: usize },
    /// A job that was waited for did not come to its end.
    #[error("job {id} was {how}; what it did until then stays")]
    JobEnded { id: String, how: &'static str },
    /// A pattern without a match.
    #[error("nothing in the registry that may be read matches {pattern:?}")]
    NothingMatches { pattern: String },
    /// A tag that the registry does not have yet as this host has it.
    #[error("this host has a newer {reference} that is not pushed yet")]
    NewerHere { reference: String },
    /// A sequence must be named.
    #[error("engine {engine:?} has several sequences, name one: {known}")]
    SequenceAmbiguous { engine: String, known: String },
    /// Another capture or restore is running.
    #[error("engine {engine:?} is busy with {with}")]
    Busy { engine: String, with: String },
    /// Members of the engine are missing.
    #[error("engine {engine:?} is not complete: {missing}")]
    Incomplete { engine: String, missing: String },
    /// The engine does not do this.
    #[error("engine {engine:?} does not serve {verb}")]
    NotServed { engine: String, verb: &'static str },
    /// The engine's connection ended, or it did not answer in time.
    #[error("engine {engine:?} is lost: {reason}")]
    Lost { engine: String, reason: String },
    /// The engine answered with a failure.
    #[error("engine {engine:?} refused {call}: {}: {}", failure.code, failure.detail)]
    Refused { engine: String, call: &'static str, failure: CallError },
    /// The engine broke the protocol, or described something impossible.
    #[error("engine {engine:?}: {reason}")]
    Protocol { engine: String, reason: String },
    /// The engine's memory.
    #[error("memory: {0}")]
    Memory(#[from] MemoryError),
    /// Not enough of a resource; nothing was changed.
    #[error(
        "not enough {what}: {needed} bytes needed, {free} free{}; nothing was changed",
        if *collected { " after a collection of garbage" } else { "" }
    )]
    NoRoom {
        what: &'static str,
        needed: u64,
        free: u64,
        /// Whether garbage was collected to make room.
        collected: bool,
    },
    /// The engine went on before it was told to.
    #[error("engine {engine:?} goes on by itself after a pause of {seconds} s, and the capture was not done: it is void")]
    PauseEnded { engine: String, seconds: f64 },
    /// The engine reused blocks that it held for a capture.
    #[error("engine {engine:?} has not kept the blocks until they were copied: the capture took longer than its limit, and is void")]
    HoldEnded { engine: String },
    /// Blocks that the engine had computed itself do not hold the snapshot's bytes.
    #[error("{what}, which the engine had computed, holds other bytes than the snapshot: nothing was taken")]
    Kept { what: String },
    /// Bytes changed between the first hash and the second.
    #[error("{what} changed while it was copied: the engine did not pause")]
    TornCopy { what: String },
    /// Exactness was asked for.
    #[error("the snapshot would not be exact, not recorded: {unrecorded}")]
    NotExact { unrecorded: String },
    /// The snapshot does not fit the engine: geometry, prefix, ranks, positions or page count.
    #[error("{what}: {expected} expected, found {found}")]
    Mismatch { code: ErrorCode, what: String, expected: String, found: String },
    /// A token position at which the snapshot has no whole state.
    #[error(
        "a resume begins at token position {end}, the end of the snapshot{}, not at {found}",
        step.map(|step| format!(", or at a multiple of {step} before it")).unwrap_or_default()
    )]
    Position {
        found: u64,
        end: u64,
        /// Tokens between two positions before the end, if there are any.
        step: Option<u64>,
    },
    /// The snapshot or the engine lacks a group or a state tensor.
    #[error("{what} of rank {rank} is missing in the {side}")]
    Missing {
        code: ErrorCode,
        what: String,
        rank: u32,
        /// `snapshot` or `engine`.
        side: &'static str,
    },
    /// State that cannot be cut for other ranks.
    #[error("{what} cannot be cut for other ranks: {reason}")]
    Uncut { what: String, reason: String },
    /// The engine configurations differ.
    #[error("the snapshot is of another engine configuration{}{}", lines(differs), advice.map(|advice| format!("\n{advice}")).unwrap_or_default())]
    Fingerprint {
        /// The fields that differ.
        differs: Vec<Difference>,
        /// What can be done about it.
        advice: Option<&'static str>,
    },
    /// The configurations are the same, and the recorded digest is not theirs.
    #[error("the snapshot is of another engine configuration\n  fingerprint: {engine} in the engine, {snapshot} in the snapshot")]
    FingerprintAlone { engine: pfr_schema::Digest, snapshot: String },
    /// The engine's memory does not hold what was written.
    #[error("{what} in the engine's memory hashes to {found}, the snapshot says {expected}")]
    Live {
        what: String,
        expected: String,
        /// The digest of the bytes in memory.
        found: String,
    },
    /// A slot of `llama-server` has another state than the file that it was restored from.
    #[error("slot {slot} of engine {engine:?} does not hold the restored state: {difference}; a request may have used it meanwhile")]
    SlotDiffers { engine: String, slot: u32, difference: String },
    /// Other logits.
    #[error("the logits of the first step after the restore differ from those that were recorded: {detail}")]
    Oracle { detail: String },
    /// A document or payload that is not what it should be.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The local store.
    #[error("local store: {0}")]
    Store(#[from] pfr_store::Error),
    /// The registry, or what it sent.
    #[error(transparent)]
    Client(#[from] pfr_client::Error),
    /// The token for a registry cannot be read, or is empty. It may be renewed.
    #[error(transparent)]
    Token(Box<Error>),
    /// A file or socket.
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// Something took longer than it may.
    #[error("{what} within {seconds} s")]
    Timeout { what: String, seconds: u64 },
    /// A snapshot that lies in the local store was refused by the registry.
    #[error("{snapshot} is in this host's store, but the registry refused it: {reason}")]
    PushRefused { snapshot: pfr_schema::Digest, reason: String, code: ErrorCode },
    /// The agent stops: it writes nothing more.
    #[error("the agent has ended")]
    Ended,
    /// A copy into an engine's memory did not end. The engine learns of the agent's end from the
    /// end of the process, which ends the copy first.
    #[error("a copy into an engine's memory is in flight after {seconds} s; the process ends now")]
    Unsettled { seconds: u64 },
    /// A bug.
    #[error("internal: {0}")]
    Internal(String),
}

impl Error {
    /// Adds what was tried to a system error.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }

    /// The snapshot does not fit the engine.
    pub(crate) fn mismatch(code: ErrorCode, what: impl Into<String>, expected: impl Display, found: impl Display) -> Self {
        Self::Mismatch { code, what: what.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// The code under which it crosses the wire.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid(_) | Self::SequenceAmbiguous { .. } => ErrorCode::InvalidRequest,
            Self::EngineUnknown { .. } => ErrorCode::EngineUnknown,
            Self::SequenceUnknown { .. } => ErrorCode::SequenceUnknown,
            Self::SaveUnknown { .. } | Self::JobUnknown { .. } | Self::NothingMatches { .. } => ErrorCode::NotFound,
            Self::TooManyJobs { .. } => ErrorCode::Overloaded,
            Self::NewerHere { .. } => ErrorCode::TagMoved,
            Self::Busy { .. } | Self::Incomplete { .. } | Self::NotServed { .. } => ErrorCode::EngineBusy,
            Self::Lost { .. } => ErrorCode::EngineLost,
            Self::Refused { .. } | Self::Protocol { .. } => ErrorCode::EngineRefused,
            Self::Memory(MemoryError::NoRoom { .. }) | Self::NoRoom { .. } => ErrorCode::NoRoom,
            Self::Memory(MemoryError::OutOfBounds { .. }) => ErrorCode::EngineRefused,
            Self::Memory(MemoryError::File { source, .. }) | Self::Io { source, .. } => match ErrorCode::of_io(source.kind()) {
                Some(code @ (ErrorCode::StorageFull | ErrorCode::Denied)) => code,
                _ => ErrorCode::Unavailable,
            },
            Self::Memory(_) => ErrorCode::EngineLost,
            Self::TornCopy { .. } => ErrorCode::TornCopy,
            Self::NotExact { .. } => ErrorCode::NotExact,
            Self::Position { .. } => ErrorCode::BoundaryMismatch,
            Self::Fingerprint { .. } | Self::FingerprintAlone { .. } => ErrorCode::FingerprintMismatch,
            Self::Uncut { .. } => ErrorCode::RankMismatch,
            Self::Live { .. } | Self::SlotDiffers { .. } => ErrorCode::LiveMismatch,
            Self::Kept { .. } => ErrorCode::KeptDiffers,
            Self::Oracle { .. } => ErrorCode::OracleMismatch,
            Self::Format(error) => error.code(),
            Self::Store(error) => error.local_code(),
            Self::Client(error) => error.code(),
            Self::Token(_) => ErrorCode::Unauthorized,
            Self::Timeout { .. } | Self::PauseEnded { .. } | Self::HoldEnded { .. } | Self::Unsettled { .. } => ErrorCode::Timeout,
            Self::PushRefused { code, .. } | Self::Mismatch { code, .. } | Self::Missing { code, .. } => *code,
            Self::Ended | Self::JobEnded { .. } => ErrorCode::Unavailable,
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    /// As it crosses the wire.
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem::new(self.code(), self.to_string())
    }
}

/// Fields that an error lists.
const FIELDS: usize = 20;

/// A line for each field, and how many more there are.
fn lines(differs: &[Difference]) -> String {
    let mut text: String = differs.iter().take(FIELDS).map(|difference| format!("\n  {difference}")).collect();
    if differs.len() > FIELDS {
        text.push_str(&format!("\n  and {} more", differs.len() - FIELDS));
    }
    text
}

/// Runs `work` on a thread that may block. The thread starts at once, and goes on if the future is
/// dropped. `what` names the work if it panics.
pub(crate) fn blocking<T, E>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> impl Future<Output = Result<T>> + Send
where
    T: Send + 'static,
    E: Into<Error> + Send + 'static,
{
    let task = pfr_service::task::spawn_blocking(work);
    async move { task.await.map_err(|panic| Error::Internal(format!("{what}: {panic}")))?.map_err(Into::into) }
}

/// Reads 64 bytes of a CUDA handle in hex.
pub(crate) fn cuda_handle(hex: &str) -> Option<[u8; 64]> {
    let mut bytes = [0; 64];
    hex::decode_to_slice(hex, &mut bytes).ok().map(|()| bytes)
}

impl From<Error> for problem::ApiError {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

/// Names that an error lists.
const NAMED: usize = 10;

/// The first few of these names, for an error.
pub(crate) fn few<S: AsRef<str>>(names: impl IntoIterator<Item = S, IntoIter: ExactSizeIterator>) -> String {
    pfr_service::few(names, NAMED)
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
