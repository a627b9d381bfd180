//! The queue of GC candidates.

use super::arguments::at_most;
use super::leases::leased_by_a_session;
use super::sql::values;
use super::tx::{Outcome, Tx};
use super::{Candidate, ObjectId, PackId, Queued};

/// An entry of the queue.
pub(super) struct Entry {
    pub id: i64,
    pub queued: Queued,
}

/// The due entries: first only those of deleted snapshots, and the others when none of these is
/// left. A blob may belong to a deleted snapshot and to an upload that was never committed. With
/// this order, it is counted as released for any number of entries in a step.
pub(super) async fn due(tx: &mut dyn Tx, take: bool, limit: usize) -> Outcome<Vec<Entry>> {
    let now = tx.now().await?;
    let released = entries(tx, now, true, take, limit).await?;
    if released.is_empty() { entries(tx, now, false, take, limit).await } else { Ok(released) }
}

async fn entries(tx: &mut dyn Tx, until: u64, released: bool, take: bool, limit: usize) -> Outcome<Vec<Entry>> {
    macro_rules! find {
        ($lock:literal) => {
            concat!(
                "SELECT id, object, pack, due, session FROM suspects WHERE released = $1 AND due <= $2 ORDER BY due, id LIMIT $3",
                $lock
            )
        };
    }
    type Row = (i64, Option<ObjectId>, Option<PackId>, u64, Option<i64>);
    let find = if take { find!(" FOR UPDATE SKIP LOCKED") } else { find!("") };
    let rows: Vec<Row> = tx.query(find, values![released, until, at_most(limit)]).await?;
    let entry = |(id, object, pack, due, session): Row| {
        let candidate = object.map(Candidate::Object).or(pack.map(Candidate::Pack))?;
        Some(Entry { id, queued: Queued { candidate, released, due, session } })
    };
    Ok(rows.into_iter().filter_map(entry).collect())
}

pub(super) async fn queue(tx: &mut dyn Tx, due: bool, limit: usize) -> Outcome<Vec<Queued>> {
    let until = if due { tx.now().await? } else { u64::MAX };
    let mut all = entries(tx, until, true, false, limit).await?;
    all.extend(entries(tx, until, false, false, limit - all.len().min(limit)).await?);
    Ok(all.into_iter().map(|entry| entry.queued).collect())
}

pub(super) async fn unclaimed(tx: &mut dyn Tx, pack: PackId, limit: usize) -> Outcome<Vec<ObjectId>> {
    let now = tx.now().await?;
    let find = concat!(
        "SELECT id FROM objects o WHERE pack = $1 AND refs = 0 AND keep_until <= $2 AND NOT ",
        leased_by_a_session!("$2"),
        " ORDER BY id LIMIT $3"
    );
    tx.query(find, values![pack, now, at_most(limit)]).await
}

pub(super) async fn unheld(tx: &mut dyn Tx, packs: &[PackId]) -> Outcome<Vec<ObjectId>> {
    tx.query("SELECT id FROM objects WHERE pack = ANY($1) AND refs = 0 ORDER BY id", values![packs]).await
}
