//! Names from the journal.

use super::connection::Tx;
use super::error::Outcome;
use super::journal::last_number;
use super::names::{insert_snapshot, make_repository, point_tag, release, remove_snapshot, targets};
use super::objects::add_refs;
use super::{DOMAIN, int};
use crate::metadata::ObjectId;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use std::collections::HashMap;

pub(super) async fn restore_names(tx: &mut Tx, records: &[Record], last: u64) -> Outcome<Vec<Record>> {
    // Nobody else writes names meanwhile.
    sqlx::query("LOCK TABLE manifests, tags, changes IN SHARE ROW EXCLUSIVE MODE").execute(tx.on()).await?;
    let mut restore = Restore { tx, repositories: HashMap::new() };
    let mut lost: HashMap<(&RepositoryName, Digest), &Record> = HashMap::new();
    for record in records {
        match record {
            Record::Snapshot { repository, manifest, .. } => {
                if !restore.snapshot(repository, manifest, record).await? {
                    lost.insert((repository, *manifest), record);
                }
            }
            Record::Tag { repository, tag, manifest, at } => restore.tag(repository, tag, manifest, int(*at)).await?,
            Record::Untag { repository, tag } => restore.untag(repository, tag).await?,
            Record::Delete { repository, manifest } => {
                lost.remove(&(repository, *manifest));
                if let Some((row, object)) = restore.row(repository, manifest).await? {
                    remove_snapshot(restore.tx, row, object).await?;
                }
            }
        }
    }
    let last = int(last).max(last_number(tx).await?);
    if last > 0 {
        sqlx::query("SELECT setval(pg_get_serial_sequence('changes', 'seq')::regclass, $1)").bind(last).execute(tx.on()).await?;
    }
    Ok(lost.into_values().cloned().collect())
}

struct Restore<'a> {
    tx: &'a mut Tx,
    repositories: HashMap<RepositoryName, i64>,
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

    /// Row id and object of a snapshot that exists.
    async fn row(&mut self, repository: &RepositoryName, manifest: &Digest) -> Outcome<Option<(i64, ObjectId)>> {
        let id = self.repository(repository).await?;
        let row = sqlx::query_as(
            "SELECT m.id, m.object FROM objects o JOIN manifests m ON m.object = o.id WHERE o.domain = $1 AND o.digest = $2 AND m.repository = $3",
        );
        Ok(row.bind(DOMAIN).bind(manifest.to_key()).bind(id).fetch_optional(self.tx.on()).await?)
    }

    /// Brings a snapshot back; false if its manifest is not stored, or not as a manifest that holds what it lists.
    async fn snapshot(&mut self, repository: &RepositoryName, manifest: &Digest, record: &Record) -> Outcome<bool> {
        if self.row(repository, manifest).await?.is_some() {
            return Ok(true);
        }
        let stored: Option<(ObjectId, i64, i64)> = sqlx::query_as(
            "SELECT o.id, o.size, c.logical_bytes FROM objects o JOIN containers c ON c.object = o.id
             WHERE o.domain = $1 AND o.digest = $2 AND o.kind = $3",
        )
        .bind(DOMAIN)
        .bind(manifest.to_key())
        .bind(Kind::Manifest as i16)
        .fetch_optional(self.tx.on())
        .await?;
        let Some((object, size, reach)) = stored else { return Ok(false) };
        let id = self.repository(repository).await?;
        insert_snapshot(self.tx, id, object, record, i64::saturating_add(size, reach)).await?;
        Ok(true)
    }

    /// Points a tag; if its snapshot is not there, it points nowhere.
    async fn tag(&mut self, repository: &RepositoryName, tag: &Tag, manifest: &Digest, at: i64) -> Outcome<()> {
        let Some((row, object)) = self.row(repository, manifest).await? else { return self.untag(repository, tag).await };
        let id = self.repository(repository).await?;
        let before = targets(self.tx, id, &[tag]).await?.remove(tag.as_str());
        point_tag(self.tx, id, tag, row, before.is_some(), at).await?;
        add_refs(self.tx, object, 1).await?;
        match before {
            Some(before) => release(self.tx, before.object, 1).await,
            None => Ok(()),
        }
    }

    async fn untag(&mut self, repository: &RepositoryName, tag: &Tag) -> Outcome<()> {
        let id = self.repository(repository).await?;
        let Some(before) = targets(self.tx, id, &[tag]).await?.remove(tag.as_str()) else { return Ok(()) };
        let delete = sqlx::query("DELETE FROM tags WHERE repository = $1 AND name = $2");
        self.tx.execute(delete.bind(id).bind(tag.as_str().to_owned())).await?;
        release(self.tx, before.object, 1).await
    }
}
