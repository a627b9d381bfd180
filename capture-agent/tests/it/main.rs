//! The capture agent, against engines made of test memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod automatic;
mod common;
mod compression;
mod config;
mod control;
mod ending;
mod engines_register;
mod engines_wire;
mod gpu;
mod holds;
mod jobs;
mod kernels;
mod library;
mod llama;
mod llama_faults;
mod loads;
mod memory;
mod modules;
mod passing;
mod pushes;
mod report;
mod reshard;
mod restore;
mod restore_asking;
mod restore_forms;
mod snapshot;
mod snapshot_faults;
