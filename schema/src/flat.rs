//! The flat page manifest `paged-batchinvariant-v1`: the interchange form, byte-compatible with
//! ProcessFork's `pf-cache` 1.0.15.

use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::FormatError;
use crate::geometry::{Dtype, Geometry};
use crate::json;
use crate::limits::Limits;
use serde::{Deserialize, Serialize};
use std::io;

/// The only layout a flat manifest may name.
pub const LAYOUT: &str = "paged-batchinvariant-v1";
const DOCUMENT: &str = "page manifest";

/// One physical page: the digests of its K bytes and of its V bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    /// Index in the engine's page table.
    pub ix: u32,
    /// Digest of the K bytes.
    pub k: Digest,
    /// Digest of the V bytes.
    pub v: Digest,
}

/// One request's ordered list of pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// Stable identifier.
    pub id: String,
    /// Pages in token order.
    pub page_ixs: Vec<u32>,
    /// Occupied slots of the last page; 0 means the last page is full.
    pub fill_in_last_page: u32,
}

impl Sequence {
    /// Tokens this sequence covers.
    #[must_use]
    pub fn tokens(&self, page_size_tokens: u32) -> u64 {
        tokens(self.page_ixs.len() as u64, page_size_tokens, self.fill_in_last_page)
    }
}

/// Tokens in `pages` pages of which the last holds `fill` (0 = full). Saturates, because trees in
/// API responses are unchecked.
pub(crate) fn tokens(pages: u64, page_size_tokens: u32, fill: u32) -> u64 {
    let full = pages.saturating_mul(u64::from(page_size_tokens));
    if fill == 0 || pages == 0 { full } else { full - u64::from(page_size_tokens.saturating_sub(fill)) }
}

// The order of the fields is the order of the bytes.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    layout: String,
    page_size_tokens: u32,
    n_layers: u32,
    n_heads: u32,
    head_dim: u32,
    dtype: Dtype,
    pages: Vec<Page>,
    logical_seqs: Vec<Sequence>,
}

/// A valid flat page manifest: pages sorted by ix, sequences sorted by id, nothing dangling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatManifest {
    geometry: Geometry,
    page_bytes: u64,
    pages: Vec<Page>,
    sequences: Vec<Sequence>,
    /// Of its bytes, which it does not hold.
    digest: Digest,
}

/// What is written, without a copy of the pages.
#[derive(Serialize)]
struct Borrowed<'a> {
    layout: &'static str,
    page_size_tokens: u32,
    n_layers: u32,
    n_heads: u32,
    head_dim: u32,
    dtype: Dtype,
    pages: &'a [Page],
    logical_seqs: &'a [Sequence],
}

/// Compares what is written with the bytes that are expected.
struct Compare<'a> {
    left: &'a [u8],
    /// How many bytes are alike.
    alike: usize,
}

impl io::Write for Compare<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(left) = self.left.strip_prefix(bytes) {
            self.left = left;
            self.alike += bytes.len();
            return Ok(bytes.len());
        }
        self.alike += bytes.iter().zip(self.left).take_while(|(a, b)| a == b).count();
        // A buffer before this writer may try again.
        self.left = &[];
        Err(io::ErrorKind::InvalidData.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl FlatManifest {
    /// Sorts and checks.
    ///
    /// # Errors
    /// [`FormatError`] naming the JSON path of the first thing wrong.
    pub fn new(geometry: Geometry, mut pages: Vec<Page>, mut sequences: Vec<Sequence>, limits: &Limits) -> Result<Self, FormatError> {
        pages.sort_by_key(|p| p.ix);
        sequences.sort_by(|a, b| a.id.cmp(&b.id));
        let page_bytes = geometry.page_bytes(limits)?;
        let manifest = Self { geometry, page_bytes, pages, sequences, digest: Digest::sha256(b"") };
        manifest.check(limits)?;
        let mut hasher = Hasher::new(Algorithm::Sha256);
        manifest.write(&mut hasher).unwrap_or_else(|e| unreachable!("a hasher takes everything: {e}"));
        Ok(Self { digest: hasher.finish(), ..manifest })
    }

    /// Parses a manifest; its bytes must be the canonical ones, so that the flat form can be given
    /// back byte for byte from the tree form.
    ///
    /// # Errors
    /// [`FormatError`] with JSON path, expected and found.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let wire: Wire = json::parse_many(DOCUMENT, bytes, limits.document_bytes)?;
        if wire.layout != LAYOUT {
            return Err(FormatError::field(DOCUMENT, "$.layout", format!("{LAYOUT:?}"), format!("{:?}", wire.layout)));
        }
        let geometry = Geometry {
            page_size_tokens: wire.page_size_tokens,
            n_layers: wire.n_layers,
            n_heads: wire.n_heads,
            head_dim: wire.head_dim,
            dtype: wire.dtype,
        };
        let page_bytes = geometry.page_bytes(limits)?;
        let manifest = Self { geometry, page_bytes, pages: wire.pages, sequences: wire.logical_seqs, digest: Digest::sha256(bytes) };
        manifest.check(limits)?;
        let mut compare = Compare { left: bytes, alike: 0 };
        let is_canonical = manifest.write(&mut compare).is_ok() && compare.left.is_empty();
        if !is_canonical {
            let at = compare.alike;
            return Err(FormatError::field(
                DOCUMENT,
                format!("byte {at}"),
                "the canonical bytes (compact JSON in the documented field order)",
                "another spelling of the same document",
            ));
        }
        Ok(manifest)
    }

    fn check(&self, limits: &Limits) -> Result<(), FormatError> {
        too_many("pages in a manifest", self.pages.len() as u64, limits.pages)?;
        too_many("sequences in a manifest", self.sequences.len() as u64, limits.sequences)?;
        let mut algorithm = None;
        for (i, page) in self.pages.iter().enumerate() {
            if let Some(previous) = i.checked_sub(1).map(|p| self.pages[p].ix) {
                if page.ix == previous {
                    return Err(FormatError::field(DOCUMENT, format!("$.pages[{i}].ix"), "every ix once", format!("{} again", page.ix)));
                }
                if page.ix < previous {
                    return Err(FormatError::field(
                        DOCUMENT,
                        format!("$.pages[{i}].ix"),
                        "pages sorted by ix",
                        format!("{} after {previous}", page.ix),
                    ));
                }
            }
            for (name, digest) in [("k", &page.k), ("v", &page.v)] {
                let expected: Algorithm = *algorithm.get_or_insert(digest.algorithm());
                if digest.algorithm() != expected {
                    return Err(FormatError::field(
                        DOCUMENT,
                        format!("$.pages[{i}].{name}"),
                        format!("{expected} like the pages before"),
                        digest,
                    ));
                }
            }
        }
        // Most manifests have all indices from 0 on.
        let has = |ix: u32| {
            let at_its_place = self.pages.get(ix as usize).is_some_and(|page| page.ix == ix);
            at_its_place || self.pages.binary_search_by_key(&ix, |page| page.ix).is_ok()
        };
        let mut listed = 0_u64;
        for (i, sequence) in self.sequences.iter().enumerate() {
            if let Some(previous) = i.checked_sub(1).map(|p| &self.sequences[p].id) {
                if sequence.id == *previous {
                    return Err(FormatError::field(
                        DOCUMENT,
                        format!("$.logical_seqs[{i}].id"),
                        "every id once",
                        format!("{:?} again", sequence.id),
                    ));
                }
                if sequence.id < *previous {
                    return Err(FormatError::field(
                        DOCUMENT,
                        format!("$.logical_seqs[{i}].id"),
                        "sequences sorted by id",
                        format!("{:?} after {previous:?}", sequence.id),
                    ));
                }
            }
            listed += sequence.page_ixs.len() as u64;
            too_many("page indices in sequences", listed, limits.sequence_pages)?;
            check_fill(
                DOCUMENT,
                &format!("$.logical_seqs[{i}].fill_in_last_page"),
                sequence.fill_in_last_page,
                self.geometry.page_size_tokens,
                sequence.page_ixs.is_empty(),
            )?;
            for (j, ix) in sequence.page_ixs.iter().enumerate() {
                if !has(*ix) {
                    return Err(FormatError::field(
                        DOCUMENT,
                        format!("$.logical_seqs[{i}].page_ixs[{j}]"),
                        "the ix of a page in $.pages",
                        ix,
                    ));
                }
            }
        }
        Ok(())
    }

    /// The manifest's bytes: compact JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        json::bytes(&self.borrowed())
    }

    /// The digest of [`Self::to_bytes`], SHA-256.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    fn write(&self, writer: impl io::Write) -> io::Result<()> {
        json::write(&self.borrowed(), writer)
    }

    fn borrowed(&self) -> Borrowed<'_> {
        let g = self.geometry;
        Borrowed {
            layout: LAYOUT,
            page_size_tokens: g.page_size_tokens,
            n_layers: g.n_layers,
            n_heads: g.n_heads,
            head_dim: g.head_dim,
            dtype: g.dtype,
            pages: &self.pages,
            logical_seqs: &self.sequences,
        }
    }

    /// The shape of its pages.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of one K page, or of one V page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Pages, sorted by ix.
    #[must_use]
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Sequences, sorted by id.
    #[must_use]
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }
}

/// Refuses a count over its limit.
pub(crate) fn too_many(what: &'static str, found: u64, limit: u64) -> Result<(), FormatError> {
    if found > limit { Err(FormatError::TooLarge { what, found, limit }) } else { Ok(()) }
}

/// A fill is below the page size, and 0 when there is no page to fill.
pub(crate) fn check_fill(document: &'static str, path: &str, fill: u32, page_size_tokens: u32, empty: bool) -> Result<(), FormatError> {
    if fill >= page_size_tokens {
        return Err(FormatError::field(document, path, format!("less than the page size {page_size_tokens} (0 = full)"), fill));
    }
    if empty && fill != 0 {
        return Err(FormatError::field(document, path, "0 for a sequence without pages", fill));
    }
    Ok(())
}
