//! Changes of tags and snapshots that take place once, however often their requests are repeated.
//!
//! A client whose answer was lost repeats its request. A commit is known by its push session; every
//! other change by a session whose id the caller chose, and which lives in the transaction of the
//! change. Its row stays until its lease ends and says what was asked and answered.

use super::{Commit, Committed, PushId, TagMove};
use crate::error::{Error, Result};
use pfr_schema::api::{self, TagState};
use pfr_schema::{Digest, RepositoryName, Tag};
use serde::{Deserialize, Serialize};

/// A change of tags or snapshots other than a commit.
#[derive(Clone, Debug)]
pub enum NameChange {
    /// Points tags at a snapshot of the repository; all or nothing.
    PutTags {
        /// The snapshot.
        snapshot: Digest,
        /// The tags.
        moves: Vec<TagMove>,
    },
    /// Deletes a tag.
    DeleteTag {
        /// The tag.
        tag: Tag,
        /// Only from this state.
        expected: Option<TagState>,
    },
    /// Deletes a snapshot and the tags that point at it.
    DeleteSnapshot {
        /// The snapshot.
        snapshot: Digest,
        /// Only with the tags that it had when its entity tag was this one
        /// ([`api::snapshot_etag`]).
        etag: Option<Digest>,
    },
}

/// Identifies a repeated change.
#[derive(Clone, Debug)]
pub struct Once {
    /// Id of the session that the change opens and ends: a UUID that the caller uses for one
    /// request and its repetitions.
    pub session: PushId,
    /// Digest of the request: another request with the same id is refused.
    pub request: Digest,
}

/// A session, open or ended, whose lease has not run out.
#[derive(Clone, Debug)]
pub struct Session {
    /// Its repository.
    pub repository: RepositoryName,
    /// What ended it; none while it is open, or if another version of this program ended it.
    pub ended: Option<Ended>,
}

/// What ended a session, with the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// A commit.
    Commit {
        /// The manifest.
        manifest: Digest,
        /// The tag that was moved.
        tag: Option<Tag>,
        /// The answer.
        done: Committed,
    },
    /// Another change of names.
    Change {
        /// Digest of the request.
        request: Digest,
        /// The snapshot that tags were pointed at, or that was deleted.
        snapshot: Option<Digest>,
    },
}

impl NameChange {
    /// Tags `<prefix>-1…` that point at a snapshot, none of which exists yet; with their names.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a count out of bounds, [`Error::Format`] for names that are none.
    pub fn fork(snapshot: Digest, prefix: &str, count: u32) -> Result<(Self, Vec<Tag>)> {
        if !(1..=10_000).contains(&count) {
            return Err(Error::Invalid(format!("expected 1 to 10000 forks, found {count}")));
        }
        let tags: Vec<Tag> = (1..=count).map(|i| format!("{prefix}-{i}").parse()).collect::<std::result::Result<_, _>>()?;
        let moves = tags.iter().map(|tag| TagMove { tag: tag.clone(), expected: Some(TagState::Absent) }).collect();
        Ok((Self::PutTags { snapshot, moves }, tags))
    }

    /// The snapshot that it names.
    fn snapshot(&self) -> Option<Digest> {
        match self {
            Self::PutTags { snapshot, .. } | Self::DeleteSnapshot { snapshot, .. } => Some(*snapshot),
            Self::DeleteTag { .. } => None,
        }
    }
}

impl Ended {
    pub(crate) fn by_commit(commit: &Commit, done: &Committed) -> Self {
        Self::Commit { manifest: commit.manifest, tag: commit.tag.as_ref().map(|t| t.tag.clone()), done: *done }
    }

    pub(crate) fn by_change(change: &NameChange, once: &Once) -> Self {
        Self::Change { request: once.request, snapshot: change.snapshot() }
    }

    /// The column `committed` of a session's row.
    pub(crate) fn to_column(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|e| Error::Internal(e.to_string()))
    }

    /// Reads what [`Self::to_column`] wrote; `None` for what another version wrote.
    pub(crate) fn from_column(column: &[u8]) -> Option<Self> {
        serde_json::from_slice(column).ok()
    }

    /// The answer, if it was the commit of this manifest under this tag.
    pub(crate) fn answer_to_commit(&self, wanted: &Digest, wanted_tag: Option<&Tag>) -> Option<Committed> {
        match self {
            Self::Commit { manifest, tag, done } if manifest == wanted && tag.as_ref() == wanted_tag => Some(*done),
            _ => None,
        }
    }
}

impl Committed {
    /// As it is answered.
    pub(crate) fn of(self, digest: Digest) -> api::Committed {
        api::Committed { digest, created: self.created, logical_bytes: self.logical_bytes, new_bytes: self.new_bytes }
    }
}

impl Session {
    /// The snapshot that the change named which `once` asks for and which ended this session.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is another session, or was ended by another change.
    pub(crate) fn was_ended_by(&self, repository: &RepositoryName, once: &Once) -> Result<Option<Digest>> {
        match &self.ended {
            Some(Ended::Change { request, snapshot }) if *request == once.request && self.repository == *repository => Ok(*snapshot),
            _ => Err(Error::Invalid(format!("the idempotency key {} was used for another request; use a new one for each", once.session))),
        }
    }
}
