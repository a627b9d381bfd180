//! A bound on the bytes that are in flight between registries and the readers of snapshots.

use crate::error::{Error, Result};
use crate::plan::Item;
use pfr_store::WHOLE_MAX;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes are counted in units of this many.
const UNIT: u64 = 1 << 10;
/// A blob counts twice: as it came, and decoded.
const COPIES: u64 = 2;

/// A budget of bytes that all restores of a process share. Cheap to clone; all clones are one.
///
/// The bytes of a request are taken before it is sent, all at once and in the order in which blobs
/// are needed. So the first blob that a reader waits for never waits for the budget behind others
/// of the same reader.
#[derive(Clone, Debug)]
pub struct Flight {
    permits: Arc<Semaphore>,
    units: u32,
}

impl Flight {
    /// A budget of so many bytes, 1 KiB at least. A blob that is larger passes alone.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let units = u32::try_from((bytes / UNIT).max(1)).unwrap_or(u32::MAX);
        Self { permits: Arc::new(Semaphore::new(units as usize)), units }
    }

    /// Bytes of the whole budget.
    #[must_use]
    pub fn total(&self) -> u64 {
        u64::from(self.units) * UNIT
    }

    /// Bytes that are taken.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.total() - self.permits.available_permits() as u64 * UNIT
    }

    /// Bytes that a blob takes.
    pub(super) fn cost(&self, item: &Item) -> u64 {
        self.units_of(item) * UNIT
    }

    fn units_of(&self, item: &Item) -> u64 {
        largest(item).saturating_mul(COPIES).div_ceil(UNIT).clamp(1, u64::from(self.units))
    }

    /// Waits until the bytes of all these blobs are free, and takes them.
    pub(super) async fn take(&self, items: &[Item]) -> Result<Taken> {
        let units = items.iter().map(|item| self.units_of(item)).sum::<u64>().min(u64::from(self.units));
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.permits).acquire_many_owned(units).await;
        Ok(Taken { flight: self.clone(), permit: permit.map_err(|e| Error::Internal(e.to_string()))? })
    }
}

/// The most raw bytes that a blob may have.
pub(super) fn largest(item: &Item) -> u64 {
    item.size.unwrap_or(WHOLE_MAX)
}

/// The bytes of a request.
#[derive(Debug)]
pub(super) struct Taken {
    flight: Flight,
    permit: OwnedSemaphorePermit,
}

impl Taken {
    /// The bytes of one of its blobs, free again when the part is dropped.
    pub fn part(&mut self, item: &Item) -> Part {
        let units = usize::try_from(self.flight.units_of(item)).unwrap_or(usize::MAX).min(self.permit.num_permits());
        Part { _permit: self.permit.split(units) }
    }
}

/// The bytes of one blob.
#[derive(Debug)]
pub(super) struct Part {
    _permit: Option<OwnedSemaphorePermit>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::{Digest, Kind};

    fn item(bytes: u64) -> Item {
        Item { digest: Digest::sha256(b""), kind: Kind::Blob, size: Some(bytes), elements: None }
    }

    #[tokio::test]
    async fn bytes_are_free_again_blob_by_blob() {
        let flight = Flight::new(8 << 10);
        let mut taken = flight.take(&[item(1024), item(500)]).await.expect("free");
        assert_eq!(flight.used(), 3 << 10, "both copies, in whole units");
        let (first, second) = (taken.part(&item(1024)), taken.part(&item(500)));
        drop(taken);
        assert_eq!(flight.used(), 3 << 10);
        drop(first);
        assert_eq!(flight.used(), 1 << 10);
        drop(second);
        assert_eq!(flight.used(), 0);
    }

    #[tokio::test]
    async fn a_blob_that_is_larger_than_the_budget_passes_alone() {
        let flight = Flight::new(4 << 10);
        let small = flight.take(&[item(10)]).await.expect("free");
        let items = [item(1 << 30)];
        let mut large = Box::pin(flight.take(&items));
        assert!(futures::poll!(&mut large).is_pending(), "another blob is in flight");
        drop(small);
        let mut large = large.await.expect("free");
        let part = large.part(&item(1 << 30));
        drop(large);
        assert_eq!(flight.used(), flight.total());
        drop(part);
        assert_eq!(flight.used(), 0);
    }
}
