//! Why a job failed: as the store's error, or as the database's.

use crate::error::Error;
use pfr_schema::FormatError;

/// What a job returns.
pub(super) type Outcome<T> = Result<T, Fail>;

/// Why a job failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fail {
    /// The store's word.
    #[error(transparent)]
    Store(#[from] Error),
    /// The database's.
    #[error(transparent)]
    Sql(#[from] sqlx::Error),
    /// Somebody else was faster: what was read no longer holds.
    #[error("another transaction came first")]
    Again,
}

impl From<FormatError> for Fail {
    fn from(error: FormatError) -> Self {
        Self::Store(error.into())
    }
}

impl Fail {
    /// A bug, or tables that somebody else changed.
    pub(super) fn internal(reason: impl Into<String>) -> Self {
        Self::Store(Error::Internal(reason.into()))
    }

    /// What callers see.
    pub(super) fn into_error(self) -> Error {
        let unavailable = |reason: String| Error::Unavailable { what: "metadata", reason };
        match self {
            Self::Store(error) => error,
            Self::Again => unavailable("other transactions came first each time: try again".into()),
            Self::Sql(error) => {
                let code = error.as_database_error().and_then(|e| e.code()).unwrap_or_default().into_owned();
                match code.as_str() {
                    "53100" => Error::Full(error.to_string()),
                    // A constraint: what the tables must never say.
                    c if c.starts_with("23") => Error::Internal(format!("the tables refuse it ({error}); run fsck")),
                    _ => unavailable(error.to_string()),
                }
            }
        }
    }
}
