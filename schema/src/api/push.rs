//! Push sessions: questions for missing blobs, uploads, commits.

use super::TagState;
use crate::codec::Codecs;
use crate::digest::Digest;
use crate::kind::Kind;
use crate::name::Tag;
use serde::{Deserialize, Serialize};

api! {
    /// A push session: a lease on everything it asks about or uploads.
    pub struct Push {
        /// The session's id.
        pub id: String,
        /// Seconds until the lease ends unless the session is used; each use renews it.
        pub lease_seconds: u64,
        /// Most digests in one `missing` or `frames` request.
        pub max_digests: u64,
        /// Bytes of frames that one request should carry at most. A single larger blob is allowed.
        pub max_frames_bytes: u64,
        /// Codecs that frames may have. If it is left out: `raw` and `zstd`.
        #[serde(default)]
        #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
        pub codecs: Codecs,
        /// Seconds after which a claim has ended at the latest. 0, or left out: the registry knows
        /// no claims, and refuses questions with one.
        #[serde(default)]
        pub claim_seconds: u64,
    }

    /// Digests to be read as one kind.
    #[serde(deny_unknown_fields)]
    pub struct DigestGroup {
        /// The kind.
        pub kind: Kind,
        /// The digests; those of all groups together are at most `max_digests` of the session.
        #[cfg_attr(feature = "openapi", schema(max_items = 100_000))]
        pub digests: Vec<Digest>,
        /// How many of these blobs the session sends next, if they are missing: it claims the first
        /// so many that no other session sends. 0 claims none, and asks what others send. If it is
        /// left out, neither.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub claim: Option<u64>,
    }

    /// Asks which of these blobs the registry lacks.
    #[serde(deny_unknown_fields)]
    pub struct MissingRequest {
        /// Digests, grouped by kind.
        #[cfg_attr(feature = "openapi", schema(max_items = 100_000))]
        pub groups: Vec<DigestGroup>,
    }

    /// The blobs that the registry lacks.
    pub struct MissingResponse {
        /// Positions in the concatenated groups as `[start, count]`, ascending.
        #[cfg_attr(feature = "openapi", schema(value_type = Vec<super::openapi::Pair>))]
        pub missing: Vec<(u64, u64)>,
        /// Of these, the ones that other sessions send, only of groups with `claim`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        #[cfg_attr(feature = "openapi", schema(value_type = Vec<super::openapi::Pair>))]
        pub coming: Vec<(u64, u64)>,
        /// Milliseconds after which to ask about those again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub wait_ms: Option<u64>,
    }

    /// What became of uploaded frames. Sent when they are durable.
    pub struct FramesStored {
        /// Frames received.
        pub frames: u64,
        /// Of these, blobs the store did not have.
        pub new: u64,
        /// Payload bytes received.
        pub bytes: u64,
    }

    /// Makes a snapshot visible.
    #[serde(deny_unknown_fields)]
    pub struct CommitRequest {
        /// The manifest, uploaded before.
        pub manifest: Digest,
        /// A tag to point at it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tag: Option<Tag>,
        /// Move the tag only from this state.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub if_tag_is: Option<TagState>,
    }

    /// A snapshot was committed.
    pub struct Committed {
        /// The snapshot.
        pub digest: Digest,
        /// Whether this repository did not have it before.
        pub created: bool,
        /// Raw bytes it reaches. A blob counts once for each node that lists it.
        pub logical_bytes: u64,
        /// Raw bytes that were new in the domain.
        pub new_bytes: u64,
    }
}
