//! The real programs as processes: end to end, under attack, in fleets.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a test that cannot go on should stop and say where")]

mod adversary;
mod capture;
mod compression;
mod deploy;
mod docs;
mod e2e;
mod earlier;
mod mirror;
mod oci_clients;
mod pull_through;
mod replicas;
mod tags;
mod traces;
