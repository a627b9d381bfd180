//! The report on each image of ProcessFork.

use pfr_client::{Error, Result};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Tag};
use serde::Serialize;

/// The result for one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The import made a snapshot of the image.
    Imported,
    /// The repository had the snapshot already.
    Unchanged,
    /// An import without `--dry-run` would make a snapshot of the image.
    Planned,
    /// The image cannot be imported.
    Failed,
}

/// Why an image cannot be imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The kind of error.
    pub code: ErrorCode,
    /// What is wrong, and where.
    pub message: String,
}

/// The report on one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageReport {
    /// The digest of the image, or the path of its file if the file is not a readable image.
    pub image: String,
    /// The result.
    pub outcome: Outcome,
    /// Whether this import added the snapshot to the repository.
    pub created: bool,
    /// The kind of agent that the image was captured from.
    pub agent: Option<String>,
    /// The repository of the snapshot.
    pub repository: Option<RepositoryName>,
    /// The tag of the snapshot.
    pub tag: Option<Tag>,
    /// The digest of the snapshot.
    pub digest: Option<Digest>,
    /// The snapshot's parents.
    pub parents: Vec<Digest>,
    /// Parents of the image that are not among the imported images: the snapshot does not list
    /// them.
    pub parents_missing: Vec<Digest>,
    /// Pages of the snapshot.
    pub pages: u64,
    /// Layers that became attachments.
    pub attachments: u64,
    /// Raw bytes of all blobs of the snapshot.
    pub bytes_raw: u64,
    /// Raw bytes that the destination lacked.
    pub bytes_new: u64,
    /// Remarks for the user.
    pub notes: Vec<String>,
    /// Why the image cannot be imported.
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

    /// This report with outcome `Failed`. Passes on an error that is not about the image.
    pub(super) fn failed(self, error: Error) -> Result<Self> {
        if !is_about_image(&error) {
            return Err(error);
        }
        let error = Some(Refusal { code: error.code(), message: error.to_string() });
        Ok(Self { outcome: Outcome::Failed, error, ..self })
    }
}

/// Whether an error is about the image and not about the destination: if so, the import goes on
/// with the next image.
fn is_about_image(error: &Error) -> bool {
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
