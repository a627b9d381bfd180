//! The pin of an engine in this process, shared by the threads that copy.

use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;

/// A pin of the engine's own type, or none. Each thread that copies has a clone, so that the engine
/// cannot reuse blocks while they are copied, even if the capture is cancelled.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedPin(#[expect(dead_code, reason = "lives to be dropped")] Option<Arc<Mutex<Box<dyn Any + Send>>>>);

impl SharedPin {
    pub(crate) fn new(pin: Box<dyn Any + Send>) -> Self {
        Self(Some(Arc::new(Mutex::new(pin))))
    }
}
