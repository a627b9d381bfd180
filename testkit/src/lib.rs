//! What tests share: generated snapshots and their frames, a proxy that falsifies answers, a
//! storage that fails, small and broken disks, real PostgreSQL and S3 servers on loopback, which
//! end with the process that started them, a collector of traces, certificates and tokens of
//! issuers, and the seeds and required capabilities of a test run.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::print_stdout,
    reason = "a test that cannot go on should stop and say where"
)]

#[cfg(feature = "collector")]
pub mod collector;
pub mod directory;
pub mod disk;
pub mod frames;
#[cfg(feature = "front")]
pub mod front;
pub mod json;
#[cfg(feature = "keys")]
pub mod jwt;
pub mod llama;
pub mod postgres;
pub mod run;
pub mod s3;
pub mod snapshot;
pub mod storage;
#[cfg(feature = "keys")]
pub mod tls;

use std::time::{Duration, Instant};

/// Waits until `condition` yields something; panics after `seconds`.
pub fn wait_for<T>(what: &str, seconds: u64, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(seconds);
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {seconds} s for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
