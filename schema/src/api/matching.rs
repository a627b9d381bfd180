//! Snapshots to resume from.

use crate::digest::Digest;
use serde::{Deserialize, Serialize};

api! {
    /// Asks for the snapshot that holds the longest prefix of these tokens.
    #[serde(deny_unknown_fields)]
    pub struct MatchRequest {
        /// Token ids. The size limit of a body limits their number: a token has at least 2 bytes.
        #[cfg_attr(feature = "openapi", schema(value_type = Vec<super::openapi::TokenId>, max_items = 8_388_608))]
        pub tokens: Vec<u32>,
        /// Fingerprint of the engine configuration.
        pub fingerprint: Digest,
        /// Tenant salt.
        #[serde(default)]
        pub salt: String,
        /// Adapter (LoRA).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub adapter: Option<String>,
    }

    /// The snapshot that holds the longest prefix of the tokens.
    pub struct MatchResponse {
        /// The snapshot; absent if there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub digest: Option<Digest>,
        /// Tokens that need not be computed: the position at which the snapshot can be resumed.
        /// 0 if there is none.
        pub boundary: u64,
        /// Prefix length of the snapshot. If it is greater than `boundary`, only the beginning of
        /// the snapshot is used.
        #[serde(default)]
        pub tokens: u64,
        /// A few snapshots that nearly match, each with the reason why it does not. The longest
        /// common prefix comes first.
        pub rejected: Vec<MatchRejected>,
        /// Whether the search of the index ended at its limit: there may be a longer match.
        #[serde(default)]
        pub truncated: bool,
    }

    /// A snapshot that does not match.
    pub struct MatchRejected {
        /// The snapshot.
        pub digest: Digest,
        /// Tokens at the beginning that agree.
        pub common: u64,
        /// Why it does not match.
        pub reason: String,
    }
}
