//! Snapshots to resume from.

use crate::digest::Digest;
use serde::{Deserialize, Serialize};

api! {
    /// Is there a snapshot that these tokens can be resumed from?
    #[serde(deny_unknown_fields)]
    pub struct MatchRequest {
        /// Token ids.
        pub tokens: Vec<u32>,
        /// Deployment fingerprint.
        pub fingerprint: Digest,
        /// Tenant salt.
        #[serde(default)]
        pub salt: String,
        /// Adapter (LoRA).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub adapter: Option<String>,
    }

    /// The deepest boundary at which both keys hold.
    pub struct MatchResponse {
        /// The snapshot; absent if there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub digest: Option<Digest>,
        /// Tokens whose state it gives; 0 if there is none.
        pub boundary: u64,
        /// The nearest that did not match, and why; the deepest first, a few at most.
        pub rejected: Vec<MatchRejected>,
    }

    /// A snapshot that does not match.
    pub struct MatchRejected {
        /// The snapshot.
        pub digest: Digest,
        /// Tokens that agree.
        pub common: u64,
        /// Why not.
        pub reason: String,
    }
}
