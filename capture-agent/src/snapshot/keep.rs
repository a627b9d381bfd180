//! What keeps blocks as they are while they are copied.

use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;

/// A pin of the engine's own kind, or none. Each thread that copies has a clone: whoever gives the capture up, blocks are not let
/// go under a copy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keep(#[expect(dead_code, reason = "lives to be dropped")] Option<Arc<Mutex<Box<dyn Any + Send>>>>);

impl Keep {
    pub(crate) fn new(pin: Box<dyn Any + Send>) -> Self {
        Self(Some(Arc::new(Mutex::new(pin))))
    }
}
