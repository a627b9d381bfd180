//! The report of one pass of a mirror.

use pfr_client::human::{bytes, count, number};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Tag};
use serde::Serialize;

/// A tag that was not moved: at the target it points at a snapshot that the source does not know,
/// or it moved meanwhile, or it is immutable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Conflict {
    /// The repository.
    pub repository: RepositoryName,
    /// The tag.
    pub tag: Tag,
    /// Where it points at the source.
    pub source: Digest,
    /// Where it points at the target; none if it was deleted meanwhile.
    pub target: Option<Digest>,
}

/// What could not be copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotCopied {
    /// The repository.
    pub repository: RepositoryName,
    /// The snapshot, if it is about one.
    pub snapshot: Option<Digest>,
    /// The kind of error.
    pub code: ErrorCode,
    /// What, where, and what to do.
    pub reason: String,
}

/// The work of one pass. Bytes are those of frames, as transferred.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Repositories that were compared.
    pub repositories: u64,
    /// Snapshots that the target lacked and now has.
    pub snapshots_copied: u64,
    /// Snapshots that the target had.
    pub snapshots_present: u64,
    /// Snapshots that the source deleted while they were copied.
    pub snapshots_skipped: u64,
    /// Snapshots deleted at the target.
    pub snapshots_deleted: u64,
    /// Signatures that the target lacked and now has, without those that came with their snapshot.
    pub signatures_copied: u64,
    /// Tags made or moved.
    pub tags_moved: u64,
    /// Tags deleted at the target, without those that were deleted with their snapshot.
    pub tags_deleted: u64,
    /// Blobs and nodes moved.
    pub blobs: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Patterns that no repository matches.
    pub unmatched: Vec<String>,
    /// Tags that were not moved.
    pub conflicts: Vec<Conflict>,
    /// Snapshots and repositories that could not be copied.
    pub failures: Vec<NotCopied>,
    /// Wall time.
    pub seconds: f64,
}

impl Report {
    /// The error of the pass, if not everything was copied.
    #[must_use]
    pub fn incomplete(&self) -> Option<super::Error> {
        let (code, first) = match (self.failures.first(), self.conflicts.first()) {
            (Some(failed), _) => (failed.code, format!("{}: {}", failed.repository, failed.reason)),
            (None, Some(conflict)) => {
                let Conflict { repository, tag, source, target } = conflict;
                let target = target.map_or("elsewhere".to_owned(), |digest| format!("at {digest}"));
                let why = format!(
                    "{repository}:{tag} is {target}, at the source it is at {source}; it was left alone (--delete takes the source's)"
                );
                (ErrorCode::TagMoved, why)
            }
            (None, None) if self.unmatched.is_empty() => return None,
            (None, None) => {
                let detail = format!("no repository at the source matches {}", self.unmatched.join(", "));
                return Some(super::Error::Incomplete { code: ErrorCode::RepositoryUnknown, detail });
            }
        };
        let (failures, conflicts) = (self.failures.len(), count(self.conflicts.len() as u64, "tag"));
        let detail = format!("{failures} not copied, {conflicts} in conflict; first: {first}");
        Some(super::Error::Incomplete { code, detail })
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: {} copied, {} there already, {} gone meanwhile, {} deleted; {} moved, {} deleted; {}, {} moved; {}, {}; {:.1} s",
            if self.repositories == 1 { "1 repository".to_owned() } else { format!("{} repositories", number(self.repositories)) },
            count(self.snapshots_copied, "snapshot"),
            number(self.snapshots_present),
            number(self.snapshots_skipped),
            number(self.snapshots_deleted),
            count(self.tags_moved, "tag"),
            number(self.tags_deleted),
            count(self.blobs, "blob"),
            bytes(self.bytes),
            count(self.conflicts.len() as u64, "conflict"),
            count(self.failures.len() as u64, "failure"),
            self.seconds
        )
    }
}
