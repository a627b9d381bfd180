//! Throw-away servers for tests: real processes, on loopback, which end with the process that started them. A storage that does what
//! a test says. What the whole run is asked to do: seeds and required capabilities.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::print_stdout,
    reason = "a test that cannot go on should stop and say where"
)]

pub mod postgres;
pub mod run;
pub mod s3;
pub mod storage;
