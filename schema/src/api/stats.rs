//! What snapshots cost, and what takes up room.

use super::{Protected, Quota, UnfinishedPacks};
use crate::digest::Digest;
use crate::name::{RepositoryName, Tag};
use serde::{Deserialize, Serialize};

api! {
    /// What one snapshot costs, in raw bytes.
    pub struct SnapshotStats {
        /// Its repository.
        pub repository: RepositoryName,
        /// The snapshot.
        pub digest: Digest,
        /// Tags that point at it.
        pub tags: Vec<Tag>,
        /// Parents.
        pub parents: Vec<Digest>,
        /// Milliseconds since 1970, UTC, of the push.
        #[serde(default)] // older registries do not say
        pub pushed_at: u64,
        /// Bytes it reaches, each blob once.
        pub logical: u64,
        /// Bytes that were new in the domain when it was pushed.
        pub new: u64,
        /// Bytes that something else holds as well.
        pub shared: u64,
        /// Bytes that deleting it (and its tags) would free.
        pub exclusive: u64,
    }

    /// How much snapshots share. All in bytes.
    pub struct Stats {
        /// The repository, or none for the whole domain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub repository: Option<RepositoryName>,
        /// Only this snapshot, and those that descend from it, if the request asked for that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub below: Option<Digest>,
        /// Only the snapshots of this agent, if the request asked for that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub agent: Option<String>,
        /// Sum over snapshots of the raw bytes each reaches.
        pub logical: u64,
        /// Raw bytes of what they reach, each blob once.
        pub unique: u64,
        /// Encoded bytes of the same, with frame headers.
        pub stored: u64,
        /// `logical / unique`; 1 if there is nothing.
        pub dedup_ratio: f64,
        /// `unique / stored`; 1 if there is nothing.
        pub codec_ratio: f64,
        /// Bytes of all packs of the domain, also those of blobs that no snapshot holds.
        pub disk: u64,
        /// How many snapshots are counted but not listed.
        #[serde(default)]
        pub omitted: u64,
        /// Snapshots, oldest first. Of more than 10,000 only the newest 10,000 are listed.
        pub snapshots: Vec<SnapshotStats>,
    }

    /// Snapshots of one repository.
    #[serde(deny_unknown_fields)]
    pub struct SnapshotsOf {
        /// The repository.
        pub repository: RepositoryName,
        /// The snapshots. Naming one twice is naming it once.
        #[cfg_attr(feature = "openapi", schema(max_items = 100_000))]
        pub snapshots: Vec<Digest>,
    }

    /// Asks what a deletion of snapshots would free.
    #[serde(deny_unknown_fields)]
    pub struct FreedRequest {
        /// The snapshots, by repository.
        #[cfg_attr(feature = "openapi", schema(max_items = 100_000))]
        pub repositories: Vec<SnapshotsOf>,
    }

    /// What a deletion of snapshots, all together, would free once garbage is collected. All in
    /// bytes, each blob once.
    #[derive(Copy, Eq, Default)]
    pub struct Freed {
        /// How many of the snapshots there are.
        pub snapshots: u64,
        /// Raw bytes of the blobs that nothing else holds.
        pub bytes: u64,
        /// Encoded bytes of the same, with frame headers.
        pub stored_bytes: u64,
    }

    /// What takes up room. The bytes of the rows add up to `disk_bytes`.
    #[derive(Default)]
    pub struct Usage {
        /// All packs on storage.
        pub disk_bytes: u64,
        /// Blobs that snapshots hold.
        pub live_bytes: u64,
        /// Blobs that no snapshot holds and that stay for now.
        pub leased: Protected,
        /// Blobs that no snapshot holds and that the next garbage collection frees.
        pub garbage_bytes: u64,
        /// Room in packs that no blob uses: indexes, and what compaction gives back.
        pub dead_bytes: u64,
        /// Deleted packs that stay for the grace period.
        pub draining_bytes: u64,
        /// When the grace period of the last of them ends: milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub draining_ends_at: Option<u64>,
        /// Uploads that have not ended.
        #[serde(default)]
        pub unfinished: UnfinishedPacks,
        /// Snapshots, over all repositories.
        pub snapshots: u64,
        /// Of these, pinned: eviction leaves them.
        pub pinned: u64,
        /// The quota of the domain, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub quota: Option<Quota>,
    }
}
