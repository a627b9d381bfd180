//! Formats of `pf`: everything that two processes must agree on, and no I/O.
//!
//! A *blob* is opaque bytes named by the digest of its raw bytes. A *node* is a blob that lists
//! other blobs: a page chunk ([`run`]) lists pages, a page [`tree`] lists page chunks, a
//! [`checkpoint`] lists tensors, a [`snapshot`] manifest lists all of these. Only [`container`]
//! follows references. Blobs travel and rest as [`frame`]s; a [`pack`] is many frames and an index.
//!
//! The specification in words is `docs/formats.md`; golden files under `tests/golden` keep both
//! true.
//!
//! ```
//! use pfr_schema::{Algorithm, Digest};
//! let digest = Digest::of(Algorithm::Sha256, b"hi");
//! assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
//! ```

pub mod access;
pub mod agent;
pub mod api;
pub mod checkpoint;
pub mod codec;
pub mod container;
pub mod digest;
pub mod engine;
pub mod error;
pub mod export;
pub mod flat;
pub mod frame;
pub mod geometry;
pub mod image;
pub mod journal;
pub mod json;
pub mod llama;
pub mod media_type;
pub mod name;
pub mod pack;
pub mod pattern;
pub mod prefix;
pub mod ranges;
pub mod resume;
pub mod run;
pub mod shards;
pub mod signature;
pub mod snapshot;
pub mod sse;
pub mod tree;

mod document;
mod kind;
mod limits;

pub use access::{AccessScope, AccessToken, AccessTokenId, Action};
pub use container::Container;
pub use digest::{Algorithm, Digest, DigestPrefix, Hasher};
pub use document::Document;
pub use error::{ErrorCode, FormatError};
pub use image::Image;
pub use kind::Kind;
pub use limits::Limits;
pub use name::{AgentName, DomainName, Reference, RepositoryName, Selector, Tag};
pub use pattern::Pattern;
