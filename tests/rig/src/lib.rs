//! Throw-away servers for tests: real processes, on loopback, torn down with who started them; and a storage that does what a test says.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "a test that cannot go on should stop and say where"
)]

pub mod postgres;
pub mod s3;
pub mod storage;
