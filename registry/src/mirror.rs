//! Replication between registries, by the algorithm of push and pull.
//!
//! ```text
//! names of both sites ─▶ snapshots that one lacks, parents first ─▶ pull, push, or frames passed through ─▶ tags
//! ```
//!
//! The cost follows the change: a node that the target holds is not walked into. A snapshot becomes
//! visible at the target only when it is complete there. So a mirror that is killed leaves complete
//! snapshots and leased uploads, and the next run continues from there.

mod names;
mod order;
mod pass;
mod report;

pub use pass::{Options, check, mirror};
pub use report::{Conflict, NotCopied, Report};

use pfr_schema::ErrorCode;

/// Why a mirror ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One site cannot be used, or no longer.
    #[error(transparent)]
    Client(Box<pfr_client::Error>),
    /// The two sites contradict each other.
    #[error("{0}")]
    Sites(&'static str),
    /// Not everything was copied.
    #[error("{detail}")]
    Incomplete {
        /// The first cause.
        code: ErrorCode,
        /// What was not copied.
        detail: String,
    },
}

impl From<pfr_client::Error> for Error {
    fn from(error: pfr_client::Error) -> Self {
        Self::Client(Box::new(error))
    }
}

impl From<pfr_store::Error> for Error {
    fn from(error: pfr_store::Error) -> Self {
        pfr_client::Error::from(error).into()
    }
}

impl Error {
    /// The kind of error.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Client(error) => error.code(),
            Self::Sites(_) => ErrorCode::InvalidRequest,
            Self::Incomplete { code, .. } => *code,
        }
    }
}
