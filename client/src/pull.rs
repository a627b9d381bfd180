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
use crate::signing::find_signature;
use fetch::Fetcher;
use pfr_schema::api::{NewSignature, Signature, SnapshotDetail};
use pfr_schema::signature::MOST;
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use pfr_store::Store;
use serde::Serialize;
use std::collections::HashSet;
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

/// What a pull would fetch. Bytes are raw bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lacking {
    /// Blobs and nodes that are not here.
    pub blobs: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Bytes of everything that the snapshot lists.
    pub bytes_total: u64,
}

/// Blobs and nodes that are counted already: of several snapshots that share them each is fetched
/// once. Takes some 20 bytes for each.
#[derive(Clone, Debug, Default)]
pub struct Counted(HashSet<u128>);

impl Counted {
    /// Counts these, too.
    pub fn add(&mut self, more: Self) {
        self.0.extend(more.0);
    }

    fn has(&self, digest: &Digest, is_node: bool) -> bool {
        self.0.contains(&Self::key(digest, is_node))
    }

    /// Whether it was not counted before.
    fn insert(&mut self, digest: &Digest, is_node: bool) -> bool {
        self.0.insert(Self::key(digest, is_node))
    }

    /// No two digests in use begin with the same 127 bits. A node is not counted because another
    /// snapshot lists the same bytes as a plain blob: that one does not bring what the node lists.
    fn key(digest: &Digest, is_node: bool) -> u128 {
        let begins = digest.as_bytes().iter().take(16).fold(0, |key, byte| (key << 8) | u128::from(*byte));
        (begins & !1) | u128::from(is_node)
    }
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
/// [`crate::Error::NotSigned`] before anything is fetched, if pulls from this registry are
/// [verified](Remote::verifying). `digest_mismatch`, `corrupt_frame` and their like if the registry
/// sends wrong bytes: then nothing is published. [`crate::Error::Unreachable`]. Running it again
/// fetches only what has not arrived.
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
    let found = look_up(remote, repository, selector).await?;
    let report = pull_found(remote, repository, &found, destination, progress).await?;
    Ok(PullReport { round_trips: remote.round_trips() - trips, seconds: start.elapsed().as_secs_f64(), ..report })
}

/// What a registry says of the snapshot that a selector means. No frame is asked for, and nothing
/// but the digest that was asked for is verified: whatever is decided by it must be decided again
/// by the bytes.
///
/// # Errors
/// As [`Remote::snapshot`]; [`crate::Error::Protocol`] if the answer is of another snapshot;
/// [`crate::Error::NotSigned`] if pulls from this registry are [verified](Remote::verifying).
#[boxed]
pub async fn look_up(remote: &Remote, repository: &RepositoryName, selector: &Selector) -> Result<SnapshotDetail> {
    let detail = remote.snapshot(repository, selector).await?;
    let said = detail.summary.digest;
    let other = match selector {
        Selector::Digest(asked) if *asked != said => asked.to_string(),
        Selector::Prefix(asked) if !asked.matches(&said) => format!("{asked}…"),
        _ => {
            if let Some(keys) = remote.verify_keys() {
                find_signature(&said, &detail.signatures, keys)?;
            }
            return Ok(detail);
        }
    };
    Err(remote.protocol(format!("the request names {other}, the answer {said}")))
}

/// The same as [`pull`] for a snapshot that [`look_up`] found.
///
/// # Errors
/// As [`pull`].
#[boxed]
pub async fn pull_found(
    remote: &Remote,
    repository: &RepositoryName,
    found: &SnapshotDetail,
    destination: &Destination,
    progress: &Progress,
) -> Result<PullReport> {
    let (start, trips) = (Instant::now(), remote.round_trips());
    progress.enter(Phase::Negotiating);
    let digest = found.summary.digest;
    let fetcher = Fetcher::new(remote, repository, progress);
    let totals: Totals = match destination {
        Destination::Store { store, repository, tag } => {
            let totals = into_store::pull(&fetcher, digest, store, repository, tag.clone()).await?;
            keep_signatures(store, repository, &digest, &found.signatures).await?;
            totals
        }
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

/// Keeps the signatures of a snapshot beside it. They say nothing here before a key checks them, so
/// those that cannot be signatures are left out, and those that find no place.
///
/// # Errors
/// Those of the store.
#[boxed]
pub async fn keep_signatures(store: &Store, repository: &RepositoryName, digest: &Digest, signatures: &[Signature]) -> Result<()> {
    let new: Vec<NewSignature> =
        signatures.iter().cloned().map(NewSignature::from).filter(|new| new.check(digest).is_ok()).take(MOST).collect();
    if new.is_empty() {
        return Ok(());
    }
    match store.add_signatures(repository, digest, &new).await {
        Ok(_) => Ok(()),
        // It has others here, as many as a snapshot may have.
        Err(pfr_store::Error::Invalid(reason)) => {
            tracing::warn!(%repository, %digest, reason, "the signatures of the registry are not kept");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// What a pull into a store would fetch of which nothing is `counted` yet, and what that is. Asks
/// for nodes, and for no page; the store is as before.
///
/// # Errors
/// As [`pull`].
#[boxed]
pub async fn lacking(
    remote: &Remote,
    repository: &RepositoryName,
    digest: Digest,
    store: &Store,
    counted: &Counted,
) -> Result<(Lacking, Counted)> {
    into_store::lacking(&Fetcher::new(remote, repository, &Progress::default()), digest, store, repository, counted).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_counted_although_its_bytes_were_counted_as_a_plain_blob() {
        let (digest, other) = (Digest::sha256(b"a page chunk"), Digest::sha256(b"another"));
        let mut counted = Counted::default();
        assert!(counted.insert(&digest, false));
        assert!(counted.has(&digest, false) && !counted.has(&digest, true));
        assert!(counted.insert(&digest, true) && !counted.insert(&digest, true));
        let mut more = Counted::default();
        assert!(more.insert(&other, true));
        counted.add(more);
        assert!(counted.has(&other, true) && counted.has(&digest, true) && !counted.has(&other, false));
    }
}
