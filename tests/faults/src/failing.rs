//! A storage that fails: slowly, before the effect, after it, in the middle, or for lack of space.
//!
//! Every call passes the task's gate before and after, so a schedule decides which task goes first
//! and which is killed in between.

use crate::faults::{Fault, Faults};
use crate::gate;
use async_trait::async_trait;
use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt as _, Result};
use pfr_testkit::storage::{Call, Hooks, Moment, hooked};
use std::sync::Arc;

/// Wraps `inner` so that its calls fail as `faults` draws. With `tears`, a write that fails can
/// leave a part of its bytes under its key: buckets cannot, file systems without rename can.
pub fn failing(inner: Arc<dyn ObjectStore>, faults: Faults, tears: bool) -> Arc<dyn ObjectStore> {
    hooked(Arc::clone(&inner), Arc::new(Failing { inner, faults, tears }))
}

#[derive(Debug)]
struct Failing {
    inner: Arc<dyn ObjectStore>,
    faults: Faults,
    tears: bool,
}

#[async_trait]
impl Hooks for Failing {
    async fn before(&self, call: &Call) -> Result<Option<Error>> {
        pass(call).await;
        let whole = matches!(call.moment, Moment::Put | Moment::Complete);
        if is_gated(call) && !whole {
            for _ in 0..self.faults.latency() {
                gate::pass().await;
            }
        }
        let writes = !matches!(call.moment, Moment::Get | Moment::Delete | Moment::List | Moment::ListFolder);
        let answer = match self.faults.draw(writes) {
            None => return Ok(None),
            Some(Fault::Torn) if whole && self.tears => self.tear(&call.location, &call.bytes).await,
            Some(fault @ Fault::After) => return Ok(Some(error(fault))),
            // Other calls that write have no bytes to tear.
            Some(fault @ Fault::Torn) if is_gated(call) && !whole => return Ok(Some(error(fault))),
            Some(fault) => error(fault),
        };
        pass(call).await;
        Err(answer)
    }

    async fn after(&self, call: &Call, _: bool) -> Result<()> {
        pass(call).await;
        Ok(())
    }
}

/// Whether the schedule orders the call.
fn is_gated(call: &Call) -> bool {
    !matches!(call.moment, Moment::Part | Moment::List)
}

async fn pass(call: &Call) {
    if is_gated(call) {
        gate::pass().await;
    }
}

impl Failing {
    /// Leaves a part of the bytes under the key and fails.
    async fn tear(&self, location: &Path, bytes: &[Bytes]) -> Error {
        let bytes = bytes.concat();
        let len = self.faults.below(bytes.len());
        // An existing object stays: no storage in use loses a whole object to a failed write of the
        // same key.
        if self.inner.head(location).await.is_err() {
            drop(self.inner.put(location, bytes[..len].to_vec().into()).await);
        }
        error(Fault::Torn)
    }
}

fn error(fault: Fault) -> Error {
    let source: Box<dyn std::error::Error + Send + Sync> = match fault {
        Fault::Reset => "connection reset by peer (injected)".into(),
        Fault::Before => "503 slow down (injected, nothing happened)".into(),
        Fault::After => "500 internal error (injected, it happened)".into(),
        Fault::Torn => "500 internal error (injected, a part was written)".into(),
        Fault::Full => Box::new(std::io::Error::from(std::io::ErrorKind::StorageFull)),
    };
    Error::Generic { store: "failing", source }
}
