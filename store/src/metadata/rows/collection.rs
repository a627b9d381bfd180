//! Arguments and results of collection.

use super::{ObjectId, PackId, SnapshotRow};
use pfr_schema::{Digest, RepositoryName};

/// The counts of one step of collection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// GC candidates taken from the queue.
    pub examined: u64,
    /// Objects deleted that a deleted snapshot or tag held, directly or not.
    pub released: u64,
    /// Objects deleted that were uploaded and never committed.
    pub unclaimed: u64,
    /// Frame bytes of the deleted objects.
    pub frame_bytes: u64,
    /// Push sessions that had ended.
    pub sessions: u64,
    /// Nodes that nothing holds and whose children are not known: they are left alone for a
    /// day, with everything below them.
    pub deferred: u64,
    /// Whether more is due.
    pub more: bool,
}

/// Packs that are emptied by a transaction: their bytes are deleted after the grace period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Emptied {
    /// Packs that nothing points to.
    pub empty: u64,
    /// Packs whose upload never ended.
    pub abandoned: u64,
}

/// A GC candidate: an entry of the queue that collection works from. The table is called `suspects`
/// for historical reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// An object whose last reference may have gone.
    Object(ObjectId),
    /// A pack whose unclaimed objects may have outlived their leases.
    Pack(PackId),
}

/// An entry of the queue, and what put it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// What to look at.
    pub candidate: Candidate,
    /// A deleted snapshot or tag. If not: an upload that may never have been committed.
    pub released: bool,
    /// When it is due: milliseconds since 1970.
    pub due: u64,
    /// The session at whose end it is due at once.
    pub session: Option<i64>,
}

/// What keeps an object that nothing holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lease {
    /// Milliseconds since 1970 of its end, unless the session is used until then.
    pub until: u64,
    /// Number of the oldest live session that leases it; none if the lease belongs to no session.
    pub session: Option<i64>,
}

/// A push session that is neither committed nor over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// Its number.
    pub session: i64,
    /// Its repository.
    pub repository: RepositoryName,
    /// Milliseconds since 1970 of its end, unless it is used until then.
    pub until: u64,
}

/// The trigger of a collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GcTrigger {
    /// The background schedule.
    Schedule,
    /// `gc` on the command line.
    Command,
    /// A request.
    Request,
}

/// Maximum number of runs in the list: about six weeks with one run in an hour.
pub const GC_RUNS: usize = 1000;

/// Why a snapshot is kept from eviction. A pin is taken back for the same reason for which it was
/// set; pins with other reasons stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Pin {
    /// A user said so.
    ByHand = 1,
    /// It waits to be pushed: there is no other copy yet.
    UntilPushed = 2,
    /// It was pulled ahead, and is kept for a time.
    Warm = 4,
}

impl Pin {
    /// The reasons whose values add up to `sum`.
    pub(crate) fn of(sum: u64) -> Vec<Self> {
        [Self::ByHand, Self::UntilPushed, Self::Warm].into_iter().filter(|pin| sum & *pin as u64 != 0).collect()
    }
}

impl std::fmt::Display for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ByHand => "by hand",
            Self::UntilPushed => "until it is pushed",
            Self::Warm => "for a time: pulled ahead",
        })
    }
}

/// A snapshot that eviction leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedSnapshot {
    /// Its repository.
    pub repository: RepositoryName,
    /// The snapshot.
    pub snapshot: SnapshotRow,
    /// Why, at least one.
    pub pins: Vec<Pin>,
}

/// A snapshot that may be evicted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Evictable {
    /// Its repository.
    pub repository: RepositoryName,
    /// Its digest.
    pub digest: Digest,
    /// Milliseconds since 1970 of its last use.
    pub used_at: u64,
}

/// A row of `gc_runs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcRun {
    /// Its id, a UUIDv7.
    pub id: String,
    /// Why it ran.
    pub trigger: GcTrigger,
    /// Milliseconds since 1970.
    pub started_at: u64,
    /// Milliseconds since 1970; none while it runs, or if it was killed.
    pub finished_at: Option<u64>,
    /// The report as JSON: `pfr_schema::api::GcReport`.
    pub report: String,
}
