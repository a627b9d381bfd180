//! The first hex digits of a digest: what a person copies from a listing.

use super::{Algorithm, Digest};
use crate::error::FormatError;
use std::fmt;
use std::str::FromStr;

/// The beginning of a digest, `2a19b2c9309a` or `sha256:2a19b2c9309a`. It stands for the one
/// snapshot of a repository whose digest begins so.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DigestPrefix {
    algorithm: Option<Algorithm>,
    hex: String,
}

impl DigestPrefix {
    /// Hex digits that a prefix has at least. Fewer would soon match several snapshots, and look
    /// like a tag.
    pub const MIN: usize = 6;

    /// Whether the digest begins so.
    #[must_use]
    pub fn matches(&self, digest: &Digest) -> bool {
        self.algorithm.is_none_or(|algorithm| algorithm == digest.algorithm()) && digest.hex().starts_with(&self.hex)
    }

    /// The hex digits.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// The algorithm, if the prefix names one.
    #[must_use]
    pub fn algorithm(&self) -> Option<Algorithm> {
        self.algorithm
    }

    /// First and last key ([`Digest::to_key`]) of the digests that begin so, both included: one
    /// range for each algorithm.
    #[must_use]
    pub fn key_ranges(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let possible =
            |algorithm: &Algorithm| self.algorithm.is_none_or(|wanted| wanted == *algorithm) && self.hex.len() <= algorithm.len() * 2;
        let end = |algorithm: Algorithm, filler: u8| {
            let digits = self.hex.bytes().chain(std::iter::repeat(filler)).take(algorithm.len() * 2);
            let text: Vec<u8> = digits.collect();
            let mut key = vec![algorithm as u8];
            // The parser has let nothing but hex digits in.
            key.extend(hex::decode(text).unwrap_or_default());
            key
        };
        Algorithm::ALL.into_iter().filter(possible).map(|algorithm| (end(algorithm, b'0'), end(algorithm, b'f'))).collect()
    }
}

impl fmt::Display for DigestPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.algorithm {
            Some(algorithm) => write!(f, "{algorithm}:{}", self.hex),
            None => f.write_str(&self.hex),
        }
    }
}

impl FromStr for DigestPrefix {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| FormatError::Digest { found: text.chars().take(140).collect(), reason };
        let (algorithm, hex) = match text.split_once(':') {
            None => (None, text),
            Some((name, hex)) => {
                let known = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name);
                (Some(known.ok_or_else(|| fail("unknown algorithm; known are sha256, blake3, sha512"))?), hex)
            }
        };
        // Upper case would give one blob two names.
        if !hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(fail("expected lower-case hex digits"));
        }
        if hex.len() < Self::MIN {
            return Err(fail("expected at least 6 hex digits"));
        }
        if hex.len() > algorithm.unwrap_or(Algorithm::Sha512).len() * 2 {
            return Err(fail("more hex digits than the algorithm has"));
        }
        Ok(Self { algorithm, hex: hex.to_owned() })
    }
}
