//! Pull-through: what is not here is pulled whole from an upstream registry when it is asked for.

use super::follow::Seen;
use crate::config::Config;
use crate::problem::Failure;
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use pfr_client::{Destination, Error, Progress, Remote, RemoteOptions, VIA};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use pfr_store::Store;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Snapshots pulled at once; others wait.
const PULLS: usize = 2;
/// Registries that a request may have come through.
const HOPS: usize = 8;
/// Streams passed on at once; others wait. Each holds a piece or two, of a few hundred KiB.
const PASSED: usize = 64;

pub(super) type Done = Result<(), Failure>;
/// A snapshot, and on whose behalf it is pulled: a request that came through others must not wait for one that may be waiting for it.
type Flight = (RepositoryName, Digest, String);

/// The registry that is asked for what is not here.
pub struct Upstream {
    remote: Remote,
    pub(super) store: Store,
    pub(super) ttl: Duration,
    /// This process, among registries that ask each other.
    id: String,
    pub(super) tags: Mutex<HashMap<(RepositoryName, Tag), Seen>>,
    flights: Mutex<HashMap<Flight, Shared<BoxFuture<'static, Done>>>>,
    pulls: Semaphore,
    pub(super) passed: Arc<Semaphore>,
}

impl Upstream {
    /// The upstream that the settings name, if they name one. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Url`].
    pub fn of(config: &Config, store: &Store) -> Result<Option<Arc<Self>>, Error> {
        if config.upstream.is_empty() {
            return Ok(None);
        }
        let token = std::env::var("PF_REGISTRY_UPSTREAM_TOKEN").ok().filter(|token| !token.is_empty());
        // Someone waits for the answer: an upstream that is down must be known soon.
        let connect_timeout = Duration::from_secs(3);
        let options = RemoteOptions { token, retries: 1, retry_for: Duration::ZERO, connect_timeout, ..RemoteOptions::default() };
        Ok(Some(Arc::new(Self {
            remote: Remote::new(&config.upstream, options)?,
            store: store.clone(),
            ttl: Duration::from_secs(config.upstream_ttl_seconds),
            id: uuid::Uuid::now_v7().to_string(),
            tags: Mutex::default(),
            flights: Mutex::default(),
            pulls: Semaphore::new(PULLS),
            passed: Arc::new(Semaphore::new(PASSED)),
        })))
    }

    /// The upstream as a request that came through `via` may ask it; none if it has been asked for this already, or too many were.
    pub(super) fn asked_via(&self, via: &str) -> Option<Remote> {
        let hops: Vec<&str> = via.split(',').map(str::trim).filter(|hop| !hop.is_empty()).collect();
        if hops.len() >= HOPS || hops.contains(&self.id.as_str()) {
            return None;
        }
        let chain: Vec<&str> = hops.into_iter().chain([self.id.as_str()]).collect();
        Some(self.remote.via(&chain.join(",")))
    }

    /// Sees to it that what a selector means is here, if the upstream has it. Says which snapshot that is where only the upstream knows the way
    /// to it: `tag~N`, if not all between is here.
    pub(super) async fn ensure(
        self: &Arc<Self>,
        repository: &RepositoryName,
        selector: &Selector,
        via: &str,
    ) -> Result<Option<Digest>, Failure> {
        let Some(remote) = self.asked_via(via) else { return Ok(None) };
        let (tag, back) = match selector {
            Selector::Digest(digest) => return self.snapshot(&remote, repository, *digest, via).await.map(|()| None),
            Selector::Prefix(_) => return self.shortened(&remote, repository, selector, via).await,
            Selector::Tag { tag, back } => (tag, *back),
        };
        self.tag(&remote, repository, tag, via).await?;
        if back == 0 {
            return Ok(None);
        }
        let Ok(row) = self.store.tag(repository, tag).await else { return Ok(None) };
        let Some(end) = self.walk(&remote, repository, row.digest, back).await? else { return Ok(None) };
        self.snapshot(&remote, repository, end, via).await?;
        Ok(Some(end))
    }

    /// The snapshot that a shortened digest means: of those that are here, else of those that the upstream has.
    async fn shortened(
        self: &Arc<Self>,
        remote: &Remote,
        repository: &RepositoryName,
        selector: &Selector,
        via: &str,
    ) -> Result<Option<Digest>, Failure> {
        match self.store.resolve(repository, selector).await {
            Err(error) if matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => {}
            // The handler finds the same, and refuses what is ambiguous.
            _ => return Ok(None),
        }
        let there = match remote.lineage(repository, selector, 1).await {
            Ok(lineage) => lineage.snapshots.into_iter().next().map(|snapshot| snapshot.digest),
            Err(error) if unknown(&error) => return Ok(None),
            Err(error) => return Err(failure(&error)),
        };
        let Some(digest) = there else { return Ok(None) };
        self.snapshot(remote, repository, digest, via).await?;
        Ok(Some(digest))
    }

    /// Whether the upstream knows a snapshot that is here.
    async fn came_from(&self, remote: &Remote, repository: &RepositoryName, digest: Digest) -> Result<bool, Failure> {
        match remote.lineage(repository, &Selector::Digest(digest), 1).await {
            Ok(_) => Ok(true),
            Err(error) if unknown(&error) => Ok(false),
            Err(error) => Err(failure(&error)),
        }
    }

    pub(super) async fn snapshot(self: &Arc<Self>, remote: &Remote, repository: &RepositoryName, digest: Digest, via: &str) -> Done {
        match self.store.snapshot(repository, &digest).await {
            Ok(_) => return Ok(()),
            Err(error) if matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => {}
            Err(error) => return Err(error.into()),
        }
        let key: Flight = (repository.clone(), digest, via.to_owned());
        let flight = {
            let mut flights = locked(&self.flights);
            match flights.get(&key) {
                Some(flight) => flight.clone(),
                None => {
                    let flight = self.depart(remote.clone(), key.clone());
                    flights.insert(key, flight.clone());
                    flight
                }
            }
        };
        flight.await
    }

    /// Pulls in a task of its own: whoever asked first may leave, others wait for it.
    fn depart(self: &Arc<Self>, remote: Remote, key: Flight) -> Shared<BoxFuture<'static, Done>> {
        let upstream = Arc::clone(self);
        let task = tokio::spawn(async move {
            let landing = Landing { upstream, key };
            landing.upstream.pull(&remote, &landing.key.0, landing.key.1).await
        });
        async move { task.await.unwrap_or_else(|error| Err(Failure::internal(error.to_string()))) }.boxed().shared()
    }

    async fn pull(&self, remote: &Remote, repository: &RepositoryName, digest: Digest) -> Done {
        // The upstream may have to pull it first. Only then is there something that takes a turn.
        if !self.came_from(remote, repository, digest).await? {
            return Ok(());
        }
        let _turn = self.pulls.acquire().await.map_err(|error| Failure::internal(error.to_string()))?;
        if self.store.snapshot(repository, &digest).await.is_ok() {
            return Ok(());
        }
        let destination = Destination::Store { store: self.store.clone(), repository: repository.clone(), tag: None };
        let pulled = pfr_client::pull(remote, repository, &Selector::Digest(digest), &destination, &Progress::new()).await;
        match pulled {
            Ok(report) => {
                let (blobs, bytes) = (report.blobs_received, report.bytes_received);
                tracing::info!(%repository, %digest, blobs, bytes, "pulled from the upstream");
                Ok(())
            }
            Err(error) if unknown(&error) => Ok(()),
            Err(error) => Err(failure(&error)),
        }
    }
}

/// Forgets a flight when it ends, however it does: what it came to is not the answer to those who ask later.
struct Landing {
    upstream: Arc<Upstream>,
    key: Flight,
}

impl Drop for Landing {
    fn drop(&mut self) {
        locked(&self.upstream.flights).remove(&self.key);
    }
}

/// The ids in a request's header.
pub(super) fn via(headers: &axum::http::HeaderMap) -> String {
    headers.get(VIA).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

pub(super) fn unknown(error: &Error) -> bool {
    use ErrorCode::{BlobUnknown, RepositoryUnknown, SnapshotUnknown, TagUnknown};
    matches!(error.code(), BlobUnknown | RepositoryUnknown | SnapshotUnknown | TagUnknown)
}

/// What the reader is told. That the upstream could not be asked is not that it has nothing.
pub(super) fn failure(error: &Error) -> Failure {
    let code = error.code();
    let (code, detail) = match error {
        Error::Received { digest, .. } => {
            (ErrorCode::CorruptStore, format!("the upstream registry sent wrong bytes for {digest}; nothing of them was kept"))
        }
        _ if unknown(error) || matches!(code, ErrorCode::CorruptStore | ErrorCode::AmbiguousDigest) => {
            (code, format!("the upstream registry: {error}"))
        }
        _ if matches!(code, ErrorCode::StorageFull) => (code, "no room for what the upstream registry has".to_owned()),
        _ => {
            let detail = "this is not here, and the upstream registry cannot be asked; that says nothing about what it holds, try again";
            (ErrorCode::Unavailable, detail.to_owned())
        }
    };
    Failure::new(code, detail).because(error.to_string())
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
