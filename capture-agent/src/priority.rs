//! The order on the way from the registry: pulls in the background hold their bytes back while a
//! restore pulls.

use futures::FutureExt as _;
use parking_lot::Mutex;
use pfr_client::Brake;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A piece of a pull in the background waits for restores at most for this long: a connection on
/// which nothing moves is cut. A piece has some hundred KiB.
const GIVE_WAY: Duration = Duration::from_secs(2);

/// How many restores pull now. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub(crate) struct Priority(Arc<watch::Sender<usize>>);

impl Default for Priority {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }
}

/// The pull of a restore, until this is dropped.
#[derive(Debug)]
pub(crate) struct First(Priority);

impl Drop for First {
    fn drop(&mut self) {
        self.0.0.send_modify(|restores| *restores -= 1);
    }
}

impl Priority {
    /// A restore pulls from now on.
    pub fn restore(&self) -> First {
        self.0.send_modify(|restores| *restores += 1);
        First(self.clone())
    }

    /// A brake for one job in the background, with its limit in bytes a second.
    pub fn brake(&self, rate: Option<u64>) -> Brake {
        let (restores, free_at) = (self.clone(), Arc::new(Mutex::new(Instant::now())));
        Brake::new(move |bytes| {
            let due = rate.map(|rate| pass_at(&mut free_at.lock(), Instant::now(), bytes, rate));
            let restores = restores.clone();
            async move {
                if let Some(due) = due {
                    tokio::time::sleep_until(due.into()).await;
                }
                // The sender lives as long as this does.
                let _ = tokio::time::timeout(GIVE_WAY, restores.0.subscribe().wait_for(|restores| *restores == 0)).await;
            }
            .boxed()
        })
    }
}

/// When a piece may pass; the next one may when its bytes have had their time.
fn pass_at(free_at: &mut Instant, now: Instant, bytes: u64, rate: u64) -> Instant {
    let due = (*free_at).max(now);
    *free_at = due + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_pass_no_faster_than_the_limit_and_an_idle_time_saves_nothing() {
        let begun = Instant::now();
        let mut free_at = begun;
        let mut pass = |after: u64, bytes| pass_at(&mut free_at, begun + Duration::from_secs(after), bytes, 100).duration_since(begun);
        assert_eq!([pass(0, 100), pass(0, 200), pass(0, 100)], [0, 1, 3].map(Duration::from_secs));
        assert_eq!([pass(60, 100), pass(60, 100)], [60, 61].map(Duration::from_secs));
    }
    #[tokio::test]
    async fn a_piece_waits_while_a_restore_pulls_and_not_for_ever() {
        let priority = Priority::default();
        let brake = priority.brake(None);
        let within = async |time| tokio::time::timeout(time, brake.hold(1)).await.is_ok();
        assert!(within(GIVE_WAY / 4).await, "no restore pulls");
        let (one, two) = (priority.restore(), priority.restore());
        assert!(!within(GIVE_WAY / 4).await);
        drop(one);
        assert!(!within(GIVE_WAY / 4).await, "the other one pulls");
        assert!(within(GIVE_WAY * 2).await, "the connection stays open");
        drop(two);
        assert!(within(GIVE_WAY / 4).await);
    }
}
