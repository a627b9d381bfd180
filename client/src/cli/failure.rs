//! How a command fails: an exit code, what happened, and what the user can do about it.

use super::output::paint::Paint;
use pfr_schema::{ErrorCode, FormatError};
use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

/// Why a command ended early.
#[derive(Debug)]
pub enum Failure {
    /// Whoever read stdout has read enough. Not a failure at all.
    BrokenPipe,
    /// A message without the word error, such as after Ctrl-C.
    Plain {
        /// Exit code.
        exit: u8,
        /// What to say.
        message: String,
    },
    /// An error.
    Error {
        /// Exit code.
        exit: u8,
        /// What, and where.
        message: String,
        /// What to do.
        hint: Option<String>,
    },
}

impl Failure {
    /// An error without a hint.
    pub fn new(exit: u8, message: impl Into<String>) -> Self {
        Self::Error { exit, message: message.into(), hint: None }
    }

    /// The command line is wrong: exit code 1.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest.exit_code(), message)
    }

    /// An error that one of the closed set of codes describes, with the code's hint.
    pub fn of_code(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Error { exit: code.exit_code(), message: message.into(), hint: hint(code).map(Into::into) }
    }

    /// Not an error, but an end.
    pub fn plain(exit: u8, message: impl Into<String>) -> Self {
        Self::Plain { exit, message: message.into() }
    }

    /// Says what to do instead of what the code would say.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        match self {
            Self::Error { exit, message, .. } => Self::Error { exit, message, hint: Some(hint.into()) },
            other => other,
        }
    }

    /// Puts what was being done before the message.
    #[must_use]
    pub fn context(self, what: &str) -> Self {
        match self {
            Self::Error { exit, message, hint } => Self::Error { exit, message: format!("{what}: {message}"), hint },
            other => other,
        }
    }

    /// The process exit code.
    pub fn exit(&self) -> u8 {
        match self {
            Self::BrokenPipe => 0,
            Self::Plain { exit, .. } | Self::Error { exit, .. } => *exit,
        }
    }

    /// Writes the message to stderr and gives the exit code.
    pub fn report(&self) -> ExitCode {
        let paint = Paint::for_stream(io::stderr().is_terminal());
        let mut stderr = io::stderr().lock();
        // If stderr is gone there is nobody left to tell.
        let _ = match self {
            Self::BrokenPipe => Ok(()),
            Self::Plain { message, .. } => writeln!(stderr, "{message}"),
            Self::Error { message, hint, .. } => {
                let hint = hint.as_ref().map(|h| format!("\n  {} {h}", paint.bold("hint:"))).unwrap_or_default();
                writeln!(stderr, "{} {}{hint}", paint.red("error:"), super::output::human::printable(message))
            }
        };
        ExitCode::from(self.exit())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BrokenPipe => f.write_str("the output was closed"),
            Self::Plain { message, .. } | Self::Error { message, .. } => f.write_str(&super::output::human::printable(message)),
        }
    }
}

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Self {
        Self::of_code(error.code(), error.to_string())
    }
}

impl From<pfr_store::Error> for Failure {
    fn from(error: pfr_store::Error) -> Self {
        let local = match error.code() {
            ErrorCode::Unavailable => Some("--store or PF_STORE says where the local store is"),
            ErrorCode::RepositoryUnknown => Some("`pf ls --local` lists the repositories there are"),
            ErrorCode::SnapshotUnknown | ErrorCode::TagUnknown => Some("`pf ls REPOSITORY --local` lists its tags and snapshots"),
            ErrorCode::CorruptStore => Some("pull the snapshot again: that heals the store"),
            code => hint(code),
        };
        Self::Error { exit: error.code().exit_code(), message: format!("local store: {error}"), hint: local.map(Into::into) }
    }
}

impl From<pfr_client::Error> for Failure {
    fn from(error: pfr_client::Error) -> Self {
        match error {
            pfr_client::Error::Store(error) => error.into(),
            // The hint of this code speaks of the registry.
            pfr_client::Error::NoAgent { .. } => Self::new(ErrorCode::Unavailable.exit_code(), error.to_string())
                .hint("PF_AGENT_SOCKET, or `agent` in the configuration file, say where its socket is, too"),
            pfr_client::Error::AgentGone { .. } => Self::new(ErrorCode::Unavailable.exit_code(), error.to_string())
                .hint("`pf engines` says whether it is back; look before you ask again"),
            error => Self::of_code(error.code(), error.to_string()),
        }
    }
}

/// What a user can do about an error of this kind, where there is something to do.
pub fn hint(code: ErrorCode) -> Option<&'static str> {
    Some(match code {
        ErrorCode::InvalidName => "a reference is [[http(s)://]host[:port]/]repository[:tag[~N]|@digest]",
        ErrorCode::AmbiguousDigest => "run the same command with one of these digests, or more of its digits",
        ErrorCode::RepositoryUnknown => "`pf ls` lists the repositories there are",
        ErrorCode::SnapshotUnknown | ErrorCode::TagUnknown => "`pf ls REPOSITORY` lists its tags and snapshots",
        ErrorCode::TagMoved => "look at `pf log REPOSITORY`, then use --if-tag-is with where the tag is now, or another tag",
        ErrorCode::CorruptFrame | ErrorCode::Truncated | ErrorCode::DigestMismatch | ErrorCode::LengthMismatch => {
            "the bytes are not what their name says; nothing of the snapshot became visible"
        }
        ErrorCode::CorruptStore => "push the snapshot again from a good copy: that heals the store",
        ErrorCode::MissingBlobs => "the source is not complete; push from a copy that has every page",
        ErrorCode::PushUnknown => "the upload's lease ended; run the same command again, what arrived is not sent twice",
        ErrorCode::Unauthorized => "set PF_TOKEN, or `token` in the configuration file",
        ErrorCode::Denied => "the token does not cover this repository or action; ask the registry's operator for one that does",
        ErrorCode::Overloaded | ErrorCode::Timeout => "run the same command again in a while; what was transferred is not sent twice",
        ErrorCode::Unavailable => {
            "is the registry up? `pf-registry serve --data DIR` starts one; --registry or PF_REGISTRY says where it is"
        }
        ErrorCode::StorageFull => "free space (`pf rm`, then garbage collection), and run the same command again",
        ErrorCode::Internal => "this is a bug; please report it with the message above",
        ErrorCode::PayloadHashMismatch | ErrorCode::ValueHashMismatch | ErrorCode::LiveMismatch | ErrorCode::OracleMismatch => {
            "the state is not the one that was captured; the sequence was not started"
        }
        ErrorCode::FingerprintMismatch | ErrorCode::GeometryMismatch | ErrorCode::RankMismatch => {
            "restore into an engine with the same weights, kernels and parallelism"
        }
        ErrorCode::TornCopy | ErrorCode::EngineBusy | ErrorCode::EngineLost => "run the same command again in a while",
        ErrorCode::NoRoom => "free memory or disk on this host and run the same command again; nothing was begun",
        ErrorCode::NotExact => "take the snapshot without asking for exactness, or turn off what cannot be recorded",
        ErrorCode::EngineUnknown | ErrorCode::SequenceUnknown => "`pf engines` lists the engines of this host and their sequences",
        ErrorCode::InvalidRequest
        | ErrorCode::InvalidDocument
        | ErrorCode::TooLarge
        | ErrorCode::BlobUnknown
        | ErrorCode::NotFound
        | ErrorCode::InexactStorage
        | ErrorCode::PageCountMismatch
        | ErrorCode::PrefixMismatch
        | ErrorCode::MissingGroup
        | ErrorCode::MissingState
        | ErrorCode::BoundaryMismatch
        | ErrorCode::EngineRefused => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_ends_in_a_documented_exit_code() {
        for code in ErrorCode::ALL {
            let exit = Failure::of_code(*code, "x").exit();
            assert!([1, 3, 4, 5, 6, 7, 70].contains(&exit), "{code} exits {exit}");
        }
    }

    #[test]
    fn a_closed_pipe_is_success_and_ctrl_c_is_130() {
        assert_eq!(Failure::BrokenPipe.exit(), 0);
        assert_eq!(Failure::plain(130, "interrupted").exit(), 130);
    }

    #[test]
    fn context_keeps_code_and_hint() {
        let failure = Failure::of_code(ErrorCode::TagMoved, "tag x is elsewhere").context("push");
        let Failure::Error { exit, message, hint } = failure else { panic!("an error stays one") };
        assert_eq!((exit, message.as_str()), (3, "push: tag x is elsewhere"));
        assert!(hint.is_some());
    }
}
