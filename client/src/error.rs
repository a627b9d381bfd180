//! Errors of the client: what, where (file, digest or address), and what to do. [`Error::code`] is
//! what callers act on.

use crate::remote::Distrust;
use pfr_schema::api::Problem;
use pfr_schema::{Digest, ErrorCode, FormatError};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The result of a client operation.
pub type Result<T> = std::result::Result<T, Error>;

/// The errors of the client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages explain the fields")]
pub enum Error {
    /// Not the base URL of a registry.
    #[error("{url:?} is not the base URL of a registry: {reason}")]
    Url { url: String, reason: String },
    /// A token would be sent where others can read it.
    #[error("the token for {url} is not sent over plain http, where other machines could read it; use https")]
    TokenOverHttp { url: String },
    /// The registry refused, with its message.
    #[error("{}{}", problem.detail, request_id(problem))]
    Registry { problem: Box<Problem> },
    /// A file's bytes do not hash to its name.
    #[error("{path} does not hold the bytes of {digest}: {reason}. The file is damaged; take it from a good copy", path = path.display())]
    WrongBytes { path: PathBuf, digest: Digest, code: ErrorCode, reason: String },
    /// The registry does not answer.
    #[error("the registry at {url} does not answer: {reason} (tried {})", times(*attempts))]
    Unreachable { url: String, reason: String, attempts: u32 },
    /// The registry's certificate is not trusted. Nothing was sent.
    #[error("the certificate of the registry at {url} is not accepted: {reason}")]
    Certificate { url: String, reason: Distrust },
    /// No capture agent behind its control socket.
    #[error("no capture agent answers at {socket}: {reason}", socket = socket.display())]
    NoAgent { socket: PathBuf, reason: String },
    /// The capture agent's answer did not arrive, or broke off.
    #[error("the capture agent at {socket} went away before it answered: {reason}. The request may have been carried out", socket = socket.display())]
    AgentGone { socket: PathBuf, reason: String },
    /// The capture agent has not answered a question whose answer it has at hand.
    #[error("the capture agent at {socket} has not answered for {seconds} seconds", socket = socket.display(), seconds = limit.as_secs())]
    AgentSilent { socket: PathBuf, limit: Duration },
    /// The capture agent refused, with its message.
    #[error("{}{}", problem.detail, request_id(problem))]
    Agent { problem: Box<Problem> },
    /// An answer that does not belong to the control interface.
    #[error("the program that listens at {socket} is not a capture agent: {reason}", socket = socket.display())]
    NotAnAgent { socket: PathBuf, reason: String },
    /// An answer that broke off.
    #[error("the answer of the registry at {url} broke off: {reason}")]
    Cut { url: String, reason: String },
    /// An answer that came, but too slowly.
    #[error("the answer of the registry at {url} comes too slowly: {reason}")]
    TooSlow { url: String, reason: String },
    /// An answer that does not belong to the protocol.
    #[error("{url} answered {status} with {found}; is it a pf registry?")]
    Foreign { url: String, status: u16, found: String },
    /// An answer that contradicts the protocol.
    #[error("the registry at {url} broke the protocol: {reason}")]
    Protocol { url: String, reason: String },
    /// A registry that does not know a part of the request, and has answered without it.
    #[error("the registry at {url} is of an older version, and {reason}")]
    Older { url: String, reason: String },
    /// Bytes received from a registry are damaged or wrong. None of them was published.
    #[error("received {digest}: {source}")]
    Received { digest: Digest, source: FormatError },
    /// The local store refused or failed.
    #[error("local store: {0}")]
    Store(#[from] pfr_store::Error),
    /// A document in a directory is malformed.
    #[error("{path}: {source}", path = path.display())]
    Document { path: PathBuf, source: FormatError },
    /// A directory lacks a file.
    #[error("{document}: {at} is {digest}, but neither {path} nor {path}.zst is there", document = document.display(), path = path.display())]
    MissingBlob { document: PathBuf, at: String, digest: Digest, path: PathBuf },
    /// A file has another length than a document says.
    #[error("{path} has {found} bytes, {expected} expected ({document}: {at})", path = path.display(), document = document.display())]
    WrongLength { path: PathBuf, document: PathBuf, at: String, expected: u64, found: u64 },
    /// A file changed while it was read.
    #[error("{path} changed while it was read: {reason}", path = path.display())]
    Changed { path: PathBuf, reason: String },
    /// A path or file that is not accepted.
    #[error("{path}: {reason}", path = path.display())]
    Refused { path: PathBuf, reason: String },
    /// The target directory holds another snapshot.
    #[error("{path} belongs to another snapshot; pull into a new directory, or move that one away first", path = path.display())]
    OtherSnapshot { path: PathBuf },
    /// None of the keys has signed a snapshot. Nothing of it was fetched.
    #[error("{digest} is not signed by {}: it has {}", of_keys(*keys), of_signatures(*signatures))]
    NotSigned { digest: Digest, signatures: usize, keys: usize },
    /// A snapshot that does not suit the request.
    #[error("{digest}: {reason}")]
    Unsuitable { digest: Digest, reason: String },
    /// A layout of exports that is damaged, missing, or does not answer.
    #[error("{place}: {reason}")]
    Layout { place: String, code: ErrorCode, reason: String },
    /// The disk or file system failed.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// A bug.
    #[error("bug: {0}")]
    Internal(String),
}

impl Error {
    /// The kind of error: what exit code and which advice belong to it.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Url { .. } | Self::TokenOverHttp { .. } | Self::Refused { .. } | Self::OtherSnapshot { .. } => ErrorCode::InvalidRequest,
            Self::Registry { problem } | Self::Agent { problem } => problem.code,
            Self::WrongBytes { code, .. } | Self::Layout { code, .. } => *code,
            // It may be renewed.
            Self::Certificate { .. } => ErrorCode::Unavailable,
            Self::Unreachable { .. } | Self::Cut { .. } | Self::TooSlow { .. } => ErrorCode::Unavailable,
            Self::NoAgent { .. } | Self::AgentGone { .. } | Self::AgentSilent { .. } => ErrorCode::Unavailable,
            Self::Foreign { status, .. } => match status {
                401 => ErrorCode::Unauthorized,
                403 => ErrorCode::Denied,
                413 => ErrorCode::TooLarge,
                // The server does not know the protocol.
                501 => ErrorCode::InvalidRequest,
                500.. => ErrorCode::Unavailable,
                _ => ErrorCode::InvalidRequest,
            },
            Self::Protocol { .. } | Self::Older { .. } | Self::Changed { .. } | Self::NotAnAgent { .. } => ErrorCode::InvalidRequest,
            Self::Received { source, .. } | Self::Document { source, .. } => source.code(),
            Self::Store(error) => error.local_code(),
            Self::MissingBlob { .. } => ErrorCode::MissingBlobs,
            Self::WrongLength { .. } => ErrorCode::LengthMismatch,
            Self::NotSigned { .. } => ErrorCode::SignatureRequired,
            Self::Unsuitable { .. } => ErrorCode::InvalidDocument,
            Self::Io { source, .. } => ErrorCode::of_io(source.kind()).unwrap_or(ErrorCode::InvalidRequest),
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    /// Whether a retry may help: the registry did not answer, or said that the request may succeed
    /// later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Registry { problem } | Self::Agent { problem } => problem.retryable,
            Self::Unreachable { .. } | Self::Cut { .. } | Self::AgentSilent { .. } => true,
            Self::Layout { code, .. } => code.retryable(),
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
}

/// Runs `work` on a thread that may block. The thread starts at once, and goes on if the future is
/// dropped.
///
/// # Errors
/// Those of `work`; [`Error::Internal`] if it panics.
pub fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> impl Future<Output = Result<T>> + Send {
    let task = pfr_service::task::spawn_blocking(work);
    async move { task.await.map_err(|panic| Error::Internal(panic.to_string()))? }
}

fn of_keys(keys: usize) -> String {
    if keys == 1 { "the key".to_owned() } else { format!("any of the {keys} keys") }
}

fn of_signatures(signatures: usize) -> &'static str {
    match signatures {
        0 => "no signature",
        1 => "only a signature by another one",
        _ => "only signatures by others",
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
