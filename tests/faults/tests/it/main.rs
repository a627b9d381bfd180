//! Random histories with crashes, and kills of the real programs.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop and say where")]

mod exchange;
mod full_disk;
mod model;
mod processes;
