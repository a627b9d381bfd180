//! Restores tags and snapshots from the journal.

use super::commit::insert_snapshot;
use super::journal::{last_number, number_after};
use super::names::{Target, point_tag, targets};
use super::objects::{lock_all, release};
use super::quota::Growth;
use super::sessions::make_repository;
use super::snapshots::{find_manifest, remove};
use super::sql::{Sql, values};
use super::tx::{Outcome, Tx};
use super::{ObjectId, events, quota};
use pfr_schema::journal::Record;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use std::collections::HashMap;

pub(super) async fn restore_names(tx: &mut dyn Tx, records: &[Record], last: u64) -> Outcome<Vec<Record>> {
    // The numbers of changes are set, too: readers of changes wait.
    const NUMBERS: Sql = Sql::only_postgres("LOCK TABLE changes IN SHARE ROW EXCLUSIVE MODE");
    lock_all(tx).await?;
    tx.execute(NUMBERS, &[]).await?;
    let mut restore = Restore { tx: &mut *tx, repositories: HashMap::new(), snapshots: 0 };
    let mut lost: HashMap<(&RepositoryName, Digest), &Record> = HashMap::new();
    for record in records {
        match record {
            Record::Snapshot { repository, manifest, .. } => {
                if !restore.snapshot(repository, manifest, record).await? {
                    lost.insert((repository, *manifest), record);
                }
            }
            Record::Tag { repository, tag, manifest, at } => restore.tag(repository, tag, manifest, *at).await?,
            Record::Untag { repository, tag } => restore.untag(repository, tag).await?,
            Record::Delete { repository, manifest } => {
                lost.remove(&(repository, *manifest));
                let id = restore.repository(repository).await?;
                if let Some((row, object)) = find_manifest(restore.tx, id, manifest).await? {
                    remove(restore.tx, row, object).await?;
                    restore.snapshots -= 1;
                }
            }
        }
    }
    let snapshots = restore.snapshots;
    if snapshots != 0 {
        quota::add(tx, Growth { snapshots, ..Growth::default() }).await?;
    }
    let last = last.max(last_number(tx).await?);
    number_after(tx, last).await?;
    events::end(tx).await?;
    Ok(lost.into_values().cloned().collect())
}

struct Restore<'a> {
    tx: &'a mut dyn Tx,
    repositories: HashMap<RepositoryName, i64>,
    /// Snapshots that there are now, less those that there were before.
    snapshots: i64,
}

impl Restore<'_> {
    async fn repository(&mut self, name: &RepositoryName) -> Outcome<i64> {
        if let Some(id) = self.repositories.get(name) {
            return Ok(*id);
        }
        let id = make_repository(self.tx, name).await?;
        self.repositories.insert(name.clone(), id);
        Ok(id)
    }

    /// Brings a snapshot back; false if its manifest is not stored, or not as a manifest that holds
    /// what it lists.
    async fn snapshot(&mut self, repository: &RepositoryName, manifest: &Digest, record: &Record) -> Outcome<bool> {
        let id = self.repository(repository).await?;
        if find_manifest(self.tx, id, manifest).await?.is_some() {
            return Ok(true);
        }
        let find = "SELECT o.id, o.kind, o.size, c.logical_bytes FROM objects o JOIN containers c ON c.object = o.id WHERE o.digest = $1";
        let stored: Option<(ObjectId, Kind, u64, u64)> = self.tx.first(find, values![manifest]).await?;
        let Some((object, kind, size, reach)) = stored.filter(|row| row.1.satisfies(Kind::Image)) else { return Ok(false) };
        insert_snapshot(self.tx, id, object, kind, record, size.saturating_add(reach), None).await?;
        self.snapshots += 1;
        Ok(true)
    }

    /// Points a tag; if its snapshot is not there, it points nowhere.
    async fn tag(&mut self, repository: &RepositoryName, tag: &Tag, digest: &Digest, at: u64) -> Outcome<()> {
        let id = self.repository(repository).await?;
        let Some((manifest, object)) = find_manifest(self.tx, id, digest).await? else { return self.untag(repository, tag).await };
        let target = Target { manifest, object, digest: *digest };
        let before = targets(self.tx, id, &[tag]).await?.remove(tag.as_str());
        if before != Some(target) {
            return point_tag(self.tx, id, tag, target, before, at).await;
        }
        // The tag was moved away and back since then.
        let again = "UPDATE tags SET updated_at = $3 WHERE repository = $1 AND name = $2";
        self.tx.execute(again, values![id, tag, at]).await?;
        Ok(())
    }

    async fn untag(&mut self, repository: &RepositoryName, tag: &Tag) -> Outcome<()> {
        let id = self.repository(repository).await?;
        let Some(before) = targets(self.tx, id, &[tag]).await?.remove(tag.as_str()) else { return Ok(()) };
        self.tx.execute("DELETE FROM tags WHERE repository = $1 AND name = $2", values![id, tag]).await?;
        release(self.tx, before.object, 1).await
    }
}
