//! Rows of packs.

use super::{Health, ObjectId, PackId};
use pfr_schema::{Digest, Kind};

/// Sizes of a complete pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackSizes {
    /// Bytes of the object, with index and footer.
    pub bytes: u64,
    /// Bytes of its frames: what compaction compares live bytes with.
    pub frame_bytes: u64,
}

/// The limits of a full pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FullPack {
    /// Bytes.
    pub bytes: u64,
    /// Frames.
    pub frames: u64,
}

/// Live packs, by size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackCounts {
    /// All of them.
    pub live: u64,
    /// Those with less than half of the bytes and of the frames that fill one.
    pub small: u64,
}

/// Life of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackState {
    /// Its row exists, its bytes may not: the upload runs, or ended in a crash.
    Writing,
    /// Complete and indexed.
    Live,
    /// Nothing points to it any more: its bytes are deleted after the grace period. The tables
    /// have this state as `draining`.
    Emptied,
}

/// A pack's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackRow {
    /// Row id.
    pub id: PackId,
    /// Key, a UUID.
    pub key: String,
    /// State.
    pub state: PackState,
    /// Bytes of the object; 0 while it is written.
    pub bytes: u64,
    /// Bytes of its frames.
    pub frame_bytes: u64,
    /// Bytes of the frames that objects point to.
    pub live_bytes: u64,
    /// While it is written: when its upload counts as given up. Milliseconds since 1970.
    pub keep_until: u64,
    /// Since when nothing points to it. Milliseconds since 1970.
    pub draining_since: Option<u64>,
    /// Until when a compaction claims it. Milliseconds since 1970.
    pub claimed_until: u64,
}

/// An object as it lies in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The object.
    pub object: ObjectId,
    /// Its digest.
    pub digest: Digest,
    /// Its kind.
    pub kind: Kind,
    /// Byte offset of its frame's header.
    pub offset: u64,
    /// Bytes of the whole frame.
    pub frame_len: u64,
    /// Its health.
    pub health: Health,
}

/// A frame that compaction copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The object.
    pub object: ObjectId,
    /// The pack that it was copied from. If it is elsewhere by now, or deleted, the copy is dead
    /// space.
    pub from: PackId,
    /// Byte offset of its header in the new pack.
    pub offset: u64,
}
