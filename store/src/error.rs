//! The errors of the store.

use crate::encryption::Altered;
use pfr_schema::api::TagState;
use pfr_schema::{AccessTokenId, Digest, DigestPrefix, DomainName, ErrorCode, FormatError, Kind, RepositoryName, Tag};
use pfr_service::units::{bytes, number};

/// What a store operation returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the store refused or failed. [`Error::code`] is the closed kind that callers act on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Foreign bytes are malformed.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A frame in a stream is wrong.
    #[error("frame at byte {position} ({digest}): {source}")]
    Frame {
        /// Byte offset of the frame's payload in its stream.
        position: u64,
        /// The blob it claims to be.
        digest: Digest,
        /// What is wrong.
        source: FormatError,
    },
    /// A node lists blobs that are not stored.
    #[error("{container} lists {} that are missing here, first {}: upload them before it", count(missing.len(), "blob"), missing.first().map(ToString::to_string).unwrap_or_default())]
    Missing {
        /// The node.
        container: Digest,
        /// What is missing, at most a few hundred.
        missing: Vec<Digest>,
    },
    /// A node gives a blob another shape than it has.
    #[error("{container} lists {child} as {expected}, but it has {found}")]
    WrongShape {
        /// The node.
        container: Digest,
        /// The blob.
        child: Digest,
        /// What the node says.
        expected: String,
        /// What is stored.
        found: String,
    },
    /// No such domain.
    #[error("domain {0} does not exist")]
    DomainUnknown(DomainName),
    /// A domain of this name is being deleted.
    #[error("a domain {0} is being deleted; try again when it is gone, or use another name")]
    DomainBusy(DomainName),
    /// No such access token.
    #[error("there is no access token {0}")]
    TokenUnknown(AccessTokenId),
    /// No such repository.
    #[error("repository {0} does not exist")]
    RepositoryUnknown(RepositoryName),
    /// No such snapshot in the repository.
    #[error("{repository} has no snapshot {snapshot}")]
    SnapshotUnknown {
        /// The repository.
        repository: RepositoryName,
        /// What was asked for.
        snapshot: String,
    },
    /// A shortened digest that several snapshots of the repository begin with.
    #[error("{repository} has several snapshots {prefix}…: {}; give more digits", some(candidates))]
    SnapshotAmbiguous {
        /// The repository.
        repository: RepositoryName,
        /// What was asked for.
        prefix: DigestPrefix,
        /// Some of the snapshots it may mean.
        candidates: Vec<Digest>,
    },
    /// No such tag in the repository.
    #[error("{repository} has no tag {tag}")]
    TagUnknown {
        /// The repository.
        repository: RepositoryName,
        /// The tag.
        tag: Tag,
    },
    /// No such blob.
    #[error("no {kind:?} {digest} is stored")]
    BlobUnknown {
        /// The blob.
        digest: Digest,
        /// How it was to be read.
        kind: Kind,
    },
    /// The push session is over.
    #[error("push session {0} does not exist: it was committed, aborted or its lease ended; open a new one")]
    PushUnknown(String),
    /// A chunk is not the next one of its upload.
    #[error("this chunk begins at byte {begin_at}, and the upload has {received} bytes: continue there")]
    UploadMoved {
        /// Where the chunk begins.
        begin_at: u64,
        /// Bytes that the upload has received.
        received: u64,
    },
    /// A collection gave up a pack whose upload took too long.
    #[error("pack {0} took longer than its lease and was given up; send its blobs again")]
    PackLost(String),
    /// Compare-and-swap failed.
    #[error("{}; nothing was changed", moved(tag, expected, found))]
    TagMoved {
        /// The tag.
        tag: Tag,
        /// Where the caller thought it was.
        expected: TagState,
        /// Where it is.
        found: TagState,
    },
    /// A snapshot has other tags than the caller saw.
    #[error("the tags of {repository}@{snapshot} are now {}; nothing was deleted", if tags.is_empty() { "none".to_owned() } else { some(tags) })]
    TagsMoved {
        /// The repository.
        repository: RepositoryName,
        /// The snapshot.
        snapshot: Digest,
        /// Its tags.
        tags: Vec<Tag>,
    },
    /// A retention policy keeps a tag where it is.
    #[error("the tag {tag} of {repository} is immutable: only an administrator moves or deletes it; nothing was changed")]
    TagImmutable {
        /// The repository.
        repository: RepositoryName,
        /// The tag.
        tag: Tag,
    },
    /// The image of an immutable tag lists it.
    #[error("the immutable tag {tag} of {repository} needs {digest}: only an administrator deletes it; nothing was changed")]
    NeededByTag {
        /// The repository.
        repository: RepositoryName,
        /// The tag.
        tag: Tag,
        /// A blob or a manifest that it needs.
        digest: Digest,
    },
    /// A signing policy lets the tag only be put on what is signed.
    #[error(
        "the signing policy {policy} lets the tag {tag} of {repository} be put only on what one of its keys has signed, and {digest} has \
         no such signature; nothing was changed"
    )]
    SignatureRequired {
        /// The repository.
        repository: RepositoryName,
        /// The tag.
        tag: Tag,
        /// The snapshot or image.
        digest: Digest,
        /// The policy.
        policy: String,
    },
    /// The request contradicts itself.
    #[error("{0}")]
    Invalid(String),
    /// A stored blob is not what its name says.
    #[error("stored blob {digest} is damaged ({reason}); push it again from a good copy to heal it")]
    Corrupt {
        /// The blob.
        digest: Digest,
        /// What was found.
        reason: String,
    },
    /// An object on an encrypted storage is not what was written there.
    #[error("stored object {object} is damaged at byte {byte}: expected what was encrypted there, found {found}")]
    Altered {
        /// Where it lies.
        object: String,
        /// From which byte of its plaintext on.
        byte: u64,
        /// What lies there.
        found: &'static str,
    },
    /// The key of a domain cannot be unwrapped, or wrapped.
    #[error("encryption: {0}")]
    Locked(String),
    /// A checkpoint's bytes are undamaged, but its description of a tensor does not fit the
    /// payload.
    #[error("checkpoint {checkpoint} is invalid: {source}; take the snapshot again")]
    WrongValue {
        /// The checkpoint.
        checkpoint: Digest,
        /// Which tensor, and how.
        source: FormatError,
    },
    /// A checkpoint's tensors stand for much more than their payloads hold.
    #[error(
        "checkpoint {checkpoint}: the values of its tensors have {values} bytes in all; verify computes at most {limit} for payloads of this \
         size. Store the tensors whole, without strides of 0"
    )]
    Unprovable {
        /// The checkpoint at which the limit was passed.
        checkpoint: Digest,
        /// Bytes of the values of the snapshot's tensors up to there.
        values: u64,
        /// The limit.
        limit: u64,
    },
    /// The caller waited too long for its turn, or its own slowness kept others waiting.
    #[error("{0}; try again in a moment")]
    Overloaded(&'static str),
    /// The disk is full.
    #[error("the store's disk is full: {0}; free space and try again, nothing acknowledged is lost")]
    Full(String),
    /// The quota of the domain has no room.
    #[error(
        "the quota of this domain {}; delete snapshots, and the next garbage collection frees what only they held",
        quota(what, *limit, *used, *added)
    )]
    QuotaExceeded {
        /// What there is too much of: `bytes`, `blobs` or `snapshots`.
        what: &'static str,
        /// How many there may be.
        limit: u64,
        /// How many there are.
        used: u64,
        /// How many more there would be.
        added: u64,
    },
    /// The permissions of the store's files do not allow it.
    #[error("no permission for the store's {what}: {reason}")]
    NotPermitted {
        /// The directory, packs or metadata.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
    /// Another error of the disk, bucket or database.
    #[error("the store cannot reach its {what}: {reason}")]
    Unavailable {
        /// Packs or metadata.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
    /// The client stopped sending the bytes to be stored.
    #[error("input ended: {0}")]
    Input(String),
    /// The row of a node cannot be read, so its children are not known: nothing below it may be
    /// deleted.
    #[error("bug: object {container}: {reason}; run fsck")]
    Broken {
        /// Its row id.
        container: i64,
        /// What was found.
        reason: String,
    },
    /// A bug.
    #[error("bug: {0}")]
    Internal(String),
}

/// A task of our own panicked or was stopped.
impl From<tokio::task::JoinError> for Error {
    fn from(error: tokio::task::JoinError) -> Self {
        Self::Internal(error.to_string())
    }
}

/// A semaphore of our own was closed: none ever is.
impl From<tokio::sync::AcquireError> for Error {
    fn from(error: tokio::sync::AcquireError) -> Self {
        Self::Internal(error.to_string())
    }
}

impl Error {
    /// The code under which this error crosses the wire.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Format(source) | Self::Frame { source, .. } | Self::WrongValue { source, .. } => source.code(),
            Self::Missing { .. } => ErrorCode::MissingBlobs,
            Self::WrongShape { .. } => ErrorCode::LengthMismatch,
            Self::DomainUnknown(_) => ErrorCode::DomainUnknown,
            Self::DomainBusy(_) => ErrorCode::DomainBusy,
            Self::TokenUnknown(_) => ErrorCode::TokenUnknown,
            Self::RepositoryUnknown(_) => ErrorCode::RepositoryUnknown,
            Self::SnapshotUnknown { .. } => ErrorCode::SnapshotUnknown,
            Self::SnapshotAmbiguous { .. } => ErrorCode::AmbiguousDigest,
            Self::TagUnknown { .. } => ErrorCode::TagUnknown,
            Self::BlobUnknown { .. } => ErrorCode::BlobUnknown,
            Self::PushUnknown(_) => ErrorCode::PushUnknown,
            Self::TagMoved { .. } | Self::TagsMoved { .. } => ErrorCode::TagMoved,
            Self::TagImmutable { .. } | Self::NeededByTag { .. } => ErrorCode::TagImmutable,
            Self::SignatureRequired { .. } => ErrorCode::SignatureRequired,
            Self::Invalid(_) | Self::UploadMoved { .. } => ErrorCode::InvalidRequest,
            Self::Corrupt { .. } | Self::Altered { .. } => ErrorCode::CorruptStore,
            Self::Unprovable { .. } => ErrorCode::TooLarge,
            Self::Overloaded(_) => ErrorCode::Overloaded,
            Self::Full(_) => ErrorCode::StorageFull,
            Self::QuotaExceeded { .. } => ErrorCode::QuotaExceeded,
            Self::PackLost(_) => ErrorCode::Unavailable,
            Self::Unavailable { .. } | Self::NotPermitted { .. } | Self::Locked(_) => ErrorCode::Unavailable,
            Self::Input(_) => ErrorCode::Truncated,
            Self::Broken { .. } | Self::Internal(_) => ErrorCode::Internal,
        }
    }

    /// The code for a user of this machine, since a user can change the permissions of files and a
    /// client of a registry cannot.
    #[must_use]
    pub fn local_code(&self) -> ErrorCode {
        match self {
            Self::NotPermitted { .. } => ErrorCode::Denied,
            other => other.code(),
        }
    }

    /// A directory cannot be made, opened or locked: [`Self::NotPermitted`], [`Self::Full`] or else
    /// [`Self::Unavailable`].
    #[must_use]
    pub fn of_dir(dir: &std::path::Path, error: &std::io::Error) -> Self {
        Self::io("directory", dir, error)
    }

    /// An error of the file system.
    pub(crate) fn io(what: &'static str, path: &std::path::Path, error: &std::io::Error) -> Self {
        let reason = format!("{}: {error}", path.display());
        match ErrorCode::of_io(error.kind()) {
            Some(ErrorCode::StorageFull) => Self::Full(reason),
            Some(ErrorCode::Denied) => Self::NotPermitted { what, reason },
            _ => Self::Unavailable { what, reason },
        }
    }

    pub(crate) fn metadata(error: &rusqlite::Error) -> Self {
        if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull) {
            return Self::Full(error.to_string());
        }
        if error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation) {
            // A state that the tables must never have.
            return Self::Internal(format!("the tables refuse it ({error}); run fsck"));
        }
        if matches!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::ReadOnly | rusqlite::ErrorCode::PermissionDenied)) {
            return Self::NotPermitted { what: "metadata", reason: error.to_string() };
        }
        Self::Unavailable { what: "metadata", reason: error.to_string() }
    }

    pub(crate) fn packs(error: object_store::Error) -> Self {
        let mut cause: Option<&dyn std::error::Error> = Some(&error);
        while let Some(e) = cause {
            if let Some(Altered { object, byte, found }) = e.downcast_ref() {
                return Self::Altered { object: object.clone(), byte: *byte, found };
            }
            match e.downcast_ref::<std::io::Error>().and_then(|io| ErrorCode::of_io(io.kind())) {
                Some(ErrorCode::StorageFull) => return Self::Full(error.to_string()),
                Some(ErrorCode::Denied) => return Self::NotPermitted { what: "packs", reason: error.to_string() },
                _ => {}
            }
            cause = e.source();
        }
        Self::Unavailable { what: "packs", reason: error.to_string() }
    }
}

fn quota(what: &str, limit: u64, used: u64, added: u64) -> String {
    let shown = |n| if what == "bytes" { bytes(n) } else { number(n) };
    let noun = if what == "bytes" { String::new() } else { format!(" {what}") };
    let (used, limit) = (shown(used), shown(limit));
    match added {
        0 => format!("is used up: it holds {used} of {limit}{noun}"),
        added => format!("has no room for this: it holds {used} of {limit}{noun}, and this adds {}", shown(added)),
    }
}

fn moved(tag: &Tag, expected: &TagState, found: &TagState) -> String {
    match (expected, found) {
        (TagState::Absent, found) => format!("tag {tag} exists already, at {found}"),
        (expected, TagState::Absent) => format!("there is no tag {tag}, so it is not at {expected}"),
        (expected, found) => format!("tag {tag} is at {found}, not at {expected}"),
    }
}

fn count(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

/// The first few candidates with all their digits, since the common digits were not enough.
fn some<T: ToString>(candidates: &[T]) -> String {
    const FEW: usize = 4;
    let mut text = candidates.iter().take(FEW).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if candidates.len() > FEW {
        text.push_str(" and more");
    }
    text
}
