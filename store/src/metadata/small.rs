//! Small packs, and which of them are merged.
//!
//! A pack is small until it has half of what fills one. Small packs are in tiers by weight, each
//! tier [`FACTOR`] times as heavy as the next. A tier is due when it has [`FACTOR`] packs: then it
//! is merged with all lighter ones into one pack, which is heavy enough for a tier above. So a byte
//! is copied at most once for each tier, and at most [`FACTOR`] − 1 packs are left in each.

use super::packs::{RawPack, columns, pack_row};
use super::sessions::millis;
use super::sql::values;
use super::tx::{Outcome, Tx};
use super::{FullPack, PackCounts, PackId, PackRow, arguments::at_most};
use pfr_schema::Algorithm;
use pfr_schema::frame::Header;
use std::time::Duration;

/// Packs in a tier that is due, and how many times heavier the next tier is.
const FACTOR: u64 = 8;
/// Tiers of small packs: the lightest has all below 1/1,024 of a full pack.
const TIERS: u32 = 4;
/// When two small packs are older than this, all are merged whatever their tiers, so that a store
/// at rest has only one.
const REST_MS: u64 = 24 * 3600 * 1000;
/// Maximum number of packs in one merge.
const MOST: usize = 4096;
/// Bytes of a frame's entry in the index of its pack.
const ENTRY: u64 = 8 + Header::len(Algorithm::Sha256) as u64;

impl FullPack {
    /// The weight of a pack: its live bytes and frames, as bytes of a full pack.
    fn weight(self, pack: &PackRow) -> u64 {
        let frames = pack.bytes.saturating_sub(pack.frame_bytes) / ENTRY;
        pack.live_bytes.max(frames.saturating_mul(self.bytes) / self.frames.max(1))
    }

    /// The tier of a weight: 0 for the heaviest.
    fn tier(self, weight: u64) -> u32 {
        let mut top = self.bytes / 2;
        (0..TIERS - 1)
            .find(|_| {
                top /= FACTOR;
                weight > top
            })
            .unwrap_or(TIERS - 1)
    }

    /// How many of the lightest packs to merge, given the weights in ascending order.
    fn due(self, weights: impl Iterator<Item = u64>) -> usize {
        let (mut sum, mut due, mut tier, mut in_tier) = (0, 0, TIERS, 0);
        for (before, weight) in weights.enumerate() {
            in_tier = if self.tier(weight) == tier { in_tier + 1 } else { 1 };
            tier = self.tier(weight);
            sum += weight;
            if in_tier >= FACTOR || sum >= self.bytes {
                due = before + 1;
            }
            if sum >= self.bytes {
                break;
            }
        }
        due
    }
}

/// Takes the packs of the next merge out of `packs`, which are in order of their frame bytes; none
/// if nothing is due.
pub(crate) fn take(packs: &mut Vec<PackRow>, full: FullPack, now: u64) -> Vec<PackRow> {
    let mut taken: Vec<PackRow> = packs.drain(..packs.len().min(MOST)).collect();
    taken.sort_by_key(|pack| (full.weight(pack), pack.id));
    let mut count = full.due(taken.iter().map(|pack| full.weight(pack)));
    // Two of them: if one cannot be read, a copy of the other is new, and is not copied again at
    // once.
    let at_rest = taken.iter().filter(|pack| pack.keep_until.saturating_add(REST_MS) <= now).count();
    if count == 0 && at_rest > 1 {
        count = taken.len();
    }
    packs.extend(taken.drain(count..));
    packs.sort_by_key(|pack| (pack.frame_bytes, pack.id));
    taken
}

/// Small packs. A pack with a damaged blob is left alone until the blob is healed.
macro_rules! small {
    () => {
        concat!(
            "SELECT ",
            columns!(),
            " FROM packs WHERE state = 'live' AND frame_bytes < $1 AND bytes - frame_bytes < $2 AND live_bytes > 0
              AND live_bytes * 2 >= frame_bytes AND claimed_until <= $3 AND id < $4
              AND id NOT IN (SELECT pack FROM objects WHERE health > 0 AND health = 2)
              ORDER BY frame_bytes, id LIMIT $5"
        )
    };
}

pub(super) async fn count(tx: &mut dyn Tx, full: FullPack) -> Outcome<PackCounts> {
    let count = "SELECT COUNT(*), COUNT(*) FILTER (WHERE frame_bytes < $1 AND bytes - frame_bytes < $2) FROM packs WHERE state = 'live'";
    let (live, small) = tx.one(count, values![full.bytes / 2, full.frames / 2 * ENTRY]).await?;
    Ok(PackCounts { live, small })
}

pub(super) async fn list(tx: &mut dyn Tx, full: FullPack, limit: usize) -> Outcome<Vec<PackRow>> {
    let now = tx.now().await?;
    let rows: Vec<RawPack> = tx.query(small!(), values![full.bytes / 2, full.frames / 2 * ENTRY, now, PackId::MAX, at_most(limit)]).await?;
    Ok(rows.into_iter().map(pack_row).collect())
}

pub(super) async fn claim(tx: &mut dyn Tx, full: FullPack, below: Option<PackId>, claim: Duration) -> Outcome<Vec<PackRow>> {
    let now = tx.now().await?;
    let values = values![full.bytes / 2, full.frames / 2 * ENTRY, now, below.unwrap_or(PackId::MAX), at_most(MOST)];
    let rows: Vec<RawPack> = tx.query(concat!(small!(), " FOR NO KEY UPDATE SKIP LOCKED"), values).await?;
    let taken = take(&mut rows.into_iter().map(pack_row).collect(), full, now);
    let ids: Vec<PackId> = taken.iter().map(|pack| pack.id).collect();
    if !ids.is_empty() {
        tx.execute("UPDATE packs SET claimed_until = $1 WHERE id = ANY($2)", values![now.saturating_add(millis(claim)), ids]).await?;
    }
    Ok(taken)
}

#[cfg(test)]
mod tests;
