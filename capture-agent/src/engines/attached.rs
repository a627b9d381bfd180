//! The guard of a member: the member belongs to its engine until this is dropped.

use super::Engines;
use super::member::Member;
use super::view::Shared;
use crate::error::{Result, blocking};
use crate::memory::MemoryError;
use pfr_schema::Digest;
use std::sync::Arc;

/// A member in this process, or behind a connection. The member leaves when this is dropped.
#[derive(Debug)]
pub struct Attached {
    engines: Engines,
    engine: Arc<Shared>,
    member: Arc<Member>,
}

impl Attached {
    pub(super) fn new(engines: Engines, engine: Arc<Shared>, member: Arc<Member>) -> Self {
        Self { engines, engine, member }
    }

    /// Waits until nothing writes into this member's memory any more. A member whose connection has
    /// ended takes its blocks back.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] if the thread that waits panicked.
    pub(super) async fn settle(&self) -> Result<()> {
        if self.member.groups.is_empty() {
            return Ok(());
        }
        let fills = self.engine.fills.of_rank(self.member.rank);
        let wait = move || {
            fills.iter().for_each(|fill| fill.close_and_wait());
            Ok::<_, MemoryError>(())
        };
        blocking("waiting for copies", wait).await
    }

    /// Digest of the deployment.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        self.engine.fingerprint
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.engines.leave(&self.engine, &self.member.name);
        self.member.end();
        tracing::info!(engine = self.member.engine, member = self.member.name, "engine member left");
    }
}
