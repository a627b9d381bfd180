//! End to end, through the real binaries. One binary with a module for each theme: it links once.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a test that cannot go on should stop and say where")]

mod concurrency;
mod crash;
mod dedup;
mod machine;
mod memory;
mod network;
mod processfork;
mod refusals;
mod storage_full;
mod wire;
