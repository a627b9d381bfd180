//! The client library and the `pf` program, against a registry in the same process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod agent;
mod command;
mod common;
mod completions;
mod compression;
mod events;
mod exports;
mod gc;
mod herd;
mod hints;
mod integrity;
mod json;
mod listing;
mod login;
mod names;
mod pull;
mod push;
mod refusals;
mod retries;
mod scrub;
mod signing;
mod slow_answers;
mod slow_push;
mod tls;
mod trouble;
