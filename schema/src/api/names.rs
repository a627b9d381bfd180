//! Repositories, tags and forks.

use crate::digest::Digest;
use crate::error::FormatError;
use crate::name::{RepositoryName, Tag};
use serde::{Deserialize, Serialize};

api! {
    /// A tag.
    pub struct TagInfo {
        /// Its name.
        pub name: Tag,
        /// The snapshot it points at.
        pub digest: Digest,
        /// Milliseconds since 1970, UTC, of the last move.
        pub updated_at: u64,
    }

    /// Tags of a repository by name.
    pub struct TagList {
        /// One page of them.
        pub tags: Vec<TagInfo>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// Points a tag at a snapshot of the same repository.
    #[serde(deny_unknown_fields)]
    pub struct TagRequest {
        /// The snapshot: a tag, `tag~N` or a digest, which may be cut short.
        #[cfg_attr(feature = "openapi", schema(value_type = crate::name::Selector))]
        pub snapshot: String,
        /// Move the tag only from this state; same meaning as `If-Match`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub if_tag_is: Option<TagState>,
    }

    /// Makes tags that point at one snapshot. No bytes move.
    #[serde(deny_unknown_fields)]
    pub struct ForkRequest {
        /// The snapshot: a tag, `tag~N` or a digest, which may be cut short.
        #[cfg_attr(feature = "openapi", schema(value_type = crate::name::Selector))]
        pub snapshot: String,
        /// How many, 1 to 10,000.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 10000))]
        pub count: u32,
        /// Tags are named `<prefix>-1` … `<prefix>-<count>`; existing ones make the request fail as
        /// a whole.
        #[cfg_attr(feature = "openapi", schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,121}$"))]
        pub prefix: String,
    }

    /// Forks made.
    pub struct Forked {
        /// The snapshot they point at.
        pub digest: Digest,
        /// The new tags.
        pub tags: Vec<Tag>,
    }

    /// A repository.
    pub struct RepositoryInfo {
        /// Its name.
        pub name: RepositoryName,
        /// Snapshots in it.
        pub snapshots: u64,
        /// Tags in it.
        pub tags: u64,
        /// Milliseconds since 1970, UTC, of the newest push.
        pub updated_at: u64,
    }

    /// Repositories by name.
    pub struct RepositoryList {
        /// One page of them.
        pub repositories: Vec<RepositoryInfo>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }
}

/// Where a tag should point for an update to happen: at a digest, or nowhere (`"absent"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagState {
    /// The tag does not exist.
    Absent,
    /// The tag points at this snapshot.
    At(Digest),
}

impl std::fmt::Display for TagState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Absent => f.write_str("absent"),
            Self::At(digest) => digest.fmt(f),
        }
    }
}

impl std::str::FromStr for TagState {
    type Err = FormatError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "absent" { Ok(Self::Absent) } else { text.parse().map(Self::At) }
    }
}

impl Serialize for TagState {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TagState {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
