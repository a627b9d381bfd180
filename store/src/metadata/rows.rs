//! Arguments and results of metadata transactions.

mod access;
mod audit_log;
mod collection;
mod domains;
mod events;
mod images;
mod integrity;
mod journal;
mod packs;
mod prefixes;
mod retention;
mod signing;
mod stats;

pub use access::AccessTokenRow;
pub use audit_log::{AuditEntry, AuditFilter};
pub use collection::*;
pub use domains::*;
pub use events::{Event, EventLog, EventPage, Happening};
pub use images::{Listing, ManifestName, ManifestRow, NewImage, Unlinked, UploadPart};
pub use integrity::*;
pub use journal::*;
pub use packs::*;
pub use prefixes::{PrefixHit, PrefixHits, PrefixMark, PrefixPassing, PrefixPath, Prefixed};
pub use retention::*;
pub use signing::*;
pub use stats::*;

pub(crate) use prefixes::{PASSES, WAYPOINT, levels, short, steps, waypoints};

pub use pfr_schema::AgentName;
pub use pfr_schema::api::{AgentInfo, AgentReport};
pub use pfr_schema::api::{AuditRecord, Quota, QuotaLimits, RepositoryInfo, RetentionPolicies, SignatureManifest, SigningPolicies};
use pfr_schema::api::{TagInfo, TagState};
use pfr_schema::codec::Codec;
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind, Tag};

/// Row id of an object. Never reused.
pub type ObjectId = i64;
/// Row id of a pack. Never reused.
pub type PackId = i64;

/// A push session's id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PushId(pub String);

impl PushId {
    /// An id that no session has.
    pub(crate) fn new() -> Self {
        Self(uuid::Uuid::now_v7().to_string())
    }

    /// An id that no session has, for the session of a capture: the id says so.
    pub(crate) fn of_capture() -> Self {
        Self(format!("capture-{}", uuid::Uuid::now_v7()))
    }
}

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
    /// What it lists, if it is a node.
    pub container: Option<NewContainer>,
}

/// A node's references.
#[derive(Clone, Debug)]
pub struct NewContainer {
    /// What it lists; duplicates allowed.
    pub children: Vec<Child>,
    /// Its shape, if it is a run.
    pub shape: Option<Shape>,
}

/// The result of indexing a pack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackStored {
    /// Blobs that were not stored before.
    pub new: u64,
}

/// Where a blob lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Its kind.
    pub kind: Kind,
    /// Key of the pack.
    pub pack: String,
    /// Byte offset of the frame's header.
    pub offset: u64,
    /// Bytes of the whole frame.
    pub frame_len: u64,
    /// Raw bytes of the blob.
    pub raw_len: u64,
    /// Codec of the frame.
    pub codec: Codec,
    /// Its health.
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
    /// Stored nodes, manifests and tags that list it.
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
    /// Its rows in the prefix index.
    pub marks: Vec<PrefixMark>,
    /// The agent that its configuration names, empty if it names none; `None` if that is not known.
    pub agent: Option<String>,
    /// What the audit log will say of it, if anything.
    pub audit: Option<AuditEntry>,
    /// What is known of its signatures.
    pub signed: Option<Signed>,
}

/// What a commit did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Committed {
    /// Whether the repository did not have the snapshot before.
    pub created: bool,
    /// Raw bytes it reaches. A blob counts once for each node that lists it.
    pub logical_bytes: u64,
    /// Raw bytes that it was the first to hold.
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
    /// Raw bytes that it was the first to hold.
    pub new_bytes: u64,
}

/// Where a walk over first parents ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// The snapshot.
    pub digest: Digest,
    /// Steps that led to it.
    pub steps: u64,
    /// Its first parent, which need not be in the repository.
    pub parent: Option<Digest>,
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
    /// Whether it was set to the upstream's target and was not moved here since.
    pub followed: bool,
}

impl From<TagRow> for TagInfo {
    fn from(row: TagRow) -> Self {
        Self { name: row.name, digest: row.digest, updated_at: row.updated_at }
    }
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The rows.
    pub rows: Vec<T>,
    /// Cursor of the next page.
    pub next: Option<String>,
}
