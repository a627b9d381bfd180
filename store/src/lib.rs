//! The store of `pf`: packs in an [`object_store`], [`Metadata`] beside them, references, leases.
//! The same store runs behind the registry and on every GPU host. It has no HTTP.
//!
//! ```text
//! frames in ─▶ verify (digest, checksum, off the async threads) ─▶ pack, durable ─▶ one metadata transaction ─▶ acknowledged
//! commit    ─▶ one transaction: manifest, parents, tag
//! frames out ◀─ ranges of packs, as they lie ◀─ located in metadata
//! ```
//!
//! What is durable when: [`Store::ingest`] returns after its packs are on disk and their rows
//! committed; [`Store::commit`] after the tag is. Blobs that were uploaded and never committed are
//! garbage when their lease ends.
//!
//! A stored node holds its children: it is accepted only if all of them are stored, and raises
//! their reference counts in the same transaction. So *present* means *complete*, and
//! [`Store::missing`] may stop at the first node it finds.

mod access;
mod backends;
mod clock;
mod domains;
mod encryption;
mod error;
mod events;
mod frames;
mod gc;
mod images;
mod ingest;
mod inspect;
mod integrity;
mod journal;
mod live;
mod marker;
mod metadata;
mod names;
mod packs;
mod places;
mod retention;
mod room;
mod signatures;
#[cfg(feature = "cloud")]
pub mod storage;
mod store;
mod tasks;
mod trace;
mod uploads;
mod verify;

/// Compiles the body of an async function here, once. The body of a plain one is compiled again in
/// each program and each test that awaits it: half of their build time was this crate.
use async_recursion::async_recursion as boxed;

pub use access::{AccessTokens, NewAccessToken};
pub use backends::SqliteMetadata;
#[cfg(feature = "postgres")]
pub use backends::{PostgresMetadata, PostgresOptions};
pub use clock::Clock;
pub use domains::{DomainHome, DomainPacks, DomainTables, Domains};
pub use encryption::{KeyOptions, Keys, WrappedKey, encrypted};
pub use error::{Error, Result};
pub use frames::{BoxFrames, PackRange, Served, in_codecs};
pub use gc::{GcOptions, GcPart};
pub use ingest::Ingested;
pub use inspect::{PrefixIndexTask, StatsFilter, VerifyProgress};
pub use integrity::ScrubOptions;
pub use live::LivePush;
pub use metadata::*;
pub use retention::{Criteria, KeepLast};
pub use room::{Freeing, MadeRoom};
pub use signatures::{PrivateKey, signer};
pub use store::{Options, PushSession, Store, document_frame};
pub use tasks::{Budget, Lane, RunEnd, Schedule, Task};
pub use uploads::BodyStream;
pub use verify::{Incoming, Opened, Sink, WHOLE_MAX, Whole, opened_frames, verified_frames, verified_frames_into};
