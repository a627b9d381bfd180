//! The session of a capture in the local store: it ends with the capture.

use super::target::{CommitBegun, Target};
use crate::error::Result;
use pfr_store::{PushSession, Store};
use tokio::runtime::Handle;

/// A session of the local store. Its end ends the leases of what the capture has stored: the next
/// collection frees it. Until then the next try of the capture finds it. The next start of an agent
/// that was killed ends its sessions.
///
/// A capture that is given up, or that panics, drops this, and the drop ends the session in a task
/// of its own. Once a commit has begun, the drop does nothing: the commit goes on by itself, and
/// ends the session. If that commit fails, the session ends with its lease.
#[derive(Debug)]
pub(super) struct CaptureSession {
    store: Store,
    pub push: PushSession,
    commit_begun: CommitBegun,
    is_over: bool,
    runtime: Handle,
}

impl CaptureSession {
    pub async fn open(store: &Store, target: &Target) -> Result<Self> {
        let push = store.open_capture(&target.repository).await?;
        let (store, commit_begun) = (store.clone(), target.commit_begun.clone());
        Ok(Self { store, push, commit_begun, is_over: false, runtime: Handle::current() })
    }

    /// Ends it after a failure.
    pub async fn abort(mut self) {
        abort(&self.store, &self.push).await;
        self.is_over = true;
    }
}

impl Drop for CaptureSession {
    fn drop(&mut self) {
        if self.is_over || self.commit_begun.get() {
            return;
        }
        let (store, push) = (self.store.clone(), self.push.clone());
        pfr_service::task::spawn_on(&self.runtime, async move { abort(&store, &push).await });
    }
}

async fn abort(store: &Store, push: &PushSession) {
    if let Err(error) = store.abort(&push.id).await {
        tracing::debug!(%error, "the session of a capture stays open until its lease ends");
    }
}
