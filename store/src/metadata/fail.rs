//! How a transaction fails.

use crate::error::Error;
use pfr_schema::FormatError;

/// What a transaction returns to the back end that runs it.
pub(crate) type Outcome<T> = std::result::Result<T, Fail>;

/// Why a transaction failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fail {
    /// The logic refused the change.
    #[error(transparent)]
    Store(#[from] Error),
    /// Another transaction was faster, so the rows read are out of date. The transaction is
    /// repeated.
    #[error("another transaction came first")]
    Again,
    /// The database failed.
    #[error("{error}")]
    Database {
        /// The error for the caller.
        error: Error,
        /// The outcome of the last statement is not known.
        connection_lost: bool,
        /// The same transaction may succeed when it is run again.
        passing: bool,
    },
}

impl From<FormatError> for Fail {
    fn from(error: FormatError) -> Self {
        Self::Store(error.into())
    }
}

impl Fail {
    /// A bug, or tables that were changed from outside.
    pub(crate) fn internal(reason: impl Into<String>) -> Self {
        Self::Store(Error::Internal(reason.into()))
    }

    /// The error for the caller.
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Store(error) | Self::Database { error, .. } => error,
            Self::Again => Error::Unavailable { what: "metadata", reason: "other transactions came first each time: try again".into() },
        }
    }
}
