//! Collections of garbage.

use crate::name::RepositoryName;
use serde::{Deserialize, Serialize};

api! {
    /// What a collection freed, and why. Numbers grow while it runs.
    #[derive(Default)]
    pub struct GcReport {
        /// Its id.
        pub id: String,
        /// Why it ran: `schedule`, `command` or `request`.
        pub trigger: String,
        /// Whether it was a dry run: nothing was changed, and the numbers say what would be freed.
        pub dry_run: bool,
        /// Milliseconds since 1970.
        pub started_at: u64,
        /// Milliseconds since 1970; none while it runs, or if it was killed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub finished_at: Option<u64>,
        /// Blobs deleted because the snapshots or tags that held them were deleted.
        pub released: u64,
        /// Blobs deleted because they were uploaded and never committed.
        pub unclaimed: u64,
        /// Bytes of their frames.
        pub freed_bytes: u64,
        /// Push sessions that had ended and were forgotten.
        pub sessions: u64,
        /// Packs that nothing points to any more: they wait for the end of the grace period.
        pub packs_emptied: u64,
        /// Packs whose upload never ended: they wait for the end of the grace period too.
        pub packs_abandoned: u64,
        /// Packs whose live frames were copied by compaction: they are emptied.
        pub packs_compacted: u64,
        /// Small packs whose live frames were copied by merging: they are emptied.
        #[serde(default)]
        pub packs_merged: u64,
        /// Bytes of the frames that were copied.
        pub moved_bytes: u64,
        /// Packs whose bytes were deleted: the grace period since they were emptied had passed.
        pub packs_deleted: u64,
        /// Their bytes on storage; of an upload that never ended, where the storage tells them.
        pub deleted_bytes: u64,
        /// Bytes of emptied packs, which stay on storage for the grace period.
        pub draining_bytes: u64,
        /// When the grace period of the last of them ends: milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub draining_ends_at: Option<u64>,
        /// Bytes of all packs when the run ended; none while it runs, and for a dry run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub disk_bytes: Option<u64>,
        /// What no snapshot holds and what stays for now. None for a scheduled run, and while a run
        /// lasts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub protected: Option<Protected>,
        /// Uploads that have not ended, and stay for now. None for a scheduled run, and while a run
        /// lasts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub unfinished: Option<UnfinishedPacks>,
        /// Objects of the journal that a journal summary replaced.
        pub journal_deleted: u64,
        /// Snapshots evicted to keep a local store within its size.
        pub evicted: u64,
        /// Nodes that nothing holds and whose children are not known, because their rows cannot be
        /// read: kept for a day, with all below them. `fsck` names them.
        #[serde(default, alias = "parked")] // the name in reports of earlier runs
        pub deferred: u64,
        /// The error that ended it early.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub error: Option<String>,
    }

    /// Blobs that no snapshot holds and that stay: a push or pull under way leases them.
    #[derive(Default)]
    pub struct Protected {
        /// Blobs.
        pub objects: u64,
        /// Bytes of their frames.
        pub bytes: u64,
        /// When the last of these leases ends, unless it is renewed: milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<u64>,
        /// The push sessions that hold these leases, at most a hundred. A pull into a local store
        /// is one too.
        pub sessions: Vec<OpenSession>,
    }

    /// Packs whose upload has not ended: it is still running, or the registry that received it was
    /// killed.
    #[derive(Default)]
    pub struct UnfinishedPacks {
        /// How many there are.
        pub packs: u64,
        /// Bytes written so far; 0 on a bucket, which does not show them.
        pub bytes: u64,
        /// When the last of them counts as abandoned, unless its upload goes on: milliseconds since
        /// 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<u64>,
    }

    /// A push session that is neither committed nor over.
    pub struct OpenSession {
        /// Its repository.
        pub repository: RepositoryName,
        /// When its lease ends, unless it is used until then: milliseconds since 1970.
        pub expires_at: u64,
    }

    /// Runs of collection, newest first.
    pub struct GcRuns {
        /// The runs.
        pub runs: Vec<GcReport>,
        /// Cursor of the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// Asks for a collection.
    #[derive(Default)]
    #[serde(deny_unknown_fields, default)]
    pub struct GcRequest {
        /// Change nothing, only report what would be freed.
        pub dry_run: bool,
    }
}
