//! Values that many futures hold, and whose fields the compiler does not look through.
//!
//! The compiler lets a future go to another thread if all values that it holds may go there. To see
//! that, it looks through the fields of each of them, again for each function. axum asks it for
//! this many times for each route, and the state of the registry leads to the stores of all
//! domains: a fifth of the registry's build was this. A future that holds a [`Shared`] needs no
//! such look; one that holds a reference into its content still does.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// An `Arc` that hides the fields of its value. Each access is a call: this is for values that many
/// futures hold, and not for those that a loop reads.
///
/// ```
/// let shared = pfr_service::Shared::new(String::from("state"));
/// assert_eq!(shared.len(), 5);
/// ```
///
/// A value that threads must not share is refused:
///
/// ```compile_fail
/// pfr_service::Shared::new(std::cell::Cell::new(0));
/// ```
pub struct Shared<T: 'static>(Arc<dyn Deref<Target = T> + Send + Sync>);

impl<T: Send + Sync> Shared<T> {
    /// Shares a value.
    pub fn new(value: T) -> Self {
        Self(Arc::new(Hidden(value)))
    }
}

/// Gives its value by a trait that has objects.
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
        (*self.0).deref()
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
