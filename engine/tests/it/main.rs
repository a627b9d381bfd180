//! The reference engine.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod dense;
mod hybrid;
mod model;
mod serve;
