//! Errors of the client: what, where (file, digest or address), and what to do. [`Error::code`] is what callers act on.

use pfr_schema::api::Problem;
use pfr_schema::{Digest, ErrorCode, FormatError};
use std::path::{Path, PathBuf};

/// What a client operation returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the client refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not the base URL of a registry.
    #[error("{url:?} is not the base URL of a registry: {reason}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The registry refused, in its own words.
    #[error("{}{}", problem.detail, request_id(problem))]
    Registry {
        /// The registry's answer.
        problem: Box<Problem>,
    },
    /// A file's bytes do not hash to its name.
    #[error("{path} does not hold the bytes of {digest}: {reason}. The file is damaged; take it from a good copy", path = path.display())]
    WrongBytes {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        digest: Digest,
        /// The registry's verdict.
        code: ErrorCode,
        /// The registry's words.
        reason: String,
    },
    /// No answer.
    #[error("the registry at {url} does not answer: {reason} (tried {})", times(*attempts))]
    Unreachable {
        /// Base URL.
        url: String,
        /// The last attempt's error.
        reason: String,
        /// How often it was tried.
        attempts: u32,
    },
    /// No capture agent behind its control socket.
    #[error("no capture agent answers at {socket}: {reason}. Start one with `pf-agent serve`, or name its socket with --agent", socket = socket.display())]
    NoAgent {
        /// The socket.
        socket: PathBuf,
        /// What happened.
        reason: String,
    },
    /// The capture agent's answer did not come, or not whole.
    #[error("the capture agent at {socket} went away before it answered: {reason}. What was asked for may have been done", socket = socket.display())]
    AgentGone {
        /// The socket.
        socket: PathBuf,
        /// What happened.
        reason: String,
    },
    /// The capture agent refused, in its own words.
    #[error("{}{}", problem.detail, request_id(problem))]
    Agent {
        /// The agent's answer.
        problem: Box<Problem>,
    },
    /// An answer that is none of the control interface's.
    #[error("what listens at {socket} is no capture agent: {reason}", socket = socket.display())]
    NotAnAgent {
        /// The socket.
        socket: PathBuf,
        /// What it answered.
        reason: String,
    },
    /// An answer that was cut short.
    #[error("the answer of the registry at {url} was cut: {reason}")]
    Cut {
        /// Base URL.
        url: String,
        /// What happened.
        reason: String,
    },
    /// An answer that came, but too slowly.
    #[error("the answer of the registry at {url} comes too slowly: {reason}")]
    TooSlow {
        /// Base URL.
        url: String,
        /// How slowly.
        reason: String,
    },
    /// An answer that is none of the protocol's.
    #[error("{url} answered {status} with {said}; is it a pf registry?")]
    Foreign {
        /// The URL that was asked.
        url: String,
        /// HTTP status.
        status: u16,
        /// What the answer is, in a few words.
        said: String,
    },
    /// An answer that contradicts the protocol.
    #[error("the registry at {url} broke the protocol: {reason}")]
    Protocol {
        /// Base URL.
        url: String,
        /// What it did.
        reason: String,
    },
    /// Bytes received from a registry are not what they should be. Nothing of them was published.
    #[error("received {digest}: {source}")]
    Received {
        /// The blob.
        digest: Digest,
        /// What is wrong.
        source: FormatError,
    },
    /// The local store refused or failed.
    #[error("local store: {0}")]
    Store(#[from] pfr_store::Error),
    /// A document in a directory is malformed.
    #[error("{path}: {source}", path = path.display())]
    Document {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the place in the file.
        source: FormatError,
    },
    /// A directory lacks a file.
    #[error("{document}: {at} is {digest}, but neither {path} nor {path}.zst is there", document = document.display(), path = path.display())]
    MissingBlob {
        /// The document that lists the blob.
        document: PathBuf,
        /// JSON path in the document.
        at: String,
        /// The blob.
        digest: Digest,
        /// Where its bytes should be.
        path: PathBuf,
    },
    /// A file has another length than a document says.
    #[error("{path} has {found} bytes, {expected} expected ({document}: {at})", path = path.display(), document = document.display())]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// The document that lists the blob.
        document: PathBuf,
        /// JSON path in the document.
        at: String,
        /// Bytes expected.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// A file changed while it was read.
    #[error("{path} changed while it was read: {reason}", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// What changed.
        reason: String,
    },
    /// A path or file that is not accepted.
    #[error("{path}: {reason}", path = path.display())]
    Refused {
        /// The path.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// A directory holds another snapshot than the one to be written.
    #[error("{path} is there and is another snapshot's; pull into a new directory, or move that one away first", path = path.display())]
    OtherSnapshot {
        /// The document found.
        path: PathBuf,
    },
    /// A snapshot that cannot be what was asked for.
    #[error("{digest}: {reason}")]
    Unsuitable {
        /// The snapshot.
        digest: Digest,
        /// Why, and what to do.
        reason: String,
    },
    /// The disk or file system failed.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// A bug.
    #[error("bug: {0}")]
    Internal(String),
}

impl Error {
    /// The kind of error: what exit code and which advice belong to it.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Url { .. } | Self::Refused { .. } | Self::OtherSnapshot { .. } => ErrorCode::InvalidRequest,
            Self::Registry { problem } | Self::Agent { problem } => problem.code,
            Self::WrongBytes { code, .. } => *code,
            Self::Unreachable { .. } | Self::Cut { .. } | Self::TooSlow { .. } | Self::NoAgent { .. } | Self::AgentGone { .. } => {
                ErrorCode::Unavailable
            }
            Self::Foreign { status, .. } => match status {
                401 => ErrorCode::Unauthorized,
                403 => ErrorCode::Denied,
                413 => ErrorCode::TooLarge,
                // Whatever this is, it does not know the protocol.
                501 => ErrorCode::InvalidRequest,
                500.. => ErrorCode::Unavailable,
                _ => ErrorCode::InvalidRequest,
            },
            Self::Protocol { .. } | Self::Changed { .. } | Self::NotAnAgent { .. } => ErrorCode::InvalidRequest,
            Self::Received { source, .. } | Self::Document { source, .. } => source.code(),
            Self::Store(error) => error.local_code(),
            Self::MissingBlob { .. } => ErrorCode::MissingBlobs,
            Self::WrongLength { .. } => ErrorCode::LengthMismatch,
            Self::Unsuitable { .. } => ErrorCode::InvalidDocument,
            Self::Io { source, .. } => ErrorCode::of_io(source.kind()).unwrap_or(ErrorCode::InvalidRequest),
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    /// Whether the registry could not be asked, or asked to be asked again: a retry may help.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Registry { problem } | Self::Agent { problem } => problem.retryable,
            Self::Unreachable { .. } | Self::Cut { .. } => true,
            Self::Foreign { status, .. } => matches!(status, 408 | 429 | 502 | 503 | 504),
            _ => false,
        }
    }

    /// Makes an error of a failed operation on a file.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Makes an error of a file that does not parse.
    pub fn document(path: &Path) -> impl FnOnce(FormatError) -> Self {
        let path = path.to_owned();
        move |source| Self::Document { path, source }
    }

    /// An error of a task that was to run on a blocking thread.
    #[must_use]
    pub fn joined(error: tokio::task::JoinError) -> Self {
        Self::Internal(error.to_string())
    }
}

fn times(n: u32) -> String {
    if n == 1 { "once".to_owned() } else { format!("{n} times") }
}

fn request_id(problem: &Problem) -> String {
    match &problem.request_id {
        Some(id) if problem.code == ErrorCode::Internal => format!(" (request {id})"),
        _ => String::new(),
    }
}
