//! Push.

use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::remote::Remote;
use pfr_schema::api::TagState;
use pfr_schema::{Digest, RepositoryName, Tag};
use pfr_store::Store;
use serde::Serialize;
use std::path::PathBuf;

/// Where a snapshot comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A snapshot directory, read in place.
    Directory(PathBuf),
    /// A snapshot in a local store.
    Store {
        /// The store.
        store: Store,
        /// The snapshot's manifest.
        snapshot: Digest,
    },
}

/// Where a snapshot goes to.
#[derive(Clone, Debug)]
pub struct PushTarget {
    /// The repository.
    pub repository: RepositoryName,
    /// A tag to point at the snapshot.
    pub tag: Option<Tag>,
    /// Move the tag only from this state.
    pub if_tag_is: Option<TagState>,
    /// Parents to record; empty leaves the configuration as it is. Only for directories: a stored snapshot is what it is.
    pub parents: Vec<Digest>,
}

/// What a push did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PushReport {
    /// The snapshot.
    pub digest: Digest,
    /// Pages in it, over all page trees.
    pub pages: u64,
    /// Blobs it reaches, containers included, each once.
    pub blobs_total: u64,
    /// Blobs sent.
    pub blobs_sent: u64,
    /// Raw bytes it reaches, each blob once.
    pub bytes_raw: u64,
    /// Raw bytes that the registry had already.
    pub bytes_deduplicated: u64,
    /// Bytes of frames sent.
    pub bytes_sent: u64,
    /// Requests.
    pub round_trips: u64,
    /// Wall time.
    pub seconds: f64,
    /// Whether the repository did not have the snapshot before.
    pub created: bool,
    /// Raw bytes that the snapshot brought first, as the registry counts them.
    pub new_bytes: u64,
}

/// Makes the registry hold a snapshot, and commits it.
///
/// # Errors
/// Whatever is wrong with the source, before anything is sent; the registry's refusal; [`Error::Unreachable`].
pub async fn push(_source: &Source, _remote: &Remote, _target: PushTarget, _progress: &Progress) -> Result<PushReport> {
    Err(Error::Internal("not yet".into()))
}
