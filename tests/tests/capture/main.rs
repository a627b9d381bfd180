//! Capture and restore, through the real binaries: two hosts, their agents, a registry, the reference engine.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a test that cannot go on should stop and say where")]

mod demo;
mod equality;
mod exactness;
mod faults;
mod fleet;
mod growth;
mod refusals;
