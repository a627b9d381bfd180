//! The guard of a member: the member belongs to its engine until this is dropped.

use super::Engines;
use super::member::Member;
use super::view::Shared;
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
