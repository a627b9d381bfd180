//! Signatures that an upstream got after the snapshot was pulled.

use super::upstream::is_unknown;
use lru::LruCache;
use parking_lot::Mutex;
use pfr_client::{Remote, keep_signatures};
use pfr_schema::{Digest, RepositoryName, Selector};
use pfr_store::Store;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Snapshots that are remembered; of more, those that were read last.
const SNAPSHOTS: NonZeroUsize = NonZeroUsize::new(100_000).expect("not zero");
/// Questions to the upstream at once; others wait.
const AT_ONCE: usize = 4;
/// The shortest time between two questions about one snapshot.
const LEAST: Duration = Duration::from_secs(1);
/// How long a reader waits for the upstream: those that are here are served then.
const PATIENCE: Duration = Duration::from_secs(5);

/// The signatures of the snapshots of one registry.
pub(super) struct Signatures {
    store: Store,
    /// How long signatures are served before the upstream is asked again.
    ttl: Duration,
    asked: Mutex<LruCache<(RepositoryName, Digest), Instant>>,
    places: Semaphore,
}

impl Signatures {
    pub(super) fn new(store: Store, ttl: Duration) -> Self {
        Self { store, ttl: ttl.max(LEAST), asked: Mutex::new(LruCache::new(SNAPSHOTS)), places: Semaphore::new(AT_ONCE) }
    }

    /// Fetches the signatures of a snapshot that is here, unless the upstream was asked for them
    /// less than the TTL ago. If it fails for any reason, those that are here are served.
    pub(super) async fn refresh(&self, remote: &Remote, repository: &RepositoryName, digest: Digest) {
        let key = (repository.clone(), digest);
        if self.is_fresh(&key) {
            return;
        }
        let asking = async {
            let Ok(_place) = self.places.acquire().await else { return };
            // Another reader may have asked meanwhile.
            if !self.is_fresh(&key) {
                self.fetch(remote, repository, digest).await;
            }
        };
        if tokio::time::timeout(PATIENCE, asking).await.is_err() {
            tracing::warn!(%repository, %digest, "pull-through: the upstream did not say in time how the snapshot is signed");
        }
        self.are_fresh(key);
    }

    async fn fetch(&self, remote: &Remote, repository: &RepositoryName, digest: Digest) {
        let kept = match remote.snapshot(repository, &Selector::Digest(digest)).await {
            Ok(there) => keep_signatures(&self.store, repository, &digest, &there.signatures).await,
            Err(error) => Err(error),
        };
        match kept {
            Ok(()) => {}
            // It was deleted there, or here since.
            Err(error) if is_unknown(&error) => {}
            Err(error) => tracing::warn!(%error, %repository, %digest, "pull-through: the signatures that are here are served"),
        }
    }

    /// The signatures of a snapshot have just been fetched.
    pub(super) fn are_fresh(&self, key: (RepositoryName, Digest)) {
        self.asked.lock().put(key, Instant::now());
    }

    fn is_fresh(&self, key: &(RepositoryName, Digest)) -> bool {
        self.asked.lock().get(key).is_some_and(|asked| asked.elapsed() < self.ttl)
    }
}
