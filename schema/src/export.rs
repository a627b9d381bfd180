//! Exports: a snapshot as an artifact of a few packs, for an OCI image layout or any OCI registry.
//!
//! ```text
//! index.json ─▶ manifest (artifactType of an export) ─▶ layer 0: pack of the documents
//!                                                   └▶ layer 1…: packs of pages, tensors and attachments
//! ```
//!
//! The packs are cut by content ([`packs`]), so a fork has most packs of its parent, under the same
//! digests. An export holds everything that the snapshot reaches. No two exports refer to each
//! other.

use crate::digest::{Algorithm, Digest, Hasher};
use crate::document::Document;
use crate::error::FormatError;
use crate::flat::too_many;
use crate::image::Image;
use crate::kind::Kind;
use crate::limits::Limits;
use crate::name::{RepositoryName, Tag};
use crate::snapshot::{Descriptor, MAX_BYTES, Manifest};
use crate::{json, media_type};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

const EXPORT: &str = "export manifest";
const INDEX: &str = "layout index";

/// Annotation of an export: the digest of its snapshot.
pub const SNAPSHOT: &str = "org.pf.snapshot";
/// Annotation of a layer: [`contents`] of its pack.
pub const CONTENTS: &str = "org.pf.contents";
/// Annotation of an entry of an index: the repository of the snapshot.
pub const REPOSITORY: &str = "org.pf.repository";
/// Annotation of an entry of an index: its tag.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The file that says that a folder is a layout, and its bytes.
pub const LAYOUT_FILE: (&str, &[u8]) = ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);
/// The file that lists the manifests of a layout.
pub const INDEX_FILE: &str = "index.json";
/// The configuration of every export: the empty one of OCI.
pub const EMPTY: &[u8] = b"{}";

/// Raw bytes after which a pack may end.
const LEAST: u64 = 128 << 20;
/// Raw bytes that a pack has on average beyond [`LEAST`].
const MORE: u64 = 128 << 20;
/// Raw bytes of a pack at most, unless one blob has more.
pub const MOST: u64 = 512 << 20;
/// Blobs in a pack at most.
pub const BLOBS: usize = 256 << 10;
/// Manifests in an index at most.
pub const MANIFESTS: u64 = 10_000;
/// Bytes of an index at most.
pub const INDEX_BYTES: u64 = 16 << 20;

/// Where packs are cut: positions of the blobs of each, given the digests and raw lengths of all.
///
/// A pack ends after a blob whose digest says so, once it has 128 MiB; the chance is proportional
/// to the blob's length. It ends before a blob that would bring it over 512 MiB, or 262,144 blobs.
/// So the cuts depend on the blobs alone, and soon after a difference two lists are cut at the same
/// places again.
#[must_use]
pub fn packs(blobs: impl IntoIterator<Item = (Digest, u64)>) -> Vec<Range<usize>> {
    cut(blobs, LEAST, MORE, MOST)
}

fn cut(blobs: impl IntoIterator<Item = (Digest, u64)>, least: u64, more: u64, most: u64) -> Vec<Range<usize>> {
    let (mut packs, mut start, mut bytes, mut end) = (Vec::new(), 0, 0_u64, 0);
    for (at, (digest, len)) in blobs.into_iter().enumerate() {
        if at > start && (bytes.saturating_add(len) > most || at - start >= BLOBS) {
            packs.push(start..at);
            (start, bytes) = (at, 0);
        }
        (bytes, end) = (bytes.saturating_add(len), at + 1);
        if bytes >= least && is_mark(&digest, len, more) {
            packs.push(start..end);
            (start, bytes) = (end, 0);
        }
    }
    if end > start {
        packs.push(start..end);
    }
    packs
}

/// Whether a digest, as a fraction of 1, is below `len` / `more`.
fn is_mark(digest: &Digest, len: u64, more: u64) -> bool {
    let bytes = digest.as_bytes();
    let last = bytes.last_chunk::<8>().copied().map_or(u64::MAX, u64::from_le_bytes);
    u128::from(last) * u128::from(more) < u128::from(len) << 64
}

/// Names what is in a pack, however it is encoded: SHA-256 over the keys of the digests of its
/// blobs, in order.
#[must_use]
pub fn contents<'a>(blobs: impl IntoIterator<Item = &'a Digest>) -> Digest {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    blobs.into_iter().for_each(|digest| hasher.update(&digest.to_key()));
    hasher.finish()
}

/// A pack that an export lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// SHA-256 of the pack's bytes.
    pub digest: Digest,
    /// Bytes of the pack.
    pub size: u64,
    /// [`contents`] of the pack. Nothing relies on it.
    pub contents: Option<Digest>,
}

/// A snapshot as an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The snapshot.
    pub snapshot: Digest,
    /// Its packs, the one with the documents first.
    pub layers: Vec<Layer>,
}

impl Export {
    /// Reads the manifest of an export; `None` for the manifest of any other artifact.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Option<Self>, FormatError> {
        let image = Image::describe(bytes, limits)?;
        if image.artifact_type.as_deref() != Some(media_type::EXPORT) {
            return Ok(None);
        }
        let manifest: Manifest = json::parse(EXPORT, bytes, limits.document_bytes.min(MAX_BYTES))?;
        let field = |path: String, expected: &str, found: &dyn ToString| FormatError::field(EXPORT, path, expected, found.to_string());
        let snapshot = manifest.annotations.get(SNAPSHOT).map_or("nothing", String::as_str);
        let path = format!("$.annotations.{SNAPSHOT}");
        let snapshot = snapshot.parse::<Digest>().map_err(|_| field(path, "the digest of a snapshot", &snapshot))?;
        if manifest.layers.is_empty() {
            return Err(field("$.layers".into(), "at least the pack of the documents", &"none"));
        }
        too_many("layers in a manifest", manifest.layers.len() as u64, limits.layers)?;
        let mut layers = Vec::with_capacity(manifest.layers.len());
        for (at, layer) in manifest.layers.iter().enumerate() {
            if layer.media_type != media_type::PACK {
                return Err(field(format!("$.layers[{at}].mediaType"), media_type::PACK, &layer.media_type));
            }
            if layer.digest.algorithm() != Algorithm::Sha256 {
                return Err(field(format!("$.layers[{at}].digest"), "a SHA-256 digest", &layer.digest));
            }
            let contents = layer.annotations.get(CONTENTS).and_then(|text| text.parse().ok());
            layers.push(Layer { digest: layer.digest, size: layer.size, contents });
        }
        Ok(Some(Self { snapshot, layers }))
    }

    /// The manifest: compact JSON, the same for the same packs.
    ///
    /// # Errors
    /// [`FormatError::TooLarge`] for more packs or bytes than a registry takes.
    pub fn to_document(&self, limits: &Limits) -> Result<Document, FormatError> {
        too_many("packs of an export", self.layers.len() as u64, limits.layers)?;
        let described = |layer: &Layer| Descriptor {
            media_type: media_type::PACK.into(),
            digest: layer.digest,
            size: layer.size,
            annotations: layer.contents.iter().map(|contents| (CONTENTS.to_owned(), contents.to_string())).collect(),
        };
        let config = Descriptor {
            media_type: media_type::EMPTY.into(),
            digest: Digest::sha256(EMPTY),
            size: EMPTY.len() as u64,
            annotations: BTreeMap::new(),
        };
        let manifest = Manifest {
            schema_version: 2,
            media_type: media_type::OCI_MANIFEST.into(),
            artifact_type: Some(media_type::EXPORT.into()),
            config,
            layers: self.layers.iter().map(described).collect(),
            subject: None,
            annotations: BTreeMap::from([(SNAPSHOT.to_owned(), self.snapshot.to_string())]),
        };
        let document = Document { kind: Kind::Image, ..manifest.to_document() };
        too_many("bytes of an export manifest", document.bytes.len() as u64, MAX_BYTES)?;
        Ok(document)
    }
}

/// A manifest that a layout lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// Its media type.
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// Its `artifactType`, if the index repeats that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Fields of other programs, kept when the index is written again.
    #[serde(flatten)]
    pub others: BTreeMap<String, serde_json::Value>,
}

impl Entry {
    /// An export, and the name of its snapshot.
    #[must_use]
    pub fn of(manifest: &Document, snapshot: &Digest, repository: &RepositoryName, tag: Option<&Tag>) -> Self {
        let names =
            [(REPOSITORY, Some(repository.to_string())), (REF_NAME, tag.map(Tag::to_string)), (SNAPSHOT, Some(snapshot.to_string()))];
        Self {
            media_type: media_type::OCI_MANIFEST.into(),
            digest: manifest.digest,
            size: manifest.bytes.len() as u64,
            artifact_type: Some(media_type::EXPORT.into()),
            annotations: names.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect(),
            others: BTreeMap::new(),
        }
    }

    /// The repository of the snapshot, if the index names a valid one.
    #[must_use]
    pub fn repository(&self) -> Option<RepositoryName> {
        self.annotations.get(REPOSITORY)?.parse().ok()
    }

    /// The tag, if the index names a valid one.
    #[must_use]
    pub fn tag(&self) -> Option<Tag> {
        self.annotations.get(REF_NAME)?.parse().ok()
    }

    /// Whether it may be an export: its manifest decides.
    #[must_use]
    pub fn may_be_export(&self) -> bool {
        self.media_type == media_type::OCI_MANIFEST && self.artifact_type.as_deref().is_none_or(|kind| kind == media_type::EXPORT)
    }
}

/// The list of the manifests of a layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    /// The manifests, in order.
    pub manifests: Vec<Entry>,
    /// Fields of other programs, kept when the index is written again.
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

impl Default for Index {
    fn default() -> Self {
        Self { schema_version: 2, media_type: Some(media_type::OCI_INDEX.into()), manifests: Vec::new(), others: BTreeMap::new() }
    }
}

impl Index {
    /// Parses an index.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let index: Self = json::parse(INDEX, bytes, INDEX_BYTES)?;
        if index.schema_version != 2 {
            return Err(FormatError::field(INDEX, "$.schemaVersion", "2", index.schema_version));
        }
        too_many("manifests in a layout", index.manifests.len() as u64, MANIFESTS)?;
        Ok(index)
    }

    /// Compact JSON.
    ///
    /// # Errors
    /// [`FormatError::TooLarge`] for an index that no reader takes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        too_many("manifests in a layout", self.manifests.len() as u64, MANIFESTS)?;
        let bytes = json::bytes(self);
        too_many("bytes of a layout index", bytes.len() as u64, INDEX_BYTES)?;
        Ok(bytes)
    }

    /// Adds an export. One that had its name before loses the name, and stays in the list.
    pub fn add(&mut self, entry: Entry) {
        let name = |entry: &Entry| Some((entry.annotations.get(REPOSITORY).cloned(), entry.annotations.get(REF_NAME).cloned()?));
        let taken = name(&entry);
        if taken.is_none() && self.manifests.iter().any(|before| before.digest == entry.digest) {
            return;
        }
        // The same export is listed once for each of its names.
        self.manifests.retain(|before| before.digest != entry.digest || (name(before).is_some() && name(before) != taken));
        self.manifests.iter_mut().filter(|before| taken.is_some() && name(before) == taken).for_each(|before| {
            before.annotations.remove(REF_NAME);
        });
        self.manifests.push(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn digest(number: u64) -> Digest {
        Digest::sha256(&number.to_le_bytes())
    }

    fn export(layers: u64) -> Export {
        let layer = |n| Layer { digest: digest(n), size: n + 40, contents: Some(digest(n + 1000)) };
        Export { snapshot: digest(7), layers: (0..layers).map(layer).collect() }
    }

    fn entry(export: &Export, repository: &str, tag: Option<&str>) -> Entry {
        let tag = tag.map(|tag| tag.parse().unwrap());
        Entry::of(&export.to_document(&Limits::default()).unwrap(), &export.snapshot, &repository.parse().unwrap(), tag.as_ref())
    }

    #[test]
    fn a_manifest_is_read_back_and_one_of_another_program_is_no_export() {
        let limits = Limits::default();
        let document = export(3).to_document(&limits).unwrap();
        assert_eq!(Export::parse(&document.bytes, &limits).unwrap(), Some(export(3)));
        let text = String::from_utf8(document.bytes).unwrap();
        let foreign = text.replace(media_type::EXPORT, "application/vnd.other");
        assert_eq!(Export::parse(foreign.as_bytes(), &limits).unwrap(), None);
        for wrong in [
            text.replace(media_type::PACK, "application/x-tar"),
            text.replace(SNAPSHOT, "org.pf.other"),
            text.replace(&digest(0).to_string(), &Digest::of(Algorithm::Blake3, b"x").to_string()),
        ] {
            assert!(Export::parse(wrong.as_bytes(), &limits).is_err(), "{wrong}");
        }
        let none = Export { layers: Vec::new(), ..export(0) }.to_document(&limits).unwrap();
        assert!(Export::parse(&none.bytes, &limits).is_err());
        assert!(export(limits.layers + 1).to_document(&limits).is_err());
    }

    #[test]
    fn a_name_moves_to_a_newer_export_and_the_older_one_stays_in_the_list() {
        let mut index = Index::default();
        index.add(entry(&export(1), "team/agent", Some("a")));
        index.add(entry(&export(2), "team/other", Some("a")));
        index.add(entry(&export(1), "team/agent", Some("b")));
        let listed = |index: &Index| index.manifests.iter().map(|e| (e.size, e.tag().map(|t| t.to_string()))).collect::<Vec<_>>();
        assert_eq!(listed(&index).len(), 3);
        index.add(entry(&export(3), "team/other", Some("a")));
        let names: Vec<Option<String>> = listed(&index).into_iter().map(|(_, tag)| tag).collect();
        assert_eq!(names, [Some("a".into()), None, Some("b".into()), Some("a".into())]);
        let before = index.clone();
        index.add(entry(&export(3), "team/other", Some("a")));
        assert_eq!(index, before, "adding it again changes nothing");
        assert_eq!(Index::parse(&index.to_bytes().unwrap()).unwrap(), index);
    }

    #[test]
    fn an_index_keeps_the_images_of_other_programs_and_has_limits() {
        let text = format!(
            r#"{{"schemaVersion":2,"annotations":{{"x":"y"}},"manifests":[{{"mediaType":"{}","digest":"{}","size":9,"platform":{{"os":"linux"}}}}]}}"#,
            media_type::OCI_INDEX,
            digest(1)
        );
        let mut index = Index::parse(text.as_bytes()).unwrap();
        index.add(entry(&export(1), "team/agent", None));
        let written = String::from_utf8(index.to_bytes().unwrap()).unwrap();
        assert!(written.contains(r#""platform":{"os":"linux"}"#) && written.contains(r#""annotations":{"x":"y"}"#), "{written}");
        assert!(!index.manifests[0].may_be_export() && index.manifests[1].may_be_export());
        let one = text.split_once('[').unwrap().1.strip_suffix("]}").unwrap();
        let many = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, vec![one; MANIFESTS as usize + 1].join(","));
        assert!(matches!(Index::parse(many.as_bytes()), Err(FormatError::TooLarge { .. })));
        assert!(Index::parse(br#"{"schemaVersion":1,"manifests":[]}"#).is_err());
    }

    #[test]
    fn a_large_blob_is_a_pack_of_its_own() {
        let blobs = [(digest(1), 10), (digest(2), 5000), (digest(3), 10)];
        let packs = cut(blobs, 100, 1 << 40, 400);
        assert_eq!(packs[0], 0..1);
        assert_eq!(packs.last().unwrap().end, 3);
        assert!(packs.contains(&(1..2)), "{packs:?}");
    }

    proptest! {
        #[test]
        fn packs_cover_all_blobs_in_order_and_stay_below_the_limit(sizes in proptest::collection::vec(1_u64..300, 0..400)) {
            let blobs: Vec<(Digest, u64)> = sizes.iter().enumerate().map(|(at, size)| (digest(at as u64), *size)).collect();
            let packs = cut(blobs.iter().copied(), 1000, 1000, 4000);
            let mut next = 0;
            for pack in &packs {
                prop_assert_eq!(pack.start, next);
                prop_assert!(pack.end > pack.start);
                prop_assert!(sizes[pack.clone()].iter().sum::<u64>() <= 4000);
                next = pack.end;
            }
            prop_assert_eq!(next, blobs.len());
        }

        #[test]
        fn appended_blobs_change_no_pack_but_the_last(count in 200_u64..800, more in 1_u64..50) {
            let list = |count: u64| (0..count).map(|n| (digest(n), 50)).collect::<Vec<_>>();
            let before = cut(list(count), 1000, 1000, 4000);
            let after = cut(list(count + more), 1000, 1000, 4000);
            prop_assert_eq!(&before[..before.len() - 1], &after[..before.len() - 1]);
        }

        #[test]
        fn lists_are_cut_alike_again_after_a_difference(at in 0_usize..200) {
            let list: Vec<(Digest, u64)> = (0..2000).map(|n| (digest(n), 50)).collect();
            let mut changed = list.clone();
            changed[at] = (digest(1_000_000 + at as u64), 50);
            let ends = |list: Vec<(Digest, u64)>| cut(list, 1000, 1000, 4000).into_iter().map(|pack| pack.end).collect::<HashSet<_>>();
            let (a, b) = (ends(list), ends(changed));
            prop_assert!(a.intersection(&b).filter(|end| **end > at).count() > a.len() / 4);
        }

        #[test]
        fn bytes_that_are_no_export_are_refused_and_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Export::parse(&bytes, &Limits::default());
            let _ = Index::parse(&bytes);
        }
    }
}
