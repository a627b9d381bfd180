//! A document in memory: its bytes and their name.

use crate::digest::Digest;
use crate::kind::Kind;

/// A node as bytes, with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// SHA-256 of the bytes.
    pub digest: Digest,
    /// What kind of node (or blob) it is.
    pub kind: Kind,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl Document {
    /// Names `bytes`.
    #[must_use]
    pub fn new(kind: Kind, bytes: Vec<u8>) -> Self {
        Self { digest: Digest::sha256(&bytes), kind, bytes }
    }
}
