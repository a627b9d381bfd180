//! What metadata transactions take and give.

use pfr_schema::api::TagState;
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};

/// Row id of an object. Never reused.
pub type ObjectId = i64;
/// Row id of a pack. Never reused.
pub type PackId = i64;

/// A push session's id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PushId(pub String);

impl std::fmt::Display for PushId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A frame that lies in a durable pack, about to be indexed.
#[derive(Clone, Debug)]
pub struct NewFrame {
    /// Its header.
    pub header: Header,
    /// Byte offset of the header in the pack.
    pub offset: u64,
    /// What it lists, if it is a container.
    pub container: Option<NewContainer>,
}

/// A container's references.
#[derive(Clone, Debug)]
pub struct NewContainer {
    /// What it lists; duplicates allowed.
    pub children: Vec<Child>,
    /// Its shape, if it is a run.
    pub shape: Option<Shape>,
}

/// What became of a pack's frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackStored {
    /// Blobs that were not stored before.
    pub new: u64,
}

/// Where a blob lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Key of the pack.
    pub pack: String,
    /// Byte offset of the frame's header.
    pub offset: u64,
    /// Bytes of the whole frame.
    pub frame_len: u64,
    /// Raw bytes of the blob.
    pub raw_len: u64,
    /// What lies there may be known to be bad.
    pub health: Health,
}

/// An object, for walks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRow {
    /// Row id.
    pub id: ObjectId,
    /// Digest.
    pub digest: Digest,
    /// Kind.
    pub kind: Kind,
    /// Raw bytes.
    pub size: u64,
    /// Bytes of its frame in the pack.
    pub frame_len: u64,
    /// Stored containers, manifests and tags that list it.
    pub refs: u64,
    /// The pack it lies in.
    pub pack: PackId,
    /// What it lists, each once; empty for a blob.
    pub children: Vec<ObjectId>,
}

/// A tag update that goes with a commit or stands alone.
#[derive(Clone, Debug)]
pub struct TagMove {
    /// The tag.
    pub tag: Tag,
    /// Only from this state.
    pub expected: Option<TagState>,
}

/// A commit.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The manifest.
    pub manifest: Digest,
    /// Parents, from the snapshot's configuration.
    pub parents: Vec<Digest>,
    /// `artifactType`.
    pub artifact_type: Option<String>,
    /// Digest of the manifest's subject.
    pub subject: Option<Digest>,
    /// Tag to move.
    pub tag: Option<TagMove>,
    /// Why it is kept from eviction from the start.
    pub pin: Option<Pin>,
}

/// What a commit did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Committed {
    /// Whether the repository did not have the snapshot before.
    pub created: bool,
    /// Raw bytes it reaches, each blob once a container.
    pub logical_bytes: u64,
    /// Raw bytes that it brought first.
    pub new_bytes: u64,
}

/// A snapshot of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRow {
    /// The manifest's object.
    pub object: ObjectId,
    /// Its digest.
    pub digest: Digest,
    /// Tags that point at it, sorted.
    pub tags: Vec<Tag>,
    /// Parents, in order.
    pub parents: Vec<Digest>,
    /// Milliseconds since 1970.
    pub pushed_at: u64,
    /// Raw bytes it reaches.
    pub logical_bytes: u64,
    /// Raw bytes that it brought first.
    pub new_bytes: u64,
}

/// A tag of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagRow {
    /// The tag.
    pub name: Tag,
    /// The snapshot.
    pub digest: Digest,
    /// Milliseconds since 1970.
    pub updated_at: u64,
    /// Whether it was put where an upstream has it, and nobody moved it here since.
    pub followed: bool,
}

/// A repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryRow {
    /// Name.
    pub name: RepositoryName,
    /// Snapshots in it.
    pub snapshots: u64,
    /// Tags in it.
    pub tags: u64,
    /// Milliseconds since 1970 of the newest push.
    pub updated_at: u64,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The rows.
    pub rows: Vec<T>,
    /// Cursor of the next page.
    pub next: Option<String>,
}

// ---- packs

/// Sizes of a complete pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackSizes {
    /// Bytes of the object, with index and footer.
    pub bytes: u64,
    /// Bytes of its frames: what compaction compares live bytes with.
    pub frame_bytes: u64,
}

/// Life of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackState {
    /// Its row exists, its bytes may not: the upload runs, or ended in a crash.
    Writing,
    /// Complete and indexed.
    Live,
    /// Nothing points to it any more; its bytes go when the horizon has passed.
    Draining,
}

/// A pack's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackRow {
    /// Row id.
    pub id: PackId,
    /// Key, a UUID.
    pub key: String,
    /// State.
    pub state: PackState,
    /// Bytes of the object; 0 while it is written.
    pub bytes: u64,
    /// Bytes of its frames.
    pub frame_bytes: u64,
    /// Bytes of the frames that objects point to.
    pub live_bytes: u64,
    /// While it is written: when its upload counts as given up. Milliseconds since 1970.
    pub keep_until: u64,
    /// Since when nothing points to it. Milliseconds since 1970.
    pub draining_since: Option<u64>,
    /// Until when a compaction claims it. Milliseconds since 1970.
    pub claimed_until: u64,
}

/// An object as it lies in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The object.
    pub object: ObjectId,
    /// Its digest.
    pub digest: Digest,
    /// Its kind.
    pub kind: Kind,
    /// Byte offset of its frame's header.
    pub offset: u64,
    /// Bytes of the whole frame.
    pub frame_len: u64,
    /// What lies there may be known to be bad.
    pub health: Health,
}

/// A frame that compaction copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The object.
    pub object: ObjectId,
    /// Where it lay. If it lies elsewhere by now, or is gone, the copy is dead space.
    pub from: PackId,
    /// Byte offset of its header in the new pack.
    pub offset: u64,
}

// ---- collection

/// What one step of collection did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Suspects taken from the queue.
    pub examined: u64,
    /// Objects deleted that a deleted snapshot or tag held, directly or not.
    pub released: u64,
    /// Objects deleted that were uploaded and never committed.
    pub unclaimed: u64,
    /// Frame bytes of the deleted objects.
    pub frame_bytes: u64,
    /// Push sessions that had ended.
    pub sessions: u64,
    /// Containers that nothing holds and whose children are not known: they are left alone for a day, with everything below them.
    pub parked: u64,
    /// Whether more is due.
    pub more: bool,
}

/// Packs whose bytes may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    /// Packs that nothing points to.
    pub empty: u64,
    /// Packs whose upload never ended.
    pub abandoned: u64,
}

/// An entry of the queue that collection works from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspect {
    /// An object whose last reference may have gone.
    Object(ObjectId),
    /// A pack whose unclaimed objects may have outlived their leases.
    Pack(PackId),
}

/// An entry of the queue, and what put it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// What to look at.
    pub suspect: Suspect,
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

/// Why a collection ran.
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

/// Runs that are remembered: some six weeks of one an hour.
pub const GC_RUNS: usize = 1000;

/// Why a snapshot is kept from eviction. Who takes a pin back takes back its own, and no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Pin {
    /// Somebody said so.
    ByHand = 1,
    /// It waits to be pushed: there is no other copy yet.
    UntilPushed = 2,
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

// ---- integrity

/// Whether an object can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Health {
    /// As far as is known.
    Whole = 0,
    /// A container that reaches something damaged: it counts as missing until it and what is damaged are pushed again.
    Incomplete = 1,
    /// Its bytes are not what its digest says: quarantined. Not given out, and missing to who pushes.
    Damaged = 2,
}

impl Health {
    /// The worst that something wanted as `kind` may have: what is wanted as a blob is its bytes, and not what they reach as a container.
    pub(crate) fn enough_for(kind: Kind) -> Self {
        if kind.is_container() { Self::Whole } else { Self::Incomplete }
    }
}

/// A frame that scrub or a reader found bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The blob.
    pub digest: Digest,
    /// Key of the pack in which it was found bad: a copy elsewhere is not touched.
    pub pack: String,
    /// What was found.
    pub reason: String,
}

/// A quarantined blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedRow {
    /// The blob.
    pub digest: Digest,
    /// Kind.
    pub kind: Kind,
    /// What was found.
    pub reason: String,
    /// Milliseconds since 1970.
    pub found_at: u64,
    /// Snapshots that reach it, at most a hundred.
    pub snapshots: Vec<(RepositoryName, Digest)>,
}

/// A difference between tables and what they should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discrepancy {
    /// What it is about, for example `object 17 sha256:…` or `pack 3`.
    pub what: String,
    /// What follows from the containers, manifests and tags.
    pub expected: String,
    /// What the tables say.
    pub found: String,
}

/// What an audit of the tables found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Objects looked at.
    pub objects: u64,
    /// Containers looked at.
    pub containers: u64,
    /// Packs looked at.
    pub packs: u64,
    /// Differences, at most a thousand.
    pub discrepancies: Vec<Discrepancy>,
    /// All differences.
    pub wrong: u64,
    /// Whether they were corrected.
    pub repaired: bool,
}

// ---- journal

/// A change of names that is in the tables and may not be in the journal yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unjournaled {
    /// Its number: the order in which names changed.
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
    /// Whether it is a part of a checkpoint. Rows of a checkpoint are written together, when all its parts are durable.
    pub checkpoint: bool,
    /// Records in it.
    pub records: u64,
}

/// How far the journal has grown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalState {
    /// Number of the newest checkpoint; 0 without one.
    pub checkpoint: u64,
    /// Names in it.
    pub names: u64,
    /// The last number handed out.
    pub last: u64,
    /// Objects of changes since the checkpoint, as far as they were counted.
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
