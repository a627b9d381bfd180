//! Packs: the only code that writes one, reads one, knows where one lies, and decides what it means
//! that one is not found.
//!
//! | file | is |
//! |---|---|
//! | `paths` | where a pack lies |
//! | `folders` | the folders of a storage that is a directory, durable |
//! | `files` | a directory as an object store, which writes parts of packs in one piece |
//! | `writer` | many frames into one object (`pending`), its leases renewed meanwhile (`renewal`) |
//! | `reader` | bytes of a pack, and what a failed read means |
//! | `index` | what lies in a pack, by its own words |
//! | `extents` | from digests to bytes, also while compaction moves them |
//! | `checks` | frames as they lie, against their checksums and digests |

mod checks;
mod extents;
mod files;
mod folders;
mod index;
mod paths;
mod pending;
mod reader;
mod renewal;
mod writer;

pub(crate) use checks::{Expected, FrameChecks, another, header_of};
pub(crate) use extents::{Extent, locate, locate_as, plan, read_extent};
pub(crate) use files::in_directory;
pub(crate) use index::{Index, IndexFound, read_index};
pub(crate) use paths::{PROBES, key_of, path};
pub(crate) use reader::read_at;
pub(crate) use renewal::Renewal;
pub(crate) use writer::PackWriter;

/// Bytes read from a pack at a time. Frames that lie back to back are read together.
pub(crate) const READ: u64 = 4 << 20;
/// Bytes of a piece of a read that is handed on while the next is made.
pub(crate) const PIECE: u64 = 512 << 10;
