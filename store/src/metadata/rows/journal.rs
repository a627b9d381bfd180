//! The journal, and walks over all tags and snapshots.

/// A change of tags or snapshots that is in the tables and may not be in the journal yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unjournaled {
    /// Its number, by which changes are ordered.
    pub seq: u64,
    /// The record.
    pub record: pfr_schema::journal::Record,
}

/// An object of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalRow {
    /// Its key.
    pub key: String,
    /// First and last number in it.
    pub first: u64,
    /// See `first`.
    pub last: u64,
    /// Whether it is a part of a summary. Rows of a summary are written together, when all its
    /// parts are durable.
    pub summary: bool,
    /// Records in it.
    pub records: u64,
}

/// How far the journal has grown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalState {
    /// Number of the newest summary; 0 without one.
    pub summary: u64,
    /// Names in it.
    pub names: u64,
    /// The last number handed out.
    pub last: u64,
    /// Objects of changes since the summary, as far as they were counted.
    pub objects: u64,
}

/// Where a walk over all names stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamesCursor {
    /// Snapshots by row id.
    Snapshots {
        /// The last one seen.
        after: i64,
        /// The last one that there was when the walk began.
        until: i64,
    },
    /// Tags by row id of the repository and name.
    Tags {
        /// The last one seen.
        repository: i64,
        /// See `repository`.
        tag: String,
    },
}

impl NamesCursor {
    /// Before the first tag.
    pub(crate) const TAGS: Self = Self::Tags { repository: 0, tag: String::new() };
}
