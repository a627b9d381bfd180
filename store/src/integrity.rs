//! Checks that stored bytes are unchanged, and repairs damage.
//!
//! ```text
//! scrub    every byte of every pack against its checksums (and digests) ─▶ quarantine what is bad, name the snapshots that reach it; release what is good again
//! heal     frames from a good copy ─▶ ingest: a quarantined blob is taken from the new pack ─▶ reassess
//! fsck     nodes' bytes against their rows, then all counts against the nodes' rows, and the prefix index against the snapshots
//! rebuild  packs and journal ─▶ metadata, from nothing
//! ```
//!
//! A quarantined blob is not given out, and counts as missing, with every node above it, until it
//! is pushed again. So a client sends what [`Store::missing`] returns, whether it is damaged or was
//! never there.

mod fsck;
mod heal;
mod rebuild;
mod scrub;

pub use scrub::ScrubOptions;

use crate::Store;
use crate::error::Result;
use crate::metadata::{Damage, DamagedRow, Health};
use crate::packs::{Expected, FrameChecks, READ};
use pfr_schema::Digest;
use pfr_schema::api::DamagedBlob;
use std::ops::Range;

impl From<DamagedRow> for DamagedBlob {
    fn from(row: DamagedRow) -> Self {
        let snapshots = row.snapshots.iter().map(|(repository, digest)| format!("{repository}@{digest}")).collect();
        Self { digest: row.digest, reason: row.reason, snapshots }
    }
}

impl Store {
    /// Reads one blob in its pack and checks it against its digest. Returns the damage; `None` if
    /// it is good or not stored. A bad blob is quarantined. A good one is released from quarantine:
    /// its storage was out of reach, or a read had failed. Afterwards [`Self::reassess`] is needed.
    pub(crate) async fn examine(&self, digest: &Digest) -> Result<Option<Damage>> {
        let Some(location) = self.metadata.locate(vec![*digest]).await?.pop().flatten() else { return Ok(None) };
        let expected = Expected { offset: location.offset, digest: *digest, frame_len: location.frame_len, header: None };
        let Some(reason) = check_frame(self, &location.pack, expected).await? else {
            if location.health == Health::Damaged && self.metadata.lift_quarantine(vec![(*digest, location.pack.clone())]).await? > 0 {
                tracing::info!(%digest, pack = location.pack, "a blob that was found damaged before is good again");
            }
            return Ok(None);
        };
        let damage = Damage { digest: *digest, pack: location.pack, reason };
        self.metadata.quarantine(vec![damage.clone()]).await?;
        Ok(Some(damage))
    }
}

/// Reads one frame and checks it against its digest: what is wrong with it.
async fn check_frame(store: &Store, pack: &str, expected: Expected) -> Result<Option<String>> {
    let range = expected.offset..expected.offset.saturating_add(expected.frame_len);
    let checks = FrameChecks::new(vec![expected], true, store.options.limits.clone());
    Ok(match read_through(store, pack, range, checks, &mut Pace::unlimited()).await? {
        None => Some(format!("pack {pack} is not there")),
        Some(checks) => checks.finish().into_iter().next().map(|(_, reason)| reason),
    })
}

/// How fast bytes may be read.
struct Pace {
    start: tokio::time::Instant,
    read: u64,
    bytes_per_second: Option<u64>,
}

impl Pace {
    fn new(bytes_per_second: Option<u64>) -> Self {
        Self { start: tokio::time::Instant::now(), read: 0, bytes_per_second: bytes_per_second.filter(|rate| *rate > 0) }
    }

    fn unlimited() -> Self {
        Self::new(None)
    }

    /// Counts `bytes` and waits until they were due.
    async fn take(&mut self, bytes: u64) {
        self.read += bytes;
        if let Some(rate) = self.bytes_per_second {
            tokio::time::sleep_until(self.start + std::time::Duration::from_secs_f64(self.read as f64 / rate as f64)).await;
        }
    }
}

/// Reads a range of a pack from its first byte to its last, in pieces, and checks the frames in it
/// off the async threads. `None` if the pack is not there. [`FrameChecks::finish`] detects a pack
/// that ends early.
async fn read_through(
    store: &Store,
    key: &str,
    range: Range<u64>,
    mut checks: FrameChecks,
    pace: &mut Pace,
) -> Result<Option<FrameChecks>> {
    let mut at = range.start;
    checks.begin_at(at);
    while at < range.end {
        let Some(piece) = store.read_pack_to_check(key, at..range.end.min(at + READ)).await? else { return Ok(None) };
        if piece.is_empty() {
            break;
        }
        at += piece.len() as u64;
        pace.take(piece.len() as u64).await;
        checks = pfr_service::task::spawn_blocking(move || {
            checks.feed(&piece);
            checks
        })
        .await?;
    }
    Ok(Some(checks))
}
