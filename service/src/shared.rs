//! A value that many hold, and that the compiler does not look through.
//!
//! A future that goes to another thread may only hold values that may go there. For a reference the
//! compiler looks through all fields of its target, again for each function. axum asks it many times
//! over for each route, and the state of the registry leads to the stores of all domains: to look
//! through these took a third of the registry's build. With this type the answer is known.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// An `Arc` of a value whose type is hidden. Each access is a call: this is for values that many
/// futures hold, and not for those that a loop reads.
///
/// A value that must stay on its thread cannot be shared:
///
/// ```compile_fail,E0277
/// pfr_service::Shared::new(std::cell::Cell::new(0));
/// ```
pub struct Shared<T: 'static>(Arc<dyn Deref<Target = T> + Send + Sync>);

impl<T: Send + Sync> Shared<T> {
    /// Shares a value.
    pub fn new(value: T) -> Self {
        Self(Arc::new(Hidden(value)))
    }
}

/// The value behind its type.
struct Hidden<T>(T);

impl<T> Deref for Hidden<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.deref()
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        T::fmt(self, f)
    }
}
