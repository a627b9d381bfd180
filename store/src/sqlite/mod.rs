//! [`Metadata`] on SQLite: WAL, `synchronous=FULL`, one writer thread that batches commits, a few readers.

mod connection;
mod ids;
mod names;
mod objects;

use crate::clock::Clock;
use crate::error::Result;
use crate::metadata::{
    Commit, Committed, Location, Metadata, NewFrame, ObjectId, ObjectRow, PackId, PackStored, Page, PushId, RepositoryRow, SnapshotRow,
    TagMove, TagRow,
};
use async_trait::async_trait;
use connection::Database;
use pfr_schema::api::TagState;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
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
        Ok(Self { database: Database::open(Some(path.to_owned())).await?, clock })
    }

    /// A database in memory, for tests.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`] if SQLite cannot be set up.
    pub async fn open_in_memory(clock: Clock) -> Result<Self> {
        Ok(Self { database: Database::open(None).await?, clock })
    }

    fn until(&self, lease: Duration) -> u64 {
        self.clock.now().saturating_add(millis(lease))
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
    async fn open_push(&self, push: PushId, repository: RepositoryName, lease: Duration) -> Result<()> {
        let expires = self.until(lease);
        self.database.write(move |tx| names::open_push(tx, &push, &repository, expires)).await
    }

    async fn renew_push(&self, push: PushId, lease: Duration) -> Result<RepositoryName> {
        let (now, until) = (self.clock.now(), self.until(lease));
        let id = push.clone();
        let (name, expires) = self.database.read(move |tx| names::push(tx, &id, now)).await?;
        // Only past half of the lease: peers died of touching rows on every look.
        if expires < now.saturating_add(millis(lease) / 2) {
            self.database.write(move |tx| names::renew_push(tx, &push, now, until)).await?;
        }
        Ok(name)
    }

    async fn close_push(&self, push: PushId) -> Result<()> {
        self.database.write(move |tx| names::close_push(tx, &push)).await
    }

    async fn begin_pack(&self, key: String, lease: Duration) -> Result<PackId> {
        let until = self.until(lease);
        self.database.write(move |tx| objects::begin_pack(tx, &key, until)).await
    }

    async fn finish_pack(&self, push: PushId, pack: PackId, bytes: u64, frames: Vec<NewFrame>, lease: Duration) -> Result<PackStored> {
        let (now, until) = (self.clock.now(), self.until(lease));
        self.database
            .write(move |tx| {
                names::renew_push(tx, &push, now, until)?;
                objects::finish_pack(tx, pack, bytes, &frames, until)
            })
            .await
    }

    async fn missing(&self, push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Result<Vec<usize>> {
        self.renew_push(push, lease).await?;
        let until = self.until(lease);
        let enough = self.clock.now().saturating_add(millis(lease) / 2);
        let (mut missing, to_raise) = self.database.read(move |tx| objects::missing(tx, &wanted, enough)).await?;
        if !to_raise.is_empty() {
            // What was collected since the look is missing after all.
            missing.extend(self.database.write(move |tx| objects::raise_leases(tx, &to_raise, until)).await?);
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

    async fn commit(&self, push: PushId, commit: Commit) -> Result<Committed> {
        let now = self.clock.now();
        self.database.write(move |tx| names::commit(tx, &push, &commit, now)).await
    }

    async fn tag(&self, repository: RepositoryName, tag: Tag) -> Result<TagRow> {
        self.database.read(move |tx| names::tag(tx, &repository, &tag)).await
    }

    async fn tags(&self, repository: RepositoryName, after: Option<String>, limit: usize) -> Result<Page<TagRow>> {
        self.database.read(move |tx| names::tags(tx, &repository, after.as_deref(), limit)).await
    }

    async fn put_tags(&self, repository: RepositoryName, snapshot: Digest, moves: Vec<TagMove>) -> Result<()> {
        let now = self.clock.now();
        self.database.write(move |tx| names::put_tags(tx, &repository, &snapshot, &moves, now)).await
    }

    async fn delete_tag(&self, repository: RepositoryName, tag: Tag, expected: Option<TagState>) -> Result<()> {
        let now = self.clock.now();
        self.database.write(move |tx| names::delete_tag(tx, &repository, &tag, expected, now)).await
    }

    async fn snapshot(&self, repository: RepositoryName, digest: Digest) -> Result<SnapshotRow> {
        self.database.read(move |tx| names::snapshot(tx, &repository, &digest)).await
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

    fn rows_written(&self) -> u64 {
        self.database.rows_written()
    }
}
