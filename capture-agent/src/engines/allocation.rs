//! The guard over blocks that an engine gives for a sequence to be restored.

use super::engine::View;
use super::member::Member;
use super::{pause, table};
use crate::error::Result;
use pfr_schema::engine::{Allocate, Allocated, SequenceName, ToEngine, Verb};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// Blocks for a sequence to be restored. Dropped, they are given back.
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
        for rank in 0..view.shared.world {
            table::check_blocks(view.groups(rank), boundary, &allocation.allocated.blocks, table::Use::Fill)
                .map_err(|reason| allocation.member.broke(format!("allocated {:?}: {reason}", allocation.allocated.sequence)))?;
        }
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
                tracing::warn!(engine = member.engine, sequence, %error, "allocated blocks were not given back");
            }
        });
    }
}
