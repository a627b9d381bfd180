//! The rows of changes and of journal objects.

use super::arguments::at_most;
use super::sql::{Sql, values};
use super::tx::{Backend, Fail, Mode, Outcome, Tx};
use super::{JournalRow, JournalState, NamesCursor, Unjournaled, events};
use crate::error::Result;
use crate::journal::summary_of;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, RepositoryName, Tag};
use std::collections::HashMap;

/// PostgreSQL hands numbers out before they become visible. This waits until no transaction is
/// writing a change. Then every number below the highest visible one is visible too. Call it first
/// in a transaction that reads one state.
async fn settle(tx: &mut dyn Tx) -> Outcome<()> {
    tx.execute(Sql::only_postgres("LOCK TABLE changes IN SHARE MODE"), &[]).await?;
    Ok(())
}

pub(super) async fn unjournaled(tx: &mut dyn Tx, limit: usize) -> Outcome<Vec<Unjournaled>> {
    settle(tx).await?;
    let find = "SELECT seq, record FROM changes WHERE is_name = true ORDER BY seq LIMIT $1";
    let rows: Vec<(u64, String)> = tx.query(find, values![at_most(limit)]).await?;
    let unjournaled = |(seq, record): (u64, String)| {
        let record = serde_json::from_str(&record).map_err(|e| Fail::internal(format!("change {seq} cannot be read: {e}")))?;
        Ok(Unjournaled { seq, record })
    };
    rows.into_iter().map(unjournaled).collect()
}

/// Records objects. If the host goes down before the record of changes is durable, these changes
/// are found again, and the next flush writes them into another object. A summary makes objects
/// superfluous, which are deleted then, so its record is durable first.
pub(super) async fn journaled(backend: &dyn Backend, rows: Vec<JournalRow>) -> Result<()> {
    let mode = if rows.iter().any(|row| row.summary) { Mode::WRITE } else { Mode::UNDOABLE };
    backend.run(mode.named("journaled"), rows, |tx, rows| Box::pin(record(tx, rows))).await
}

async fn record(tx: &mut dyn Tx, rows: &[JournalRow]) -> Outcome<()> {
    for row in rows {
        let insert = "INSERT INTO journal (key, first_seq, last_seq, is_checkpoint, records) VALUES ($1, $2, $3, $4, $5)
                      ON CONFLICT (key) DO NOTHING";
        tx.execute(insert, values![&row.key, row.first, row.last, row.summary, row.records]).await?;
        if !row.summary {
            events::keep(tx, row.first, row.last).await?;
        }
    }
    Ok(())
}

/// The last number handed out.
pub(super) async fn last_number(tx: &mut dyn Tx) -> Outcome<u64> {
    const LAST: Sql = Sql::of_each(
        "SELECT pg_sequence_last_value(pg_get_serial_sequence('changes', 'seq')::regclass)",
        "SELECT seq FROM sqlite_sequence WHERE name = 'changes'",
    );
    Ok(tx.first::<Option<u64>>(LAST, &[]).await?.flatten().unwrap_or(0))
}

/// Lets the numbers of changes go on after `last`.
pub(super) async fn number_after(tx: &mut dyn Tx, last: u64) -> Outcome<()> {
    // SQLite has the row only once something was inserted.
    const FORGET: Sql = Sql::of_each("", "DELETE FROM sqlite_sequence WHERE name = 'changes'");
    const SET: Sql = Sql::of_each(
        "SELECT setval(pg_get_serial_sequence('changes', 'seq')::regclass, $1)",
        "INSERT INTO sqlite_sequence (name, seq) VALUES ('changes', $1)",
    );
    if last > 0 {
        tx.execute(FORGET, &[]).await?;
        tx.execute(SET, values![last]).await?;
    }
    Ok(())
}

/// The lock is held for these two numbers only: names are read without one.
pub(super) async fn begin_names(tx: &mut dyn Tx) -> Outcome<(u64, NamesCursor)> {
    settle(tx).await?;
    let last = last_number(tx).await?;
    let until: Option<i64> = tx.one("SELECT max(id) FROM manifests", &[]).await?;
    Ok((last, NamesCursor::Snapshots { after: 0, until: until.unwrap_or(0) }))
}

/// A page of records, and where the next one begins.
type Names = (Vec<Record>, Option<NamesCursor>);

pub(super) async fn names(tx: &mut dyn Tx, cursor: &NamesCursor, limit: usize) -> Outcome<Names> {
    match cursor {
        NamesCursor::Snapshots { after, until } => snapshots(tx, *after, *until, limit).await,
        NamesCursor::Tags { repository, tag } => tags(tx, *repository, tag, limit).await,
    }
}

/// In order of row ids: it is the order of lists.
async fn snapshots(tx: &mut dyn Tx, after: i64, until: i64, limit: usize) -> Outcome<Names> {
    type Row = (i64, RepositoryName, Digest, Option<String>, Option<Digest>, u64, u64);
    let find = "SELECT m.id, r.name, o.digest, m.artifact_type, m.subject, m.pushed_at, m.new_bytes
                FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
                WHERE m.id > $1 AND m.id <= $2 ORDER BY m.id LIMIT $3";
    let snapshots: Vec<Row> = tx.query(find, values![after, until, at_most(limit)]).await?;
    let Some(last) = snapshots.last().map(|row| row.0) else { return Ok((Vec::new(), Some(NamesCursor::TAGS))) };
    let mut parents: HashMap<i64, Vec<Digest>> = HashMap::new();
    let find = "SELECT manifest, digest FROM parents WHERE manifest > $1 AND manifest <= $2 ORDER BY manifest, position";
    for (manifest, digest) in tx.query::<(i64, Digest)>(find, values![after, last]).await? {
        parents.entry(manifest).or_default().push(digest);
    }
    let record = |(id, repository, manifest, artifact_type, subject, at, new_bytes): Row| {
        let parents = parents.remove(&id).unwrap_or_default();
        Record::Snapshot { repository, manifest, parents, artifact_type, subject, at, new_bytes }
    };
    Ok((snapshots.into_iter().map(record).collect(), Some(NamesCursor::Snapshots { after: last, until })))
}

async fn tags(tx: &mut dyn Tx, repository: i64, tag: &str, limit: usize) -> Outcome<Names> {
    let find = "SELECT t.repository, r.name, t.name, o.digest, t.updated_at FROM tags t JOIN repositories r ON r.id = t.repository
                JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
                WHERE (t.repository, t.name) > ($1, $2) ORDER BY t.repository, t.name LIMIT $3";
    let tags: Vec<(i64, RepositoryName, Tag, Digest, u64)> = tx.query(find, values![repository, tag, at_most(limit)]).await?;
    let next = tags.last().map(|(repository, _, tag, ..)| NamesCursor::Tags { repository: *repository, tag: tag.to_string() });
    let record = |(_, repository, tag, manifest, at)| Record::Tag { repository, tag, manifest, at };
    Ok((tags.into_iter().map(record).collect(), next))
}

/// Number of the newest summary, and what the keys of its parts begin with.
async fn newest(tx: &mut dyn Tx) -> Outcome<Option<(u64, String)>> {
    let find = "SELECT last_seq, key FROM journal WHERE is_checkpoint = true ORDER BY last_seq DESC, key DESC LIMIT 1";
    let row: Option<(u64, String)> = tx.first(find, &[]).await?;
    row.map(|(last, key)| Ok((last, summary_of(&key)?))).transpose()
}

pub(super) async fn state(tx: &mut dyn Tx, most: usize) -> Outcome<JournalState> {
    let (summary, prefix) = newest(tx).await?.unwrap_or_default();
    let names = "SELECT coalesce(sum(records), 0)::bigint FROM journal WHERE is_checkpoint = true AND last_seq = $1 AND key >= $2";
    let names = tx.one(names, values![summary, &prefix]).await?;
    let since = "SELECT count(*) FROM (SELECT 1 FROM journal WHERE is_checkpoint = false AND last_seq > $1 LIMIT $2) AS since";
    let objects = tx.one(since, values![summary, at_most(most)]).await?;
    Ok(JournalState { summary, names, last: last_number(tx).await?, objects })
}

pub(super) async fn superfluous(tx: &mut dyn Tx, limit: usize) -> Outcome<Vec<String>> {
    let Some((last, prefix)) = newest(tx).await? else { return Ok(Vec::new()) };
    let find = "SELECT key FROM (SELECT key FROM journal WHERE is_checkpoint = false AND last_seq <= $1 ORDER BY last_seq LIMIT $3) AS changes
                UNION ALL SELECT key FROM (SELECT key FROM journal WHERE is_checkpoint = true AND key < $2 ORDER BY last_seq LIMIT $3) AS parts
                LIMIT $3";
    tx.query(find, values![last, &prefix, at_most(limit)]).await
}

pub(super) async fn journal(tx: &mut dyn Tx) -> Outcome<Vec<JournalRow>> {
    let find = "SELECT key, first_seq, last_seq, is_checkpoint, records FROM journal ORDER BY last_seq, key";
    let rows: Vec<(String, u64, u64, bool, u64)> = tx.query(find, &[]).await?;
    let row = |(key, first, last, summary, records)| JournalRow { key, first, last, summary, records };
    Ok(rows.into_iter().map(row).collect())
}

pub(super) async fn forget(tx: &mut dyn Tx, keys: &[String]) -> Outcome<()> {
    if !keys.is_empty() {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        tx.execute("DELETE FROM journal WHERE key = ANY($1)", values![keys]).await?;
    }
    Ok(())
}
