//! Why the program, or one of its commands, ended without success.

use crate::config::SettingsError;
use crate::http::tls::TlsError;
use crate::jwt::IssuersError;
use crate::mirror;
use pfr_schema::ErrorCode;
use pfr_service::settings::FileError;
use std::net::SocketAddr;

/// Why a registry did not start, or a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Its settings are refused.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Its store cannot be opened.
    #[error("cannot open the store: {0}")]
    Store(#[from] pfr_store::Error),
    /// Another process has the data directory.
    #[error(
        "the data directory {} is in use{}: stop the registry that serves it, or give another --data",
        data.display(),
        holder.map(|pid| format!(" by process {pid}")).unwrap_or_default()
    )]
    Locked {
        /// The directory.
        data: std::path::PathBuf,
        /// The process that has it, if its id is known.
        holder: Option<u32>,
    },
    /// A command is for a store that there is, and the data directory has none.
    #[error(
        "there is no store in {}: it has no {missing}. --data names the directory that `pf-registry serve` uses{}",
        data.display(),
        if *has_packs { "; its packs are there, and `pf-registry rebuild` makes the tables from them" } else { "" }
    )]
    NoStore {
        /// The directory.
        data: std::path::PathBuf,
        /// What every store has there.
        missing: String,
        /// Whether packs are there.
        has_packs: bool,
    },
    /// A command is for a store that there is, and the directory of its packs is not there.
    #[error("there is no store in {}: there is no such directory. --storage names the one that `pf-registry serve` uses", .0.display())]
    NoStorage(std::path::PathBuf),
    /// The other registry of a command cannot be used.
    #[error(transparent)]
    Mirror(#[from] mirror::Error),
    /// Its certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The issuers of tokens cannot be used.
    #[error(transparent)]
    Issuers(#[from] IssuersError),
    /// It cannot listen.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file for the audit log cannot be written.
    #[error("cannot write the audit file {}: {source}", path.display())]
    AuditFile {
        /// The file.
        path: std::path::PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The work of a command on the store failed.
    #[error(transparent)]
    Work(pfr_store::Error),
    /// A command found something wrong with the store; its report says what.
    #[error("{0}")]
    Found(String),
    /// The other registry of a command failed.
    #[error("the other registry: {0}")]
    OtherRegistry(String),
    /// The registry that a command asked does not serve.
    #[error("{0}")]
    Unhealthy(String),
    /// A command was told to end before it was done.
    #[error("interrupted: {what}")]
    Interrupted {
        /// What is left, and what to do.
        what: &'static str,
        /// Exit code: 128 and the signal's number, as a shell expects.
        exit: u8,
    },
    /// The process cannot be set up.
    #[error("cannot set up the process: {0}")]
    Runtime(std::io::Error),
    /// Metrics cannot be set up.
    #[error("cannot set up metrics: {0}")]
    Metrics(String),
}

impl Error {
    /// Exit code of the process.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted { exit, .. } => *exit,
            other => other.code().map_or(1, ErrorCode::exit_code),
        }
    }

    /// Advice for the user, where the message has none.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Listen { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => {
                return Some("another process listens there; stop it, or give another --listen");
            }
            Self::Store(pfr_store::Error::Unavailable { .. }) => {
                return Some("--data, --database and --storage say where the store is");
            }
            _ => {}
        }
        match self.code()? {
            ErrorCode::Denied => Some("check the owner and the permissions, or run this as the user that the files belong to"),
            ErrorCode::StorageFull => Some("free space on that disk, and run the same command again"),
            _ => None,
        }
    }

    /// The kind of error. None for an interruption, which is not an error.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        Some(match self {
            Self::Settings(SettingsError::File(FileError::Read { source, .. }))
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                ErrorCode::Denied
            }
            Self::Settings(_) => ErrorCode::InvalidRequest,
            Self::Tls(TlsError::Read { source, .. }) | Self::Issuers(IssuersError::Read { source, .. })
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                ErrorCode::Denied
            }
            Self::Tls(_) | Self::Issuers(_) => ErrorCode::InvalidRequest,
            Self::Listen { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => ErrorCode::Denied,
            Self::AuditFile { source, .. } => ErrorCode::of_io(source.kind()).unwrap_or(ErrorCode::InvalidRequest),
            Self::Listen { .. } | Self::Locked { .. } => ErrorCode::InvalidRequest,
            Self::NoStore { .. } | Self::NoStorage(_) => ErrorCode::NotFound,
            Self::Store(error) | Self::Work(error) => error.local_code(),
            Self::Mirror(error) => error.code(),
            Self::Found(_) => ErrorCode::CorruptStore,
            Self::OtherRegistry(_) | Self::Unhealthy(_) => ErrorCode::Unavailable,
            Self::Runtime(_) | Self::Metrics(_) => ErrorCode::Internal,
            Self::Interrupted { .. } => return None,
        })
    }
}
