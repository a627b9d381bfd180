//! Page chunks (in code: runs): a few hundred consecutive page entries as one immutable node, so
//! that forks share lists.
//!
//! ```text
//! 0   4  magic "PFRN"
//! 4   1  version, 1
//! 5   1  digest algorithm (number)
//! 6   1  components per page, 1 or 2
//! 7   1  zero
//! 8   8  bytes of one component, u64 LE
//! 16  4  pages in this run, u32 LE
//! 20  …  for each page, for each component: the digest's bytes
//! ```
//!
//! A run holds no ix: it does not depend on where its pages sit. Runs are cut by content ([`cut`]),
//! so a run's boundaries depend on the pages around them and not on the history of edits.

use crate::digest::{Algorithm, Digest};
use crate::error::FormatError;
use crate::flat::too_many;
use crate::limits::Limits;

const DOCUMENT: &str = "page run";
const MAGIC: &[u8; 4] = b"PFRN";
const HEADER: usize = 20;
/// Fewest pages in a run that is not the last.
pub const MIN_PAGES: usize = 64;
/// Most pages in a run.
pub const MAX_PAGES: usize = 1024;

/// What a tree must know about a run without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Pages in the run.
    pub pages: u32,
    /// Components per page.
    pub components: u8,
    /// Bytes of one component.
    pub page_bytes: u64,
}

/// A run of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    algorithm: Algorithm,
    components: u8,
    page_bytes: u64,
    digests: Vec<Digest>,
}

impl Run {
    /// A run of `digests.len() / components` pages; `digests` lists the components of the first
    /// page, then of the second…
    ///
    /// # Errors
    /// [`FormatError::Field`] if it is empty, too long, of empty pages, or of mixed algorithms.
    pub fn new(components: u8, page_bytes: u64, digests: Vec<Digest>) -> Result<Self, FormatError> {
        let field = |path: &str, expected: String, found: String| Err(FormatError::field(DOCUMENT, path, expected, found));
        if !(1..=2).contains(&components) {
            return field("byte 6", "1 or 2 components".into(), components.to_string());
        }
        if page_bytes == 0 {
            return field("byte 8", "a positive number of bytes".into(), "0".into());
        }
        if digests.is_empty()
            || !digests.len().is_multiple_of(usize::from(components))
            || digests.len() / usize::from(components) > MAX_PAGES
        {
            return field("byte 16", format!("1 to {MAX_PAGES} whole pages"), format!("{} digests", digests.len()));
        }
        let algorithm = digests[0].algorithm();
        if let Some(other) = digests.iter().find(|d| d.algorithm() != algorithm) {
            return field("byte 5", format!("{algorithm} throughout"), other.to_string());
        }
        Ok(Self { algorithm, components, page_bytes, digests })
    }

    /// Parses a run; every byte must be accounted for.
    ///
    /// # Errors
    /// [`FormatError`] with the byte offset.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let field = |path: &str, expected: &str, found: String| Err(FormatError::field(DOCUMENT, path, expected, found));
        if bytes.len() < HEADER || &bytes[..4] != MAGIC {
            let found = format!("{} bytes that start with {:02x?}", bytes.len(), &bytes[..bytes.len().min(4)]);
            return field("byte 0", "a header that starts with PFRN", found);
        }
        if bytes[4] != 1 {
            return field("byte 4", "version 1", bytes[4].to_string());
        }
        let Some(algorithm) = Algorithm::from_number(bytes[5]) else {
            return field("byte 5", "a known digest algorithm", bytes[5].to_string());
        };
        if bytes[7] != 0 {
            return field("byte 7", "0", bytes[7].to_string());
        }
        let page_bytes = u64::from_le_bytes(bytes[8..16].try_into().unwrap_or_default());
        too_many("a page in bytes", page_bytes, limits.page_bytes)?;
        let pages = u32::from_le_bytes(bytes[16..20].try_into().unwrap_or_default()) as usize;
        let body = &bytes[HEADER..];
        if pages > MAX_PAGES || body.len() != pages * usize::from(bytes[6]) * algorithm.len() {
            return field("byte 16", "as many digests as the header says", format!("{pages} pages, {} bytes of digests", body.len()));
        }
        let digests = body.chunks_exact(algorithm.len()).map(|raw| Digest::from_bytes(algorithm, raw)).collect::<Result<_, _>>()?;
        Self::new(bytes[6], page_bytes, digests)
    }

    /// The run's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER + self.digests.len() * self.algorithm.len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[1, self.algorithm as u8, self.components, 0]);
        out.extend_from_slice(&self.page_bytes.to_le_bytes());
        out.extend_from_slice(&self.shape().pages.to_le_bytes());
        for digest in &self.digests {
            out.extend_from_slice(digest.as_bytes());
        }
        out
    }

    /// Pages, components, bytes.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape {
            pages: (self.digests.len() / usize::from(self.components)) as u32,
            components: self.components,
            page_bytes: self.page_bytes,
        }
    }

    /// Every component of every page, in order.
    #[must_use]
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }
}

/// Where to cut a list of pages into runs: the lengths of the runs, in pages.
///
/// A run ends after a page whose first component digest ends in eight zero bits, has at least
/// [`MIN_PAGES`] (but for the last) and at most [`MAX_PAGES`]; `first_components` yields the first
/// component of each page.
#[must_use]
pub fn cut<'a>(first_components: impl IntoIterator<Item = &'a Digest>) -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut length = 0;
    for digest in first_components {
        length += 1;
        let marked = digest.as_bytes().last() == Some(&0);
        if length == MAX_PAGES || (marked && length >= MIN_PAGES) {
            lengths.push(length);
            length = 0;
        }
    }
    if length > 0 {
        lengths.push(length);
    }
    lengths
}
