//! Maps PostgreSQL's errors to those of the store.

use crate::error::Error;
use crate::metadata::tx::Fail;

/// The name of the missing part when a table does not exist.
pub(super) const TABLES: &str = "tables";

/// The server's code of an error.
pub(super) fn code(error: &sqlx::Error) -> String {
    error.as_database_error().and_then(|e| e.code()).unwrap_or_default().into_owned()
}

impl From<sqlx::Error> for Fail {
    fn from(error: sqlx::Error) -> Self {
        let code = code(&error);
        // Shutdown, crash, a session that was ended.
        let ended = code.starts_with("08") || matches!(code.as_str(), "57P01" | "57P02" | "57P05" | "25P03");
        let connection_lost =
            ended || matches!(error, sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed | sqlx::Error::BeginFailed | sqlx::Error::Protocol(_));
        // Serialisation, deadlock, start-up, too many connections.
        let passing = connection_lost || matches!(code.as_str(), "40001" | "40P01" | "57P03" | "53300");
        let error = match code.as_str() {
            "53100" => Error::Full(error.to_string()),
            // A violated constraint, which is a bug.
            c if c.starts_with("23") => Error::Internal(format!("the tables refuse it ({error}); run fsck")),
            // A lock was not granted in the time that the transaction set for it.
            "55P03" => Error::Overloaded("other transactions hold the locks that this change needs"),
            "42P01" => Error::Unavailable { what: TABLES, reason: error.to_string() },
            _ => Error::Unavailable { what: "metadata", reason: error.to_string() },
        };
        Self::Database { error, connection_lost, passing }
    }
}

/// Whether the outcome of the last statement is unknown.
pub(super) fn lost_connection(fail: &Fail) -> bool {
    matches!(fail, Fail::Database { connection_lost: true, .. })
}

/// Whether the whole transaction may succeed when it is run again.
pub(super) fn is_worth_another_try(fail: &Fail) -> bool {
    matches!(fail, Fail::Again | Fail::Database { passing: true, .. })
}
