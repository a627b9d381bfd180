//! Exchange with ProcessFork: its crates write what the import reads, and read what the import
//! writes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop and say where")]

mod manifests;
mod stores;
