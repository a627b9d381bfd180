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

/// Blocks for a sequence to be restored. Dropping this discards them.
#[derive(Debug)]
pub struct Allocation {
    member: Arc<Member>,
    allocated: Allocated,
    open: bool,
    timeout: Duration,
    runtime: Handle,
}

impl Allocation {
    pub(super) async fn take(view: Arc<View>, what: Allocate) -> Result<Self> {
        let member = Arc::clone(view.must_serve(Verb::Allocate, "allocate")?);
        let (boundary, timeout) = (what.boundary, view.shared.timeout);
        let guard = move |member, allocated| Self { member, allocated, open: true, timeout, runtime: Handle::current() };
        let allocation = pause::granted(member, timeout, ToEngine::Allocate(Box::new(what)), "allocate", guard).await?;
        let Allocated { sequence, blocks } = &allocation.allocated;
        let checked = view.check_blocks(boundary, blocks);
        checked.map_err(|reason| allocation.member.broke(format!("allocated {sequence:?}: {reason}")))?;
        Ok(allocation)
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
        self.open = false;
        Ok(sequence)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let (member, timeout) = (Arc::clone(&self.member), self.timeout);
        let sequence = self.allocated.sequence.clone();
        self.runtime.spawn(async move {
            let call = ToEngine::Discard(SequenceName { sequence: sequence.clone() });
            if let Err(error) = member.insist(timeout, call).await {
                tracing::warn!(engine = member.engine, sequence, %error, "cannot discard an allocated sequence");
            }
        });
    }
}
