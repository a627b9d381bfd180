//! Pull: fetch the missing parts of a snapshot, and make it visible here.
//!
//! ```text
//! resolve ─▶ manifest ─▶ trees, checkpoints ─▶ runs ─▶ blobs, several requests in flight ─▶ nodes ─▶ commit
//! ```
//!
//! The registry is trusted only for the snapshot that a tag points to. Every byte is verified
//! against the requested digest, and unrequested frames end the pull. Nodes are fetched first,
//! to learn what they list, and accepted last, since the local store takes a node only when
//! what it lists is there.

pub(crate) mod fetch;
mod flight;
mod into_directory;
mod into_store;
mod passage;
mod publish;
mod writer;

pub use flight::Flight;
pub use passage::{Arrivals, Passage, Way};

use crate::boxed;
use crate::error::Result;
use crate::plan::Totals;
use crate::progress::{Phase, Progress};
use crate::remote::Remote;
use fetch::Fetcher;
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use pfr_store::Store;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

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
    /// A snapshot directory, made if it is not there. Its page manifest appears last, when
    /// everything else is durable.
    Directory {
        /// The directory.
        path: PathBuf,
        /// A store to take blobs from that need not be fetched. Nothing is added to it.
        store: Option<Store>,
    },
}

/// The result of a pull.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PullReport {
    /// The snapshot.
    pub digest: Digest,
    /// Pages in it, over all page trees.
    pub pages: u64,
    /// Blobs and nodes that it lists, itself included.
    pub blobs_total: u64,
    /// Blobs and nodes received.
    pub blobs_received: u64,
    /// Raw bytes of everything it lists.
    pub bytes_raw: u64,
    /// Raw bytes of what was here already.
    pub bytes_deduplicated: u64,
    /// Bytes of frames received.
    pub bytes_received: u64,
    /// Raw bytes that these stand for.
    pub bytes_received_raw: u64,
    /// Requests.
    pub round_trips: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Fetches the missing parts of a snapshot, and makes it visible here.
///
/// # Errors
/// `digest_mismatch`, `corrupt_frame` and their like if the registry sends wrong bytes: then
/// nothing is published; [`crate::Error::Unreachable`]. Running it again fetches only what has not
/// arrived.
#[boxed]
pub async fn pull(
    remote: &Remote,
    repository: &RepositoryName,
    selector: &Selector,
    destination: &Destination,
    progress: &Progress,
) -> Result<PullReport> {
    let (start, trips) = (Instant::now(), remote.round_trips());
    progress.enter(Phase::Negotiating);
    let digest = resolve(remote, repository, selector).await?;
    let fetcher = Fetcher::new(remote, repository, progress);
    let totals: Totals = match destination {
        Destination::Store { store, repository, tag } => into_store::pull(&fetcher, digest, store, repository, tag.clone()).await?,
        Destination::Directory { path, store } => into_directory::pull(&fetcher, digest, path, store.as_ref()).await?,
    };
    progress.enter(Phase::Done);
    Ok(PullReport {
        digest,
        pages: totals.pages,
        blobs_total: totals.blobs,
        blobs_received: fetcher.blobs(),
        bytes_raw: totals.bytes,
        bytes_deduplicated: progress.bytes_deduplicated(),
        bytes_received: fetcher.frame_bytes(),
        bytes_received_raw: fetcher.raw_bytes(),
        round_trips: remote.round_trips() - trips,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// The snapshot that a registry has under a name. A registry that names another one than the digest
/// in the request has broken the protocol.
async fn resolve(remote: &Remote, repository: &RepositoryName, selector: &Selector) -> Result<Digest> {
    let said = remote.snapshot(repository, selector).await?.summary.digest;
    match selector {
        Selector::Digest(asked) if *asked != said => Err(remote.protocol(format!("the request names {asked}, the answer {said}"))),
        Selector::Prefix(asked) if !asked.matches(&said) => Err(remote.protocol(format!("the request names {asked}…, the answer {said}"))),
        _ => Ok(said),
    }
}
