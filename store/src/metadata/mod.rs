//! The metadata trait: every transaction the store makes, each atomic and durable when it returns.
//!
//! SQLite implements it for the embedded store, PostgreSQL for replicas; one behaviour suite (`tests/metadata`) runs against every implementation.
//! Time is the implementation's own.

pub(crate) mod accept;
pub(crate) mod arguments;
pub(crate) mod children;
mod once;
mod plan;
mod rows;

pub use once::*;
pub use rows::*;

use crate::Result;
use crate::room::{Freeing, MadeRoom};
use async_trait::async_trait;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, DigestPrefix, Kind, RepositoryName, Tag};
use std::time::Duration;

/// The transactions of the store.
#[async_trait]
pub trait Metadata: Send + Sync + std::fmt::Debug + 'static {
    /// Sees to it that there is space for work that frees space, where the metadata lie on a disk that may be full. It is there until what
    /// is returned is dropped. Transactions that store something new are refused while such a disk is nearly full.
    async fn make_room(&self, _work: Freeing) -> Result<MadeRoom> {
        Ok(MadeRoom::default())
    }

    /// Opens a push session in `repository`, which is created if it is new (it shows once something is committed).
    async fn open_push(&self, push: PushId, repository: RepositoryName, lease: Duration) -> Result<()>;

    /// The repository of a live session, whose lease is renewed.
    async fn renew_push(&self, push: PushId, lease: Duration) -> Result<RepositoryName>;

    /// Ends a session and with it its leases. Ending a session twice is no error.
    async fn close_push(&self, push: PushId) -> Result<()>;

    /// Sessions that live, oldest first.
    async fn unfinished(&self, limit: usize) -> Result<Vec<Unfinished>>;

    /// Ends every session that lives and gives up every pack that is being written; returns how many sessions. For a store of one host.
    async fn end_pushes(&self) -> Result<u64>;

    /// Of these objects, those that a lease covers.
    async fn leases(&self, ids: Vec<ObjectId>) -> Result<Vec<(ObjectId, Lease)>>;

    /// Records a pack before its upload starts.
    async fn begin_pack(&self, key: String, lease: Duration) -> Result<PackId>;

    /// Renews the lease of a pack that is being written, and of the session that it is written for.
    ///
    /// # Errors
    /// [`crate::Error::PackLost`] if it is not being written any more, [`crate::Error::PushUnknown`] if the session is over: nothing was renewed.
    async fn renew_pack(&self, push: Option<PushId>, pack: PackId, lease: Duration) -> Result<()>;

    /// Indexes a durable pack: objects, containers, child counts; all or nothing. Frames come in stream order, children before
    /// the containers that list them. A blob that is stored already keeps its place.
    ///
    /// # Errors
    /// [`crate::Error::Missing`] or [`crate::Error::WrongShape`] if a container's children are not all stored as it says.
    /// [`crate::Error::PackLost`] if collection gave the pack up in the meantime, whatever became of the session: its bytes must be uploaded again,
    /// and nobody but the caller may know that they are there.
    async fn finish_pack(&self, push: PushId, pack: PackId, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration)
    -> Result<PackStored>;

    /// Positions in `wanted` of what is not stored (as that kind). The rest is leased to the session, as long as that lives.
    async fn missing(&self, push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Result<Vec<usize>>;

    /// Where blobs lie; `None` for what is not stored.
    async fn locate(&self, digests: Vec<Digest>) -> Result<Vec<Option<Location>>>;

    /// Objects by digest.
    async fn find(&self, digests: Vec<Digest>) -> Result<Vec<Option<ObjectRow>>>;

    /// Objects by row id; ids that do not exist are left out.
    async fn objects(&self, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>>;

    /// A session whose lease has not run out, open or ended.
    ///
    /// # Errors
    /// [`crate::Error::PushUnknown`] if there is none.
    async fn session(&self, session: PushId) -> Result<Session>;

    /// Makes a snapshot visible, in one transaction; ends the session and with it its leases. Until
    /// the session would have expired, the same commit of the same session again does nothing and
    /// answers as the first did, whatever became of the snapshot since.
    async fn commit(&self, push: PushId, commit: Commit) -> Result<Committed>;

    /// The snapshot a tag points at.
    async fn tag(&self, repository: RepositoryName, tag: Tag) -> Result<TagRow>;

    /// Tags by name.
    async fn tags(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<TagRow>>;

    /// Points tags at a snapshot of the repository; all or nothing.
    async fn put_tags(&self, repository: RepositoryName, snapshot: Digest, moves: Vec<TagMove>) -> Result<()>;

    /// Changes names, once. While the lease of its session lasts, the same change again does
    /// nothing and answers as the first did.
    ///
    /// # Errors
    /// Those of the change, which then may be asked for again; [`crate::Error::Invalid`] if the
    /// session stands for something else.
    async fn change_names(&self, repository: RepositoryName, change: NameChange, once: Once, lease: Duration) -> Result<()>;

    /// Notes that a tag that points at `at` was put there because an upstream has it there; the next move forgets it. Nothing happens if it points
    /// elsewhere by now.
    async fn mark_followed(&self, repository: RepositoryName, tag: Tag, at: Digest) -> Result<()>;

    /// Deletes a tag.
    async fn delete_tag(&self, repository: RepositoryName, tag: Tag, expected: Option<TagState>) -> Result<()>;

    /// One snapshot.
    async fn snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<SnapshotRow>;

    /// Snapshots whose digest begins so, at most `limit`.
    async fn snapshots_like(&self, repository: RepositoryName, prefix: DigestPrefix, limit: usize) -> Result<Vec<Digest>>;

    /// Snapshots, newest first.
    async fn snapshots(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<SnapshotRow>>;

    /// Deletes a snapshot and the tags that point at it.
    async fn delete_snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<()>;

    /// Repositories by name.
    async fn repositories(&self, after: Option<String>, limit: usize) -> Result<Page<RepositoryRow>>;

    /// Bytes of all packs that are not deleted yet.
    async fn disk_bytes(&self) -> Result<u64>;

    // ---- collection: docs/gc.md

    /// Takes due suspects from the queue and deletes what nothing holds and no lease covers, and
    /// what hung on it, about `budget` objects. What is left to look at stays in the queue. Also
    /// forgets push sessions that ended.
    async fn collect(&self, budget: usize) -> Result<Collected>;

    /// Entries of the queue, without taking them, in the order in which collection would: those that are `due`, or all.
    async fn queue(&self, due: bool, limit: usize) -> Result<Vec<Queued>>;

    /// Due suspects.
    async fn suspects(&self, limit: usize) -> Result<Vec<Suspect>> {
        Ok(self.queue(true, limit).await?.into_iter().map(|queued| queued.suspect).collect())
    }

    /// Objects of a pack that nothing holds and no lease covers.
    async fn unclaimed(&self, pack: PackId) -> Result<Vec<ObjectId>>;

    /// Objects of a pack that nothing holds, leased or not.
    async fn unheld(&self, pack: PackId) -> Result<Vec<ObjectId>>;

    /// Marks as draining at most `limit` packs: those that nothing points to, and those still being written after their lease.
    async fn retire_packs(&self, limit: usize) -> Result<Retired>;

    /// Packs that have been draining for longer than `horizon`.
    async fn drained_packs(&self, horizon: Duration, limit: usize) -> Result<Vec<PackRow>>;

    /// Deletes the rows of draining packs whose bytes are gone.
    async fn forget_packs(&self, packs: Vec<PackId>) -> Result<()>;

    /// Claims for the caller, for the time of `claim`, live packs less than half of whose frames are live, emptiest first.
    async fn claim_sparse_packs(&self, limit: usize, claim: Duration) -> Result<Vec<PackRow>>;

    /// Objects that lie in a pack, in order of offset, damaged ones too.
    async fn pack_contents(&self, pack: PackId) -> Result<Vec<Packed>>;

    /// Makes a pack that compaction wrote live and points what it moved to it. Old packs that nothing points to any more start draining.
    ///
    /// # Errors
    /// [`crate::Error::PackLost`] if collection gave the new pack up in the meantime; nothing was changed.
    async fn finish_compaction(&self, pack: PackId, sizes: PackSizes, moved: Vec<Moved>) -> Result<()>;

    /// Writes (or updates) the row of a run, and forgets all but the newest [`GC_RUNS`].
    async fn record_gc_run(&self, run: GcRun) -> Result<()>;

    /// Runs, newest first.
    async fn gc_runs(&self, after: Option<String>, limit: usize) -> Result<Page<GcRun>>;

    /// Marks a snapshot as used now.
    async fn touch_snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<()>;

    /// Keeps a snapshot from eviction for a reason, or no longer for that one. Returns whether any reason is left.
    async fn pin_snapshot(&self, repository: RepositoryName, digest: Digest, reason: Pin, pinned: bool) -> Result<bool>;

    /// Snapshots that may be evicted, least recently used first.
    async fn evictable(&self, limit: usize) -> Result<Vec<Evictable>>;

    /// Deletes a snapshot as [`Metadata::delete_snapshot`] does, unless it was pinned, used or deleted since it was listed. Returns whether it did.
    async fn evict_snapshot(&self, snapshot: Evictable) -> Result<bool>;

    // ---- integrity

    /// Packs by id, whatever their state.
    async fn packs(&self, after: Option<PackId>, limit: usize) -> Result<Vec<PackRow>>;

    /// Quarantines blobs, if they still lie in the pack in which they were found bad, and marks the containers that reach them as incomplete.
    /// Returns those that were quarantined now. Costs one look at every container.
    async fn quarantine(&self, damage: Vec<Damage>) -> Result<Vec<Digest>>;

    /// Lifts the quarantine of blobs that were found good where they lie, each with the key of that pack; a copy elsewhere is not touched. Returns how
    /// many. Containers among them, and above them, are for [`Self::reassess`].
    async fn lift_quarantine(&self, good: Vec<(Digest, String)>) -> Result<u64>;

    /// Quarantined blobs, and who reaches them. Costs one look at every container that is not whole.
    async fn damaged(&self, after: Option<String>, limit: usize) -> Result<Page<DamagedRow>>;

    /// Clears the mark of containers below which everything is whole again; returns how many. Does nothing unless something became well since the last
    /// time; costs one look at every container that is not whole.
    async fn reassess(&self) -> Result<u64>;

    /// Recomputes references, live bytes and sizes from containers, manifests and tags, in one state of the tables, and compares; corrects them if `repair`.
    /// Also finds packs that drain though something lies in them, and objects that nothing holds and that collection's queue lacks. If the children of
    /// a container are not known, no reference is corrected.
    async fn audit(&self, repair: bool) -> Result<Audit>;

    // ---- journal and rebuilding

    /// Changes of names whose journal object is not recorded yet, oldest first. Numbers become visible in their order: once a number was seen
    /// here or in [`Self::names`], no smaller one appears.
    async fn unjournaled(&self, limit: usize) -> Result<Vec<Unjournaled>>;

    /// Records journal objects, all or none: changes between the numbers of an object of changes lie in it. Twice is no error.
    async fn journaled(&self, rows: Vec<JournalRow>) -> Result<()>;

    /// Begins a walk over all names: returns the number of the last change that every page contains, and where to begin.
    async fn begin_names(&self) -> Result<(u64, NamesCursor)>;

    /// About `limit` names as records, and where to go on. Each page is a state of its own: what changed since the walk began may be in it or not,
    /// but not a snapshot that is newer. So a walk and all changes after its number, replayed over it up to where it ended, are the names.
    async fn names(&self, cursor: NamesCursor, limit: usize) -> Result<(Vec<Record>, Option<NamesCursor>)>;

    /// How far the journal has grown; objects are counted up to `most`.
    async fn journal_state(&self, most: usize) -> Result<JournalState>;

    /// Objects of the journal, in order.
    async fn journal(&self) -> Result<Vec<JournalRow>>;

    /// Keys of at most `limit` objects that the newest checkpoint makes superfluous, changes first, oldest first.
    async fn superfluous_journal(&self, limit: usize) -> Result<Vec<String>>;

    /// Forgets journal objects whose bytes are gone.
    async fn forget_journal(&self, keys: Vec<String>) -> Result<()>;

    /// Whether there is nothing in it: no pack, no repository.
    async fn is_empty(&self) -> Result<bool>;

    /// Takes in a pack that was found on storage: its frames become plain blobs, those that are known stay where they are, unless
    /// they are damaged or a frame here says that they are containers: it takes their place. Twice is no error.
    async fn adopt_pack(&self, key: String, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration) -> Result<PackStored>;

    /// Makes stored blobs containers; returns those that lack children and stay blobs.
    async fn adopt_containers(&self, containers: Vec<(Digest, Kind, NewContainer)>) -> Result<Vec<Digest>>;

    /// Replays journal records, in order, over the names that there are, and continues their numbering after `last`. A snapshot that exists stays where
    /// it is in lists. Records of snapshots that should exist after these and whose manifest is not stored (as a manifest) are returned and skipped,
    /// and a tag that should point at one is not there. No new changes are noted.
    async fn restore_names(&self, records: Vec<Record>, last: u64) -> Result<Vec<Record>>;

    /// Rows inserted, updated or deleted since the process started: what a transaction costs.
    fn rows_written(&self) -> u64;
}
