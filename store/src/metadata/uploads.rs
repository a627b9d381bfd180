//! Unfinished uploads: the parts that each has received.
//!
//! An upload is a push session. Its parts are blobs that the session leases, so their rows and
//! their bytes go when it ends.

use super::arguments::{at_most, can_be_kept};
use super::sessions::{extend_push, live_push};
use super::sql::{int, values};
use super::tx::{Outcome, Tx};
use super::{PushId, UploadPart};
use crate::error::Error;
use pfr_schema::Digest;
use std::time::Duration;

/// Bytes that an upload has received.
pub(super) async fn received(tx: &mut dyn Tx, push: &PushId) -> Outcome<u64> {
    if !can_be_kept(&push.0) {
        return Ok(0);
    }
    let last = "SELECT begin_at + size FROM upload_parts WHERE push = $1 ORDER BY begin_at DESC LIMIT 1";
    Ok(tx.first(last, values![&push.0]).await?.unwrap_or(0))
}

pub(super) async fn parts(tx: &mut dyn Tx, push: &PushId, from: u64, limit: usize) -> Outcome<Vec<UploadPart>> {
    let find = "SELECT begin_at, size, digest FROM upload_parts WHERE push = $1 AND begin_at >= $2 ORDER BY begin_at LIMIT $3";
    let rows: Vec<(u64, u64, Digest)> = tx.query(find, values![&push.0, from, at_most(limit)]).await?;
    Ok(rows.into_iter().map(|(begin_at, size, digest)| UploadPart { begin_at, size, digest }).collect())
}

pub(super) async fn append(tx: &mut dyn Tx, push: &PushId, begin_at: u64, parts: &[UploadPart], lease: Duration) -> Outcome<u64> {
    let now = live_push(tx, push).await?.now;
    // Locks the session: of two chunks for one place, in whichever replicas, one comes first.
    extend_push(tx, push, lease, now).await?;
    let found = received(tx, push).await?;
    if found != begin_at {
        return Err(Error::UploadMoved { begin_at, received: found }.into());
    }
    let insert = "INSERT INTO upload_parts (push, begin_at, size, digest) SELECT $4, u.begin_at, u.size, u.digest
                  FROM unnest($1::bigint[], $2::bigint[], $3::bytea[]) AS u(begin_at, size, digest)";
    let columns = vec![
        parts.iter().map(|part| int(part.begin_at)).collect(),
        parts.iter().map(|part| int(part.size)).collect(),
        parts.iter().map(|part| part.digest).collect(),
    ];
    tx.execute_each(insert, columns, values![&push.0]).await?;
    Ok(parts.last().map_or(begin_at, |part| part.begin_at + part.size))
}

pub(super) async fn cut(tx: &mut dyn Tx, push: &PushId, from: u64, to: u64, lease: Duration) -> Outcome<()> {
    let now = live_push(tx, push).await?.now;
    // Locks the session, as a chunk does.
    extend_push(tx, push, lease, now).await?;
    if received(tx, push).await? == to {
        tx.execute("DELETE FROM upload_parts WHERE push = $1 AND begin_at >= $2", values![&push.0, from]).await?;
    }
    Ok(())
}
