//! The public interface of the store, for registries and hosts.

use crate::backends::SqliteMetadata;
use crate::boxed;
use crate::clock::Clock;
use crate::encryption::WrappedKey;
use crate::error::{Error, Result};
use crate::frames::Outputs;
use crate::inspect::agent_of;
use crate::live::LivePush;
use crate::metadata::{
    Ancestor, AuditEntry, Commit, Metadata, NameChange, Page, Pin, PushId, RepositoryInfo, SnapshotRow, TagMove, TagRow,
};
use crate::places::Places;
use crate::room::Disk;
use bytes::Bytes;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use parking_lot::Mutex;
use pfr_schema::api::{Committed, TagState, snapshot_etag};
use pfr_schema::codec::{self, Codecs};
use pfr_schema::container::Container;
use pfr_schema::snapshot::Manifest;
use pfr_schema::{Digest, Kind, Limits, RepositoryName, Selector, Tag};
use pfr_service::memory::SharedMemory;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Pieces of full size, for each place of an upload.
const PIECES: usize = 4;
/// Uploads in chunks that are put together at once, for each place of an upload. Each reads 3 MiB
/// before it has a place. They take turns, so there are more of them than places.
const FINISHING: usize = 8;
/// Snapshots looked for of a shortened digest: more than one is too many, and a few are named.
const CANDIDATES: usize = 5;

/// Settings of a store, with the defaults of a registry.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a lease protects what a push session uploaded or asked about. Default 1 hour.
    pub lease: Duration,
    /// Bytes after which a pack is closed; one of many tiny blobs is closed earlier. Default 64
    /// MiB.
    pub pack_bytes: u64,
    /// Uploads at full speed at once; others wait. Bounds memory to about 20 MiB each, and to
    /// 16 MiB more where blobs are tiny. One that waits for its client gives way. Uploads in chunks
    /// hold 4 MiB more for each, all together, and 24 MiB while they are put together. Default 6.
    pub ingests: usize,
    /// Downloads that are read ahead at once; others go on piece by piece. Bounds memory to about
    /// 12 MiB each. Default 6.
    pub outputs: usize,
    /// Bytes that stay free on the disks of packs and metadata: nothing new is stored below that,
    /// and deletions and collections go on. Default 64 MiB, on small disks a twentieth of them.
    pub min_free: Option<u64>,
    /// Bytes that all uploads that wait for their clients may hold together, beyond 64 KiB each.
    /// Default 32 MiB.
    pub slow_bytes: u64,
    /// Codecs of frames that are taken in; a frame in another one is refused. Stored frames are
    /// read in every codec. Default all.
    pub codecs: Codecs,
    /// How long an upload waits for its turn before it is refused as [`Error::Overloaded`]. Default
    /// 10 minutes, since the clients of a local store have no other store to use.
    pub queue: Duration,
    /// Limits on foreign bytes.
    pub limits: Limits,
    /// Source of time.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(3600),
            pack_bytes: 64 << 20,
            ingests: 6,
            outputs: 6,
            min_free: None,
            slow_bytes: 32 << 20,
            codecs: Codecs::ALL,
            queue: Duration::from_secs(600),
            limits: Limits::default(),
            clock: Clock::system(),
        }
    }
}

/// An open push session.
#[derive(Clone, Debug)]
pub struct PushSession {
    /// Its id.
    pub id: LivePush,
    /// How long it lives unless it is used.
    pub lease: Duration,
}

/// A store. Cheap to clone; all clones are one store.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) packs: Arc<dyn ObjectStore>,
    /// The directory of the packs, if they are files: the object store neither syncs deletions nor
    /// shows unfinished uploads.
    pub(crate) packs_dir: Option<Arc<Path>>,
    /// Folders in it whose names are known to be durable.
    pub(crate) settled: Arc<Mutex<HashSet<String>>>,
    /// The disk of that directory.
    pub(crate) packs_disk: Option<Arc<Disk>>,
    pub(crate) metadata: Arc<dyn Metadata>,
    pub(crate) options: Arc<Options>,
    pub(crate) ingests: Arc<Places>,
    pub(crate) outputs: Arc<Outputs>,
    /// Places for streams of frames whose readers are in this process.
    pub(crate) reads: Arc<Semaphore>,
    /// Memory that uploads may hold without a place.
    pub(crate) slow: Arc<SharedMemory>,
    /// Pieces of full size that are cut from uploads in chunks.
    pub(crate) pieces: Arc<Semaphore>,
    /// Held while an upload in chunks is put together: it reads before it has a place, and goes on
    /// when its client has left.
    pub(crate) finishing: Arc<Semaphore>,
    /// Held while a document of more than a few MiB is in memory.
    pub(crate) large_documents: Arc<Semaphore>,
    /// The same, for those that give way to each other.
    pub(crate) large: Arc<Places>,
    /// Held while changes of names are journaled: those that wait share the next object.
    pub(crate) journaling: Arc<tokio::sync::Mutex<()>>,
    /// The id of the storage, set once its marker was found before the first write.
    pub(crate) marked: Arc<tokio::sync::OnceCell<String>>,
    /// The wrapped key of its domain, if `packs` encrypts.
    pub(crate) wrapped_key: Option<Arc<WrappedKey>>,
    /// What the audit log will say of the changes that are made by this clone.
    pub(crate) audit: Option<Arc<AuditEntry>>,
}

impl Store {
    /// Opens (or creates) the embedded store in `dir`: packs on disk with fsync, metadata in
    /// SQLite.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the directory cannot be made or opened.
    #[boxed]
    pub async fn open(dir: &Path, options: Options) -> Result<Self> {
        let packs_dir = dir.join("packs");
        let fail = |e: &dyn std::fmt::Display| Error::Unavailable { what: "directory", reason: format!("{}: {e}", dir.display()) };
        pfr_service::durable::create_dir_all(&packs_dir).map_err(|e| Error::io("directory", dir, &e))?;
        let packs = crate::packs::in_directory(&packs_dir).map_err(|e| fail(&e))?;
        let metadata = SqliteMetadata::open_above(&dir.join("metadata.sqlite"), options.clock.clone(), options.min_free).await?;
        Ok(Self::new(packs, metadata, options).with_packs_dir(&packs_dir))
    }

    /// A store that lives in memory, for tests.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if SQLite cannot be set up.
    #[boxed]
    pub async fn open_in_memory(options: Options) -> Result<Self> {
        let metadata = SqliteMetadata::open_in_memory(options.clock.clone()).await?;
        Ok(Self::new(Arc::new(InMemory::new()), metadata, options))
    }

    /// A store over any packs and metadata.
    #[must_use]
    pub fn new(packs: Arc<dyn ObjectStore>, metadata: Arc<dyn Metadata>, options: Options) -> Self {
        let large_documents = Arc::new(Semaphore::new(1));
        // A frame that is held whole fits, and the largest part of a pack.
        let slow = usize::try_from(options.slow_bytes.max(16 << 20)).unwrap_or(usize::MAX);
        Self {
            packs,
            packs_dir: None,
            settled: Arc::default(),
            packs_disk: None,
            metadata,
            ingests: Arc::new(Places::new(options.ingests)),
            outputs: Arc::new(Outputs::new(options.outputs)),
            reads: Arc::new(Semaphore::new(options.outputs.max(1))),
            slow: SharedMemory::new(slow),
            pieces: Arc::new(Semaphore::new(PIECES * options.ingests.clamp(1, 1000))),
            finishing: Arc::new(Semaphore::new(FINISHING * options.ingests.clamp(1, 1000))),
            large: Arc::new(Places::over(Arc::clone(&large_documents))),
            large_documents,
            journaling: Arc::default(),
            marked: Arc::default(),
            wrapped_key: None,
            audit: None,
            options: Arc::new(options),
        }
    }

    /// The store of another domain, in the same process: they share settings and limits on memory,
    /// and nothing that is stored.
    pub(crate) fn beside(&self, packs: Arc<dyn ObjectStore>, metadata: Arc<dyn Metadata>) -> Self {
        Self {
            packs,
            packs_dir: None,
            settled: Arc::default(),
            packs_disk: None,
            metadata,
            journaling: Arc::default(),
            marked: Arc::default(),
            wrapped_key: None,
            audit: None,
            // Named one by one: whether a new field is shared is a decision.
            options: Arc::clone(&self.options),
            ingests: Arc::clone(&self.ingests),
            outputs: Arc::clone(&self.outputs),
            reads: Arc::clone(&self.reads),
            slow: Arc::clone(&self.slow),
            pieces: Arc::clone(&self.pieces),
            finishing: Arc::clone(&self.finishing),
            large_documents: Arc::clone(&self.large_documents),
            large: Arc::clone(&self.large),
        }
    }

    /// Says that the packs are files below `dir`: then collection makes deletions durable and
    /// removes what interrupted uploads left there, and nothing new is stored while their disk is
    /// nearly full.
    #[must_use]
    pub fn with_packs_dir(mut self, dir: &Path) -> Self {
        self.packs_dir = Some(Arc::from(dir));
        self.packs_disk = Some(Arc::new(Disk::new(dir, self.options.min_free)));
        self
    }

    /// The same store for one request: each change of tags or snapshots that it makes is in the
    /// audit log, in the transaction of the change.
    #[must_use]
    pub fn audited(&self, entry: AuditEntry) -> Self {
        Self { audit: Some(Arc::new(entry)), ..self.clone() }
    }

    /// The entry of the request that this clone is for.
    pub(crate) fn audit_entry(&self) -> Option<AuditEntry> {
        self.audit.as_deref().cloned()
    }

    /// Whether both are clones of one store.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.marked, &other.marked)
    }

    /// Its settings.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Its metadata.
    #[must_use]
    pub fn metadata(&self) -> &dyn Metadata {
        &*self.metadata
    }

    // ---- pushing

    /// Opens a push session.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`].
    pub async fn open_push(&self, repository: &RepositoryName) -> Result<PushSession> {
        self.open_session(PushId::new(), repository).await
    }

    /// Opens a push session for a capture. Unlike a push or a pull, a capture that was interrupted
    /// does not go on, so [`Store::end_captures`] may end it.
    ///
    /// # Errors
    /// As [`Store::open_push`].
    pub async fn open_capture(&self, repository: &RepositoryName) -> Result<PushSession> {
        self.open_session(PushId::of_capture(), repository).await
    }

    async fn open_session(&self, id: PushId, repository: &RepositoryName) -> Result<PushSession> {
        self.metadata.open_push(id.clone(), repository.clone(), self.options.lease).await?;
        Ok(PushSession { id: LivePush::found(self, id), lease: self.options.lease })
    }

    /// Ends the sessions of all captures: what they stored is garbage. Returns how many there were.
    /// For the process that alone makes captures into this store, when none is under way.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn end_captures(&self) -> Result<u64> {
        self.metadata.end_captures().await
    }

    /// Positions in `wanted` of the blobs that the store lacks. The others are leased to the
    /// session.
    ///
    /// # Errors
    /// [`Error::PushUnknown`].
    pub async fn missing(&self, push: &PushId, wanted: Vec<(Digest, Kind)>) -> Result<Vec<usize>> {
        self.metadata.missing(push.clone(), wanted, self.options.lease).await
    }

    /// Makes an uploaded manifest visible in the session's repository and moves `tag`, in one
    /// transaction. Ends the session.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`] if the manifest is not stored, [`Error::Format`] if configuration and
    /// checkpoints contradict each other, [`Error::TagMoved`], [`Error::PushUnknown`].
    #[boxed]
    pub async fn commit(&self, push: &PushId, manifest: Digest, tag: Option<Tag>, if_tag_is: Option<TagState>) -> Result<Committed> {
        self.commit_as(push, manifest, tag, if_tag_is, None).await
    }

    /// The same, and eviction never takes the snapshot before `pin` is taken back with
    /// [`Store::pin`].
    ///
    /// # Errors
    /// As [`Store::commit`].
    #[boxed]
    pub async fn commit_pinned(&self, push: &PushId, manifest: Digest, tag: Option<Tag>, pin: Pin) -> Result<Committed> {
        self.commit_as(push, manifest, tag, None, Some(pin)).await
    }

    pub(crate) async fn commit_as(
        &self,
        push: &PushId,
        manifest: Digest,
        tag: Option<Tag>,
        if_tag_is: Option<TagState>,
        pin: Option<Pin>,
    ) -> Result<Committed> {
        if tag.is_none() && if_tag_is.is_some() {
            return Err(Error::Invalid("if_tag_is needs a tag".into()));
        }
        let document = self.manifest(&manifest).await?;
        let config = self.coherent_config(&document).await?.unwrap_or_default();
        let commit = Commit {
            manifest,
            marks: self.prefix_marks(&document, &config).await?,
            agent: Some(agent_of(&config)),
            parents: config.parents,
            artifact_type: document.artifact_type,
            subject: document.subject.map(|s| s.digest),
            tag: tag.map(|tag| TagMove { tag, expected: if_tag_is }),
            pin,
            audit: self.audit_entry(),
            signed: None,
        };
        let mut signed = None;
        let done = loop {
            let done = self.metadata.commit(push.clone(), Commit { signed: signed.clone(), ..commit.clone() }).await;
            if !self.is_signed_after_all(done.as_ref().err(), &mut signed).await? {
                break done;
            }
        };
        Ok(self.journaled(done).await?.of(manifest))
    }

    /// Ends a session without a commit.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn abort(&self, push: &PushId) -> Result<()> {
        self.metadata.close_push(push.clone()).await
    }

    // ---- reading

    /// A stored manifest.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`], [`Error::Corrupt`].
    #[boxed]
    pub async fn manifest(&self, digest: &Digest) -> Result<Manifest> {
        match self.container(digest, Kind::Manifest).await? {
            Container::Manifest(manifest) => Ok(manifest),
            _ => Err(Error::Internal("a manifest parsed as something else".into())),
        }
    }

    /// A stored node, parsed.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`], [`Error::Corrupt`].
    #[boxed]
    pub async fn container(&self, digest: &Digest, kind: Kind) -> Result<Container> {
        let bytes = self.read_as(digest, kind).await?;
        Container::parse(kind, &bytes, &self.options.limits)?.ok_or(Error::BlobUnknown { digest: *digest, kind })
    }

    // ---- names

    /// The snapshot that a selector means.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::TagUnknown`], [`Error::SnapshotUnknown`] (also for
    /// `tag~N` beyond the first snapshot), [`Error::SnapshotAmbiguous`].
    #[boxed]
    pub async fn resolve(&self, repository: &RepositoryName, selector: &Selector) -> Result<Digest> {
        match selector {
            Selector::Prefix(prefix) => {
                let candidates = self.metadata.snapshots_like(repository.clone(), prefix.clone(), CANDIDATES).await?;
                match candidates[..] {
                    [digest] => Ok(digest),
                    [] => Err(Error::SnapshotUnknown { repository: repository.clone(), snapshot: prefix.to_string() }),
                    _ => Err(Error::SnapshotAmbiguous { repository: repository.clone(), prefix: prefix.clone(), candidates }),
                }
            }
            Selector::Digest(digest) => Ok(self.metadata.snapshot(repository.clone(), *digest).await?.digest),
            Selector::Tag { tag, back: 0 } => Ok(self.metadata.tag(repository.clone(), tag.clone()).await?.digest),
            Selector::Tag { tag, back } => {
                let back = u64::from(*back);
                let found = self.metadata.ancestor_of_tag(repository.clone(), tag.clone(), back).await?;
                if found.steps == back {
                    return Ok(found.digest);
                }
                let snapshot =
                    found.parent.map_or_else(|| format!("{selector}: {} has no parent", found.digest), |parent| parent.to_string());
                Err(Error::SnapshotUnknown { repository: repository.clone(), snapshot })
            }
        }
    }

    /// Goes from a snapshot to its first parent, `back` times or as far as the repository has them.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::SnapshotUnknown`].
    pub async fn ancestor(&self, repository: &RepositoryName, from: &Digest, back: u64) -> Result<Ancestor> {
        self.metadata.ancestor(repository.clone(), *from, back).await
    }

    /// One snapshot.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::SnapshotUnknown`].
    pub async fn snapshot(&self, repository: &RepositoryName, digest: &Digest) -> Result<SnapshotRow> {
        self.metadata.snapshot(repository.clone(), *digest).await
    }

    /// Snapshots of a repository, newest first.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::Invalid`] for a cursor that is none.
    pub async fn snapshots(&self, repository: &RepositoryName, after: Option<String>, limit: usize) -> Result<Page<SnapshotRow>> {
        self.metadata.snapshots(repository.clone(), after, limit).await
    }

    /// The prefix lengths of snapshots, in tokens. Snapshots that say no length are left out.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`].
    pub async fn prefix_lengths(&self, repository: &RepositoryName, snapshots: Vec<Digest>) -> Result<HashMap<Digest, u64>> {
        Ok(self.metadata.prefix_lengths(repository.clone(), snapshots).await?.into_iter().collect())
    }

    /// Tags of a repository by name.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`].
    pub async fn tags(&self, repository: &RepositoryName, after: Option<String>, limit: usize) -> Result<Page<TagRow>> {
        self.metadata.tags(repository.clone(), after, limit).await
    }

    /// One tag.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::TagUnknown`].
    pub async fn tag(&self, repository: &RepositoryName, tag: &Tag) -> Result<TagRow> {
        self.metadata.tag(repository.clone(), tag.clone()).await
    }

    /// Points a tag at a snapshot of the repository.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`], [`Error::TagMoved`].
    pub async fn put_tag(&self, repository: &RepositoryName, tag: Tag, snapshot: Digest, expected: Option<TagState>) -> Result<()> {
        self.change_names(repository, NameChange::PutTags { snapshot, moves: vec![TagMove { tag, expected }] }, None).await
    }

    /// Makes `count` tags `<prefix>-1…` that point at one snapshot; all or nothing, no bytes move.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::TagMoved`] if one of them exists.
    pub async fn fork(&self, repository: &RepositoryName, snapshot: Digest, prefix: &str, count: u32) -> Result<Vec<Tag>> {
        let (change, tags) = NameChange::fork(snapshot, prefix, count)?;
        self.change_names(repository, change, None).await?;
        Ok(tags)
    }

    /// Deletes a tag. Its snapshot stays.
    ///
    /// # Errors
    /// [`Error::TagUnknown`], [`Error::TagMoved`].
    pub async fn delete_tag(&self, repository: &RepositoryName, tag: &Tag, expected: Option<TagState>) -> Result<()> {
        self.change_names(repository, NameChange::DeleteTag { tag: tag.clone(), expected }, None).await
    }

    /// Deletes a snapshot and the tags that point at it. Blobs that only it reached become garbage.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`].
    pub async fn delete_snapshot(&self, repository: &RepositoryName, digest: &Digest) -> Result<()> {
        self.change_names(repository, NameChange::DeleteSnapshot { snapshot: *digest, etag: None }, None).await
    }

    /// The same, if exactly these tags point at it.
    ///
    /// # Errors
    /// [`Error::SnapshotUnknown`], [`Error::TagsMoved`].
    pub async fn delete_snapshot_tagged(&self, repository: &RepositoryName, digest: &Digest, tags: &[Tag]) -> Result<()> {
        let etag = Some(snapshot_etag(digest, tags));
        self.change_names(repository, NameChange::DeleteSnapshot { snapshot: *digest, etag }, None).await
    }

    /// Repositories by name.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn repositories(&self, after: Option<String>, limit: usize) -> Result<Page<RepositoryInfo>> {
        self.metadata.repositories(after, limit).await
    }

    /// Whether packs and metadata can be reached.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[boxed]
    pub async fn ready(&self) -> Result<()> {
        self.metadata.disk_bytes().await?;
        self.storage_is_there().await
    }
}

/// Encodes a document as a frame: header and payload in one buffer.
#[must_use]
pub fn document_frame(document: &pfr_schema::tree::Document) -> Bytes {
    let (codec, payload) = codec::encode_document(&document.bytes);
    let header = pfr_schema::frame::Header {
        codec,
        kind: document.kind,
        digest: document.digest,
        raw_len: document.bytes.len() as u64,
        stored_len: payload.len() as u64,
    };
    pfr_schema::frame::encode(&header, &payload).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stores_of_one_process_share_its_limits_and_nothing_else() {
        let store = Store::open_in_memory(Options::default()).await.expect("a store");
        let other = Store::open_in_memory(Options::default()).await.expect("another");
        let beside = store.beside(Arc::clone(&other.packs), Arc::clone(&other.metadata));
        assert!(Arc::ptr_eq(&store.ingests, &beside.ingests) && Arc::ptr_eq(&store.outputs, &beside.outputs));
        assert!(Arc::ptr_eq(&store.reads, &beside.reads) && Arc::ptr_eq(&store.slow, &beside.slow));
        assert!(Arc::ptr_eq(&store.pieces, &beside.pieces) && Arc::ptr_eq(&store.finishing, &beside.finishing));
        assert!(Arc::ptr_eq(&store.large, &beside.large) && Arc::ptr_eq(&store.large_documents, &beside.large_documents));
        assert!(!Arc::ptr_eq(&store.journaling, &beside.journaling) && !Arc::ptr_eq(&store.settled, &beside.settled));
        assert!(!store.is_same(&beside));
    }
}
