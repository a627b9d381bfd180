//! When the leases of an upload are renewed.

use crate::Store;
use crate::error::{Error, Result};
use std::ops::Range;
use std::time::Duration;

/// Part of a lease after which it is renewed. A session may have been at half of its own when the
/// pack began.
const RENEW: u32 = 4;
/// Part of a lease after which a renewal that failed is tried again.
const RETRY: u32 = 64;

/// When leases are renewed: well before they end, and soon again where that failed.
#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    /// When nothing need be renewed, in milliseconds since 1970.
    fresh: Range<u64>,
}

impl Renewal {
    /// The leases were renewed a moment ago.
    pub(crate) fn done(store: &Store) -> Self {
        Self { fresh: span(store.options.clock.now(), store.options.lease / RENEW) }
    }

    /// The time, if it is time to renew. A clock that was set back does not say how long ago the
    /// last time was: rather once too often.
    pub(crate) fn due(&self, store: &Store) -> Option<u64> {
        let now = store.options.clock.now();
        (!self.fresh.contains(&now)).then_some(now)
    }

    /// Notes the outcome of a renewal at `now`.
    ///
    /// # Errors
    /// [`Error::PackLost`], [`Error::PushUnknown`]: it is too late. After any other error it is
    /// tried again.
    pub(crate) fn note(&mut self, store: &Store, now: u64, renewed: Result<()>) -> Result<()> {
        let lease = store.options.lease;
        let pause = match renewed {
            Ok(()) => lease / RENEW,
            Err(error @ (Error::PackLost(_) | Error::PushUnknown(_))) => return Err(error),
            Err(error) => {
                tracing::debug!(%error, "lease renewal failed, retrying");
                lease / RETRY
            }
        };
        self.fresh = span(now, pause);
        Ok(())
    }
}

/// The time from `now` on, for so long.
fn span(now: u64, length: Duration) -> Range<u64> {
    now..now.saturating_add(u64::try_from(length.as_millis()).unwrap_or(u64::MAX))
}
