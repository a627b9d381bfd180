//! How long to wait before trying again.

use crate::error::Error;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(200);
const LARGEST: Duration = Duration::from_secs(10);

/// The wait before try number `failures + 1`, doubling, with jitter so that many clients do not come back as one.
pub(crate) fn wait(failures: u32) -> Duration {
    let full = FIRST.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(LARGEST);
    // The keys of the standard hasher are the randomness that needs no dependency; quality does not matter here.
    let random = RandomState::new().build_hasher().finish() as u32;
    full / 2 + full.mul_f64(0.5 * f64::from(random) / f64::from(u32::MAX))
}

/// Whether and when to try again after `error`, the `failures`-th in a row: `None` to give up.
pub(crate) fn after(error: &Error, retry_after: Option<Duration>, failures: u32, retries: u32, longest: Duration) -> Option<Duration> {
    if failures > retries || !error.retryable() {
        return None;
    }
    let wait = retry_after.unwrap_or_default().max(wait(failures));
    (wait <= longest).then_some(wait)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_within_their_jitter() {
        for failures in 1..20 {
            let full = Duration::from_millis(200).saturating_mul(1 << (failures - 1).min(10)).min(LARGEST);
            let found = wait(failures);
            assert!(found >= full / 2 && found <= full, "failure {failures}: {found:?} of {full:?}");
        }
    }

    #[test]
    fn a_wait_longer_than_allowed_is_giving_up() {
        let error = Error::Cut { url: String::new(), reason: String::new() };
        let again = |retry_after, failures| after(&error, retry_after, failures, 3, Duration::from_secs(30));
        assert!(again(Some(Duration::from_secs(5)), 1).is_some_and(|w| w >= Duration::from_secs(5)));
        assert!(again(Some(Duration::from_secs(60)), 1).is_none());
        assert!(again(None, 3).is_some());
        assert!(again(None, 4).is_none());
        let refused = Error::Internal(String::new());
        assert!(after(&refused, None, 1, 3, Duration::from_secs(30)).is_none());
    }
}
