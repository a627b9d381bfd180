//! Inputs that several modules share.

use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Algorithm, Digest, FormatError, Limits};
use proptest::prelude::*;

/// Proptest with this many cases. Nothing is written next to the sources: a failure prints its
/// smallest input.
pub fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// SplitMix64: numbers that look random and are the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn digest(&mut self) -> Digest {
        let raw: Vec<u8> = (0..4).flat_map(|_| self.next().to_le_bytes()).collect();
        Digest::from_bytes(Algorithm::Sha256, &raw).unwrap()
    }

    pub fn digests(&mut self, count: usize) -> Vec<Digest> {
        (0..count).map(|_| self.digest()).collect()
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

pub fn digest(text: &str) -> Digest {
    Digest::sha256(text.as_bytes())
}

pub const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 };

/// A manifest with `pages` random pages, ixs in random gaps and order, and up to 5 sequences, as
/// unsorted parts.
pub fn parts(seed: u64, pages: usize) -> (Vec<Page>, Vec<Sequence>) {
    let mut random = Random(seed);
    let mut ix = random.below(5) as u32;
    let mut list: Vec<Page> = (0..pages)
        .map(|_| {
            ix += 1 + if random.below(8) == 0 { random.below(1000) as u32 } else { 0 };
            Page { ix, k: random.digest(), v: random.digest() }
        })
        .collect();
    let mut sequences = Vec::new();
    for number in 0..random.below(6) {
        let length = if pages == 0 { 0 } else { random.below(pages * 2) };
        let start = random.below(pages.max(1));
        let mut page_ixs = Vec::new();
        for i in 0..length {
            // Mostly in order, as an engine allocates, with jumps back and forth, as it reuses.
            let at = if random.below(10) == 0 { random.below(pages) } else { (start + i) % pages };
            page_ixs.push(list[at].ix);
        }
        let fill = if length == 0 { 0 } else { random.below(16) as u32 };
        sequences.push(Sequence { id: format!("séq \"{number}\"\n{}", random.below(100)), page_ixs, fill_in_last_page: fill });
    }
    for i in (1..list.len()).rev() {
        list.swap(i, random.below(i + 1));
    }
    (list, sequences)
}

pub fn manifest(seed: u64, pages: usize) -> FlatManifest {
    let (pages, sequences) = parts(seed, pages);
    FlatManifest::new(GEOMETRY, pages, sequences, &Limits::default()).unwrap()
}

/// Limits small enough to pass with small inputs.
pub fn small_limits() -> Limits {
    Limits {
        document_bytes: 2000,
        pages: 3,
        sequences: 2,
        sequence_pages: 8,
        page_bytes: 4096,
        blob_bytes: 10_000,
        tensors: 2,
        layers: 3,
        listed_bytes: 1500,
        journal_bytes: 2000,
    }
}

/// Asserts the error's whole text and its code.
#[track_caller]
pub fn assert_refused<T: std::fmt::Debug>(what: &str, result: Result<T, FormatError>, message: &str, code: pfr_schema::ErrorCode) {
    match result {
        Ok(value) => panic!("{what}: accepted as {value:?}"),
        Err(error) => {
            assert_eq!(error.to_string(), message, "{what}");
            assert_eq!(error.code(), code, "{what}");
        }
    }
}

/// Bytes with one thing wrong: a byte flipped, cut, inserted, removed, or a piece doubled.
pub fn mutate(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..=random.below(3) {
        let at = random.below(out.len().max(1));
        match random.below(6) {
            0 if !out.is_empty() => out[at] ^= 1 << random.below(8),
            1 if !out.is_empty() => out[at] = random.next() as u8,
            2 => out.truncate(at),
            3 => out.insert(at.min(out.len()), random.next() as u8),
            4 if !out.is_empty() => {
                out.remove(at);
            }
            _ => {
                let end = (at + random.below(40)).min(out.len());
                let piece = out[at.min(end)..end].to_vec();
                let to = random.below(out.len() + 1);
                out.splice(to..to, piece);
            }
        }
    }
    out
}
