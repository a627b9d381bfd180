//! Every state that a power cut may leave on disk, opened by the real store.
//!
//! ```text
//! record    the real programs run under a tracer; each operation on files below one directory is kept
//! trace     the operations, in order: names, writes, sizes, syncs
//! states    at each sync: which subsets of the operations before it may have reached the disk
//! disk      a state as files and directories, written out to be opened
//! oracle    what was acknowledged at that time, and what was begun
//! check     the store opens, has what was acknowledged, serves nothing corrupt, takes pushes, leaks nothing
//! ```
//!
//! docs/decisions/0028 says why the operations are recorded by a tracer, and what is assumed of a
//! file system.

#![expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test that cannot go on should stop and say where")]

pub mod check;
pub mod disk;
pub mod oracle;
pub mod record;
pub mod states;
pub mod trace;
