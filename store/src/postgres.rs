//! [`Metadata`] on PostgreSQL: any number of registries over one database.
//!
//! Time is the database's. A transaction locks all objects that it changes with one statement, in
//! id order, before packs, tags and sessions: so transactions never wait for each other in a
//! circle. Every statement that deletes asks again whether it may.
//! The same behaviour suite runs here and against SQLite: where they differ, one of them is wrong.

mod audit;
mod connection;
mod error;
mod gc;
mod index;
mod integrity;
mod journal;
mod leases;
mod lists;
mod names;
mod objects;
mod packs;
mod restore;

use crate::clock::Clock;
use crate::error::Result;
use crate::metadata::{
    Audit, Collected, Commit, Committed, Damage, DamagedRow, Evictable, GcRun, JournalRow, JournalState, Lease, Location, Metadata, Moved,
    NameChange, NamesCursor, NewContainer, NewFrame, ObjectId, ObjectRow, Once, PackId, PackRow, PackSizes, PackStored, Packed, Page, Pin,
    PushId, Queued, RepositoryRow, Retired, Session, SnapshotRow, TagMove, TagRow, Unfinished, Unjournaled,
};
use async_trait::async_trait;
use connection::Database;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, DigestPrefix, Kind, RepositoryName, Tag};
use std::time::Duration;

/// Everything lives in one domain until tokens and domains exist.
const DOMAIN: i64 = 1;

/// Connections of one process.
const MAX_CONNECTIONS: u32 = 16;

/// A host that loses power says nothing more: without a limit who waits for it waits for ever.
const LIMIT: Duration = Duration::from_secs(5 * 60);

/// How to use a database.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    /// Connections at a time, at most; who needs one more waits for it.
    pub max_connections: u32,
    /// How long a transaction may take before its connection is taken for lost. An audit may take longer.
    pub limit: Duration,
    /// Time instead of the database's own: for tests.
    pub clock: Option<Clock>,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self { max_connections: MAX_CONNECTIONS, limit: LIMIT, clock: None }
    }
}

/// Metadata in one PostgreSQL database (15 or newer). Any number of processes may use it at the same time.
#[derive(Debug)]
pub struct PostgresMetadata {
    database: Database,
}

impl PostgresMetadata {
    /// Connects to `postgres://user:password@host:port/database` and brings its tables up to date.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if it cannot be reached, or its tables were written by a newer version.
    pub async fn connect(url: &str, options: PostgresOptions) -> Result<Self> {
        Ok(Self { database: Database::connect(url, options).await? })
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// PostgreSQL's integers are signed; nothing here comes near 2⁶³.
fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn uint(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Digests as the tables keep them.
fn keys(digests: &[Digest]) -> Vec<Vec<u8>> {
    digests.iter().map(Digest::to_key).collect()
}

#[async_trait]
impl Metadata for PostgresMetadata {
    async fn open_push(&self, push: PushId, repository: RepositoryName, lease: Duration) -> Result<()> {
        self.database
            .write((push, repository, lease), |tx, (push, repository, lease)| {
                Box::pin(names::open_push(tx, push, repository, millis(*lease)))
            })
            .await
    }

    async fn renew_push(&self, push: PushId, lease: Duration) -> Result<RepositoryName> {
        self.database
            .statements((push, lease), |tx, (push, lease)| {
                Box::pin(async move { Ok(names::renew_push(tx, push, millis(*lease)).await?.name) })
            })
            .await
    }

    async fn close_push(&self, push: PushId) -> Result<()> {
        self.database.write(push, |tx, push| Box::pin(names::close_push(tx, push))).await
    }

    async fn unfinished(&self, limit: usize) -> Result<Vec<Unfinished>> {
        self.database.statements(limit, |tx, limit| Box::pin(leases::unfinished(tx, *limit))).await
    }

    async fn end_pushes(&self) -> Result<u64> {
        self.database.write((), |tx, ()| Box::pin(leases::end_all(tx))).await
    }

    async fn leases(&self, ids: Vec<ObjectId>) -> Result<Vec<(ObjectId, Lease)>> {
        self.database.statements(ids, |tx, ids| Box::pin(leases::of(tx, ids))).await
    }

    async fn begin_pack(&self, key: String, lease: Duration) -> Result<PackId> {
        self.database.write((key, lease), |tx, (key, lease)| Box::pin(index::begin_pack(tx, key, millis(*lease)))).await
    }

    async fn renew_pack(&self, push: Option<PushId>, pack: PackId, lease: Duration) -> Result<()> {
        self.database
            .write((push, pack, lease), |tx, (push, pack, lease)| Box::pin(index::renew_pack(tx, push.as_ref(), *pack, millis(*lease))))
            .await
    }

    async fn finish_pack(
        &self,
        push: PushId,
        pack: PackId,
        sizes: PackSizes,
        frames: Vec<NewFrame>,
        lease: Duration,
    ) -> Result<PackStored> {
        self.database
            .write((push, pack, sizes, frames, lease), |tx, (push, pack, sizes, frames, lease)| {
                Box::pin(index::finish_pack(tx, push, *pack, *sizes, frames, millis(*lease)))
            })
            .await
    }

    async fn missing(&self, push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Result<Vec<usize>> {
        self.database
            .statements((push, wanted, lease), |tx, (push, wanted, lease)| Box::pin(objects::missing(tx, push, wanted, millis(*lease))))
            .await
    }

    async fn locate(&self, digests: Vec<Digest>) -> Result<Vec<Option<Location>>> {
        self.database.statements(digests, |tx, digests| Box::pin(objects::locate(tx, digests))).await
    }

    async fn find(&self, digests: Vec<Digest>) -> Result<Vec<Option<ObjectRow>>> {
        self.database.statements(digests, |tx, digests| Box::pin(objects::find(tx, digests))).await
    }

    async fn objects(&self, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>> {
        self.database.statements(ids, |tx, ids| Box::pin(objects::objects(tx, ids))).await
    }

    async fn session(&self, session: PushId) -> Result<Session> {
        self.database.statements(session, |tx, session| Box::pin(names::session(tx, session))).await
    }

    async fn commit(&self, push: PushId, commit: Commit) -> Result<Committed> {
        self.database.write((push, commit), |tx, (push, commit)| Box::pin(names::commit(tx, push, commit))).await
    }

    async fn tag(&self, repository: RepositoryName, tag: Tag) -> Result<TagRow> {
        self.database.snapshot((repository, tag), |tx, (repository, tag)| Box::pin(lists::tag(tx, repository, tag))).await
    }

    async fn tags(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<TagRow>> {
        self.database
            .snapshot((repository, after, limit), |tx, (repository, after, limit)| {
                Box::pin(lists::tags(tx, repository, after.as_deref(), *limit))
            })
            .await
    }

    async fn put_tags(&self, repository: RepositoryName, snapshot: Digest, moves: Vec<TagMove>) -> Result<()> {
        self.database
            .write((repository, snapshot, moves), |tx, (repository, snapshot, moves)| {
                Box::pin(names::put_tags(tx, repository, snapshot, moves))
            })
            .await
    }

    async fn change_names(&self, repository: RepositoryName, change: NameChange, once: Once, lease: Duration) -> Result<()> {
        self.database
            .write((repository, change, once, lease), |tx, (repository, change, once, lease)| {
                Box::pin(names::change_names(tx, repository, change, once, millis(*lease)))
            })
            .await
    }

    async fn mark_followed(&self, repository: RepositoryName, tag: Tag, at: Digest) -> Result<()> {
        self.database
            .write((repository, tag, at), |tx, (repository, tag, at)| Box::pin(names::mark_followed(tx, repository, tag, at)))
            .await
    }

    async fn delete_tag(&self, repository: RepositoryName, tag: Tag, expected: Option<TagState>) -> Result<()> {
        self.database
            .write((repository, tag, expected), |tx, (repository, tag, expected)| {
                Box::pin(names::delete_tag(tx, repository, tag, *expected))
            })
            .await
    }

    async fn snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<SnapshotRow> {
        self.database.snapshot((repository, digest), |tx, (repository, digest)| Box::pin(lists::snapshot(tx, repository, digest))).await
    }

    async fn snapshots_like(&self, repository: RepositoryName, prefix: DigestPrefix, limit: usize) -> Result<Vec<Digest>> {
        self.database
            .snapshot((repository, prefix, limit), |tx, (repository, prefix, limit)| {
                Box::pin(lists::snapshots_like(tx, repository, prefix, *limit))
            })
            .await
    }

    async fn snapshots(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<SnapshotRow>> {
        self.database
            .snapshot((repository, after, limit), |tx, (repository, after, limit)| {
                Box::pin(lists::snapshots(tx, repository, after.as_deref(), *limit))
            })
            .await
    }

    async fn delete_snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<()> {
        self.database.write((repository, digest), |tx, (repository, digest)| Box::pin(names::delete_snapshot(tx, repository, digest))).await
    }

    async fn repositories(&self, after: Option<String>, limit: usize) -> Result<Page<RepositoryRow>> {
        self.database.statements((after, limit), |tx, (after, limit)| Box::pin(lists::repositories(tx, after.as_deref(), *limit))).await
    }

    async fn disk_bytes(&self) -> Result<u64> {
        self.database.statements((), |tx, ()| Box::pin(objects::disk_bytes(tx))).await
    }

    async fn collect(&self, budget: usize) -> Result<Collected> {
        gc::collect(&self.database, budget).await
    }

    async fn queue(&self, due: bool, limit: usize) -> Result<Vec<Queued>> {
        self.database.statements((due, limit), |tx, (due, limit)| Box::pin(gc::queue(tx, *due, *limit))).await
    }

    async fn unclaimed(&self, pack: PackId) -> Result<Vec<ObjectId>> {
        self.database.statements(pack, |tx, pack| Box::pin(gc::unclaimed(tx, *pack, usize::MAX))).await
    }

    async fn unheld(&self, pack: PackId) -> Result<Vec<ObjectId>> {
        self.database.statements(pack, |tx, pack| Box::pin(gc::unheld(tx, *pack))).await
    }

    async fn retire_packs(&self, limit: usize) -> Result<Retired> {
        self.database.write(limit, |tx, limit| Box::pin(packs::retire_packs(tx, *limit))).await
    }

    async fn drained_packs(&self, horizon: Duration, limit: usize) -> Result<Vec<PackRow>> {
        self.database
            .statements((horizon, limit), |tx, (horizon, limit)| Box::pin(packs::drained_packs(tx, millis(*horizon), *limit)))
            .await
    }

    async fn forget_packs(&self, packs: Vec<PackId>) -> Result<()> {
        self.database.write(packs, |tx, packs| Box::pin(packs::forget_packs(tx, packs))).await
    }

    async fn claim_sparse_packs(&self, limit: usize, claim: Duration) -> Result<Vec<PackRow>> {
        self.database.write((limit, claim), |tx, (limit, claim)| Box::pin(packs::claim_sparse_packs(tx, *limit, millis(*claim)))).await
    }

    async fn pack_contents(&self, pack: PackId) -> Result<Vec<Packed>> {
        self.database.statements(pack, |tx, pack| Box::pin(packs::pack_contents(tx, *pack))).await
    }

    async fn finish_compaction(&self, pack: PackId, sizes: PackSizes, moved: Vec<Moved>) -> Result<()> {
        self.database
            .write((pack, sizes, moved), |tx, (pack, sizes, moved)| Box::pin(packs::finish_compaction(tx, *pack, *sizes, moved)))
            .await
    }

    async fn record_gc_run(&self, run: GcRun) -> Result<()> {
        self.database.write(run, |tx, run| Box::pin(packs::record_gc_run(tx, run))).await
    }

    async fn gc_runs(&self, after: Option<String>, limit: usize) -> Result<Page<GcRun>> {
        self.database.statements((after, limit), |tx, (after, limit)| Box::pin(packs::gc_runs(tx, after.as_deref(), *limit))).await
    }

    async fn touch_snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<()> {
        self.database.write((repository, digest), |tx, (repository, digest)| Box::pin(names::touch_snapshot(tx, repository, digest))).await
    }

    async fn pin_snapshot(&self, repository: RepositoryName, digest: Digest, reason: Pin, pinned: bool) -> Result<bool> {
        self.database
            .write((repository, digest, reason, pinned), |tx, (repository, digest, reason, pinned)| {
                Box::pin(names::pin_snapshot(tx, repository, digest, *reason, *pinned))
            })
            .await
    }

    async fn evictable(&self, limit: usize) -> Result<Vec<Evictable>> {
        self.database.statements(limit, |tx, limit| Box::pin(lists::evictable(tx, *limit))).await
    }

    async fn evict_snapshot(&self, snapshot: Evictable) -> Result<bool> {
        self.database.write(snapshot, |tx, snapshot| Box::pin(names::evict_snapshot(tx, snapshot))).await
    }

    async fn packs(&self, after: Option<PackId>, limit: usize) -> Result<Vec<PackRow>> {
        self.database.statements((after, limit), |tx, (after, limit)| Box::pin(packs::packs(tx, *after, *limit))).await
    }

    async fn quarantine(&self, damage: Vec<Damage>) -> Result<Vec<Digest>> {
        self.database.write_long(damage, |tx, damage| Box::pin(integrity::quarantine(tx, damage))).await
    }

    async fn lift_quarantine(&self, good: Vec<(Digest, String)>) -> Result<u64> {
        self.database.write_long(good, |tx, good| Box::pin(integrity::lift_quarantine(tx, good))).await
    }

    async fn damaged(&self, after: Option<String>, limit: usize) -> Result<Page<DamagedRow>> {
        self.database.snapshot((after, limit), |tx, (after, limit)| Box::pin(integrity::damaged(tx, after.as_deref(), *limit))).await
    }

    async fn reassess(&self) -> Result<u64> {
        self.database.write_long((), |tx, ()| Box::pin(integrity::reassess(tx))).await
    }

    async fn audit(&self, repair: bool) -> Result<Audit> {
        self.database.audit(repair, |tx, repair| Box::pin(audit::audit(tx, *repair))).await
    }

    async fn unjournaled(&self, limit: usize) -> Result<Vec<Unjournaled>> {
        self.database.snapshot(limit, |tx, limit| Box::pin(journal::unjournaled(tx, *limit))).await
    }

    async fn journaled(&self, rows: Vec<JournalRow>) -> Result<()> {
        self.database.write(rows, |tx, rows| Box::pin(journal::journaled(tx, rows))).await
    }

    async fn begin_names(&self) -> Result<(u64, NamesCursor)> {
        self.database.snapshot((), |tx, ()| Box::pin(journal::begin_names(tx))).await
    }

    async fn names(&self, cursor: NamesCursor, limit: usize) -> Result<(Vec<Record>, Option<NamesCursor>)> {
        self.database.snapshot((cursor, limit), |tx, (cursor, limit)| Box::pin(journal::names(tx, cursor, *limit))).await
    }

    async fn journal_state(&self, most: usize) -> Result<JournalState> {
        self.database.snapshot(most, |tx, most| Box::pin(journal::journal_state(tx, *most))).await
    }

    async fn journal(&self) -> Result<Vec<JournalRow>> {
        self.database.statements((), |tx, ()| Box::pin(journal::journal(tx))).await
    }

    async fn superfluous_journal(&self, limit: usize) -> Result<Vec<String>> {
        self.database.snapshot(limit, |tx, limit| Box::pin(journal::superfluous(tx, *limit))).await
    }

    async fn forget_journal(&self, keys: Vec<String>) -> Result<()> {
        self.database.write(keys, |tx, keys| Box::pin(journal::forget_journal(tx, keys))).await
    }

    async fn is_empty(&self) -> Result<bool> {
        self.database.statements((), |tx, ()| Box::pin(journal::is_empty(tx))).await
    }

    async fn adopt_pack(&self, key: String, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration) -> Result<PackStored> {
        self.database
            .write((key, sizes, frames, lease), |tx, (key, sizes, frames, lease)| {
                Box::pin(index::adopt_pack(tx, key, *sizes, frames, millis(*lease)))
            })
            .await
    }

    async fn adopt_containers(&self, containers: Vec<(Digest, Kind, NewContainer)>) -> Result<Vec<Digest>> {
        self.database.write(containers, |tx, containers| Box::pin(index::adopt_containers(tx, containers))).await
    }

    async fn restore_names(&self, records: Vec<Record>, last: u64) -> Result<Vec<Record>> {
        self.database.write((records, last), |tx, (records, last)| Box::pin(restore::restore_names(tx, records, *last))).await
    }

    fn rows_written(&self) -> u64 {
        self.database.rows_written()
    }
}
