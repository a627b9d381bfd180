//! The end of the time for a capture.

use super::target::CommitBegun;
use crate::error::{Error, Result};
use pfr_schema::agent::SnapshotReport;
use std::pin::pin;
use std::time::Instant;

/// When a capture is given up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    pub at: Instant,
    /// Seconds that there were until then, for the error.
    pub seconds: u64,
}

impl Deadline {
    /// The error of a capture that was given up. `busy_with` names what its engine was busy with
    /// until then.
    pub fn missed(&self, engine: &str, sequence: &str, busy_with: Option<&str>) -> Error {
        let busy = busy_with.map_or_else(String::new, |with| format!(", which was busy with {with},"));
        Error::Timeout { what: format!("{sequence} of {engine}{busy} was not captured"), seconds: self.seconds }
    }

    /// Waits for a capture until the deadline, and longer if its commit has begun. `None` if it was
    /// given up: the engine runs again, and nothing is committed.
    pub(super) async fn bound(
        &self,
        taking: impl Future<Output = Result<SnapshotReport>>,
        commit_begun: &CommitBegun,
    ) -> Option<Result<SnapshotReport>> {
        let mut taking = pin!(taking);
        tokio::select! {
            biased;
            taken = &mut taking => Some(taken),
            () = tokio::time::sleep_until(self.at.into()) => match commit_begun.get() {
                true => Some(taking.await),
                false => None,
            },
        }
    }
}
