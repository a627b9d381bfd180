//! Carrying an error around an API that only takes its words.

use crate::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

/// The first error of a stream that is read by someone who would reduce it to text (an HTTP body, a store).
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot(Arc<Mutex<Option<Error>>>);

impl Slot {
    /// Keeps `error` and gives its words to the reader.
    pub fn keep(&self, error: Error) -> std::io::Error {
        let words = std::io::Error::other(error.to_string());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        words
    }

    /// The error, if there was one.
    pub fn take(&self) -> Option<Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
