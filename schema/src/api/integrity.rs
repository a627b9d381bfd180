//! What checks and repairs found.

use crate::digest::Digest;
use crate::name::DomainName;
use serde::{Deserialize, Serialize};

/// The lowest rate of a scrub, in bytes per second: a slower one would take practically for ever.
pub const LEAST_SCRUB_RATE: u64 = 64 << 10;

api! {
    /// A blob whose bytes are bad.
    pub struct DamagedBlob {
        /// The blob.
        pub digest: Digest,
        /// What was found.
        pub reason: String,
        /// Snapshots that reach it, as `repository@digest`, at most a hundred. None: it was dead
        /// space, and nothing is lost.
        pub snapshots: Vec<String>,
    }

    /// What a scrub found.
    #[derive(Default)]
    pub struct ScrubReport {
        /// Packs read from their first byte to their last.
        pub packs: u64,
        /// Frames in them.
        pub frames: u64,
        /// Bytes read.
        pub bytes: u64,
        /// Whether every blob was hashed, and not only its checksum compared.
        pub full: bool,
        /// Packs that are missing, cut short or have a bad index, each with what was found.
        pub bad_packs: Vec<String>,
        /// Bad frames that no blob uses any more, in words, for example those that a repair
        /// replaced. Nothing is lost with them.
        #[serde(default)]
        pub dead_frames: Vec<String>,
        /// Packs that could not be read this time, each with the reason. The scrub says nothing
        /// about them.
        #[serde(default)]
        pub unread: Vec<String>,
        /// Blobs that are bad, quarantined now or before.
        pub damaged: Vec<DamagedBlob>,
        /// Of these, how many were fetched again from the mirror.
        pub healed: u64,
    }

    /// What a check of the tables found.
    #[derive(Default)]
    pub struct FsckReport {
        /// Objects looked at.
        pub objects: u64,
        /// Nodes read and compared with their rows.
        pub containers: u64,
        /// Packs looked at.
        pub packs: u64,
        /// Differences, in words, at most a thousand.
        pub discrepancies: Vec<String>,
        /// How many differences there are.
        pub wrong: u64,
        /// Whether they were corrected.
        pub repaired: bool,
    }

    /// What was brought back from packs and journal.
    #[derive(Default)]
    pub struct RebuildReport {
        /// Packs taken in.
        pub packs: u64,
        /// Objects that are not complete packs, each with the reason. They are left where they are.
        pub refused: Vec<String>,
        /// Blobs.
        pub objects: u64,
        /// Nodes.
        pub containers: u64,
        /// Objects of the journal that were read.
        pub journal: u64,
        /// Snapshots that are back.
        pub snapshots: u64,
        /// Tags that are back.
        pub tags: u64,
        /// Snapshots that are not back because something is missing, in words.
        pub lost: Vec<String>,
        /// Other domains that were found on the storage. Each is a store of its own, to be rebuilt
        /// separately.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub domains: Vec<DomainName>,
        /// Domains of which packs or tables were found, and no marker. Each was being made or
        /// deleted, or its storage is not complete.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub left: Vec<DomainName>,
    }
}
