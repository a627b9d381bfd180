//! Push: make the registry hold a snapshot, and commit it.
//!
//! ```text
//! open ─▶ missing: manifest and what it lists ─▶ missing: runs, payloads ─▶ missing: pages ─▶ frames ─▶ commit
//! ```
//!
//! Each step asks only below what the step before found lacking, so an unchanged snapshot takes
//! three round trips and a small change six. The pages of 128 page chunks are asked about and sent
//! before those of the next, so that memory does not follow their number. A small plan is sent in
//! one request. Otherwise several requests with blobs are in flight at a time, and the nodes come
//! at the end: the registry accepts a node only after everything that it lists. Blobs that other
//! clients are sending are not sent here too, but asked about again (`queue`). If the registry has
//! forgotten the session, a new one is opened: the registry still has the blobs that it received.

mod batch;
mod into_store;
mod queue;
mod relay;
mod session;
pub(crate) mod source;

pub use into_store::push_into_store;

use crate::boxed;
use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::export::Exported;
use crate::progress::{Phase, Progress};
use crate::remote::Remote;
use pfr_schema::api::TagState;
use pfr_schema::codec::Compression;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Tag};
use pfr_store::Store;
use serde::Serialize;
use session::{Sent, Session};
use source::OpenedSource;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a session that the registry has forgotten is opened again.
const REOPENINGS: u32 = 2;
/// How long a failed push tries to end its session. Without that the lease ends the session.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// The source of a push.
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
    /// A snapshot in another registry. Its frames are verified on their way through; nothing is
    /// kept here.
    Remote {
        /// The registry.
        remote: Remote,
        /// The repository there.
        repository: RepositoryName,
        /// The snapshot's manifest.
        snapshot: Digest,
    },
    /// A directory that was read and checked already.
    Opened(Arc<Directory>),
    /// An exported snapshot.
    Export(Arc<Exported>),
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
    /// Parents to record; empty leaves the configuration as it is. Only for directories given by
    /// path: other snapshots are made already.
    pub parents: Vec<Digest>,
    /// How blobs of directories are encoded. Stored ones stay as they are.
    pub compression: Compression,
}

/// The result of a push.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PushReport {
    /// The snapshot.
    pub digest: Digest,
    /// Pages in it, over all page trees.
    pub pages: u64,
    /// Blobs and nodes that it lists, itself included.
    pub blobs_total: u64,
    /// Blobs and nodes sent.
    pub blobs_sent: u64,
    /// Raw bytes of everything it lists.
    pub bytes_raw: u64,
    /// Raw bytes of what the registry had already.
    pub bytes_deduplicated: u64,
    /// Bytes of frames sent.
    pub bytes_sent: u64,
    /// Raw bytes that these stand for.
    pub bytes_sent_raw: u64,
    /// Raw bytes sent that were not encoded because the registry took them faster so, or to find
    /// that out.
    pub bytes_left_raw: u64,
    /// Requests.
    pub round_trips: u64,
    /// Wall time.
    pub seconds: f64,
    /// Whether the repository did not have the snapshot before.
    pub created: bool,
    /// Raw bytes that were new in the domain, as the registry counts them.
    pub new_bytes: u64,
}

/// Makes the registry hold a snapshot, and commits it.
///
/// # Errors
/// Errors of the source, before anything is sent, but for files of pages beyond the first 128 page
/// chunks; the registry's refusal, with the file if its bytes are wrong; [`Error::Unreachable`].
/// Nothing becomes visible, and running it again sends only what has not arrived.
#[boxed]
pub async fn push(source: &Source, remote: &Remote, target: PushTarget, progress: &Progress) -> Result<PushReport> {
    let (start, trips) = (Instant::now(), remote.round_trips());
    progress.enter(Phase::Reading);
    let opened = OpenedSource::open(source, &target.parents).await?;
    let totals = opened.totals().await?;
    progress.begin(&totals);
    let mut sent = Sent::default();
    let mut reopenings = 0;
    let committed = loop {
        progress.enter(Phase::Negotiating);
        let session = Session::open(&opened, remote, &target, progress).await?;
        match session.run(totals.bytes, &mut sent).await {
            Ok(committed) => break committed,
            Err(error) if error.code() == ErrorCode::PushUnknown && reopenings < REOPENINGS => {
                reopenings += 1;
                // What it claimed is free for the next one.
                drop(tokio::time::timeout(ABORT_TIMEOUT, session.abort()).await);
            }
            Err(error) => {
                // Lets garbage collection free the bytes at once. The caller gets the first error.
                if !matches!(error, Error::Unreachable { .. }) {
                    drop(tokio::time::timeout(ABORT_TIMEOUT, session.abort()).await);
                }
                return Err(opened.explain(error));
            }
        }
    };
    progress.enter(Phase::Done);
    Ok(PushReport {
        digest: committed.digest,
        pages: totals.pages,
        blobs_total: totals.blobs,
        blobs_sent: sent.blobs,
        bytes_raw: totals.bytes,
        bytes_deduplicated: progress.bytes_deduplicated(),
        bytes_sent: sent.frame_bytes,
        bytes_sent_raw: sent.raw_bytes,
        bytes_left_raw: sent.left_raw,
        round_trips: remote.round_trips() - trips,
        seconds: start.elapsed().as_secs_f64(),
        created: committed.created,
        new_bytes: committed.new_bytes,
    })
}
