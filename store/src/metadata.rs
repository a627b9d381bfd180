//! The metadata trait: every transaction the store makes, each atomic and durable when it returns.
//!
//! SQLite implements it for the embedded store; one behaviour suite (`tests/metadata.rs`) runs against every implementation.
//! Time is the implementation's own.

use crate::Result;
use async_trait::async_trait;
use pfr_schema::api::TagState;
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use std::time::Duration;

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
}

/// What a commit did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// The transactions of the store.
#[async_trait]
pub trait Metadata: Send + Sync + std::fmt::Debug + 'static {
    /// Opens a push session in `repository`, which is created if it is new (it shows once something is committed).
    async fn open_push(&self, push: PushId, repository: RepositoryName, lease: Duration) -> Result<()>;

    /// The repository of a live session, whose lease is renewed.
    async fn renew_push(&self, push: PushId, lease: Duration) -> Result<RepositoryName>;

    /// Ends a session. What it uploaded keeps its lease; ending a session twice is no error.
    async fn close_push(&self, push: PushId) -> Result<()>;

    /// Records a pack before its upload starts.
    async fn begin_pack(&self, key: String, lease: Duration) -> Result<PackId>;

    /// Indexes a durable pack: objects, containers, child counts; all or nothing. Frames come in stream order, children before
    /// the containers that list them. A blob that is stored already keeps its place.
    ///
    /// # Errors
    /// [`crate::Error::Missing`] or [`crate::Error::WrongShape`] if a container's children are not all stored as it says.
    async fn finish_pack(&self, push: PushId, pack: PackId, bytes: u64, frames: Vec<NewFrame>, lease: Duration) -> Result<PackStored>;

    /// Positions in `wanted` of what is not stored (as that kind). The rest is leased to the session.
    async fn missing(&self, push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Result<Vec<usize>>;

    /// Where blobs lie; `None` for what is not stored.
    async fn locate(&self, digests: Vec<Digest>) -> Result<Vec<Option<Location>>>;

    /// Objects by digest.
    async fn find(&self, digests: Vec<Digest>) -> Result<Vec<Option<ObjectRow>>>;

    /// Objects by row id; ids that do not exist are left out.
    async fn objects(&self, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>>;

    /// Makes a snapshot visible, in one transaction; ends the session.
    async fn commit(&self, push: PushId, commit: Commit) -> Result<Committed>;

    /// The snapshot a tag points at.
    async fn tag(&self, repository: RepositoryName, tag: Tag) -> Result<TagRow>;

    /// Tags by name.
    async fn tags(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<TagRow>>;

    /// Points tags at a snapshot of the repository; all or nothing.
    async fn put_tags(&self, repository: RepositoryName, snapshot: Digest, moves: Vec<TagMove>) -> Result<()>;

    /// Deletes a tag.
    async fn delete_tag(&self, repository: RepositoryName, tag: Tag, expected: Option<TagState>) -> Result<()>;

    /// One snapshot.
    async fn snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<SnapshotRow>;

    /// Snapshots, newest first.
    async fn snapshots(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<SnapshotRow>>;

    /// Deletes a snapshot and the tags that point at it.
    async fn delete_snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<()>;

    /// Repositories by name.
    async fn repositories(&self, after: Option<String>, limit: usize) -> Result<Page<RepositoryRow>>;

    /// Bytes of all packs that are in use.
    async fn disk_bytes(&self) -> Result<u64>;

    /// Rows inserted, updated or deleted since the process started: what a transaction costs.
    fn rows_written(&self) -> u64;
}
