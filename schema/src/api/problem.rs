//! Errors.

use crate::digest::Digest;
use crate::error::ErrorCode;
use serde::{Deserialize, Serialize};

api! {
    /// An error, RFC 9457.
    pub struct Problem {
        /// Reference to the code's documentation.
        pub r#type: String,
        /// The code's meaning in a few words.
        pub title: String,
        /// HTTP status.
        pub status: u16,
        /// What happened, where, and what to do.
        pub detail: String,
        /// The error code, one of a closed set.
        pub code: ErrorCode,
        /// Whether trying the same again can help.
        pub retryable: bool,
        /// Blobs that a node lists and the registry lacks (the first few).
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub missing: Vec<Digest>,
        /// The request's id, as in the server's log.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub request_id: Option<String>,
    }
}

impl Problem {
    /// A problem with the code's own title, status and retry rule.
    #[must_use]
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Self {
            r#type: format!("urn:pf:problem:{code}"),
            title: code.title().into(),
            status: code.status(),
            detail: detail.into(),
            code,
            retryable: code.retryable(),
            missing: Vec::new(),
            request_id: None,
        }
    }
}
