//! Commits: a manifest becomes a snapshot, its tag moves, the session ends.

use super::arguments::check_artifact_type;
use super::names::{Allowed, Target, lock_with_targets, note, put_tags_at};
use super::quota::Growth;
use super::sessions::{LivePush, find_session, live_push};
use super::snapshots::{pin_row, used};
use super::sql::values;
use super::tx::{Fail, Outcome, Tx};
use super::{Commit, Committed, Ended, ObjectId, PrefixMark, PushId, audit_log, leases, objects, prefixes, quota};
use crate::error::Error;
use pfr_schema::Kind;
use pfr_schema::journal::Record;

/// The answer of a commit that this session made before.
async fn committed_before(tx: &mut dyn Tx, push: &PushId, commit: &Commit) -> Outcome<Option<Committed>> {
    let ended = find_session(tx, push).await?.and_then(|session| session.ended);
    Ok(ended.and_then(|ended| ended.answer_to_commit(&commit.manifest, commit.tag.as_ref().map(|t| &t.tag))))
}

pub(super) async fn commit(tx: &mut dyn Tx, push: &PushId, commit: &Commit) -> Outcome<Committed> {
    if let Some(before) = committed_before(tx, push, commit).await? {
        return Ok(before);
    }
    match commit_now(tx, push, commit).await {
        // The quota is asked last: the session was open until this transaction ended it, so no
        // other commit explains the refusal.
        Err(Fail::Store(refused @ Error::QuotaExceeded { .. })) => Err(refused.into()),
        // The same commit may have succeeded while this one waited, which explains the refusal:
        // look again.
        Err(Fail::Store(refused)) => match committed_before(tx, push, commit).await? {
            Some(_) => Err(Fail::Again),
            None => Err(refused.into()),
        },
        done => done,
    }
}

async fn commit_now(tx: &mut dyn Tx, push: &PushId, commit: &Commit) -> Outcome<Committed> {
    let LivePush { number, repository, name, now, .. } = live_push(tx, push).await?;
    check_artifact_type(commit.artifact_type.as_deref())?;
    let digest = commit.manifest;
    let unknown = || Error::BlobUnknown { digest, kind: Kind::Manifest };
    let find = "SELECT id FROM objects WHERE digest = $1";
    let object: ObjectId = tx.first(find, values![&digest]).await?.ok_or_else(unknown)?;
    let before = lock_with_targets(tx, repository, object, commit.tag.as_slice()).await?;
    // Read after the lock: a transaction that collected, quarantined or committed it has ended.
    let find = "SELECT o.size, o.refs, c.logical_bytes, c.new_bytes FROM objects o JOIN containers c ON c.object = o.id
                WHERE o.id = $1 AND o.kind = $2 AND o.health = 0";
    let row: Option<(u64, u64, u64, u64)> = tx.first(find, values![object, Kind::Manifest]).await?;
    let (size, refs, reach, new) = row.ok_or_else(unknown)?;
    let find = "SELECT id, logical_bytes, new_bytes FROM manifests WHERE repository = $1 AND object = $2";
    let existing: Option<(i64, u64, u64)> = tx.first(find, values![repository, object]).await?;
    let mut records = Vec::new();
    let (manifest, logical_bytes, new_bytes) = match existing {
        Some(row) => {
            used(tx, row.0).await?;
            row
        }
        None => {
            let logical = size.saturating_add(reach);
            // Only the first commit of a manifest counts its new bytes.
            let new = if refs == 0 { size.saturating_add(new) } else { 0 };
            let record = Record::Snapshot {
                repository: name.clone(),
                manifest: digest,
                parents: commit.parents.clone(),
                artifact_type: commit.artifact_type.clone(),
                subject: commit.subject,
                at: now,
                new_bytes: new,
            };
            let configured = Configured { marks: &commit.marks, agent: commit.agent.as_deref() };
            let id = insert_snapshot(tx, repository, object, Kind::Manifest, &record, logical, Some(configured)).await?;
            records.push(record);
            (id, logical, new)
        }
    };
    let target = Target { manifest, object, digest };
    let allowed = Allowed::new(commit.audit.as_ref(), commit.signed.as_ref());
    records.extend(put_tags_at(tx, (repository, &name), target, commit.tag.as_slice(), before, allowed).await?);
    if let Some(pin) = commit.pin {
        pin_row(tx, manifest, pin, true).await?;
    }
    let done = Committed { created: existing.is_none(), logical_bytes, new_bytes };
    let update = "UPDATE pushes SET committed = $1 WHERE id = $2 AND committed IS NULL";
    if tx.execute(update, values![Ended::by_commit(commit, &done).to_column()?, &push.0]).await? == 0 {
        // The same session committed or was closed at the same time: look again.
        return Err(Fail::Again);
    }
    leases::ended(tx, &[number]).await?;
    if done.created {
        quota::grow(tx, Growth { snapshots: 1, ..Growth::default() }).await?;
    }
    note(tx, &records).await?;
    let tags: Vec<_> = commit.tag.iter().map(|moved| &moved.tag).collect();
    audit_log::note(tx, commit.audit.as_ref(), done.created, |record| audit_log::about_names(record, &name, Some(digest), &tags)).await?;
    Ok(done)
}

/// What the configuration of a snapshot says, for the tables.
#[derive(Clone, Copy)]
pub(super) struct Configured<'a> {
    marks: &'a [PrefixMark],
    agent: Option<&'a str>,
}

/// Writes the rows of a snapshot, or of an image; `record` is its [`Record::Snapshot`]. Without
/// `configured` a snapshot is not in the prefix index yet, and its agent is not known; an image
/// never is, and has none.
pub(super) async fn insert_snapshot(
    tx: &mut dyn Tx,
    repository: i64,
    object: ObjectId,
    kind: Kind,
    record: &Record,
    logical_bytes: u64,
    configured: Option<Configured<'_>>,
) -> Outcome<i64> {
    let Record::Snapshot { parents, artifact_type, subject, at, new_bytes, .. } = record else {
        return Err(Fail::internal("insert_snapshot was given a record that is not Record::Snapshot"));
    };
    let insert =
        "INSERT INTO manifests (repository, object, artifact_type, subject, pushed_at, used_at, logical_bytes, new_bytes, prefixed, is_image, agent)
                  VALUES ($1, $2, $3, $4, $5, $5, $6, $7, $8, $9, $10) RETURNING id";
    let is_image = kind == Kind::Image;
    let prefixed = configured.is_some() || is_image;
    let marks = configured.map_or(&[] as &[PrefixMark], |configured| configured.marks);
    let agent = configured.and_then(|configured| configured.agent);
    let row = values![repository, object, artifact_type.as_deref(), *subject, *at, logical_bytes, *new_bytes, prefixed, is_image, agent];
    let id: i64 = tx.returning(insert, row).await?.pop().ok_or_else(|| Fail::internal("a manifest was inserted and has no row"))?;
    let insert = "INSERT INTO parents (manifest, position, digest)
                  SELECT $2, u.n - 1, u.digest FROM unnest($1::bytea[]) WITH ORDINALITY AS u(digest, n)";
    tx.execute_each(insert, vec![parents.iter().copied().collect()], values![id]).await?;
    prefixes::insert(tx, &[(repository, id, marks)]).await?;
    objects::add_refs(tx, object, 1).await?;
    Ok(id)
}
