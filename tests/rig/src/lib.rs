//! Throw-away servers for tests: real processes, on loopback, torn down with who started them.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, reason = "a test that cannot go on should stop and say where")]

pub mod postgres;
pub mod s3;
