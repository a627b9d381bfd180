//! Domains.

use crate::name::DomainName;
use serde::{Deserialize, Serialize};

api! {
    /// A domain: repositories that share storage with each other, and with no others.
    pub struct DomainInfo {
        /// Its name.
        pub name: DomainName,
        /// Whether it is being deleted.
        pub state: DomainState,
        /// Milliseconds since 1970, UTC; absent for the default domain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub created_at: Option<u64>,
        /// When its deletion began, if it did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub deleting_since: Option<u64>,
        /// Whether what it writes to storage is encrypted; absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub encrypted: bool,
    }

    /// Domains by name, the default domain first.
    pub struct DomainList {
        /// One page of them.
        pub domains: Vec<DomainInfo>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }
}

/// Whether a domain can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DomainState {
    /// It can.
    Live,
    /// It cannot: its tables and bytes are being deleted.
    Deleting,
}
