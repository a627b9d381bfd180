//! What became of an image.

use pfr_client::{Error, Result};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Tag};
use serde::Serialize;

/// What became of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is a snapshot now.
    Imported,
    /// It was one already.
    Unchanged,
    /// It would be one.
    Planned,
    /// It cannot be one.
    Failed,
}

/// Why an image cannot be a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The kind of error.
    pub code: ErrorCode,
    /// What, and where.
    pub message: String,
}

/// One image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageReport {
    /// Its digest; where it has none, the file that should be one.
    pub image: String,
    /// What became of it.
    pub outcome: Outcome,
    /// Whether the repository did not have the snapshot before.
    pub created: bool,
    /// Kind of its agent.
    pub agent: Option<String>,
    /// Where it went.
    pub repository: Option<RepositoryName>,
    /// The tag that it got.
    pub tag: Option<Tag>,
    /// The snapshot.
    pub digest: Option<Digest>,
    /// The snapshot's parents.
    pub parents: Vec<Digest>,
    /// Images that are parents of it and are not among the snapshots: it was imported without them.
    pub parents_missing: Vec<Digest>,
    /// Pages.
    pub pages: u64,
    /// Layers that became attachments.
    pub attachments: u64,
    /// Raw bytes of everything in it.
    pub bytes_raw: u64,
    /// Raw bytes that the destination lacked.
    pub bytes_new: u64,
    /// What else is worth knowing.
    pub notes: Vec<String>,
    /// Why it failed.
    pub error: Option<Refusal>,
}

impl ImageReport {
    pub(super) fn new(image: String) -> Self {
        Self {
            image,
            outcome: Outcome::Failed,
            created: false,
            agent: None,
            repository: None,
            tag: None,
            digest: None,
            parents: Vec::new(),
            parents_missing: Vec::new(),
            pages: 0,
            attachments: 0,
            bytes_raw: 0,
            bytes_new: 0,
            notes: Vec::new(),
            error: None,
        }
    }

    /// The same, failed; an error that is not the image's is passed on.
    pub(super) fn failed(self, error: Error) -> Result<Self> {
        if !is_the_images(&error) {
            return Err(error);
        }
        let error = Some(Refusal { code: error.code(), message: error.to_string() });
        Ok(Self { outcome: Outcome::Failed, error, ..self })
    }
}

/// Whether an error is about an image rather than about where it goes to: then the next one may do
/// better.
fn is_the_images(error: &Error) -> bool {
    let about_bytes = |code| {
        use ErrorCode as C;
        matches!(
            code,
            C::InvalidDocument | C::TooLarge | C::CorruptFrame | C::Truncated | C::DigestMismatch | C::LengthMismatch | C::MissingBlobs
        )
    };
    match error {
        Error::Registry { problem } => about_bytes(problem.code),
        Error::Store(error) => about_bytes(error.code()),
        Error::Io { source, .. } => !matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded),
        Error::Document { .. }
        | Error::MissingBlob { .. }
        | Error::WrongBytes { .. }
        | Error::WrongLength { .. }
        | Error::Changed { .. }
        | Error::Refused { .. }
        | Error::Unsuitable { .. } => true,
        _ => false,
    }
}
