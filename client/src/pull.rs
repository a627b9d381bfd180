//! Pull.

use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::remote::Remote;
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use pfr_store::Store;
use serde::Serialize;
use std::path::PathBuf;

/// Where a snapshot goes to.
#[derive(Clone, Debug)]
pub enum Destination {
    /// A local store.
    Store {
        /// The store.
        store: Store,
        /// The local repository.
        repository: RepositoryName,
        /// A local tag to point at the snapshot.
        tag: Option<Tag>,
    },
    /// A snapshot directory, made if it is not there.
    Directory {
        /// The directory.
        path: PathBuf,
        /// A store to take blobs from that need not be fetched.
        store: Option<Store>,
    },
}

/// What a pull did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PullReport {
    /// The snapshot.
    pub digest: Digest,
    /// Pages in it, over all page trees.
    pub pages: u64,
    /// Blobs it reaches, containers included, each once.
    pub blobs_total: u64,
    /// Blobs received.
    pub blobs_received: u64,
    /// Raw bytes it reaches, each blob once.
    pub bytes_raw: u64,
    /// Raw bytes that were here already.
    pub bytes_deduplicated: u64,
    /// Bytes of frames received.
    pub bytes_received: u64,
    /// Requests.
    pub round_trips: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Fetches what of a snapshot is not here, and makes it visible here.
///
/// # Errors
/// `digest_mismatch`, `corrupt_frame` and their like if the registry sends wrong bytes: then nothing is published.
pub async fn pull(
    _remote: &Remote,
    _repository: &RepositoryName,
    _selector: &Selector,
    _destination: &Destination,
    _progress: &Progress,
) -> Result<PullReport> {
    Err(Error::Internal("not yet".into()))
}
