//! Pulls of snapshots from the upstream: each one once, however many readers wait for it.

use super::signatures::Signatures;
use super::upstream::{Via, failure, is_unknown};
use crate::problem::ApiError;
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use pfr_client::{Destination, Progress, Remote};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector};
use pfr_store::Store;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Semaphore;
use tracing::Instrument as _;

/// Snapshots pulled at once; others wait.
const PULLS: usize = 2;

type Done = Result<(), ApiError>;
/// A snapshot, and the registries that the request came through: a request that came through others
/// must not wait for a pull that may be waiting for it.
type Key = (RepositoryName, Digest, Via);

/// The pulls of one registry.
pub(super) struct Pulls {
    store: Store,
    signatures: Arc<Signatures>,
    running: Mutex<HashMap<Key, Shared<BoxFuture<'static, Done>>>>,
    permits: Semaphore,
}

impl Pulls {
    pub(super) fn new(store: Store, signatures: Arc<Signatures>) -> Arc<Self> {
        Arc::new(Self { store, signatures, running: Mutex::default(), permits: Semaphore::new(PULLS) })
    }

    /// Makes a snapshot available here, if the upstream has it.
    pub(super) async fn snapshot(self: &Arc<Self>, remote: &Remote, repository: &RepositoryName, digest: Digest, via: &Via) -> Done {
        match self.store.snapshot(repository, &digest).await {
            Ok(_) => return Ok(()),
            Err(error) if matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => {}
            Err(error) => return Err(error.into()),
        }
        let key: Key = (repository.clone(), digest, via.clone());
        let pull = {
            let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            match running.get(&key) {
                Some(pull) => pull.clone(),
                None => {
                    let pull = self.start(remote.clone(), key.clone());
                    running.insert(key, pull.clone());
                    pull
                }
            }
        };
        pull.await
    }

    /// Starts a pull in its own task: the reader that asked first may leave while others wait for
    /// it.
    fn start(self: &Arc<Self>, remote: Remote, key: Key) -> Shared<BoxFuture<'static, Done>> {
        let pulls = Arc::clone(self);
        let pulling = async move {
            let running = Running { pulls, key };
            running.pulls.pull(&remote, &running.key.0, running.key.1).await
        };
        // A part of the trace of the reader that asked first.
        let task = pfr_service::task::spawn(pulling.in_current_span());
        async move { task.await.unwrap_or_else(|error| Err(ApiError::internal(error.to_string()))) }.boxed().shared()
    }

    async fn pull(&self, remote: &Remote, repository: &RepositoryName, digest: Digest) -> Done {
        // The upstream may have to pull the snapshot itself first. A permit is taken only
        // afterwards, so that registries that ask each other do not wait for each other's permits.
        match remote.lineage(repository, &Selector::Digest(digest), 1).await {
            Ok(_) => {}
            Err(error) if is_unknown(&error) => return Ok(()),
            Err(error) => return Err(failure(&error)),
        }
        let _permit = self.permits.acquire().await.map_err(|error| ApiError::internal(error.to_string()))?;
        if self.store.snapshot(repository, &digest).await.is_ok() {
            return Ok(());
        }
        let destination = Destination::Store { store: self.store.clone(), repository: repository.clone(), tag: None };
        let pulled = pfr_client::pull(remote, repository, &Selector::Digest(digest), &destination, &Progress::default()).await;
        match pulled {
            Ok(report) => {
                // A pull into a store keeps them.
                self.signatures.are_fresh((repository.clone(), digest));
                let (blobs, bytes) = (report.blobs_received, report.bytes_received);
                tracing::info!(%repository, %digest, blobs, bytes, "pull-through: snapshot pulled from the upstream");
                Ok(())
            }
            Err(error) if is_unknown(&error) => Ok(()),
            Err(error) => Err(failure(&error)),
        }
    }
}

/// Removes a pull when it ends, even by a panic: its result is not the answer to later requests.
struct Running {
    pulls: Arc<Pulls>,
    key: Key,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.pulls.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}
