//! Snapshots, one by one, in lists and side by side.

use crate::digest::Digest;
use crate::name::Tag;
use crate::snapshot::{Manifest, SnapshotConfig};
use crate::tree::PageTree;
use serde::{Deserialize, Serialize};

api! {
    /// One snapshot in a list.
    pub struct SnapshotSummary {
        /// The snapshot.
        pub digest: Digest,
        /// Tags that point at it.
        pub tags: Vec<Tag>,
        /// Its parents.
        pub parents: Vec<Digest>,
        /// Milliseconds since 1970, UTC, of the push.
        pub pushed_at: u64,
        /// Raw bytes it reaches.
        pub logical_bytes: u64,
        /// Raw bytes that were new in the domain when it was pushed.
        pub new_bytes: u64,
    }

    /// Snapshots of a repository, newest first.
    pub struct SnapshotList {
        /// One page of them.
        pub snapshots: Vec<SnapshotSummary>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// One snapshot with its documents.
    pub struct SnapshotDetail {
        /// As in lists.
        pub summary: SnapshotSummary,
        /// The manifest.
        #[cfg_attr(feature = "openapi", schema(value_type = Object))]
        pub manifest: Manifest,
        /// Its configuration.
        #[cfg_attr(feature = "openapi", schema(value_type = Object))]
        pub config: SnapshotConfig,
        /// Its page trees.
        #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
        pub trees: Vec<PageTree>,
        /// Its signatures, at most 100; none from a registry of an older version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub signatures: Vec<super::Signature>,
    }

    /// A snapshot and everything above it in the repository.
    pub struct Lineage {
        /// The snapshot asked for first, then ancestors, nearest first. Parents that are not in the
        /// repository are named only.
        pub snapshots: Vec<SnapshotSummary>,
        /// Whether the repository has more ancestors than are listed.
        pub truncated: bool,
    }

    /// What differs between two snapshots in one group of one rank.
    pub struct GroupDiff {
        /// Group name.
        pub group: String,
        /// Rank.
        pub rank: u32,
        /// Tokens of the longest sequence, in each.
        #[cfg_attr(feature = "openapi", schema(value_type = super::openapi::Pair))]
        pub tokens: (u64, u64),
        /// Pages in each.
        #[cfg_attr(feature = "openapi", schema(value_type = super::openapi::Pair))]
        pub pages: (u64, u64),
        /// Pages found in both.
        pub pages_shared: u64,
        /// Raw bytes of blobs only in the first, only in the second.
        #[cfg_attr(feature = "openapi", schema(value_type = super::openapi::Pair))]
        pub bytes_only: (u64, u64),
        /// Raw bytes of blobs in both.
        pub bytes_shared: u64,
    }

    /// What differs between two snapshots.
    pub struct Diff {
        /// The first.
        pub a: Digest,
        /// The second.
        pub b: Digest,
        /// By group and rank.
        pub groups: Vec<GroupDiff>,
        /// Raw bytes of the other layers (checkpoint tensors, attachments) only in the first, only
        /// in the second.
        #[cfg_attr(feature = "openapi", schema(value_type = super::openapi::Pair))]
        pub other_bytes_only: (u64, u64),
    }

    /// Report of a verification: every blob was read and hashed, and every value hash that can be
    /// computed was compared.
    pub struct Verified {
        /// The snapshot.
        pub digest: Digest,
        /// Blobs read, nodes included.
        pub blobs: u64,
        /// Raw bytes hashed.
        pub bytes: u64,
        /// Bytes of the frames that they are stored in.
        #[serde(default)]
        pub stored_bytes: u64,
        /// Checkpoint tensors whose value hash was computed and is right.
        #[serde(default)]
        pub values_computed: u64,
        /// Checkpoint tensors of an opaque layout: the value hash is only attested by the writer.
        #[serde(default)]
        pub values_attested: u64,
    }
}

/// The entity tag of a snapshot: it changes with the tags that point at it, and with nothing else.
/// The SHA-256 of its digest and its tags in the order of their bytes, a line each.
#[must_use]
pub fn snapshot_etag(digest: &Digest, tags: &[Tag]) -> Digest {
    let mut names: Vec<&str> = tags.iter().map(Tag::as_str).collect();
    names.sort_unstable();
    let lines = names.into_iter().fold(format!("{digest}\n"), |lines, name| lines + name + "\n");
    Digest::sha256(lines.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entity_tag_of_a_snapshot_changes_with_its_tags_alone() {
        let tags = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<Vec<Tag>>();
        let (one, other) = (Digest::sha256(b"one"), Digest::sha256(b"other"));
        let bare = snapshot_etag(&one, &[]);
        assert_eq!(bare, Digest::sha256(format!("{one}\n").as_bytes()));
        assert_eq!(snapshot_etag(&one, &tags(&["b", "a"])), snapshot_etag(&one, &tags(&["a", "b"])), "in any order");
        let all = [bare, snapshot_etag(&other, &[]), snapshot_etag(&one, &tags(&["a", "b"])), snapshot_etag(&one, &tags(&["ab"]))];
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
    }
}
