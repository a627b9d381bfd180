//! Replication between registries, by the algorithm of push and pull.
//!
//! ```text
//! names of both ends ─▶ snapshots that one lacks, parents first ─▶ pull, push, or frames passed through ─▶ tags
//! ```
//!
//! Cost follows the change: a container that the target holds is not walked into. Nothing of a snapshot is visible at the target before all of
//! it is there, so a mirror that is killed leaves whole snapshots and leased uploads, and the next run goes on from there.

mod end;
mod names;
mod order;
mod pass;
mod report;

pub use end::End;
pub use pass::{Options, mirror};
pub use pfr_client::fetch_blobs;
pub use report::{Conflict, Failed, Report};

use pfr_schema::ErrorCode;

/// Why a mirror ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An end cannot be used, or not any more.
    #[error(transparent)]
    Client(Box<pfr_client::Error>),
    /// The ends contradict each other.
    #[error("{0}")]
    Ends(&'static str),
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
            Self::Ends(_) => ErrorCode::InvalidRequest,
            Self::Incomplete { code, .. } => *code,
        }
    }
}
