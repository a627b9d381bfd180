//! Decides whether and when a request is retried, and reports it.

use super::{Remote, RemoteOptions, Retrying};
use crate::error::Error;
use pfr_schema::ErrorCode;
use pfr_service::Backoff;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The waits between two attempts of a request.
pub(super) const WAITS: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));

/// If so many tries of a request, or fewer, end with a cut connection, a registry may have been
/// killed. A server that has never answered and cuts more connections is not a registry.
const CUTS: u32 = 2;

/// The tries of one request, or of one step that makes requests.
pub(crate) struct Tries<'a> {
    remote: &'a Remote,
    failures: u32,
    /// Of these, connections that were cut under the request.
    cuts: u32,
    /// When the first of them failed.
    since: Option<Instant>,
}

impl<'a> Tries<'a> {
    pub fn of(remote: &'a Remote) -> Self {
        Self { remote, failures: 0, cuts: 0, since: None }
    }

    /// Notes that the try that fails now ends with a cut connection.
    pub fn cut(&mut self) {
        self.cuts += 1;
    }

    /// Number of failed tries.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Waits for the next try after one that failed.
    ///
    /// # Errors
    /// The same error, if there is to be no other try.
    pub async fn again(&mut self, error: Error, retry_after: Option<Duration>) -> Result<(), Error> {
        self.failures += 1;
        let since = *self.since.get_or_insert_with(Instant::now);
        let reached = self.remote.connection.answered.load(Ordering::Relaxed) || (1..=CUTS).contains(&self.cuts);
        let Some(wait) = after(&error, retry_after, self.failures, since.elapsed(), reached, self.remote.options()) else {
            return Err(error);
        };
        tracing::debug!(%error, wait_ms = wait.as_millis(), failures = self.failures, "request failed, retrying");
        let asked = is_rate_limited(&error).then(|| retry_after.unwrap_or(wait));
        self.remote.retrying(&error, self.failures, asked);
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

/// The wait before the next try, after the `failures`-th failure in a row, the first of which was
/// `elapsed` ago; `None` to give up.
///
/// A registry that was reached before may be restarting: it is given time. So is one that lets this
/// caller send only so many requests a second, and says when the next one may come. One that was
/// never reached may be a mistake in an address, and one that refuses or cuts its answers does not
/// improve with time: both get a few tries. A try of one that takes connections and says nothing
/// lasts minutes: it gets no more time than one that was reached.
fn after(
    error: &Error,
    retry_after: Option<Duration>,
    failures: u32,
    elapsed: Duration,
    reached: bool,
    options: &RemoteOptions,
) -> Option<Duration> {
    if !error.retryable() {
        return None;
    }
    let wait = retry_after.unwrap_or_default().max(WAITS.wait(failures));
    let is_away = matches!(error, Error::Unreachable { .. } | Error::Foreign { .. });
    let by_time = (reached || options.retry_from_start) && (is_away || is_rate_limited(error)) && !options.retry_for.is_zero();
    let in_time = options.retry_for.is_zero() || elapsed.saturating_add(wait) <= options.retry_for;
    let more = if by_time { in_time } else { failures <= options.retries && (in_time || !is_away) };
    (more && wait <= options.longest_wait).then_some(wait)
}

fn is_rate_limited(error: &Error) -> bool {
    matches!(error, Error::Registry { problem } if problem.code == ErrorCode::RateLimited)
}

impl Remote {
    /// Notes that the registry has answered with a refusal.
    pub(super) fn refused(&self, is_retryable: bool) {
        self.heard();
        // Otherwise the request is not served yet.
        if !is_retryable {
            self.answered();
        }
    }

    /// Notes that the address of the registry is right.
    pub(super) fn heard(&self) {
        self.connection.answered.store(true, Ordering::Relaxed);
    }

    /// Notes that the registry has served a request, or refused it for good.
    pub(super) fn answered(&self) {
        self.heard();
        if self.connection.failures.swap(0, Ordering::Relaxed) > 0
            && let Some(tell) = &self.options.on_retry
        {
            tell.tell(None);
        }
    }

    fn retrying(&self, error: &Error, failures: u32, asked: Option<Duration>) {
        self.connection.failures.fetch_max(failures, Ordering::Relaxed);
        if let Some(tell) = &self.options.on_retry {
            let answered = matches!(error, Error::Registry { .. });
            tell.tell(Some(&Retrying { attempt: failures, answered, asked, error: error.to_string() }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn cut() -> Error {
        Error::Cut { url: String::new(), reason: String::new() }
    }

    #[test]
    fn a_wait_longer_than_allowed_is_giving_up() {
        let options = RemoteOptions { retries: 3, retry_for: Duration::ZERO, ..RemoteOptions::default() };
        let again = |retry_after, failures| after(&cut(), retry_after, failures, Duration::ZERO, true, &options);
        assert!(again(Some(5 * SECOND), 1).is_some_and(|w| w >= 5 * SECOND));
        assert!(again(Some(60 * SECOND), 1).is_none());
        assert!(again(None, 3).is_some());
        assert!(again(None, 4).is_none());
        let refused = Error::Internal(String::new());
        assert!(after(&refused, None, 1, Duration::ZERO, true, &options).is_none());
    }

    #[test]
    fn a_caller_that_is_too_fast_waits_its_turn() {
        let options = RemoteOptions { retries: 3, retry_for: 60 * SECOND, ..RemoteOptions::default() };
        let refused = |code| Error::Registry { problem: Box::new(pfr_schema::api::Problem::new(code, "x")) };
        let again = |code, elapsed| after(&refused(code), Some(SECOND), 40, elapsed, true, &options).is_some();
        assert!(again(ErrorCode::RateLimited, 45 * SECOND) && !again(ErrorCode::RateLimited, 60 * SECOND));
        assert!(!again(ErrorCode::Overloaded, SECOND) && !again(ErrorCode::QuotaExceeded, SECOND));
    }

    #[test]
    fn a_registry_that_was_reached_is_given_time_and_one_that_never_was_a_few_tries() {
        let options = RemoteOptions { retries: 3, retry_for: 60 * SECOND, ..RemoteOptions::default() };
        let away = Error::Unreachable { url: String::new(), reason: String::new(), attempts: 1 };
        let again = |error, failures, elapsed, reached| after(error, None, failures, elapsed, reached, &options).is_some();
        assert!(again(&away, 3, 50 * SECOND, false) && !again(&away, 4, SECOND, false));
        assert!(!again(&away, 2, 60 * SECOND, false), "each of its tries takes minutes");
        assert!(again(&away, 40, 45 * SECOND, true) && !again(&away, 2, 60 * SECOND, true));
        let cut = cut();
        assert!(again(&cut, 3, 50 * SECOND, true) && !again(&cut, 4, SECOND, true), "it is there");
        let asked = RemoteOptions { retry_from_start: true, ..options };
        let again = |failures, elapsed| after(&away, None, failures, elapsed, false, &asked).is_some();
        assert!(again(40, 45 * SECOND) && !again(2, 60 * SECOND), "the caller knows that it will be there");
    }
}
