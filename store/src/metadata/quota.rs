//! The quota of a domain. Its row has the limits and what is used, so that a change need not count
//! what is stored.
//!
//! Without a quota there is no row, and the updates here touch nothing. With one, every transaction
//! that changes what is stored ends with the update of that row. So the transactions of a domain
//! with a quota end one after another, and a limit is kept exactly. The row is locked after
//! everything else but the tables of changes and of the audit log: its holder waits for none of
//! those that wait for it.

use super::sql::values;
use super::tx::{Outcome, Tx};
use super::{AuditEntry, Quota, QuotaLimits, audit_log, integrity, objects};
use crate::error::Error;

/// What a transaction adds to what is stored; below zero, what it takes away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Growth {
    /// Bytes of frames of blobs.
    pub bytes: i64,
    /// Blobs.
    pub objects: i64,
    /// Snapshots.
    pub snapshots: i64,
}

/// What is used may be below zero: a replica of a version without quotas does not count.
type Row = (Option<u64>, Option<u64>, Option<u64>, i64, i64, i64);

macro_rules! columns {
    () => {
        "bytes, objects, snapshots, used_bytes, used_objects, used_snapshots"
    };
}

fn row((bytes, objects, snapshots, used_bytes, used_objects, used_snapshots): Row) -> Quota {
    let used = |count: i64| u64::try_from(count).unwrap_or(0);
    Quota {
        limits: QuotaLimits { bytes, objects, snapshots },
        used_bytes: used(used_bytes),
        used_objects: used(used_objects),
        used_snapshots: used(used_snapshots),
    }
}

pub(super) async fn quota(tx: &mut dyn Tx) -> Outcome<Option<Quota>> {
    Ok(tx.first(concat!("SELECT ", columns!(), " FROM quota"), &[]).await?.map(row))
}

/// What the row says is used, as it is there.
pub(super) async fn used(tx: &mut dyn Tx) -> Outcome<Option<Growth>> {
    let row: Option<Row> = tx.first(concat!("SELECT ", columns!(), " FROM quota"), &[]).await?;
    Ok(row.map(|(.., bytes, objects, snapshots)| Growth { bytes, objects, snapshots }))
}

/// Refuses an upload that could store nothing. One that stores nothing new passes until it begins a
/// pack. While something is damaged none is refused: it may replace that, and adds no blob then.
pub(super) async fn has_room(tx: &mut dyn Tx) -> Outcome<()> {
    let Some(Quota { limits, used_bytes, used_objects, .. }) = quota(tx).await? else { return Ok(()) };
    for (what, limit, used) in [("bytes", limits.bytes, used_bytes), ("blobs", limits.objects, used_objects)] {
        if let Some(limit) = limit.filter(|limit| used >= *limit) {
            let refused = Error::QuotaExceeded { what, limit, used, added: 0 };
            return if integrity::is_unwell(tx).await? { Ok(()) } else { Err(refused.into()) };
        }
    }
    Ok(())
}

/// Adds to what is used, whatever the limits say. Returns the quota as it is then.
pub(super) async fn add(tx: &mut dyn Tx, growth: Growth) -> Outcome<Option<Quota>> {
    let update = concat!(
        "UPDATE quota SET used_bytes = used_bytes + $1, used_objects = used_objects + $2, used_snapshots = used_snapshots + $3 RETURNING ",
        columns!()
    );
    let Growth { bytes, objects, snapshots } = growth;
    Ok(tx.returning(update, values![bytes, objects, snapshots]).await?.pop().map(row))
}

/// Adds to what is used, if the limits allow it. A snapshot needs room in every respect: its blobs
/// are stored already, and a commit would keep them. Frames that only replace damaged ones need no
/// room, even if they are longer.
pub(super) async fn grow(tx: &mut dyn Tx, growth: Growth) -> Outcome<()> {
    let Some(quota) = add(tx, growth).await? else { return Ok(()) };
    let Quota { limits, used_bytes, used_objects, used_snapshots } = quota;
    let is_snapshot = growth.snapshots > 0;
    let is_more = growth.objects > 0 || is_snapshot;
    for (what, applies, limit, used, added) in [
        ("bytes", is_more, limits.bytes, used_bytes, growth.bytes),
        ("blobs", is_more, limits.objects, used_objects, growth.objects),
        ("snapshots", is_snapshot, limits.snapshots, used_snapshots, growth.snapshots),
    ] {
        if let Some(limit) = limit.filter(|limit| applies && used > *limit) {
            let added = added.max(0).unsigned_abs();
            return Err(Error::QuotaExceeded { what, limit, used: used.saturating_sub(added), added }.into());
        }
    }
    Ok(())
}

/// What the tables hold: counted, which takes as long as reading the index of all objects.
pub(super) async fn measure(tx: &mut dyn Tx) -> Outcome<Growth> {
    Ok(Growth {
        bytes: tx.one("SELECT COALESCE(SUM(live_bytes), 0)::bigint FROM packs", &[]).await?,
        objects: tx.one("SELECT COUNT(*) FROM objects", &[]).await?,
        snapshots: tx.one("SELECT COUNT(*) FROM manifests", &[]).await?,
    })
}

pub(super) async fn set(tx: &mut dyn Tx, limits: &QuotaLimits, audit: Option<&AuditEntry>) -> Outcome<Option<Quota>> {
    let QuotaLimits { bytes, objects, snapshots } = *limits;
    if limits.is_none() {
        tx.execute("DELETE FROM quota", &[]).await?;
    } else {
        let update = "UPDATE quota SET bytes = $1, objects = $2, snapshots = $3";
        if tx.execute(update, values![bytes, objects, snapshots]).await? == 0 {
            // A transaction that has changed something ends before this lock, and is counted. One
            // that changes something later finds the row.
            objects::lock_all(tx).await?;
            let used = measure(tx).await?;
            let insert = "INSERT INTO quota (id, bytes, objects, snapshots, used_bytes, used_objects, used_snapshots)
                          VALUES (1, $1, $2, $3, $4, $5, $6) ON CONFLICT (id) DO UPDATE
                          SET bytes = excluded.bytes, objects = excluded.objects, snapshots = excluded.snapshots";
            tx.execute(insert, values![bytes, objects, snapshots, used.bytes, used.objects, used.snapshots]).await?;
        }
    }
    let now = quota(tx).await?;
    audit_log::note(tx, audit, true, |record| record.new_quota = Some(*limits)).await?;
    Ok(now)
}
