//! The steps inside a request, as spans: transactions, storage, verification, waits. They are made
//! only where a trace is exported and has begun: background work has none, and costs nothing.

use crate::Error;
use tracing::field::Empty;
use tracing::{Level, Span};

/// A step, from here until it is dropped.
#[derive(Debug)]
pub(crate) struct Stage(Span);

impl Stage {
    /// A transaction on the metadata.
    pub(crate) fn transaction(system: &'static str, operation: &'static str) -> Self {
        Self(if is_wanted() {
            tracing::info_span!(
                "transaction",
                "otel.name" = operation,
                "otel.kind" = "client",
                "db.system.name" = system,
                "db.operation.name" = operation,
                "error.type" = Empty,
                "otel.status_code" = Empty,
            )
        } else {
            Span::none()
        })
    }

    /// A request to the storage, about so many bytes of an object.
    pub(crate) fn storage(operation: &'static str, key: &str, bytes: u64) -> Self {
        Self(if is_wanted() {
            tracing::info_span!(
                "storage",
                "otel.name" = operation,
                "otel.kind" = "client",
                "pf.storage.key" = key,
                "pf.bytes" = number(bytes),
                "error.type" = Empty,
                "otel.status_code" = Empty,
            )
        } else {
            Span::none()
        })
    }

    /// Frames are hashed, and compared with their digests.
    pub(crate) fn verify(frames: usize, bytes: u64) -> Self {
        Self(if is_wanted() {
            tracing::info_span!("verify frames", "pf.frames" = number(frames as u64), "pf.bytes" = number(bytes))
        } else {
            Span::none()
        })
    }

    /// Work waits until other work is done.
    pub(crate) fn wait(what: &'static str) -> Self {
        Self(if is_wanted() { tracing::info_span!("wait", "otel.name" = what) } else { Span::none() })
    }

    /// The step failed. The span has the code of the error, and not its words: they may name what a
    /// reader of traces may not know.
    pub(crate) fn failed(&self, error: &Error) {
        self.0.record("error.type", error.code().name());
        self.0.record("otel.status_code", "ERROR");
    }

    /// The same by a result, which is handed on.
    pub(crate) fn end<T>(self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result {
            self.failed(error);
        }
        result
    }
}

/// The span of a stream of frames that is verified and stored: steps inside are below it.
pub(crate) fn storing() -> Span {
    if !is_wanted() {
        return Span::none();
    }
    tracing::info_span!("store frames", "pf.frames" = Empty, "pf.frames.new" = Empty, "pf.bytes" = Empty)
}

/// A number as traces have them.
pub(crate) fn number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn is_wanted() -> bool {
    tracing::span_enabled!(Level::INFO) && !Span::current().is_none()
}
