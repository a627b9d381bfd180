//! Which prefix a state belongs to: the fingerprint and the `pf-prefix-v1` chain.
//!
//! ```text
//! fingerprint = sha256(canonical JSON of the deployment)
//! h₀ = sha256("pf-prefix-v1" ‖ fingerprint ‖ len(salt) ‖ salt ‖ adapter?)      hᵢ = sha256(hᵢ₋₁ ‖ token ids of block i)
//! ```
//!
//! Lengths are `u64`, token ids `u32`, little-endian; a fingerprint and a link are the 32 bytes of
//! a digest; `adapter?` is one zero byte if there is none, else a one, its length and its bytes.
//! Blocks are [`BLOCK`] tokens for every page size of an engine, the last one may be shorter. State
//! of other weights, kernels or another salt does not match, by construction.

use crate::digest::{Algorithm, Digest, Hasher};
use serde_json::Value;
use std::collections::BTreeMap;

/// Name of the scheme.
pub const SCHEME: &str = "pf-prefix-v1";
/// Tokens in one link of the chain.
pub const BLOCK: usize = 16;
/// Bytes of a link.
const LINK: usize = 32;

/// The fingerprint of a deployment: the digest of its compact JSON, keys sorted at every depth.
#[must_use]
pub fn fingerprint(deployment: &BTreeMap<String, Value>) -> Digest {
    // serde_json's maps are sorted: the `preserve_order` feature is off, and a test checks that.
    Digest::sha256(&crate::json::bytes(deployment))
}

/// The key of the first `tokens.len()` tokens.
#[must_use]
pub fn key(fingerprint: &Digest, salt: &str, adapter: Option<&str>, tokens: &[u32]) -> Digest {
    keys(fingerprint, salt, adapter, tokens).last().copied().unwrap_or_else(|| root(fingerprint, salt, adapter))
}

/// The keys at each block's end and at the end.
#[must_use]
pub fn keys(fingerprint: &Digest, salt: &str, adapter: Option<&str>, tokens: &[u32]) -> Vec<Digest> {
    let mut link = root(fingerprint, salt, adapter);
    tokens
        .chunks(BLOCK)
        .map(|block| {
            link = next(&link, block);
            link
        })
        .collect()
}

/// The key after one more block of at most [`BLOCK`] tokens; `link` is the key of whole blocks.
#[must_use]
pub fn next(link: &Digest, block: &[u32]) -> Digest {
    if let Ok(link) = <&[u8; LINK]>::try_from(link.as_bytes())
        && block.len() == BLOCK
    {
        let mut message = [0; LINK + 4 * BLOCK];
        message[..LINK].copy_from_slice(link);
        write(block, &mut message[LINK..]);
        return Digest::sha256_of_96(&message);
    }
    let mut hasher = Hasher::new(Algorithm::Sha256);
    hasher.update(link.as_bytes());
    for tokens in block.chunks(BLOCK) {
        let mut bytes = [0; 4 * BLOCK];
        write(tokens, &mut bytes);
        hasher.update(&bytes[..4 * tokens.len()]);
    }
    hasher.finish()
}

/// Writes tokens as little-endian bytes.
fn write(tokens: &[u32], bytes: &mut [u8]) {
    for (four, token) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
        *four = token.to_le_bytes();
    }
}

/// Lengths up to `limit` whose keys tell roughly where two prefixes part: a block, two, four …
pub fn ladder(limit: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(BLOCK as u64), |length| length.checked_mul(2)).take_while(move |length| *length <= limit)
}

/// The keys at the lengths of the [`ladder`] of these tokens.
#[must_use]
pub fn rungs(fingerprint: &Digest, salt: &str, adapter: Option<&str>, tokens: &[u32]) -> Vec<(u64, Digest)> {
    let all = keys(fingerprint, salt, adapter, tokens);
    ladder(tokens.len() as u64).map(|length| (length, all[length as usize / BLOCK - 1])).collect()
}

fn root(fingerprint: &Digest, salt: &str, adapter: Option<&str>) -> Digest {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    hasher.update(SCHEME.as_bytes());
    hasher.update(fingerprint.as_bytes());
    hasher.update(&(salt.len() as u64).to_le_bytes());
    hasher.update(salt.as_bytes());
    hasher.update(&[u8::from(adapter.is_some())]);
    if let Some(adapter) = adapter {
        hasher.update(&(adapter.len() as u64).to_le_bytes());
        hasher.update(adapter.as_bytes());
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_identity_changes_the_key() {
        let (a, b) = (Digest::sha256(b"a"), Digest::sha256(b"b"));
        let tokens: Vec<u32> = (0..40).collect();
        let base = key(&a, "", None, &tokens);
        for (name, other) in [
            ("fingerprint", key(&b, "", None, &tokens)),
            ("salt", key(&a, "s", None, &tokens)),
            ("adapter", key(&a, "", Some(""), &tokens)),
            ("adapter's name", key(&a, "", Some("s"), &tokens)),
            ("length", key(&a, "", None, &tokens[..39])),
            ("a token", key(&a, "", None, &[&tokens[..39], &[7]].concat())),
        ] {
            assert_ne!(base, other, "{name}");
        }
        assert_ne!(key(&a, "s", None, &[]), key(&a, "", Some("s"), &[]));
    }

    #[test]
    fn the_chain_of_a_prefix_is_a_prefix_of_the_chain() {
        let fingerprint = Digest::sha256(b"a");
        let tokens: Vec<u32> = (0..100).collect();
        let all = keys(&fingerprint, "salt", None, &tokens);
        assert_eq!(all.len(), 7);
        assert_eq!(keys(&fingerprint, "salt", None, &tokens[..64]), all[..4]);
        assert_eq!(key(&fingerprint, "salt", None, &tokens[..64]), all[3]);
        assert_ne!(key(&fingerprint, "salt", None, &tokens[..63]), all[3]);
        assert_eq!(key(&fingerprint, "salt", None, &tokens[..70]), next(&all[3], &tokens[64..70]));
    }

    #[test]
    fn rungs_are_keys_of_prefixes_and_stop_at_the_end() {
        let fingerprint = Digest::sha256(b"a");
        let tokens: Vec<u32> = (0..100).collect();
        let rungs = rungs(&fingerprint, "s", None, &tokens);
        assert_eq!(rungs.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [16, 32, 64]);
        for (at, rung) in rungs {
            assert_eq!(rung, key(&fingerprint, "s", None, &tokens[..at as usize]));
        }
        assert_eq!(ladder(15).count(), 0);
        assert_eq!(ladder(u64::MAX).count(), 60);
    }

    #[test]
    fn a_whole_block_is_hashed_as_a_hasher_hashes_it() {
        let mut link = Digest::sha256(b"link");
        for first in (0..u32::MAX).step_by(9_999_991) {
            let block: [u32; BLOCK] = std::array::from_fn(|at| first.rotate_left(at as u32));
            let mut hasher = Hasher::new(Algorithm::Sha256);
            hasher.update(link.as_bytes());
            block.iter().for_each(|token| hasher.update(&token.to_le_bytes()));
            link = next(&link, &block);
            assert_eq!(link, hasher.finish(), "{first}");
        }
    }

    /// The connectors compute the same chain in Python; their test has the same digest.
    #[test]
    fn the_chain_is_the_one_that_connectors_compute() {
        let fingerprint = Digest::sha256(b"deployment");
        let tokens: Vec<u32> = (0..40).map(|i| i * 1_000_003 % 151_936).collect();
        let found = key(&fingerprint, "tenant", Some("lora"), &tokens);
        assert_eq!(found.to_string(), "sha256:e7dbd26b651e5936c22c756975acbf6647130250a7186b2c763d8bd5866be955");
    }

    #[test]
    fn the_fingerprint_does_not_depend_on_the_order_of_keys() {
        let one = serde_json::from_str(r#"{"b":{"y":1,"x":2},"a":"w"}"#).expect("JSON");
        let two = serde_json::from_str(r#"{"a":"w","b":{"x":2,"y":1}}"#).expect("JSON");
        assert_eq!(fingerprint(&one), fingerprint(&two));
        assert_eq!(fingerprint(&one), Digest::sha256(br#"{"a":"w","b":{"x":2,"y":1}}"#), "compact JSON, keys sorted");
    }
}
