//! Metadata behind gates, that sometimes cannot be reached, or loses the answer of what it did.

use crate::gate;
use crate::weather::{Fault, Weather};
use async_trait::async_trait;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, DigestPrefix, Kind, RepositoryName, Tag};
use pfr_store::{
    Audit, Collected, Commit, Committed, Damage, DamagedRow, Error, Evictable, GcRun, JournalRow, JournalState, Lease, Location, Metadata,
    Moved, NameChange, NamesCursor, NewContainer, NewFrame, ObjectId, ObjectRow, Once, PackId, PackRow, PackSizes, PackStored, Packed,
    Page, Pin, PushId, Queued, RepositoryRow, Result, Retired, Session, SnapshotRow, TagMove, TagRow, Unfinished, Unjournaled,
};
use std::sync::Arc;
use std::time::Duration;

/// Metadata as one replica sees it.
#[derive(Clone, Debug)]
pub struct Transactions {
    inner: Arc<dyn Metadata>,
    /// The same metadata with a clock that runs ahead: a planted bug, collection that does not respect leases.
    collects: Arc<dyn Metadata>,
    /// Another planted bug: packs go as soon as they drain.
    no_horizon: bool,
    weather: Weather,
}

impl Transactions {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Metadata>, weather: Weather) -> Self {
        Self { collects: Arc::clone(&inner), inner, no_horizon: false, weather }
    }

    /// Lets collection see another clock than everybody else.
    #[must_use]
    pub fn collecting_with(mut self, collects: Arc<dyn Metadata>) -> Self {
        self.collects = collects;
        self
    }

    /// Lets packs go as soon as they drain.
    #[must_use]
    pub fn without_horizon(mut self) -> Self {
        self.no_horizon = true;
        self
    }

    async fn call<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        gate::pass().await;
        let under_way = gate::Call::begin();
        let lost = |reason: &str| Err(Error::Unavailable { what: "metadata", reason: format!("{reason} (injected)") });
        let result = match self.weather.draw(false) {
            Some(Fault::After) => match call.await {
                Ok(_) => lost("the answer was lost"),
                refused => refused,
            },
            Some(_) => lost("connection reset"),
            None => call.await,
        };
        drop(under_way);
        gate::pass().await;
        result
    }
}

macro_rules! transactions {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)+) => {
        #[async_trait]
        impl Metadata for Transactions {
            $(async fn $name(&self, $($argument: $type),*) -> Result<$result> {
                self.call(self.inner.$name($($argument),*)).await
            })+

            async fn collect(&self, budget: usize) -> Result<Collected> {
                self.call(self.collects.collect(budget)).await
            }

            async fn drained_packs(&self, horizon: Duration, limit: usize) -> Result<Vec<PackRow>> {
                let horizon = if self.no_horizon { Duration::ZERO } else { horizon };
                self.call(self.inner.drained_packs(horizon, limit)).await
            }

            fn rows_written(&self) -> u64 {
                self.inner.rows_written()
            }
        }
    };
}

transactions! {
    open_push(push: PushId, repository: RepositoryName, lease: Duration) -> ();
    renew_push(push: PushId, lease: Duration) -> RepositoryName;
    close_push(push: PushId) -> ();
    unfinished(limit: usize) -> Vec<Unfinished>;
    end_pushes() -> u64;
    leases(ids: Vec<ObjectId>) -> Vec<(ObjectId, Lease)>;
    begin_pack(key: String, lease: Duration) -> PackId;
    renew_pack(push: Option<PushId>, pack: PackId, lease: Duration) -> ();
    finish_pack(push: PushId, pack: PackId, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration) -> PackStored;
    missing(push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Vec<usize>;
    locate(digests: Vec<Digest>) -> Vec<Option<Location>>;
    find(digests: Vec<Digest>) -> Vec<Option<ObjectRow>>;
    objects(ids: Vec<ObjectId>) -> Vec<ObjectRow>;
    session(session: PushId) -> Session;
    commit(push: PushId, commit: Commit) -> Committed;
    tag(repository: RepositoryName, tag: Tag) -> TagRow;
    tags(repository: RepositoryName, after: Option<String>, limit: usize) -> Page<TagRow>;
    put_tags(repository: RepositoryName, snapshot: Digest, moves: Vec<TagMove>) -> ();
    change_names(repository: RepositoryName, change: NameChange, once: Once, lease: Duration) -> ();
    mark_followed(repository: RepositoryName, tag: Tag, at: Digest) -> ();
    delete_tag(repository: RepositoryName, tag: Tag, expected: Option<TagState>) -> ();
    snapshot(repository: RepositoryName, digest: Digest) -> SnapshotRow;
    snapshots_like(repository: RepositoryName, prefix: DigestPrefix, limit: usize) -> Vec<Digest>;
    snapshots(repository: RepositoryName, after: Option<String>, limit: usize) -> Page<SnapshotRow>;
    delete_snapshot(repository: RepositoryName, digest: Digest) -> ();
    repositories(after: Option<String>, limit: usize) -> Page<RepositoryRow>;
    disk_bytes() -> u64;
    queue(due: bool, limit: usize) -> Vec<Queued>;
    unclaimed(pack: PackId) -> Vec<ObjectId>;
    unheld(pack: PackId) -> Vec<ObjectId>;
    retire_packs(limit: usize) -> Retired;
    forget_packs(packs: Vec<PackId>) -> ();
    claim_sparse_packs(limit: usize, claim: Duration) -> Vec<PackRow>;
    pack_contents(pack: PackId) -> Vec<Packed>;
    finish_compaction(pack: PackId, sizes: PackSizes, moved: Vec<Moved>) -> ();
    record_gc_run(run: GcRun) -> ();
    gc_runs(after: Option<String>, limit: usize) -> Page<GcRun>;
    touch_snapshot(repository: RepositoryName, digest: Digest) -> ();
    pin_snapshot(repository: RepositoryName, digest: Digest, reason: Pin, pinned: bool) -> bool;
    evictable(limit: usize) -> Vec<Evictable>;
    evict_snapshot(snapshot: Evictable) -> bool;
    packs(after: Option<PackId>, limit: usize) -> Vec<PackRow>;
    quarantine(damage: Vec<Damage>) -> Vec<Digest>;
    lift_quarantine(good: Vec<(Digest, String)>) -> u64;
    damaged(after: Option<String>, limit: usize) -> Page<DamagedRow>;
    reassess() -> u64;
    audit(repair: bool) -> Audit;
    unjournaled(limit: usize) -> Vec<Unjournaled>;
    journaled(rows: Vec<JournalRow>) -> ();
    begin_names() -> (u64, NamesCursor);
    names(cursor: NamesCursor, limit: usize) -> (Vec<Record>, Option<NamesCursor>);
    journal_state(most: usize) -> JournalState;
    journal() -> Vec<JournalRow>;
    superfluous_journal(limit: usize) -> Vec<String>;
    forget_journal(keys: Vec<String>) -> ();
    is_empty() -> bool;
    adopt_pack(key: String, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration) -> PackStored;
    adopt_containers(containers: Vec<(Digest, Kind, NewContainer)>) -> Vec<Digest>;
    restore_names(records: Vec<Record>, last: u64) -> Vec<Record>;
}
