//! Registries over every pair of metadata and storage, several of them over one, and what happens when the storage goes away.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a test that cannot go on should stop and say where")]

mod backend;
mod fleet;
mod matrix;
mod outage;
mod redirects;
mod secrets;
