//! Locks that another process may hold.

use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Longest wait for a lock.
const LIMIT: Duration = Duration::from_secs(5);
/// After this time the log says what it waits for.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// The time between two tries.
const LOOK: Duration = Duration::from_millis(50);

/// Tries for at most five seconds to lock `path` with `attempt`: a process that was killed holds
/// its locks until the system has ended it. `None` if another process still holds the lock.
///
/// # Errors
/// Those of `attempt`.
pub async fn wait<T, E>(path: &Path, mut attempt: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    let begun = Instant::now();
    let mut told = false;
    loop {
        if let Some(taken) = attempt()? {
            return Ok(Some(taken));
        }
        let waited = begun.elapsed();
        if waited >= LIMIT {
            return Ok(None);
        }
        if waited >= TOLD_AFTER && !std::mem::replace(&mut told, true) {
            tracing::warn!(path = %path.display(), limit_s = LIMIT.as_secs(), "another process holds the lock; waiting for it to end");
        }
        sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[tokio::test(start_paused = true)]
    async fn a_lock_is_waited_for_and_not_for_ever() {
        let begun = Instant::now();
        let held_for = |time: Duration| async move {
            let since = Instant::now();
            let attempt = || Ok::<_, Infallible>((since.elapsed() >= time).then_some("mine"));
            wait(Path::new("/data"), attempt).await
        };
        assert_eq!(held_for(Duration::ZERO).await, Ok(Some("mine")));
        assert_eq!(begun.elapsed(), Duration::ZERO, "a free lock is not waited for");
        assert_eq!(held_for(Duration::from_secs(4)).await, Ok(Some("mine")));
        let begun = Instant::now();
        assert_eq!(held_for(Duration::from_secs(3600)).await, Ok(None));
        assert!(begun.elapsed() < LIMIT * 2, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn an_error_is_not_waited_for() {
        assert_eq!(wait(Path::new("/data"), || Err::<Option<()>, _>("closed")).await, Err("closed"));
    }
}
