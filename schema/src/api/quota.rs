//! How much a domain may hold.

use serde::{Deserialize, Serialize};

api! {
    /// How much a domain may hold. A limit that is left out is none.
    #[derive(Copy, Eq, Hash, Default)]
    #[serde(deny_unknown_fields)]
    pub struct QuotaLimits {
        /// Bytes of stored blobs, as they lie in packs.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1_152_921_504_606_846_976_u64))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub bytes: Option<u64>,
        /// Stored blobs.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1_152_921_504_606_846_976_u64))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub objects: Option<u64>,
        /// Snapshots, in all repositories together.
        #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1_152_921_504_606_846_976_u64))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub snapshots: Option<u64>,
    }

    /// How much a domain may hold, and how much it holds. Blobs count until a garbage collection
    /// has freed them.
    #[derive(Copy, Eq, Default)]
    pub struct Quota {
        /// The limits.
        pub limits: QuotaLimits,
        /// Bytes of stored blobs, as they lie in packs.
        pub used_bytes: u64,
        /// Stored blobs.
        pub used_objects: u64,
        /// Snapshots.
        pub used_snapshots: u64,
    }

    /// The quota of a domain.
    #[derive(Copy, Eq, Default)]
    pub struct DomainQuota {
        /// The quota; absent if the domain has none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub quota: Option<Quota>,
    }
}

impl QuotaLimits {
    /// The greatest limit: a greater one is a mistake.
    pub const MOST: u64 = 1 << 60;

    /// Whether there is no limit.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a limit is greater than [`Self::MOST`].
    #[must_use]
    pub fn is_too_large(&self) -> bool {
        [self.bytes, self.objects, self.snapshots].into_iter().flatten().any(|limit| limit > Self::MOST)
    }
}
