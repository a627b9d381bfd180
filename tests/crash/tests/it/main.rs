//! Records the real programs and opens every state that a power cut may leave of what they did.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop and say where")]

mod agent;
mod jobs;
mod planted;
mod pull;
mod queue;
mod recorder;
mod registry;
mod store;
