//! [`Metadata`] on SQLite: WAL, `synchronous=FULL`, one writer thread that batches commits, a few readers.

mod audit;
mod connection;
mod gc;
mod integrity;
mod journal;
mod leases;
mod names;
mod objects;
mod restore;

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::metadata::{
    Audit, Collected, Commit, Committed, Damage, DamagedRow, Evictable, GcRun, JournalRow, JournalState, Lease, Location, Metadata, Moved,
    NameChange, NamesCursor, NewContainer, NewFrame, ObjectId, ObjectRow, Once, PackId, PackRow, PackSizes, PackStored, Packed, Page, Pin,
    PushId, Queued, RepositoryRow, Retired, Session, SnapshotRow, TagMove, TagRow, Unfinished, Unjournaled,
};
use crate::room::{Freeing, MadeRoom};
use async_trait::async_trait;
use connection::Database;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, DigestPrefix, Kind, RepositoryName, Tag};
use std::path::Path;
use std::time::Duration;

/// Everything lives in one domain until tokens and domains exist.
const DOMAIN: i64 = 1;

/// Metadata in one SQLite file. Several processes may open the same file.
#[derive(Debug)]
pub struct SqliteMetadata {
    database: Database,
    clock: Clock,
}

impl SqliteMetadata {
    /// Opens (or creates) the file and brings its tables up to date.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if it cannot be opened, is no database, or was written by a newer version.
    pub async fn open(path: &Path, clock: Clock) -> Result<Self> {
        Self::open_above(path, clock, None).await
    }

    /// The same; what stores something new is refused while fewer than `floor` bytes are free on the file's disk. By default that is
    /// 64 MiB, or a twentieth of a smaller file system.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_above(path: &Path, clock: Clock, floor: Option<u64>) -> Result<Self> {
        Ok(Self { database: Database::open(Some(path.to_owned()), floor).await?, clock })
    }

    /// A database in memory, for tests.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if SQLite cannot be set up.
    pub async fn open_in_memory(clock: Clock) -> Result<Self> {
        Ok(Self { database: Database::open(None, None).await?, clock })
    }

    fn until(&self, lease: Duration) -> u64 {
        self.clock.now().saturating_add(millis(lease))
    }

    /// A live session, its lease renewed if less than half of it is left: a write on every look would cost more than the look.
    async fn live_push(&self, push: PushId, lease: Duration) -> Result<names::LivePush> {
        let (now, until) = (self.clock.now(), self.until(lease));
        let id = push.clone();
        let session = self.database.read(move |tx| names::push(tx, &id, now)).await?;
        if session.expires < now.saturating_add(millis(lease) / 2) {
            self.database.write(move |tx| names::renew_push(tx, &push, now, until)).await?;
        }
        Ok(session)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// SQLite's integers are signed; nothing here comes near 2⁶³.
fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn uint(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

#[async_trait]
impl Metadata for SqliteMetadata {
    async fn make_room(&self, work: Freeing) -> Result<MadeRoom> {
        self.database.make_room(work).await
    }

    async fn open_push(&self, push: PushId, repository: RepositoryName, lease: Duration) -> Result<()> {
        let expires = self.until(lease);
        self.database.grow(move |tx| names::open_push(tx, &push, &repository, expires)).await
    }

    async fn renew_push(&self, push: PushId, lease: Duration) -> Result<RepositoryName> {
        Ok(self.live_push(push, lease).await?.repository)
    }

    async fn close_push(&self, push: PushId) -> Result<()> {
        let now = self.clock.now();
        self.database.write(move |tx| names::close_push(tx, &push, now)).await
    }

    async fn unfinished(&self, limit: usize) -> Result<Vec<Unfinished>> {
        let now = self.clock.now();
        self.database.read(move |tx| leases::unfinished(tx, now, limit)).await
    }

    async fn end_pushes(&self) -> Result<u64> {
        let now = self.clock.now();
        self.database.write(move |tx| leases::end_all(tx, now)).await
    }

    async fn leases(&self, ids: Vec<ObjectId>) -> Result<Vec<(ObjectId, Lease)>> {
        let now = self.clock.now();
        self.database.read(move |tx| leases::of(tx, &ids, now)).await
    }

    async fn begin_pack(&self, key: String, lease: Duration) -> Result<PackId> {
        let until = self.until(lease);
        self.database.write(move |tx| objects::begin_pack(tx, &key, until)).await
    }

    async fn renew_pack(&self, push: Option<PushId>, pack: PackId, lease: Duration) -> Result<()> {
        let (now, until) = (self.clock.now(), self.until(lease));
        self.database
            .write(move |tx| {
                objects::renew_pack(tx, pack, until)?;
                push.map_or(Ok(()), |push| names::renew_push(tx, &push, now, until).map(drop))
            })
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
        let (now, until) = (self.clock.now(), self.until(lease));
        self.database
            .grow(move |tx| {
                // The pack first: who lost it must learn so, although its session is over too.
                objects::renew_pack(tx, pack, until)?;
                let number = names::renew_push(tx, &push, now, until)?;
                objects::finish_pack(tx, pack, sizes, &frames, objects::For::Session { number, now, until })
            })
            .await
    }

    async fn missing(&self, push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Result<Vec<usize>> {
        let session = self.live_push(push, lease).await?.number;
        let now = self.clock.now();
        let (mut missing, to_lease) = self.database.read(move |tx| objects::missing(tx, &wanted, session)).await?;
        if !to_lease.is_empty() {
            // What was collected since the look is missing after all.
            missing.extend(self.database.grow(move |tx| objects::lease_all(tx, &to_lease, session, now)).await?);
            missing.sort_unstable();
        }
        Ok(missing)
    }

    async fn locate(&self, digests: Vec<Digest>) -> Result<Vec<Option<Location>>> {
        self.database.read(move |tx| objects::locate(tx, &digests)).await
    }

    async fn find(&self, digests: Vec<Digest>) -> Result<Vec<Option<ObjectRow>>> {
        self.database.read(move |tx| objects::find(tx, &digests)).await
    }

    async fn objects(&self, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>> {
        self.database.read(move |tx| objects::objects(tx, &ids)).await
    }

    async fn session(&self, session: PushId) -> Result<Session> {
        let now = self.clock.now();
        self.database.read(move |tx| names::session(tx, &session, now)).await
    }

    async fn commit(&self, push: PushId, commit: Commit) -> Result<Committed> {
        let now = self.clock.now();
        self.database.grow(move |tx| names::commit(tx, &push, &commit, now)).await
    }

    async fn tag(&self, repository: RepositoryName, tag: Tag) -> Result<TagRow> {
        self.database.read(move |tx| names::tag(tx, &repository, &tag)).await
    }

    async fn tags(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<TagRow>> {
        self.database.read(move |tx| names::tags(tx, &repository, after.as_deref(), limit)).await
    }

    async fn put_tags(&self, repository: RepositoryName, snapshot: Digest, moves: Vec<TagMove>) -> Result<()> {
        let now = self.clock.now();
        self.database.grow(move |tx| names::put_tags(tx, &repository, &snapshot, &moves, now)).await
    }

    async fn change_names(&self, repository: RepositoryName, change: NameChange, once: Once, lease: Duration) -> Result<()> {
        let (now, until) = (self.clock.now(), self.until(lease));
        // Deletions go on while the disk is nearly full.
        let grows = matches!(change, NameChange::PutTags { .. });
        let work = move |tx: &rusqlite::Connection| names::change_names(tx, &repository, &change, &once, now, until);
        if grows { self.database.grow(work).await } else { self.database.write(work).await }
    }

    async fn mark_followed(&self, repository: RepositoryName, tag: Tag, at: Digest) -> Result<()> {
        self.database.grow(move |tx| names::mark_followed(tx, &repository, &tag, &at)).await
    }

    async fn delete_tag(&self, repository: RepositoryName, tag: Tag, expected: Option<TagState>) -> Result<()> {
        let now = self.clock.now();
        self.database.write(move |tx| names::delete_tag(tx, &repository, &tag, expected, now)).await
    }

    async fn snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<SnapshotRow> {
        self.database.read(move |tx| names::snapshot(tx, &repository, &digest)).await
    }

    async fn snapshots_like(&self, repository: RepositoryName, prefix: DigestPrefix, limit: usize) -> Result<Vec<Digest>> {
        self.database.read(move |tx| names::snapshots_like(tx, &repository, &prefix, limit)).await
    }

    async fn snapshots(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<SnapshotRow>> {
        self.database.read(move |tx| names::snapshots(tx, &repository, after.as_deref(), limit)).await
    }

    async fn delete_snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<()> {
        let now = self.clock.now();
        self.database.write(move |tx| names::delete_snapshot(tx, &repository, &digest, now)).await
    }

    async fn repositories(&self, after: Option<String>, limit: usize) -> Result<Page<RepositoryRow>> {
        self.database.read(move |tx| names::repositories(tx, after.as_deref(), limit)).await
    }

    async fn disk_bytes(&self) -> Result<u64> {
        self.database.read(objects::disk_bytes).await
    }

    async fn collect(&self, budget: usize) -> Result<Collected> {
        let now = self.clock.now();
        let mut broken: Vec<ObjectId> = Vec::new();
        loop {
            let parked = broken.clone();
            match self.database.write_politely(move |tx, others_wait| gc::collect(tx, budget, now, &parked, others_wait)).await {
                // It was rolled back: the same again without that one.
                Err(Error::Broken { container, .. }) if !broken.contains(&container) => broken.push(container),
                other => return other,
            }
        }
    }

    async fn queue(&self, due: bool, limit: usize) -> Result<Vec<Queued>> {
        let now = if due { self.clock.now() } else { u64::MAX };
        self.database.read(move |tx| gc::queue(tx, now, limit)).await
    }

    async fn unclaimed(&self, pack: PackId) -> Result<Vec<ObjectId>> {
        let now = self.clock.now();
        self.database.read(move |tx| gc::unclaimed(tx, pack, now, i32::MAX as usize)).await
    }

    async fn unheld(&self, pack: PackId) -> Result<Vec<ObjectId>> {
        self.database.read(move |tx| gc::unheld(tx, pack)).await
    }

    async fn retire_packs(&self, limit: usize) -> Result<Retired> {
        let now = self.clock.now();
        self.database.write(move |tx| gc::retire_packs(tx, now, limit)).await
    }

    async fn drained_packs(&self, horizon: Duration, limit: usize) -> Result<Vec<PackRow>> {
        let before = self.clock.now().saturating_sub(millis(horizon));
        self.database.read(move |tx| gc::drained_packs(tx, before, limit)).await
    }

    async fn forget_packs(&self, packs: Vec<PackId>) -> Result<()> {
        self.database.write(move |tx| gc::forget_packs(tx, &packs)).await
    }

    async fn claim_sparse_packs(&self, limit: usize, claim: Duration) -> Result<Vec<PackRow>> {
        let (now, until) = (self.clock.now(), self.until(claim));
        self.database.write(move |tx| gc::claim_sparse_packs(tx, limit, now, until)).await
    }

    async fn pack_contents(&self, pack: PackId) -> Result<Vec<Packed>> {
        self.database.read(move |tx| gc::pack_contents(tx, pack)).await
    }

    async fn finish_compaction(&self, pack: PackId, sizes: PackSizes, moved: Vec<Moved>) -> Result<()> {
        let now = self.clock.now();
        self.database.write(move |tx| gc::finish_compaction(tx, pack, sizes, &moved, now)).await
    }

    async fn record_gc_run(&self, run: GcRun) -> Result<()> {
        self.database.write(move |tx| gc::record_gc_run(tx, &run)).await
    }

    async fn gc_runs(&self, after: Option<String>, limit: usize) -> Result<Page<GcRun>> {
        self.database.read(move |tx| gc::gc_runs(tx, after.as_deref(), limit)).await
    }

    async fn touch_snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<()> {
        let now = self.clock.now();
        self.database.write(move |tx| names::touch_snapshot(tx, &repository, &digest, now)).await
    }

    async fn pin_snapshot(&self, repository: RepositoryName, digest: Digest, reason: Pin, pinned: bool) -> Result<bool> {
        self.database.write(move |tx| names::pin_snapshot(tx, &repository, &digest, reason, pinned)).await
    }

    async fn evictable(&self, limit: usize) -> Result<Vec<Evictable>> {
        self.database.read(move |tx| names::evictable(tx, limit)).await
    }

    async fn evict_snapshot(&self, snapshot: Evictable) -> Result<bool> {
        let now = self.clock.now();
        self.database.write(move |tx| names::evict_snapshot(tx, &snapshot, now)).await
    }

    async fn packs(&self, after: Option<PackId>, limit: usize) -> Result<Vec<PackRow>> {
        self.database.read(move |tx| gc::packs(tx, after, limit)).await
    }

    async fn quarantine(&self, damage: Vec<Damage>) -> Result<Vec<Digest>> {
        let now = self.clock.now();
        self.database.write(move |tx| integrity::quarantine(tx, &damage, now)).await
    }

    async fn lift_quarantine(&self, good: Vec<(Digest, String)>) -> Result<u64> {
        self.database.write(move |tx| integrity::lift_quarantine(tx, &good)).await
    }

    async fn damaged(&self, after: Option<String>, limit: usize) -> Result<Page<DamagedRow>> {
        self.database.read(move |tx| integrity::damaged(tx, after.as_deref(), limit)).await
    }

    async fn reassess(&self) -> Result<u64> {
        self.database.write(integrity::reassess).await
    }

    async fn audit(&self, repair: bool) -> Result<Audit> {
        if repair { self.database.write(|tx| audit::audit(tx, true)).await } else { self.database.read(|tx| audit::audit(tx, false)).await }
    }

    async fn unjournaled(&self, limit: usize) -> Result<Vec<Unjournaled>> {
        self.database.read(move |tx| journal::unjournaled(tx, limit)).await
    }

    async fn journaled(&self, rows: Vec<JournalRow>) -> Result<()> {
        self.database.write(move |tx| rows.iter().try_for_each(|row| journal::journaled(tx, row))).await
    }

    async fn begin_names(&self) -> Result<(u64, NamesCursor)> {
        self.database.read(journal::begin_names).await
    }

    async fn names(&self, cursor: NamesCursor, limit: usize) -> Result<(Vec<Record>, Option<NamesCursor>)> {
        self.database.read(move |tx| journal::names(tx, &cursor, limit)).await
    }

    async fn journal_state(&self, most: usize) -> Result<JournalState> {
        self.database.read(move |tx| journal::journal_state(tx, most)).await
    }

    async fn journal(&self) -> Result<Vec<JournalRow>> {
        self.database.read(journal::journal).await
    }

    async fn superfluous_journal(&self, limit: usize) -> Result<Vec<String>> {
        self.database.read(move |tx| journal::superfluous(tx, limit)).await
    }

    async fn forget_journal(&self, keys: Vec<String>) -> Result<()> {
        self.database.write(move |tx| journal::forget_journal(tx, &keys)).await
    }

    async fn is_empty(&self) -> Result<bool> {
        self.database.read(journal::is_empty).await
    }

    async fn adopt_pack(&self, key: String, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration) -> Result<PackStored> {
        let until = self.until(lease);
        self.database.write(move |tx| objects::adopt_pack(tx, &key, sizes, &frames, until)).await
    }

    async fn adopt_containers(&self, containers: Vec<(Digest, Kind, NewContainer)>) -> Result<Vec<Digest>> {
        self.database.write(move |tx| objects::adopt_containers(tx, &containers)).await
    }

    async fn restore_names(&self, records: Vec<Record>, last: u64) -> Result<Vec<Record>> {
        let now = self.clock.now();
        self.database.write(move |tx| restore::restore_names(tx, &records, last, now)).await
    }

    fn rows_written(&self) -> u64 {
        self.database.rows_written()
    }
}
