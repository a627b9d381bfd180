//! The capture agent: captures the engines of this host into a local store, restores them from it,
//! and pushes the store to a registry.
//!
//! ```text
//! engine ⇄ engines (session, layout, pause, tables)     memory (hash, copy out, write)
//!    snapshot: pause ─▶ set aside ─▶ pin ─▶ resume, or hold ─▶ hash ─▶ lacking? ─▶ copy, hash again ─▶ frames ─▶ manifest ─▶ pushes
//!    restore:  pull ─▶ checks ─▶ allocate ─▶ write ─▶ hash live ─▶ oracle ─▶ activate
//! control: HTTP over a Unix socket, for `pf` and for fleets
//! ```

pub mod agent;
pub mod config;
pub mod control;
mod copies;
pub mod daemon;
mod drain;
pub mod engines;
pub mod error;
mod files;
pub mod jobs;
pub mod library;
pub mod llama;
pub mod memory;
mod metrics;
mod priority;
pub mod program;
pub mod pushes;
pub mod rate;
pub mod report;
pub mod restore;
pub mod saves;
pub mod snapshot;

mod socket;
mod upkeep;

pub use agent::Agent;
pub use config::Config;
pub use error::{Error, Result};
