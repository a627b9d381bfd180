//! Interchange with ProcessFork: its own crates write, we read, and back.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop and say where")]

mod manifests;
mod stores;
