//! The way of changes into the journal.

use super::connection::Tx;
use super::error::Outcome;
use super::{int, uint};
use crate::error::Error;
use crate::journal::checkpoint_of;
use crate::metadata::arguments::at_most;
use crate::metadata::{JournalRow, JournalState, NamesCursor, Unjournaled};
use pfr_schema::Digest;
use pfr_schema::journal::Record;
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

pub(super) async fn journaled(tx: &mut Tx, rows: &[JournalRow]) -> Outcome<()> {
    for row in rows {
        let insert = sqlx::query(
            "INSERT INTO journal (key, first_seq, last_seq, is_checkpoint, records) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (key) DO NOTHING",
        );
        let insert = insert.bind(row.key.clone()).bind(int(row.first)).bind(int(row.last)).bind(row.checkpoint).bind(int(row.records));
        tx.execute(insert).await?;
        if !row.checkpoint {
            tx.execute(sqlx::query("DELETE FROM changes WHERE seq BETWEEN $1 AND $2").bind(int(row.first)).bind(int(row.last))).await?;
        }
    }
    Ok(())
}

/// The last number handed out.
pub(super) async fn last_number(tx: &mut Tx) -> Outcome<i64> {
    let last: Option<i64> =
        sqlx::query_scalar("SELECT pg_sequence_last_value(pg_get_serial_sequence('changes', 'seq')::regclass)").fetch_one(tx.on()).await?;
    Ok(last.unwrap_or(0))
}

/// A row of `manifests` on its way into a record.
type RawSnapshot = (i64, String, Vec<u8>, Option<String>, Option<Vec<u8>>, i64, i64);

/// The lock is held for these two numbers only: names are read without one.
pub(super) async fn begin_names(tx: &mut Tx) -> Outcome<(u64, NamesCursor)> {
    settle(tx).await?;
    let last = uint(last_number(tx).await?);
    let until: Option<i64> = sqlx::query_scalar("SELECT max(id) FROM manifests").fetch_one(tx.on()).await?;
    Ok((last, NamesCursor::Snapshots { after: 0, until: until.unwrap_or(0) }))
}

pub(super) async fn names(tx: &mut Tx, cursor: &NamesCursor, limit: usize) -> Outcome<(Vec<Record>, Option<NamesCursor>)> {
    match cursor {
        NamesCursor::Snapshots { after, until } => snapshots(tx, *after, *until, limit).await,
        NamesCursor::Tags { repository, tag } => tags(tx, *repository, tag, limit).await,
    }
}

/// In order of row ids: it is the order of lists.
async fn snapshots(tx: &mut Tx, after: i64, until: i64, limit: usize) -> Outcome<(Vec<Record>, Option<NamesCursor>)> {
    let snapshots: Vec<RawSnapshot> = sqlx::query_as(
        "SELECT m.id, r.name, o.digest, m.artifact_type, m.subject, m.pushed_at, m.new_bytes
         FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
         WHERE m.id > $1 AND m.id <= $2 ORDER BY m.id LIMIT $3",
    )
    .bind(after)
    .bind(until)
    .bind(at_most(limit))
    .fetch_all(tx.on())
    .await?;
    let Some(last) = snapshots.last().map(|row| row.0) else { return Ok((Vec::new(), Some(NamesCursor::TAGS))) };
    let mut parents: HashMap<i64, Vec<Digest>> = HashMap::new();
    let rows: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT manifest, digest FROM parents WHERE manifest > $1 AND manifest <= $2 ORDER BY manifest, position")
            .bind(after)
            .bind(last)
            .fetch_all(tx.on())
            .await?;
    for (manifest, key) in rows {
        parents.entry(manifest).or_default().push(Digest::from_key(&key)?);
    }
    let mut records = Vec::with_capacity(snapshots.len());
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
    Ok((records, Some(NamesCursor::Snapshots { after: last, until })))
}

/// A row of `tags` on its way into a record.
type RawTag = (i64, String, String, Vec<u8>, i64);

async fn tags(tx: &mut Tx, repository: i64, tag: &str, limit: usize) -> Outcome<(Vec<Record>, Option<NamesCursor>)> {
    let tags: Vec<RawTag> = sqlx::query_as(
        "SELECT t.repository, r.name, t.name, o.digest, t.updated_at FROM tags t JOIN repositories r ON r.id = t.repository
         JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
         WHERE (t.repository, t.name) > ($1, $2) ORDER BY t.repository, t.name LIMIT $3",
    )
    .bind(repository)
    .bind(tag.to_owned())
    .bind(at_most(limit))
    .fetch_all(tx.on())
    .await?;
    let next = tags.last().map(|(repository, _, tag, _, _)| NamesCursor::Tags { repository: *repository, tag: tag.clone() });
    let record = |(_, repository, tag, manifest, at): RawTag| {
        Ok(Record::Tag { repository: repository.parse()?, tag: tag.parse()?, manifest: Digest::from_key(&manifest)?, at: uint(at) })
    };
    Ok((tags.into_iter().map(record).collect::<Outcome<_>>()?, next))
}

/// Number of the newest checkpoint, and what the keys of its parts begin with.
async fn newest(tx: &mut Tx) -> Outcome<Option<(i64, String)>> {
    let row: Option<(i64, String)> =
        sqlx::query_as("SELECT last_seq, key FROM journal WHERE is_checkpoint ORDER BY last_seq DESC, key DESC LIMIT 1")
            .fetch_optional(tx.on())
            .await?;
    row.map(|(last, key)| Ok((last, checkpoint_of(&key)?))).transpose()
}

pub(super) async fn journal_state(tx: &mut Tx, most: usize) -> Outcome<JournalState> {
    let (checkpoint, prefix) = newest(tx).await?.unwrap_or_default();
    let names: i64 =
        sqlx::query_scalar("SELECT coalesce(sum(records), 0)::bigint FROM journal WHERE is_checkpoint AND last_seq = $1 AND key >= $2")
            .bind(checkpoint)
            .bind(prefix)
            .fetch_one(tx.on())
            .await?;
    let since = "SELECT count(*) FROM (SELECT 1 FROM journal WHERE NOT is_checkpoint AND last_seq > $1 LIMIT $2) AS since";
    let objects: i64 = sqlx::query_scalar(since).bind(checkpoint).bind(at_most(most)).fetch_one(tx.on()).await?;
    Ok(JournalState { checkpoint: uint(checkpoint), names: uint(names), last: uint(last_number(tx).await?), objects: uint(objects) })
}

pub(super) async fn superfluous(tx: &mut Tx, limit: usize) -> Outcome<Vec<String>> {
    let Some((last, prefix)) = newest(tx).await? else { return Ok(Vec::new()) };
    let keys = sqlx::query_scalar(
        "(SELECT key FROM journal WHERE NOT is_checkpoint AND last_seq <= $1 ORDER BY last_seq LIMIT $3)
         UNION ALL (SELECT key FROM journal WHERE is_checkpoint AND key < $2 ORDER BY last_seq LIMIT $3) LIMIT $3",
    );
    Ok(keys.bind(last).bind(prefix).bind(at_most(limit)).fetch_all(tx.on()).await?)
}

pub(super) async fn journal(tx: &mut Tx) -> Outcome<Vec<JournalRow>> {
    let rows: Vec<(String, i64, i64, bool, i64)> =
        sqlx::query_as("SELECT key, first_seq, last_seq, is_checkpoint, records FROM journal ORDER BY last_seq, key")
            .fetch_all(tx.on())
            .await?;
    let row = |(key, first, last, checkpoint, records)| JournalRow {
        key,
        first: uint(first),
        last: uint(last),
        checkpoint,
        records: uint(records),
    };
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
