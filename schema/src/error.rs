//! Errors: what is wrong with foreign bytes, and the closed set of codes that crosses the wire.

use serde::{Deserialize, Serialize};

/// Why foreign bytes were refused. Messages name the place, what was expected and what was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Not a digest.
    #[error("invalid digest {found:?}: {reason}")]
    Digest {
        /// What was read.
        found: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Not a repository name, tag or reference.
    #[error("invalid {what} {found:?}: {reason}")]
    Name {
        /// What kind of name.
        what: &'static str,
        /// What was read.
        found: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A JSON document does not parse.
    #[error("{document}: at {path}: {reason}")]
    Json {
        /// Which document.
        document: &'static str,
        /// JSON path.
        path: String,
        /// The parser's words.
        reason: String,
    },
    /// A field parses but is not allowed.
    #[error("{document}: at {path}: expected {expected}, found {found}")]
    Field {
        /// Which document.
        document: &'static str,
        /// JSON path, or byte offset in a binary format.
        path: String,
        /// What the format asks for.
        expected: String,
        /// What was there.
        found: String,
    },
    /// Input over a limit.
    #[error("{what} is too large: {found}, the limit is {limit}")]
    TooLarge {
        /// What is too large, with its unit.
        what: &'static str,
        /// Its size.
        found: u64,
        /// The limit it passed.
        limit: u64,
    },
    /// A frame stream is malformed at this byte.
    #[error("frame stream, byte {position}: {reason}")]
    Frame {
        /// Byte offset of the frame in its stream.
        position: u64,
        /// What is wrong.
        reason: String,
    },
    /// A frame stream ended early.
    #[error("frame stream ends early at byte {position}: {reason}")]
    Truncated {
        /// Byte offset at which the stream ended.
        position: u64,
        /// What was missing.
        reason: &'static str,
    },
    /// An encoded payload does not decode to what its header says.
    #[error("codec {codec}: {reason}")]
    Codec {
        /// Name of the codec.
        codec: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A pack's index or footer is malformed.
    #[error("pack: {reason}")]
    Pack {
        /// What is wrong.
        reason: String,
    },
    /// An object of the journal is malformed.
    #[error("journal: {reason}")]
    Journal {
        /// What is wrong.
        reason: String,
    },
    /// Bytes do not hash to their name.
    #[error("wrong bytes: {expected} hashes to {found}")]
    DigestMismatch {
        /// The name.
        expected: String,
        /// What the bytes hash to.
        found: String,
    },
    /// A blob does not have the length that a node gives it.
    #[error("wrong length: {digest} has {found} bytes, {expected} expected")]
    LengthMismatch {
        /// The blob.
        digest: String,
        /// Bytes expected.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// A tensor's payload is not the one that was stored.
    #[error("tensor {tensor:?}: the payload hashes to {found}, its payload_hash is {expected}")]
    PayloadHashMismatch {
        /// The tensor's name.
        tensor: String,
        /// What the checkpoint says.
        expected: String,
        /// What the bytes hash to.
        found: String,
    },
    /// A tensor does not have the value that was captured.
    #[error("tensor {tensor:?}: its value hashes to {found}, its value_hash is {expected}")]
    ValueHashMismatch {
        /// The tensor's name.
        tensor: String,
        /// What the checkpoint says.
        expected: String,
        /// What the canonical value hashes to.
        found: String,
    },
    /// A type (the logical one, or that of a live slot) does not hold a stored value exactly.
    #[error("tensor {tensor:?}, element {index:?}: {value} in {storage} cannot be represented in {logical}")]
    InexactStorage {
        /// The tensor's name; its kind where it has none.
        tensor: String,
        /// The element's index along each dimension.
        index: Vec<u64>,
        /// The stored value.
        value: String,
        /// The type it is stored in.
        storage: String,
        /// The type it should have.
        logical: String,
    },
}

impl FormatError {
    pub(crate) fn field(document: &'static str, path: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self::Field { document, path: path.into(), expected: shorten(expected.to_string()), found: shorten(found.to_string()) }
    }

    /// The code under which this error crosses the wire.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Digest { .. } | Self::Name { .. } => ErrorCode::InvalidName,
            Self::Json { .. } | Self::Field { .. } => ErrorCode::InvalidDocument,
            Self::TooLarge { .. } => ErrorCode::TooLarge,
            Self::Frame { .. } | Self::Codec { .. } | Self::Pack { .. } | Self::Journal { .. } => ErrorCode::CorruptFrame,
            Self::Truncated { .. } => ErrorCode::Truncated,
            Self::DigestMismatch { .. } => ErrorCode::DigestMismatch,
            Self::LengthMismatch { .. } => ErrorCode::LengthMismatch,
            Self::PayloadHashMismatch { .. } => ErrorCode::PayloadHashMismatch,
            Self::ValueHashMismatch { .. } => ErrorCode::ValueHashMismatch,
            Self::InexactStorage { .. } => ErrorCode::InexactStorage,
        }
    }
}

/// Cuts text from a foreign document: an error is logged and sent, so it must stay short.
pub(crate) fn shorten(mut text: String) -> String {
    const MAX: usize = 300;
    if let Some((end, _)) = text.char_indices().nth(MAX) {
        text.truncate(end);
        text.push('…');
    }
    text
}

macro_rules! error_codes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $status:literal, $exit:literal, $retryable:literal, $title:literal;)*) => {
        /// The closed set of error codes. Each has one meaning, one HTTP status, one exit code of
        /// `pf` (see `docs/protocol.md`) and says whether trying the same again can help.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(rename_all = "snake_case")]
        pub enum ErrorCode { $($(#[$doc])* $variant,)* }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];
            /// The code on the wire.
            #[must_use]
            pub const fn name(self) -> &'static str { match self { $(Self::$variant => $name,)* } }
            /// Its meaning in a few words; the same for every problem with this code.
            #[must_use]
            pub const fn title(self) -> &'static str { match self { $(Self::$variant => $title,)* } }
            /// The HTTP status.
            #[must_use]
            pub const fn status(self) -> u16 { match self { $(Self::$variant => $status,)* } }
            /// The exit code of `pf`.
            #[must_use]
            pub const fn exit_code(self) -> u8 { match self { $(Self::$variant => $exit,)* } }
            /// Whether trying the same again can help.
            #[must_use]
            pub const fn retryable(self) -> bool { match self { $(Self::$variant => $retryable,)* } }
        }
    };
}

error_codes! {
    /// The request or command line is malformed.
    InvalidRequest = "invalid_request", 400, 1, false, "The request is malformed";
    /// A repository name, tag, reference or digest is malformed.
    InvalidName = "invalid_name", 400, 1, false, "A name, reference or digest is malformed";
    /// A shortened digest matches several snapshots.
    AmbiguousDigest = "ambiguous_digest", 400, 1, false, "A shortened digest matches several snapshots";
    /// A manifest, tree, run, checkpoint or configuration is malformed or contradicts itself.
    InvalidDocument = "invalid_document", 422, 1, false, "A document is malformed or contradicts itself";
    /// Something is over a limit.
    TooLarge = "too_large", 413, 1, false, "Something is over a limit";
    /// A frame or its encoded payload is malformed.
    CorruptFrame = "corrupt_frame", 422, 4, false, "A frame is malformed";
    /// A frame stream ended before its end mark.
    Truncated = "truncated", 422, 4, false, "A frame stream ended before its end mark";
    /// Bytes do not hash to their name.
    DigestMismatch = "digest_mismatch", 422, 4, false, "Bytes do not hash to their name";
    /// A blob has another length than a node says.
    LengthMismatch = "length_mismatch", 422, 4, false, "A blob has another length than a node says";
    /// A stored blob no longer hashes to its name.
    CorruptStore = "corrupt_store", 500, 4, false, "A stored blob is damaged";
    /// A node lists blobs that are not stored; `missing` names some of them.
    MissingBlobs = "missing_blobs", 422, 5, false, "A node lists blobs that are not stored";
    /// No such domain: it was never made, or was deleted.
    DomainUnknown = "domain_unknown", 404, 5, false, "No such domain";
    /// No such repository.
    RepositoryUnknown = "repository_unknown", 404, 5, false, "No such repository";
    /// No such snapshot in this repository.
    SnapshotUnknown = "snapshot_unknown", 404, 5, false, "No such snapshot in this repository";
    /// No such tag in this repository.
    TagUnknown = "tag_unknown", 404, 5, false, "No such tag in this repository";
    /// No such blob.
    BlobUnknown = "blob_unknown", 404, 5, false, "No such blob";
    /// No such access token.
    TokenUnknown = "token_unknown", 404, 5, false, "No such access token";
    /// No such push session: it was committed, aborted or has expired.
    PushUnknown = "push_unknown", 404, 5, false, "No such push session";
    /// No such address.
    NotFound = "not_found", 404, 5, false, "No such address";
    /// The tag does not point where the caller said.
    TagMoved = "tag_moved", 412, 3, false, "The tag does not point where the caller said";
    /// A retention policy keeps the tag where it is.
    TagImmutable = "tag_immutable", 403, 6, false, "The tag is immutable";
    /// A signature is needed: a policy asks for it before a tag is put, or the reader does.
    SignatureRequired = "signature_required", 403, 4, false, "A signature is needed";
    /// A domain of this name is being deleted.
    DomainBusy = "domain_busy", 409, 3, true, "A domain of this name is being deleted";
    /// A token is needed.
    Unauthorized = "unauthorized", 401, 6, false, "A token is needed";
    /// The token or the permissions of a file do not permit it.
    Denied = "denied", 403, 6, false, "Not permitted";
    /// A payload does not hash to its payload_hash.
    PayloadHashMismatch = "payload_hash_mismatch", 422, 4, false, "A payload does not hash to its payload_hash";
    /// A tensor's logical value does not hash to its value_hash.
    ValueHashMismatch = "value_hash_mismatch", 422, 4, false, "A tensor's value does not hash to its value_hash";
    /// A stored value cannot be converted to the logical type without loss.
    InexactStorage = "inexact_storage", 422, 4, false, "A stored value cannot be represented in the logical type";
    /// The snapshot has another number of pages than its prefix length needs.
    PageCountMismatch = "page_count_mismatch", 409, 4, false, "The snapshot has another number of pages than its prefix length needs";
    /// The engine's pages have another shape than the snapshot's.
    GeometryMismatch = "geometry_mismatch", 409, 4, false, "The engine's pages have another shape than the snapshot's";
    /// The snapshot is of another engine configuration (weights, kernels, parallelism …).
    FingerprintMismatch = "fingerprint_mismatch", 409, 4, false, "The snapshot is of another engine configuration";
    /// Tokens, salt or adapter are not those of the snapshot's prefix.
    PrefixMismatch = "prefix_mismatch", 409, 4, false, "Tokens, salt or adapter are not those of the snapshot's prefix";
    /// A group of layers that the engine requires is not in the snapshot, or the other way round.
    MissingGroup = "missing_group", 409, 4, false, "A group of layers is missing";
    /// State tensors that the engine requires are not in the snapshot.
    MissingState = "missing_state", 409, 4, false, "State tensors are missing";
    /// The snapshot has other ranks than the engine.
    RankMismatch = "rank_mismatch", 409, 4, false, "The snapshot has other ranks than the engine";
    /// Pages, state and tokens are not at one token position.
    BoundaryMismatch = "boundary_mismatch", 409, 4, false, "Pages, state and tokens are not at one token position";
    /// The engine's memory does not hold what was written to it.
    LiveMismatch = "live_mismatch", 409, 4, false, "The engine's memory does not hold what was written to it";
    /// Blocks that the engine had computed itself hold other bytes than the snapshot.
    KeptDiffers = "kept_differs", 409, 4, false, "Blocks that the engine computed itself differ from the snapshot";
    /// The logits of the first step after the restore differ from those that were recorded.
    OracleMismatch = "oracle_mismatch", 409, 4, false, "The logits of the first step after the restore differ";
    /// A page changed while it was read: the engine did not pause.
    TornCopy = "torn_copy", 409, 4, true, "A page changed while it was read";
    /// The snapshot would not be exact, and exactness was asked for.
    NotExact = "not_exact", 409, 3, false, "The snapshot would not be exact";
    /// No such engine on this host.
    EngineUnknown = "engine_unknown", 404, 5, false, "No such engine on this host";
    /// No such sequence in this engine.
    SequenceUnknown = "sequence_unknown", 404, 5, false, "No such sequence in this engine";
    /// The engine is not ready, does not serve this, or is busy with another capture or restore.
    EngineBusy = "engine_busy", 409, 3, true, "The engine is busy or not ready";
    /// The engine went away or did not answer in time.
    EngineLost = "engine_lost", 503, 7, true, "The engine went away or did not answer";
    /// The engine refused or broke the protocol.
    EngineRefused = "engine_refused", 502, 70, false, "The engine refused or broke the protocol";
    /// Not enough memory, GPU memory, disk or ring for this; nothing was changed.
    NoRoom = "no_room", 507, 8, true, "There is not enough room for this";
    /// Too many requests at once.
    Overloaded = "overloaded", 503, 7, true, "Too many requests at once";
    /// The store behind the registry cannot be reached or is full. This says nothing about its
    /// contents.
    Unavailable = "unavailable", 503, 7, true, "The store behind the registry cannot be reached";
    /// The disk, or the file system's quota, is full.
    StorageFull = "storage_full", 507, 8, true, "The disk is full";
    /// The quota of the domain has no room for this, until something is deleted and collected, or
    /// the quota is raised.
    QuotaExceeded = "quota_exceeded", 403, 8, false, "The quota of the domain has no room";
    /// The caller, or all callers of a domain together, send more requests than they may.
    RateLimited = "rate_limited", 429, 7, true, "Too many requests in a short time";
    /// The request took longer than it may.
    Timeout = "timeout", 504, 7, true, "The request took longer than it may";
    /// A bug. Please report it with the request id.
    Internal = "internal", 500, 70, false, "A bug";
}

impl ErrorCode {
    /// The code of an I/O error that says more than that a file cannot be used: no space, no
    /// permission, no file.
    #[must_use]
    pub fn of_io(kind: std::io::ErrorKind) -> Option<Self> {
        use std::io::ErrorKind;
        match kind {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Some(Self::StorageFull),
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => Some(Self::Denied),
            ErrorKind::NotFound => Some(Self::NotFound),
            _ => None,
        }
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
