//! Capture and restore, through the real binaries: two hosts, their agents, a registry, the
//! reference engine.

mod demo;
mod equality;
mod exactness;
mod faults;
mod fleet;
mod growth;
mod refusals;
