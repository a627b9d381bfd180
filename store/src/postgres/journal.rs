//! The way of changes into the journal, and back.

use super::connection::Tx;
use super::error::Outcome;
use super::names::{insert_snapshot, make_repository, point_tag};
use super::objects::add_refs;
use super::{DOMAIN, int, uint};
use crate::error::Error;
use crate::metadata::arguments::at_most;
use crate::metadata::replay::Names;
use crate::metadata::{JournalRow, ObjectId, Unjournaled};
use pfr_schema::journal::Record;
use pfr_schema::{Digest, Kind, RepositoryName};
use std::collections::HashMap;

/// Numbers are handed out before they become visible. Who waits here until nobody is writing a change sees every number below the
/// highest he sees. To be called before anything else in a transaction that sees one state.
async fn settle(tx: &mut Tx) -> Outcome<()> {
    sqlx::query("LOCK TABLE changes IN SHARE MODE").execute(tx.on()).await?;
    Ok(())
}

pub(super) async fn unjournaled(tx: &mut Tx, limit: usize) -> Outcome<Vec<Unjournaled>> {
    settle(tx).await?;
    let rows: Vec<(i64, String)> =
        sqlx::query_as("SELECT seq, record FROM changes ORDER BY seq LIMIT $1").bind(at_most(limit)).fetch_all(tx.on()).await?;
    rows.into_iter()
        .map(|(seq, record)| {
            let record = serde_json::from_str(&record).map_err(|e| Error::Internal(format!("change {seq} cannot be read: {e}")))?;
            Ok(Unjournaled { seq: uint(seq), record })
        })
        .collect()
}

pub(super) async fn journaled(tx: &mut Tx, row: &JournalRow) -> Outcome<()> {
    let insert = "INSERT INTO journal (key, first_seq, last_seq, is_checkpoint) VALUES ($1, $2, $3, $4) ON CONFLICT (key) DO NOTHING";
    tx.execute(sqlx::query(insert).bind(row.key.clone()).bind(int(row.first)).bind(int(row.last)).bind(row.checkpoint)).await?;
    tx.execute(sqlx::query("DELETE FROM changes WHERE seq BETWEEN $1 AND $2").bind(int(row.first)).bind(int(row.last))).await?;
    Ok(())
}

/// The last number handed out.
async fn last_number(tx: &mut Tx) -> Outcome<i64> {
    let last: Option<i64> =
        sqlx::query_scalar("SELECT pg_sequence_last_value(pg_get_serial_sequence('changes', 'seq')::regclass)").fetch_one(tx.on()).await?;
    Ok(last.unwrap_or(0))
}

/// A row of `manifests` on its way into a record.
type RawSnapshot = (i64, String, Vec<u8>, Option<String>, Option<Vec<u8>>, i64, i64);

pub(super) async fn names(tx: &mut Tx) -> Outcome<(u64, Vec<Record>)> {
    settle(tx).await?;
    let last = uint(last_number(tx).await?);
    let mut parents: HashMap<i64, Vec<Digest>> = HashMap::new();
    let rows: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT manifest, digest FROM parents ORDER BY manifest, position").fetch_all(tx.on()).await?;
    for (manifest, key) in rows {
        parents.entry(manifest).or_default().push(Digest::from_key(&key)?);
    }
    // In order of row ids: it is the order of lists.
    let snapshots: Vec<RawSnapshot> = sqlx::query_as(
        "SELECT m.id, r.name, o.digest, m.artifact_type, m.subject, m.pushed_at, m.new_bytes
         FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object ORDER BY m.id",
    )
    .fetch_all(tx.on())
    .await?;
    let tags: Vec<(String, String, Vec<u8>, i64)> = sqlx::query_as(
        "SELECT r.name, t.name, o.digest, t.updated_at FROM tags t JOIN repositories r ON r.id = t.repository
         JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object ORDER BY r.name, t.name",
    )
    .fetch_all(tx.on())
    .await?;
    let mut records = Vec::with_capacity(snapshots.len() + tags.len());
    for (id, repository, manifest, artifact_type, subject, at, new_bytes) in snapshots {
        records.push(Record::Snapshot {
            repository: repository.parse()?,
            manifest: Digest::from_key(&manifest)?,
            parents: parents.remove(&id).unwrap_or_default(),
            artifact_type,
            subject: subject.map(|key| Digest::from_key(&key)).transpose()?,
            at: uint(at),
            new_bytes: uint(new_bytes),
        });
    }
    for (repository, tag, manifest, at) in tags {
        records.push(Record::Tag {
            repository: repository.parse()?,
            tag: tag.parse()?,
            manifest: Digest::from_key(&manifest)?,
            at: uint(at),
        });
    }
    Ok((last, records))
}

pub(super) async fn journal(tx: &mut Tx) -> Outcome<Vec<JournalRow>> {
    let rows: Vec<(String, i64, i64, bool)> =
        sqlx::query_as("SELECT key, first_seq, last_seq, is_checkpoint FROM journal ORDER BY last_seq, key").fetch_all(tx.on()).await?;
    let row = |(key, first, last, checkpoint)| JournalRow { key, first: uint(first), last: uint(last), checkpoint };
    Ok(rows.into_iter().map(row).collect())
}

pub(super) async fn forget_journal(tx: &mut Tx, keys: &[String]) -> Outcome<()> {
    tx.execute_any(keys, || sqlx::query("DELETE FROM journal WHERE key = ANY($1)").bind(keys.to_vec())).await?;
    Ok(())
}

pub(super) async fn is_empty(tx: &mut Tx) -> Outcome<bool> {
    let empty = "SELECT NOT EXISTS (SELECT 1 FROM packs) AND NOT EXISTS (SELECT 1 FROM repositories)";
    Ok(sqlx::query_scalar(empty).fetch_one(tx.on()).await?)
}

pub(super) async fn restore_names(tx: &mut Tx, records: &[Record], last: u64) -> Outcome<Vec<Record>> {
    // Nobody else writes names meanwhile.
    sqlx::query("LOCK TABLE manifests, tags, changes IN SHARE ROW EXCLUSIVE MODE").execute(tx.on()).await?;
    let names = Names::replay(records);
    let snapshots: Vec<&Record> = names.snapshots().collect();
    let tags: Vec<_> = names.tags().collect();
    let mut repositories: HashMap<&RepositoryName, i64> = HashMap::new();
    let mut manifests: HashMap<(&RepositoryName, Digest), (i64, ObjectId)> = HashMap::new();
    let mut lost = Vec::new();
    for record in snapshots {
        let Record::Snapshot { repository, manifest, .. } = record else { continue };
        let stored: Option<(ObjectId, i64, i64)> = sqlx::query_as(
            "SELECT o.id, o.size, c.logical_bytes FROM objects o JOIN containers c ON c.object = o.id
             WHERE o.domain = $1 AND o.digest = $2 AND o.kind = $3",
        )
        .bind(DOMAIN)
        .bind(manifest.to_key())
        .bind(Kind::Manifest as i16)
        .fetch_optional(tx.on())
        .await?;
        let Some((object, size, reach)) = stored else {
            lost.push(record.clone());
            continue;
        };
        let id = match repositories.get(repository) {
            Some(id) => *id,
            None => make_repository(tx, repository).await?,
        };
        repositories.insert(repository, id);
        let row = insert_snapshot(tx, id, object, record, size + reach).await?;
        manifests.insert((repository, *manifest), (row, object));
    }
    for (repository, tag, manifest, at) in tags {
        let (Some((row, object)), Some(id)) = (manifests.get(&(repository, manifest)), repositories.get(repository)) else { continue };
        point_tag(tx, *id, tag, *row, false, int(at)).await?;
        add_refs(tx, *object, 1).await?;
    }
    let last = int(last).max(last_number(tx).await?);
    if last > 0 {
        sqlx::query("SELECT setval(pg_get_serial_sequence('changes', 'seq')::regclass, $1)").bind(last).execute(tx.on()).await?;
    }
    Ok(lost)
}
