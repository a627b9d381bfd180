//! The guard of blocks that an engine allocates for a restore.

use super::member::Member;
use super::pause;
use super::view::View;
use crate::error::Result;
use pfr_schema::engine::{Allocate, Allocated, SequenceName, ToEngine, Verb};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Blocks for a sequence to be restored. Dropping this discards them.
#[derive(Debug)]
pub struct Allocation {
    member: Arc<Member>,
    allocated: Allocated,
    /// Until the sequence runs. Dropped when the engine has the blocks back.
    open: Option<oneshot::Sender<()>>,
    given_back: Option<oneshot::Receiver<()>>,
    timeout: Duration,
    runtime: Handle,
}

impl Allocation {
    pub(super) async fn take(view: Arc<View>, what: Allocate) -> Result<Self> {
        let member = Arc::clone(view.must_serve(Verb::Allocate, "allocate")?);
        let (boundary, timeout) = (what.boundary, view.shared.timeout);
        let guard = move |member, allocated| {
            let (open, given_back) = oneshot::channel();
            Self { member, allocated, open: Some(open), given_back: Some(given_back), timeout, runtime: Handle::current() }
        };
        let mut allocation = pause::granted(member, timeout, ToEngine::Allocate(Box::new(what)), "allocate", guard).await?;
        let Allocated { sequence, blocks } = &allocation.allocated;
        if let Err(reason) = view.check_blocks(boundary, blocks) {
            let error = allocation.member.broke(format!("allocated {sequence:?}: {reason}"));
            let given_back = allocation.given_back();
            drop(allocation);
            given_back.await;
            return Err(error);
        }
        Ok(allocation)
    }

    /// Waits until the engine has the blocks back, or the sequence runs. Ends after the time that
    /// the engine has for a call: then the blocks come back later. A second call does not wait.
    pub fn given_back(&mut self) -> impl Future<Output = ()> + Send + use<> {
        let (given_back, timeout) = (self.given_back.take(), self.timeout);
        async move {
            if let Some(given_back) = given_back {
                drop(tokio::time::timeout(timeout, given_back).await);
            }
        }
    }

    /// The new sequence.
    #[must_use]
    pub fn sequence(&self) -> &str {
        &self.allocated.sequence
    }

    /// Its blocks.
    #[must_use]
    pub fn blocks(&self) -> &BTreeMap<String, Vec<u32>> {
        &self.allocated.blocks
    }

    /// The sequence may run.
    ///
    /// # Errors
    /// [`crate::Error::Refused`], [`crate::Error::Lost`]: then it was discarded.
    pub async fn activate(mut self) -> Result<String> {
        let sequence = self.allocated.sequence.clone();
        let call = ToEngine::Activate(SequenceName { sequence: sequence.clone() });
        self.member.call_within::<serde_json::Value>(self.timeout, call).await?;
        self.open = None;
        Ok(sequence)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        let (member, timeout) = (Arc::clone(&self.member), self.timeout);
        let sequence = self.allocated.sequence.clone();
        pfr_service::task::spawn_on(&self.runtime, async move {
            let call = ToEngine::Discard(SequenceName { sequence: sequence.clone() });
            if let Err(error) = member.insist(timeout, call).await {
                tracing::warn!(engine = member.engine, sequence, %error, "cannot discard an allocated sequence");
            }
            drop(open);
        });
    }
}
