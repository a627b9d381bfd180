//! The encrypted form of an object: segments, each of which can be decrypted alone.
//!
//! ```text
//! segment   magic "pfs1" | key id, 4 B | salt, 24 B | ciphertext, at most 64 KiB | tag, 16 B
//! object    segments of exactly 64 KiB of plaintext | one shorter segment, maybe of no plaintext
//! ```
//!
//! The object's key is derived from the domain's key, the salt and the object's path. The salt is
//! random for each writing of an object, and repeated in each of its segments, so that a ranged
//! read asks for nothing else. The nonce is the segment's number, and whether it is the short one
//! at the end: an object that is cut, or whose segments changed places, cannot be decrypted.

use crate::error::{Error, Result};
use bytes::Bytes;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use std::fmt;
use std::sync::Arc;

/// Bytes of plaintext in each segment but the last.
pub(crate) const SEGMENT: u64 = 64 << 10;
/// Bytes that a segment has besides its plaintext.
pub(crate) const OVERHEAD: u64 = (HEADER + TAG) as u64;
/// Bytes of each segment but the last.
pub(crate) const SEALED: u64 = SEGMENT + OVERHEAD;

const HEADER: usize = MAGIC.len() + ID + SALT;
/// How each segment begins.
pub(crate) const MAGIC: &[u8; 4] = b"pfs1";
const ID: usize = 4;
const SALT: usize = 24;
const TAG: usize = 16;

/// Plaintext bytes of an encrypted object. Of one that was cut, those of which something is left.
pub(crate) fn plain_len(sealed: u64) -> u64 {
    sealed / SEALED * SEGMENT + (sealed % SEALED).saturating_sub(OVERHEAD)
}

/// Whether an encrypted object of this length may end where it does.
pub(crate) fn is_whole(sealed: u64) -> bool {
    sealed % SEALED >= OVERHEAD
}

/// The key of a domain.
pub(crate) struct DomainKey {
    derives: Prk,
    id: [u8; ID],
}

/// Not even its length is shown.
impl fmt::Debug for DomainKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DomainKey({})", self.id())
    }
}

/// Bytes to derive.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl DomainKey {
    /// The key with these secret bytes.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub(crate) fn new(secret: &[u8; 32]) -> Result<Self> {
        let derives = Salt::new(HKDF_SHA256, b"pf domain key v1").extract(secret);
        let mut id = [0; ID];
        derives.expand(&[b"id".as_slice()], Length(ID)).and_then(|derived| derived.fill(&mut id)).map_err(no_key)?;
        Ok(Self { derives, id })
    }

    /// Its name: eight digits, derived from the secret.
    pub(crate) fn id(&self) -> String {
        hex(&self.id)
    }

    /// The key of the object at `path` that was written with this salt.
    fn of_object(&self, path: &str, salt: &[u8]) -> Result<LessSafeKey> {
        let info = [b"object".as_slice(), salt, path.as_bytes()];
        let key = self.derives.expand(&info, &AES_256_GCM).map_err(no_key)?;
        Ok(LessSafeKey::new(UnboundKey::from(key)))
    }
}

/// The digits of an id.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Deriving and encrypting fail for lengths that do not occur here.
fn no_key(_: ring::error::Unspecified) -> Error {
    Error::Internal("the cipher refused a key or a length".into())
}

fn nonce(number: u64, is_last: bool) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[3] = u8::from(is_last);
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Encrypts one object, once.
pub(super) struct Sealer {
    key: LessSafeKey,
    header: [u8; HEADER],
}

impl Sealer {
    /// For a new object at `path`.
    pub(super) fn new(domain: &DomainKey, path: &str) -> Result<Self> {
        let mut header = [0; HEADER];
        header[..MAGIC.len()].copy_from_slice(MAGIC);
        header[MAGIC.len()..][..ID].copy_from_slice(&domain.id);
        let salt = &mut header[MAGIC.len() + ID..];
        getrandom::fill(salt).map_err(|e| Error::Internal(format!("the system gives no random bytes: {e}")))?;
        Ok(Self { key: domain.of_object(path, salt)?, header })
    }

    /// Encrypts plaintext that begins with segment `first`. It has whole segments; at the object's
    /// end any length. No segment is to be encrypted twice.
    pub(super) fn seal(&self, first: u64, plain: &[Bytes], is_end: bool) -> Result<Vec<u8>> {
        let mut left: u64 = plain.iter().map(|bytes| bytes.len() as u64).sum();
        let mut sealed = Vec::with_capacity(capacity(left + (left / SEGMENT + 1) * OVERHEAD));
        let (mut chunks, mut number) = (plain.iter(), first);
        let mut chunk: &[u8] = &[];
        loop {
            let is_last = left < SEGMENT;
            if is_last && !is_end {
                return Ok(sealed);
            }
            sealed.extend_from_slice(&self.header);
            let begin = sealed.len();
            let mut wanted = capacity(left.min(SEGMENT));
            left -= wanted as u64;
            while wanted > 0 {
                if chunk.is_empty() {
                    let Some(next) = chunks.next() else { break };
                    chunk = &next[..];
                    continue;
                }
                let (now, later) = chunk.split_at(chunk.len().min(wanted));
                sealed.extend_from_slice(now);
                wanted -= now.len();
                chunk = later;
            }
            let nonce = nonce(number, is_last);
            let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(&self.header[..]), &mut sealed[begin..]).map_err(no_key)?;
            sealed.extend_from_slice(tag.as_ref());
            number += 1;
            if is_last {
                return Ok(sealed);
            }
        }
    }
}

/// Bytes of an encrypted object that are not what was written there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object}, byte {byte}: expected what was encrypted there, found {found}")]
pub(crate) struct Altered {
    pub object: String,
    /// Where the segment begins in the plaintext.
    pub byte: u64,
    pub found: &'static str,
}

/// Decrypts segments of one object.
pub(super) struct Opener {
    domain: Arc<DomainKey>,
    path: String,
    /// The key of the segment before, which usually has the same salt.
    last: Option<([u8; HEADER], LessSafeKey)>,
}

impl Opener {
    pub(super) fn new(domain: Arc<DomainKey>, path: &str) -> Self {
        Self { domain, path: path.to_owned(), last: None }
    }

    /// That something else lies at a byte of the plaintext.
    pub(super) fn altered(&self, byte: u64, found: &'static str) -> Altered {
        Altered { object: self.path.clone(), byte, found }
    }

    /// Decrypts, in place, segments that follow each other from number `first` on. All but the last
    /// have their full length.
    pub(super) fn open(&mut self, first: u64, sealed: &mut Vec<u8>) -> std::result::Result<(), Altered> {
        let (mut at, mut plain, mut number) = (0, 0, first);
        while at < sealed.len() {
            let end = sealed.len().min(at + capacity(SEALED));
            // The plaintext of each is moved to where that of the one before ends.
            plain += self.open_one(number, &mut sealed[plain..end], at - plain)?;
            at = end;
            number += 1;
        }
        sealed.truncate(plain);
        Ok(())
    }

    /// Decrypts the segment that begins at byte `at`; its plaintext goes to the beginning. Returns
    /// the length.
    fn open_one(&mut self, number: u64, bytes: &mut [u8], at: usize) -> std::result::Result<usize, Altered> {
        let byte = number.saturating_mul(SEGMENT);
        let length = (bytes.len() - at) as u64;
        let header = bytes[at..].first_chunk::<HEADER>().copied();
        let Some(header) = header.filter(|_| length >= OVERHEAD) else { return Err(self.altered(byte, "its end")) };
        if header[..MAGIC.len()] != MAGIC[..] {
            return Err(self.altered(byte, "bytes that are not encrypted"));
        }
        if header[MAGIC.len()..][..ID] != self.domain.id {
            return Err(self.altered(byte, "bytes that are encrypted with another key"));
        }
        let key = match self.last.take() {
            Some((same, key)) if same == header => key,
            _ => {
                let key = self.domain.of_object(&self.path, &header[MAGIC.len() + ID..]);
                key.map_err(|_| self.altered(byte, "a salt without a key"))?
            }
        };
        let nonce = nonce(number, length < SEALED);
        let opened = key.open_within(nonce, Aad::from(&header[..]), bytes, at + HEADER..).map(|plain| plain.len());
        self.last = Some((header, key));
        opened.map_err(|_| self.altered(byte, "other bytes"))
    }
}

/// Lengths here are those of buffers in memory.
fn capacity(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(byte: u8) -> Arc<DomainKey> {
        Arc::new(DomainKey::new(&[byte; 32]).expect("a key"))
    }

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at / 7 % 251) as u8).collect()
    }

    fn seal(path: &str, plain: &[u8]) -> Vec<u8> {
        Sealer::new(&key(1), path).expect("a sealer").seal(0, &[Bytes::copy_from_slice(plain)], true).expect("sealed")
    }

    fn open(path: &str, sealed: &[u8]) -> std::result::Result<Vec<u8>, Altered> {
        let mut bytes = sealed.to_vec();
        Opener::new(key(1), path).open(0, &mut bytes).map(|()| bytes)
    }

    const LENGTHS: [usize; 8] = [0, 1, 65_535, 65_536, 65_537, 131_072, 200_000, 655_360];

    #[test]
    fn what_is_encrypted_is_decrypted_and_lengths_are_known_without_that() {
        for length in LENGTHS {
            let plain = bytes(length);
            let sealed = seal("a/b", &plain);
            assert_eq!(plain_len(sealed.len() as u64), length as u64);
            assert!(is_whole(sealed.len() as u64));
            assert_eq!(open("a/b", &sealed).expect("it is what was written"), plain, "{length}");
        }
    }

    #[test]
    fn one_bit_anywhere_is_found() {
        let sealed = seal("a", &bytes(70_000));
        let second = usize::try_from(SEALED).expect("small");
        let places = [0, 3, 4, 7, 8, 31, 32, 5000, second - 17, second - 16, second - 1, second, second + 4, second + 8, second + 40];
        for at in places.into_iter().chain([sealed.len() - 17, sealed.len() - 1]) {
            let mut flipped = sealed.clone();
            flipped[at] ^= 1;
            let altered = open("a", &flipped).expect_err("a bit is wrong");
            assert_eq!(altered.byte, if at < second { 0 } else { SEGMENT }, "{altered}");
            assert_eq!(altered.object, "a");
        }
    }

    #[test]
    fn an_object_that_is_cut_anywhere_is_not_taken_for_a_shorter_one() {
        let segment = usize::try_from(SEALED).expect("small");
        let sealed = seal("a", &bytes(131_072));
        assert_eq!(sealed.len(), 2 * segment + 48);
        for end in [0, 1, 47, 48, 49, segment - 1, segment, segment + 1, segment + 48, 2 * segment, 2 * segment + 47] {
            let cut = &sealed[..end];
            assert!(!is_whole(end as u64) || open("a", cut).is_err(), "{end}");
        }
    }

    #[test]
    fn segments_and_objects_do_not_change_places() {
        let segment = usize::try_from(SEALED).expect("small");
        let (one, other) = (seal("a", &bytes(150_000)), seal("a", &bytes(150_000)));
        let mut swapped = one.clone();
        swapped[..segment].copy_from_slice(&one[segment..2 * segment]);
        assert!(open("a", &swapped).is_err());
        assert!(open("b", &one).is_err(), "an object lies at its own path only");
        let mut bytes = one.clone();
        assert!(Opener::new(key(2), "a").open(0, &mut bytes).is_err(), "another domain has another key");
        let mut bytes = other[segment..].to_vec();
        assert!(Opener::new(key(1), "a").open(0, &mut bytes).is_err(), "a segment has a number");
    }

    #[test]
    fn the_same_object_written_twice_shares_no_salt_and_no_block() {
        let plain = vec![0; 300_000];
        let (one, other) = (seal("a", &plain), seal("a", &plain));
        let mut blocks = std::collections::HashSet::new();
        for sealed in [&one, &other] {
            for segment in sealed.chunks(usize::try_from(SEALED).expect("small")) {
                let ciphertext = &segment[HEADER..segment.len() - TAG];
                for block in ciphertext.chunks_exact(16) {
                    // Equal plaintext under one key and nonce would give equal blocks.
                    assert!(blocks.insert(block.to_vec()));
                }
            }
        }
        assert_ne!(one[8..32], other[8..32]);
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_make_the_same_object(cuts in proptest::collection::vec(0_usize..150_000, 0..6)) {
            let plain = bytes(150_000);
            let mut ends: Vec<usize> = cuts.into_iter().chain([0, plain.len()]).collect();
            ends.sort_unstable();
            let pieces: Vec<Bytes> = ends.windows(2).map(|w| Bytes::copy_from_slice(&plain[w[0]..w[1]])).collect();
            let sealer = Sealer::new(&key(1), "p").expect("a sealer");
            prop_assert_eq!(open("p", &sealer.seal(0, &pieces, true).expect("sealed")).expect("opened"), plain);
        }

        #[test]
        fn foreign_bytes_are_refused(mut foreign in proptest::collection::vec(any::<u8>(), 1..400), as_header in any::<bool>()) {
            if as_header && foreign.len() > 8 {
                foreign[..4].copy_from_slice(MAGIC);
                foreign[4..8].copy_from_slice(&key(1).id);
            }
            prop_assert!(open("a", &foreign).is_err());
        }
    }
}
