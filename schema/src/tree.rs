//! Page trees: the stored form of a page list — geometry, runs and sequences of one group of one
//! rank.

use crate::digest::{Algorithm, Digest};
use crate::error::FormatError;
use crate::flat::{self, FlatManifest, Page, Sequence, check_fill, too_many};
use crate::geometry::Geometry;
use crate::json;
use crate::kind::Kind;
use crate::limits::Limits;
use crate::ranges::Ranges;
use crate::run::{self, Run};
use serde::{Deserialize, Serialize};

pub use crate::document::Document;

const DOCUMENT: &str = "page tree";
/// Value of the `schema` field.
pub const SCHEMA: &str = "pf.page-tree.v1";
/// Layouts that start so are opaque: page bytes are the engine's own.
pub const OPAQUE_PREFIX: &str = "opaque/";

/// What kind of state a group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupKind {
    /// Every token attends to every earlier one.
    FullAttention,
    /// Only the last tokens are kept.
    SlidingWindow,
    /// Latent attention: one compressed vector for each token.
    Mla,
    /// One block of recurrent state for each sequence.
    Recurrent,
}

/// A named group of layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Name, unique in a snapshot.
    pub name: String,
    /// Kind of state.
    pub kind: GroupKind,
}

impl Default for Group {
    fn default() -> Self {
        Self { name: "main".into(), kind: GroupKind::FullAttention }
    }
}

/// A run and how many pages it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRef {
    /// The run's digest.
    pub digest: Digest,
    /// Its pages; checked against the run when the tree is stored.
    pub pages: u32,
}

/// A sequence, its page indices as ranges.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeSequence {
    /// Stable identifier.
    pub id: String,
    /// Pages in token order.
    pub ix: Ranges,
    /// Occupied slots of the last page; 0 means the last page is full.
    pub fill: u32,
}

/// A page tree. The order of the fields is the order of the bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageTree {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`flat::LAYOUT`], or `opaque/…`.
    pub layout: String,
    /// Tokens in a page.
    pub page_size_tokens: u32,
    /// Bytes of one component of one page.
    pub page_bytes: u64,
    /// Shape of a page; given exactly when the layout is [`flat::LAYOUT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geometry: Option<Geometry>,
    /// Names of the blobs that make up a page: `["k","v"]`, `["kv"]`, `["latent"]` or `["state"]`.
    pub components: Vec<String>,
    /// The group of layers.
    pub group: Group,
    /// This shard's number.
    pub rank: u32,
    /// How many shards there are.
    pub world: u32,
    /// Runs in page order.
    pub runs: Vec<RunRef>,
    /// The ix of every page, ascending.
    pub ix: Ranges,
    /// Sequences, sorted by id.
    pub sequences: Vec<TreeSequence>,
    /// Digest of the equivalent flat manifest; given exactly when the layout is [`flat::LAYOUT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flat_digest: Option<Digest>,
}

impl PageTree {
    /// Turns a flat manifest into a tree and its runs.
    ///
    /// # Errors
    /// [`FormatError::Field`] if `rank` is not below `world` or the group's name is empty or over
    /// 200 bytes.
    pub fn from_flat(manifest: &FlatManifest, group: Group, rank: u32, world: u32) -> Result<(Self, Vec<Document>), FormatError> {
        let pages = manifest.pages();
        let mut documents = Vec::new();
        let mut runs = Vec::new();
        let mut start = 0;
        for length in run::cut(pages.iter().map(|p| &p.k)) {
            let digests = pages[start..start + length].iter().flat_map(|p| [p.k, p.v]).collect();
            let document = Document::new(Kind::Run, Run::new(2, manifest.page_bytes(), digests)?.to_bytes());
            runs.push(RunRef { digest: document.digest, pages: length as u32 });
            documents.push(document);
            start += length;
        }
        let tree = Self {
            schema: SCHEMA.into(),
            layout: flat::LAYOUT.into(),
            page_size_tokens: manifest.geometry().page_size_tokens,
            page_bytes: manifest.page_bytes(),
            geometry: Some(*manifest.geometry()),
            components: vec!["k".into(), "v".into()],
            group,
            rank,
            world,
            runs,
            ix: pages.iter().map(|p| p.ix).collect(),
            sequences: manifest
                .sequences()
                .iter()
                .map(|s| TreeSequence { id: s.id.clone(), ix: s.page_ixs.iter().copied().collect(), fill: s.fill_in_last_page })
                .collect(),
            flat_digest: Some(manifest.digest()),
        };
        tree.check_shard()?;
        Ok((tree, documents))
    }

    /// Turns the tree back into the flat manifest; `runs` are those of [`Self::runs`], in order.
    ///
    /// # Errors
    /// [`FormatError`] if the runs do not add up, the layout has no flat form, or the result does
    /// not hash to `flat_digest`.
    pub fn to_flat(&self, runs: &[Run], limits: &Limits) -> Result<FlatManifest, FormatError> {
        self.to_flat_of(runs.iter().cloned().map(Ok), limits)
    }

    /// The same of runs that come one after the other: only the pages of one are in memory twice.
    ///
    /// # Errors
    /// The first error of `runs`, and those of [`Self::to_flat`].
    pub fn to_flat_of(
        &self,
        runs: impl IntoIterator<Item = Result<Run, FormatError>>,
        limits: &Limits,
    ) -> Result<FlatManifest, FormatError> {
        let (Some(geometry), Some(flat_digest)) = (self.geometry, self.flat_digest) else {
            return Err(FormatError::field(
                DOCUMENT,
                "$.layout",
                format!("{:?}, the only layout with a flat form", flat::LAYOUT),
                format!("{:?}", self.layout),
            ));
        };
        // The tree may come from an unchecked API response.
        self.check(limits)?;
        let (mut indices, mut pages, mut first, mut found) = (self.ix.iter(), Vec::new(), None, 0_u64);
        for run in runs {
            for digest in run?.digests() {
                found += 1;
                match first.take() {
                    None => first = Some(*digest),
                    // A page without an index is counted, and refused below.
                    Some(k) => pages.extend(indices.next().map(|ix| Page { ix, k, v: *digest })),
                }
            }
        }
        if found != self.ix.len() * 2 {
            return Err(FormatError::field(DOCUMENT, "$.runs", format!("{} pages in all", self.ix.len()), found / 2));
        }
        let sequences = self
            .sequences
            .iter()
            .map(|s| Sequence { id: s.id.clone(), page_ixs: s.ix.iter().collect(), fill_in_last_page: s.fill })
            .collect();
        let flat = FlatManifest::new(geometry, pages, sequences, limits)?;
        let found = flat.digest();
        if found != flat_digest {
            return Err(FormatError::DigestMismatch { expected: flat_digest.to_string(), found: found.to_string() });
        }
        Ok(flat)
    }

    /// Parses and checks a tree.
    ///
    /// # Errors
    /// [`FormatError`] with JSON path, expected and found.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let tree: Self = json::parse(DOCUMENT, bytes, limits.document_bytes)?;
        tree.check(limits)?;
        Ok(tree)
    }

    fn check(&self, limits: &Limits) -> Result<(), FormatError> {
        let field = |path: &str, expected: String, found: String| Err(FormatError::field(DOCUMENT, path, expected, found));
        if self.schema != SCHEMA {
            return field("$.schema", format!("{SCHEMA:?}"), format!("{:?}", self.schema));
        }
        let known = [&["k", "v"][..], &["kv"], &["latent"], &["state"]];
        if !known.iter().any(|names| self.components == *names) {
            return field("$.components", r#"["k","v"], ["kv"], ["latent"] or ["state"]"#.into(), format!("{:?}", self.components));
        }
        if self.page_size_tokens == 0 {
            return field("$.page_size_tokens", "a positive number".into(), "0".into());
        }
        if self.page_bytes == 0 {
            return field("$.page_bytes", "a positive number".into(), "0".into());
        }
        too_many("a page in bytes", self.page_bytes, limits.page_bytes)?;
        let is_flat = self.layout == flat::LAYOUT;
        if !is_flat && (!self.layout.starts_with(OPAQUE_PREFIX) || self.layout.len() > 200) {
            return field(
                "$.layout",
                format!("{:?} or a layout that starts with {OPAQUE_PREFIX:?}", flat::LAYOUT),
                format!("{:?}", self.layout),
            );
        }
        match &self.geometry {
            Some(geometry) if is_flat => {
                let expected = geometry.page_bytes(limits)?;
                if expected != self.page_bytes {
                    return field("$.page_bytes", format!("{expected} as the geometry says"), self.page_bytes.to_string());
                }
                if geometry.page_size_tokens != self.page_size_tokens {
                    let expected = format!("{} as the geometry says", geometry.page_size_tokens);
                    return field("$.page_size_tokens", expected, self.page_size_tokens.to_string());
                }
                if self.components.len() != 2 {
                    return field("$.components", r#"["k","v"] for this layout"#.into(), format!("{:?}", self.components));
                }
            }
            None if !is_flat => {}
            _ => {
                return field(
                    "$.geometry",
                    format!("a geometry exactly when the layout is {:?}", flat::LAYOUT),
                    format!("layout {:?}", self.layout),
                );
            }
        }
        if self.flat_digest.is_some() != is_flat {
            return field(
                "$.flat_digest",
                format!("a digest exactly when the layout is {:?}", flat::LAYOUT),
                format!("layout {:?}", self.layout),
            );
        }
        if let Some(digest) = self.flat_digest.filter(|d| d.algorithm() != Algorithm::Sha256) {
            return field("$.flat_digest", "a sha256 digest, as of every document".into(), digest.to_string());
        }
        self.check_shard()?;
        self.check_pages(limits)
    }

    /// Checks what a writer chooses freely: the shard and the group's name.
    fn check_shard(&self) -> Result<(), FormatError> {
        if self.world == 0 || self.rank >= self.world {
            let found = format!("rank {} of {}", self.rank, self.world);
            return Err(FormatError::field(DOCUMENT, "$.rank", "a rank below world", found));
        }
        if self.group.name.is_empty() || self.group.name.len() > 200 {
            let found = format!("{} bytes", self.group.name.len());
            return Err(FormatError::field(DOCUMENT, "$.group.name", "1 to 200 bytes", found));
        }
        Ok(())
    }

    fn check_pages(&self, limits: &Limits) -> Result<(), FormatError> {
        self.ix.check(DOCUMENT, "$.ix", limits.pages)?;
        let mut runs_pages = 0_u64;
        for (i, run) in self.runs.iter().enumerate() {
            if run.pages == 0 || run.pages as usize > run::MAX_PAGES {
                return Err(FormatError::field(DOCUMENT, format!("$.runs[{i}].pages"), format!("1 to {}", run::MAX_PAGES), run.pages));
            }
            runs_pages += u64::from(run.pages);
        }
        if runs_pages != self.ix.len() {
            return Err(FormatError::field(
                DOCUMENT,
                "$.ix",
                format!("{runs_pages} indices, as many as the runs have pages"),
                self.ix.len(),
            ));
        }
        // Work on ranges, never on indices: a kilobyte of ranges may stand for millions of them.
        let known: Vec<(u64, u64)> = self.ix.bounds().collect();
        if let Some(pair) = known.windows(2).find(|pair| pair[1].0 < pair[0].1) {
            return Err(FormatError::field(DOCUMENT, "$.ix", "ascending indices, each once", pair[1].0));
        }
        too_many("sequences in a tree", self.sequences.len() as u64, limits.sequences)?;
        let mut listed = 0;
        for (i, sequence) in self.sequences.iter().enumerate() {
            if i > 0 && sequence.id <= self.sequences[i - 1].id {
                return Err(FormatError::field(
                    DOCUMENT,
                    format!("$.sequences[{i}].id"),
                    "ids ascending, each once",
                    format!("{:?}", sequence.id),
                ));
            }
            let path = format!("$.sequences[{i}].ix");
            sequence.ix.check(DOCUMENT, &path, limits.sequence_pages)?;
            listed += sequence.ix.len();
            too_many("page indices in sequences", listed, limits.sequence_pages)?;
            check_fill(DOCUMENT, &format!("$.sequences[{i}].fill"), sequence.fill, self.page_size_tokens, sequence.ix.is_empty())?;
            for (start, end) in sequence.ix.bounds() {
                // Adjoining ranges of `$.ix` are merged, so a list without gaps lies in one of
                // them.
                let covered = known.partition_point(|k| k.0 <= start).checked_sub(1).map_or(0, |k| known[k].1);
                if covered < end {
                    return Err(FormatError::field(DOCUMENT, path, "the ix of a page in $.ix", covered.max(start)));
                }
            }
        }
        Ok(())
    }

    /// The tree's bytes: compact JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        json::bytes(self)
    }

    /// The tree as a named node.
    #[must_use]
    pub fn to_document(&self) -> Document {
        Document::new(Kind::Tree, self.to_bytes())
    }

    /// The digest of each run, and the shape that it must have.
    pub fn run_shapes(&self) -> impl Iterator<Item = (Digest, run::Shape)> + '_ {
        self.runs
            .iter()
            .map(|r| (r.digest, run::Shape { pages: r.pages, components: self.components.len() as u8, page_bytes: self.page_bytes }))
    }

    /// Pages in the tree.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.ix.len()
    }

    /// Tokens of the longest sequence.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.sequences.iter().map(|s| flat::tokens(s.ix.len(), self.page_size_tokens, s.fill)).max().unwrap_or(0)
    }
}
