//! Push and pull: one algorithm, "make the destination hold everything that this manifest reaches".
//!
//! ```text
//! push: directory or local store ─▶ plan (nodes first) ─▶ what does the registry lack? ─▶ frames, children first ─▶ commit
//! pull: registry ─▶ nodes ─▶ what does this host lack? ─▶ frames, verified ─▶ local store, or a directory
//! ```
//!
//! Cost follows the change: a node that the destination holds is complete, so nothing below it is
//! asked about or moved. Memory is bounded by the documents of a snapshot and a few read-ahead
//! buffers, never by its pages. Both directions can be cut at any point and run again: frames that
//! arrived are not moved twice.
//!
//! [`Remote`] is the registry's `/v1` with retries; [`push()`] and [`pull()`] are built on it, and
//! [`Passage`], which hands the blobs of a snapshot to a reader with the local store behind it;
//! [`Directory`] is the interchange form on disk; [`export`] makes one artifact of a snapshot, for
//! other registries, buckets and files; [`AgentClient`] asks the capture agent of this host;
//! [`Progress`] is for progress bars.

// The command's modules name this crate as its users do.
extern crate self as pfr_client;

mod age;
pub mod agent;
mod ancestors;
pub mod cli;
pub mod directory;
pub mod encoding;
pub mod error;
pub mod export;
pub mod human;
pub mod json;
pub mod progress;
pub mod pull;
pub mod push;
pub mod remote;
mod signing;
pub mod site;
pub mod size;
pub mod text;
mod tokens;

mod local;
mod meter;
mod plain;
mod plan;
mod slot;

/// Compiles the body of an async function here, once, and not in each program that awaits it.
use async_recursion::async_recursion as boxed;

pub use age::Age;
pub use agent::AgentClient;
pub use ancestors::nth_ancestor;
pub use directory::Directory;
pub use error::{Error, Result};
pub use progress::{Phase, Progress};
pub use pull::{
    Arrivals, Counted, Destination, Flight, Lacking, Passage, PullReport, Way, keep_signatures, lacking, look_up, pull, pull_found,
};
pub use push::{PushReport, PushTarget, Source, push, push_into_store};
pub use remote::{
    BoxFrames, Brake, Distrust, Entry, EventFilter, Events, Followed, OnRetry, PageOf, Remote, RemoteOptions, Retrying, VIA, all_pages,
    extra_roots, reason,
};
pub use signing::{find_signature, public_keys};
pub use site::Site;
pub use size::{ByteSize, scrub_rate};
pub use tokens::{StoredTokens, TokenCheck, registry_url, same_registry, same_server};
