//! Carries an error past an API that takes only its text.

use crate::error::Error;
use parking_lot::Mutex;
use std::sync::Arc;

/// The first error of a stream whose reader (an HTTP body, a store) would reduce it to text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot(Arc<Mutex<Option<Error>>>);

impl Slot {
    /// Keeps `error`, and returns its text for the reader.
    pub fn keep(&self, error: Error) -> std::io::Error {
        let text = std::io::Error::other(error.to_string());
        self.0.lock().get_or_insert(error);
        text
    }

    /// The error, if there was one.
    pub fn take(&self) -> Option<Error> {
        self.0.lock().take()
    }
}
