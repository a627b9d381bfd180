//! Pull-through: what is not here is pulled whole from an upstream registry when it is asked for.

use crate::config::Config;
use crate::problem::Failure;
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use pfr_client::{Destination, Error, Progress, Remote, RemoteOptions, VIA};
use pfr_schema::api::TagState;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use pfr_store::Store;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Snapshots pulled at once; others wait.
const PULLS: usize = 2;
/// Registries that a request may have come through.
const HOPS: usize = 8;
/// Tags whose freshness is remembered.
const TAGS: usize = 100_000;

type Done = Result<(), Failure>;
/// A snapshot, and on whose behalf it is pulled: a request that came through others must not wait for one that may be waiting for it.
type Flight = (RepositoryName, Digest, String);

/// The registry that is asked for what is not here.
pub struct Upstream {
    remote: Remote,
    store: Store,
    ttl: Duration,
    /// This process, among registries that ask each other.
    id: String,
    tags: Mutex<HashMap<(RepositoryName, Tag), Seen>>,
    flights: Mutex<HashMap<Flight, Shared<BoxFuture<'static, Done>>>>,
    pulls: Semaphore,
}

/// What is remembered of a tag.
#[derive(Clone, Copy)]
struct Seen {
    at: Instant,
    /// Where we pointed it.
    digest: Option<Digest>,
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
        let options = RemoteOptions { token, retries: 1, connect_timeout, ..RemoteOptions::default() };
        Ok(Some(Arc::new(Self {
            remote: Remote::new(&config.upstream, options)?,
            store: store.clone(),
            ttl: Duration::from_secs(config.upstream_ttl_seconds),
            id: uuid::Uuid::now_v7().to_string(),
            tags: Mutex::default(),
            flights: Mutex::default(),
            pulls: Semaphore::new(PULLS),
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

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Sees to it that what a selector means is here, if the upstream has it.
    pub(super) async fn ensure(self: &Arc<Self>, repository: &RepositoryName, selector: &Selector, via: &str) -> Done {
        let Some(remote) = self.asked_via(via) else { return Ok(()) };
        match selector {
            Selector::Digest(digest) => self.snapshot(&remote, repository, *digest, via).await,
            Selector::Tag { tag, back } => {
                self.tag(&remote, repository, tag, via).await?;
                let Ok(row) = self.store.tag(repository, tag).await else { return Ok(()) };
                let mut digest = row.digest;
                for _ in 0..*back {
                    let Ok(row) = self.store.snapshot(repository, &digest).await else { return Ok(()) };
                    let Some(parent) = row.parents.first() else { return Ok(()) };
                    digest = *parent;
                    self.snapshot(&remote, repository, digest, via).await?;
                }
                Ok(())
            }
        }
    }

    async fn tag(self: &Arc<Self>, remote: &Remote, repository: &RepositoryName, tag: &Tag, via: &str) -> Done {
        let key = (repository.clone(), tag.clone());
        let here = match self.store.tag(repository, tag).await {
            Ok(row) => Some(row.digest),
            Err(error) if matches!(error.code(), ErrorCode::TagUnknown | ErrorCode::RepositoryUnknown) => None,
            Err(error) => return Err(error.into()),
        };
        let seen = locked(&self.tags).get(&key).copied();
        if here.is_some() && seen.is_some_and(|seen| seen.at.elapsed() < self.ttl) {
            return Ok(());
        }
        let mut ours = seen.and_then(|seen| seen.digest);
        match remote.tag(repository, tag).await {
            Ok(there) if here == Some(there.digest) => ours = here,
            Ok(there) => {
                let free = match here {
                    Some(here) => ours == Some(here) || self.came_from(remote, repository, here).await?,
                    None => true,
                };
                // A tag that was moved here stays where it was put.
                if free {
                    self.snapshot(remote, repository, there.digest, via).await?;
                    let expected = here.map_or(TagState::Absent, TagState::At);
                    match self.store.put_tag(repository, tag.clone(), there.digest, Some(expected)).await {
                        Ok(()) => ours = Some(there.digest),
                        // Someone was faster; what is there now is theirs.
                        Err(error) if error.code() == ErrorCode::TagMoved => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
            Err(error) if unknown(&error) => {}
            Err(error) if here.is_some() => {
                tracing::warn!(%error, %repository, %tag, "the upstream cannot be asked; what is here is served")
            }
            Err(error) => return Err(failure(&error)),
        }
        let mut tags = locked(&self.tags);
        if tags.len() >= TAGS {
            tags.clear();
        }
        tags.insert(key, Seen { at: Instant::now(), digest: ours });
        Ok(())
    }

    /// Whether the upstream knows a snapshot that is here.
    async fn came_from(&self, remote: &Remote, repository: &RepositoryName, digest: Digest) -> Result<bool, Failure> {
        match remote.lineage(repository, &Selector::Digest(digest), 1).await {
            Ok(_) => Ok(true),
            Err(error) if unknown(&error) => Ok(false),
            Err(error) => Err(failure(&error)),
        }
    }

    async fn snapshot(self: &Arc<Self>, remote: &Remote, repository: &RepositoryName, digest: Digest, via: &str) -> Done {
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
            let pulled = upstream.pull(&remote, &key.0, key.1).await;
            locked(&upstream.flights).remove(&key);
            pulled
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

/// The ids in a request's header.
pub(super) fn via(headers: &axum::http::HeaderMap) -> String {
    headers.get(VIA).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

fn unknown(error: &Error) -> bool {
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
        _ if unknown(error) || code == ErrorCode::CorruptStore => (code, format!("the upstream registry: {error}")),
        _ if matches!(code, ErrorCode::StorageFull) => (code, "no room for what the upstream registry has".to_owned()),
        _ => {
            let detail = "this is not here, and the upstream registry cannot be asked; that says nothing about what it holds, try again";
            (ErrorCode::Unavailable, detail.to_owned())
        }
    };
    Failure::new(code, detail).because(error.to_string())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
