//! Digests: the name of a blob, always over its raw (uncompressed) bytes.

mod prefix;

pub use prefix::DigestPrefix;

use crate::error::FormatError;
use pfr_kernels::sha256;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::Digest as _;
use std::str::FromStr;
use std::{fmt, io};

/// A digest algorithm. The discriminant is its stable number in binary formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Algorithm {
    /// SHA-256, the default: what the page manifest, OCI and every peer use.
    Sha256 = 1,
    /// BLAKE3, opt-in: several times faster without SHA extensions.
    Blake3 = 2,
    /// SHA-512, accepted for OCI content only.
    Sha512 = 3,
}

#[expect(clippy::len_without_is_empty, reason = "the length of a digest, not of a collection")]
impl Algorithm {
    /// Every algorithm, in the order of its number.
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Blake3, Self::Sha512];

    /// Length of the digest in bytes: 32 or 64.
    #[must_use]
    pub const fn len(self) -> usize {
        match self {
            Self::Sha256 | Self::Blake3 => 32,
            Self::Sha512 => 64,
        }
    }

    /// The name before the colon.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Blake3 => "blake3",
            Self::Sha512 => "sha512",
        }
    }

    /// The algorithm with this number in a binary format.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|a| *a as u8 == number)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// SHA-256 of blobs of one length, side by side, that come in pieces.
#[derive(Clone, Debug)]
pub struct SideBySide(sha256::Hasher);

impl SideBySide {
    /// So many blobs.
    #[must_use]
    pub fn new(blobs: usize) -> Self {
        Self(sha256::Hasher::new(blobs))
    }

    /// How many of `len` bytes [`Self::update`] takes: it needs whole blocks of SHA-256.
    #[must_use]
    pub const fn whole_blocks(len: usize) -> usize {
        len - len % sha256::BLOCK
    }

    /// The next bytes of each blob.
    ///
    /// # Panics
    /// If they are not as many of each, and [`Self::whole_blocks`].
    pub fn update(&mut self, parts: &[&[u8]]) {
        self.0.update(parts);
    }

    /// The digest of each blob, given its last bytes.
    ///
    /// # Panics
    /// If they are not as many of each.
    #[must_use]
    pub fn finish(self, ends: &[&[u8]]) -> Vec<Digest> {
        self.0.finish(ends).into_iter().map(Digest::of_sha256).collect()
    }
}

/// The digest of a blob's raw bytes: `<algorithm>:<lower-case hex>`.
///
/// Ordered by algorithm, then bytes; 65 bytes, no allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    algorithm: Algorithm,
    bytes: [u8; 64],
}

impl Digest {
    /// Hashes `bytes`.
    #[must_use]
    pub fn of(algorithm: Algorithm, bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish()
    }

    /// SHA-256 of `bytes`: the name of every document of ours.
    #[must_use]
    pub fn sha256(bytes: &[u8]) -> Self {
        Self::of(Algorithm::Sha256, bytes)
    }

    /// SHA-256 of 96 bytes. Pads the two blocks itself, which takes a fifth less time than a
    /// hasher. A request computes tens of thousands of prefix keys, each from the one before.
    #[must_use]
    pub(crate) fn sha256_of_96(message: &[u8; 96]) -> Self {
        let mut state = sha256::INITIAL;
        let mut blocks = [[0; 64]; 2];
        let padded = blocks.as_flattened_mut();
        padded[..96].copy_from_slice(message);
        padded[96] = 0x80;
        padded[120..].copy_from_slice(&(8 * 96_u64).to_be_bytes());
        sha2::block_api::compress256(&mut state, &blocks);
        let mut bytes = [0; 64];
        for (four, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(state) {
            *four = word.to_be_bytes();
        }
        Self { algorithm: Algorithm::Sha256, bytes }
    }

    /// Hashes each of `blobs`. SHA-256 takes half the time if they are of one length and as many as
    /// [`Self::side_by_side`] says.
    #[must_use]
    pub fn of_each(algorithm: Algorithm, blobs: &[&[u8]]) -> Vec<Self> {
        let alike = blobs.iter().all(|blob| blob.len() == blobs[0].len());
        if algorithm != Algorithm::Sha256 || !alike {
            return blobs.iter().map(|blob| Self::of(algorithm, blob)).collect();
        }
        sha256::of_each(blobs).into_iter().map(Self::of_sha256).collect()
    }

    /// The SHA-256 digest that was found.
    fn of_sha256(found: [u8; 32]) -> Self {
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&found);
        Self { algorithm: Algorithm::Sha256, bytes }
    }

    /// How many blobs of `len` bytes are best hashed at a time on this processor: at least one, and
    /// so few that they fit into [`Self::SIDE_BY_SIDE_MAX`] bytes, if they are not longer than a
    /// quarter of it.
    #[must_use]
    pub fn side_by_side(len: u64) -> usize {
        let lanes = sha256::lanes();
        if len.saturating_mul(lanes as u64) <= Self::SIDE_BY_SIDE_MAX { lanes } else { lanes.min(4) }
    }

    /// Most bytes of blobs that are hashed together.
    pub const SIDE_BY_SIDE_MAX: u64 = 4 << 20;

    /// A digest from its raw bytes.
    ///
    /// # Errors
    /// [`FormatError::Digest`] if the length is not the algorithm's.
    pub fn from_bytes(algorithm: Algorithm, raw: &[u8]) -> Result<Self, FormatError> {
        if raw.len() != algorithm.len() {
            return Err(FormatError::Digest { found: hex::encode(&raw[..raw.len().min(64)]), reason: "its length is not the algorithm's" });
        }
        let mut bytes = [0; 64];
        bytes[..raw.len()].copy_from_slice(raw);
        Ok(Self { algorithm, bytes })
    }

    /// The algorithm.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The digest's own bytes, 32 or 64 of them.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.algorithm.len()]
    }

    /// Lower-case hex without the algorithm.
    #[must_use]
    pub fn hex(&self) -> String {
        hex::encode(self.as_bytes())
    }

    /// The first 12 hex digits: enough to tell digests apart in a listing.
    #[must_use]
    pub fn short(&self) -> String {
        hex::encode(&self.bytes[..6])
    }

    /// Algorithm number followed by the digest's bytes: the key in metadata tables.
    #[must_use]
    pub fn to_key(&self) -> Vec<u8> {
        let mut key = Vec::with_capacity(65);
        key.push(self.algorithm as u8);
        key.extend_from_slice(self.as_bytes());
        key
    }

    /// Reads what [`Self::to_key`] wrote.
    ///
    /// # Errors
    /// [`FormatError::Digest`] on an unknown algorithm number or a wrong length.
    pub fn from_key(key: &[u8]) -> Result<Self, FormatError> {
        let unknown = || FormatError::Digest { found: hex::encode(&key[..key.len().min(65)]), reason: "unknown algorithm number" };
        let (number, raw) = key.split_first().ok_or_else(unknown)?;
        Self::from_bytes(Algorithm::from_number(*number).ok_or_else(unknown)?, raw)
    }
}

/// Bytes of the longest digest as text: a name, a colon, two digits for each byte.
const TEXT: usize = 6 + 1 + 2 * 64;

/// The value of each lower-case hex digit; above 15 for any other byte.
static DIGITS: [u8; 256] = {
    let mut values = [0xff; 256];
    let mut digit = 0;
    while digit < 16 {
        values[b"0123456789abcdef"[digit] as usize] = digit as u8;
        digit += 1;
    }
    values
};

impl Digest {
    /// As text, without an allocation: a page manifest may have a million digests.
    fn text<'b>(&self, buffer: &'b mut [u8; TEXT]) -> &'b str {
        let name = self.algorithm.name();
        let text = &mut buffer[..name.len() + 1 + 2 * self.algorithm.len()];
        let (front, digits) = text.split_at_mut(name.len() + 1);
        front[..name.len()].copy_from_slice(name.as_bytes());
        front[name.len()] = b':';
        hex::encode_to_slice(self.as_bytes(), digits).unwrap_or_else(|e| unreachable!("each byte has two digits: {e}"));
        std::str::from_utf8(text).unwrap_or_else(|e| unreachable!("names and digits are ASCII: {e}"))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text(&mut [0; TEXT]))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| FormatError::Digest { found: text.chars().take(140).collect(), reason };
        let (name, hex_digits) = text.split_once(':').ok_or_else(|| fail("expected <algorithm>:<hex>"))?;
        let algorithm = Algorithm::ALL
            .into_iter()
            .find(|a| a.name() == name)
            .ok_or_else(|| fail("unknown algorithm; known are sha256, blake3, sha512"))?;
        if hex_digits.len() != algorithm.len() * 2 {
            return Err(fail("wrong number of hex digits"));
        }
        let (mut bytes, mut largest) = ([0; 64], 0);
        for (byte, pair) in bytes.iter_mut().zip(hex_digits.as_bytes().chunks_exact(2)) {
            let (high, low) = (DIGITS[usize::from(pair[0])], DIGITS[usize::from(pair[1])]);
            largest = high.max(low).max(largest);
            *byte = (high << 4) | low;
        }
        // Upper case would give one blob two names.
        if largest > 15 {
            return Err(fail("expected lower-case hex digits"));
        }
        Ok(Self { algorithm, bytes })
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.text(&mut [0; TEXT]))
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Digest;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a digest, <algorithm>:<lower-case hex>")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Digest, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

/// A digest being computed over a stream of bytes.
#[derive(Clone)]
pub struct Hasher(State);

#[derive(Clone)]
enum State {
    Sha256(sha2::Sha256),
    // Boxed: BLAKE3's state is 2 KB, thirty times the others'.
    Blake3(Box<blake3::Hasher>),
    Sha512(sha2::Sha512),
}

impl Hasher {
    /// An empty hasher.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Self {
        Self(match algorithm {
            Algorithm::Sha256 => State::Sha256(sha2::Sha256::new()),
            Algorithm::Blake3 => State::Blake3(Box::default()),
            Algorithm::Sha512 => State::Sha512(sha2::Sha512::new()),
        })
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            State::Sha256(h) => h.update(bytes),
            State::Blake3(h) => {
                h.update(bytes);
            }
            State::Sha512(h) => h.update(bytes),
        }
    }

    /// The digest of everything added.
    #[must_use]
    pub fn finish(self) -> Digest {
        let mut bytes = [0; 64];
        let algorithm = match self.0 {
            State::Sha256(h) => {
                bytes[..32].copy_from_slice(&h.finalize());
                Algorithm::Sha256
            }
            State::Blake3(h) => {
                bytes[..32].copy_from_slice(h.finalize().as_bytes());
                Algorithm::Blake3
            }
            State::Sha512(h) => {
                bytes.copy_from_slice(&h.finalize());
                Algorithm::Sha512
            }
        };
        Digest { algorithm, bytes }
    }
}

impl io::Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
