//! Harness of the end-to-end tests: the real binaries as child processes, snapshot directories, a
//! network that can be cut.
//!
//! Everything random follows from a seed that is printed; `PF_SEED` repeats a run.

#![expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test that cannot go on should stop and say where")]

mod capture;
pub mod linearizable;
mod network;
mod processes;
mod snapshots;

pub use capture::{Engine, Host, Model, Step};
pub use network::{Proxy, Tamper};
pub use pfr_testkit::disk::{LoopDisk, SmallDisk};
pub use pfr_testkit::front::{Fate, Front, Seen};
pub use pfr_testkit::run::{seed, skip};
pub use pfr_testkit::wait_for;
pub use processes::{Output, Pf, Registry, ask, peak_memory};
pub use snapshots::{Shape, SnapshotDir, Wire};

use std::path::{Path, PathBuf};

/// Path of one of the workspace's binaries, beside the running test.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join(name);
    assert!(path.exists(), "{} is not built: run ./check, or cargo build --workspace --bins", path.display());
    path
}

/// A loopback address that only this process uses. On 127.0.0.1, another test may take a port that
/// this test has closed for a moment.
#[must_use]
pub fn own_address() -> std::net::Ipv4Addr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    std::net::Ipv4Addr::new(127, 64 | a, b, c)
}

/// Starts a [`Front`], a proxy with a rule, before a registry, on [`own_address`].
pub fn front(registry: &str, rule: impl FnMut(&Seen) -> Fate + Send + 'static) -> Front {
    Front::start_at(own_address().into(), registry, rule)
}

/// Every file below `dir` with its bytes, sorted by path.
#[must_use]
pub fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut stack = vec![dir.to_owned()];
    while let Some(next) = stack.pop() {
        for entry in std::fs::read_dir(&next).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                stack.push(path)
            } else {
                // The file may have been deleted since it was listed.
                match std::fs::read(&path) {
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    read => found.push((path.strip_prefix(dir).unwrap().to_owned(), read.unwrap())),
                }
            }
        }
    }
    found.sort();
    found
}
