//! Exports that are read: what a layout lists, and a snapshot as the source of a push.

use super::layout::{Layout, bytes_of, failed, malformed};
use super::place::{Place, PlaceOptions};
use crate::error::{Error, Result};
use crate::plan::Item;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec;
use pfr_schema::export::{Export, Layer, REF_NAME};
use pfr_schema::frame::{CHECKSUM, Header, end_mark};
use pfr_schema::pack::{Entry, FOOTER_LEN, Footer};
use pfr_schema::snapshot::MAX_BYTES;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, FormatError, Limits, RepositoryName, Tag};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Bytes at the end of a pack that are read first: index and footer of most packs.
const TAIL: u64 = 256 << 10;
/// Bytes of the index of one pack at most.
const INDEX: u64 = 32 << 20;
/// Bytes of all indexes of one export at most: those of some ten million pages.
const INDEXES: u64 = 1 << 30;
/// Bytes of a pack of documents at most, and of all documents in it.
const DOCUMENTS: u64 = 320 << 20;
/// Packs whose indexes are read at a time.
const AT_ONCE: usize = 4;
/// Bytes that are read at a time.
const EXTENT: u64 = 64 << 20;

/// An export that a layout lists.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The snapshot.
    pub snapshot: Digest,
    /// Its repository, if the layout names it.
    pub repository: Option<RepositoryName>,
    /// Its tag, if the layout names it.
    pub tag: Option<Tag>,
    export: Arc<Export>,
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let repository = self.repository.as_ref().map(RepositoryName::as_str).unwrap_or_default();
        match &self.tag {
            Some(tag) => write!(f, "{repository}:{tag}"),
            None => write!(f, "{repository}@{}", self.snapshot.short()),
        }
    }
}

/// A layout that is read.
#[derive(Debug)]
pub struct Shelf {
    layout: Arc<dyn Layout>,
    exports: Vec<Listed>,
    skipped: usize,
}

impl Shelf {
    /// Reads what a layout lists.
    ///
    /// # Errors
    /// `not_found` if there is no layout; a malformed or damaged index or manifest.
    pub async fn open(place: &Place, options: &PlaceOptions) -> Result<Self> {
        let layout = place.open(options).await?;
        let entries = layout.entries().await?;
        let (mut exports, mut skipped) = (Vec::new(), 0);
        let mut known: HashMap<Digest, Arc<Export>> = HashMap::new();
        for entry in entries {
            let found = match known.get(&entry.digest) {
                Some(export) => Some(Arc::clone(export)),
                None if entry.may_be_export() => match manifest(&layout, &entry).await {
                    // An image of another program, which need not be complete.
                    Err(error) if entry.artifact_type.is_none() && is_foreign(error.code()) => None,
                    found => found?.map(Arc::new),
                },
                None => None,
            };
            let Some(export) = found else {
                skipped += 1;
                continue;
            };
            known.insert(entry.digest, Arc::clone(&export));
            let (repository, tag) = (entry.repository(), entry.tag());
            exports.push(Listed { snapshot: export.snapshot, repository, tag, export });
        }
        Ok(Self { layout, exports, skipped })
    }

    /// The exports, in the order in which they were added.
    #[must_use]
    pub fn exports(&self) -> &[Listed] {
        &self.exports
    }

    /// Images and artifacts of other programs, which were skipped.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// The place, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        self.layout.name()
    }

    /// Reads the documents of an export and the indexes of its packs. Documents are verified;
    /// pages are verified by the store or the registry that they go to.
    ///
    /// # Errors
    /// Packs that are missing, damaged or too large.
    pub async fn read(&self, listed: &Listed) -> Result<Exported> {
        Exported::read(Arc::clone(&self.layout), &listed.export, Limits::default()).await
    }
}

/// Whether an error is no concern of this program if the manifest is not its own.
fn is_foreign(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::MissingBlobs | ErrorCode::InvalidDocument)
}

/// The verified manifest of an entry; `None` for the manifest of any other artifact.
pub(super) async fn manifest(layout: &Arc<dyn Layout>, entry: &pfr_schema::export::Entry) -> Result<Option<Export>> {
    let what = entry.annotations.get(REF_NAME).map_or_else(|| entry.digest.to_string(), String::clone);
    let what: String = what.chars().take(200).collect();
    if entry.size > MAX_BYTES {
        let too_large = FormatError::TooLarge { what: "a manifest in bytes", found: entry.size, limit: MAX_BYTES };
        return Err(malformed(layout.name(), &what)(too_large));
    }
    let bytes = layout.manifest(entry, MAX_BYTES).await?;
    let found = Digest::of(entry.digest.algorithm(), &bytes);
    if found != entry.digest {
        return Err(damaged(layout, &entry.digest, &format!("its bytes hash to {found}")));
    }
    Export::parse(&bytes, &Limits::default()).map_err(malformed(layout.name(), &what))
}

fn damaged(layout: &Arc<dyn Layout>, digest: &Digest, why: &str) -> Error {
    failed(layout.name(), ErrorCode::DigestMismatch, format!("its blob {digest} is damaged: {why}"))
}

/// The index of a pack.
pub(super) async fn index(layout: &Arc<dyn Layout>, layer: &Layer, limits: &Limits) -> Result<Vec<Entry>> {
    let wrong = || malformed(layout.name(), &format!("its pack {}", layer.digest));
    let tail = bytes_of(layout, layer.digest, layer.size.saturating_sub(TAIL)..layer.size).await?;
    let footer = tail.len().checked_sub(FOOTER_LEN).map_or(&tail[..], |at| &tail[at..]);
    let footer = Footer::parse(footer, layer.size).map_err(wrong())?;
    if footer.index_len > INDEX {
        return Err(wrong()(FormatError::TooLarge { what: "the index of a pack in bytes", found: footer.index_len, limit: INDEX }));
    }
    let begin = layer.size - tail.len() as u64;
    let index = match footer.index_offset.checked_sub(begin) {
        Some(at) => {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            tail.slice(at..tail.len() - FOOTER_LEN)
        }
        None => bytes_of(layout, layer.digest, footer.index_offset..footer.index_offset + footer.index_len).await?,
    };
    footer.parse_index(&index, limits).map_err(wrong())
}

/// Where a frame is.
#[derive(Clone, Copy, Debug)]
struct Spot {
    layer: u32,
    offset: u64,
    len: u64,
}

/// A snapshot in a layout: its documents, and where its blobs are.
#[derive(Debug)]
pub struct Exported {
    layout: Arc<dyn Layout>,
    snapshot: Digest,
    layers: Vec<Layer>,
    documents: HashMap<Digest, Document>,
    spots: HashMap<Digest, Spot>,
    limits: Limits,
}

impl Exported {
    async fn read(layout: Arc<dyn Layout>, export: &Export, limits: Limits) -> Result<Self> {
        let (mut spots, mut bytes) = (HashMap::new(), 0_u64);
        let layers: Vec<(usize, Layer)> = export.layers.iter().copied().enumerate().collect();
        let (place, bounds) = (Arc::clone(&layout), limits.clone());
        let indexes = stream::iter(layers).map(move |(at, layer)| {
            let (place, bounds) = (Arc::clone(&place), bounds.clone());
            async move { Ok::<_, Error>((at, index(&place, &layer, &bounds).await?)) }
        });
        let mut indexes = indexes.buffered(AT_ONCE).boxed();
        let mut first = Vec::new();
        while let Some((at, entries)) = indexes.try_next().await? {
            bytes = entries.iter().fold(bytes, |sum, entry| sum + 8 + Header::len(entry.header.digest.algorithm()) as u64);
            if bytes > INDEXES {
                let found = FormatError::TooLarge { what: "the indexes of an export in bytes", found: bytes, limit: INDEXES };
                return Err(malformed(layout.name(), "its packs")(found));
            }
            let layer = u32::try_from(at).unwrap_or(u32::MAX);
            for entry in &entries {
                let spot = Spot { layer, offset: entry.offset, len: entry.header.frame_len() };
                spots.entry(entry.header.digest).or_insert(spot);
            }
            if at == 0 {
                first = entries;
            }
        }
        let documents = documents(&layout, &export.layers[0], &first).await?;
        if !documents.contains_key(&export.snapshot) {
            let reason = format!("its first pack {} lacks the snapshot {}", export.layers[0].digest, export.snapshot);
            return Err(failed(layout.name(), ErrorCode::MissingBlobs, reason));
        }
        Ok(Self { layout, snapshot: export.snapshot, layers: export.layers.clone(), documents, spots, limits })
    }

    /// The snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Digest {
        self.snapshot
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    fn missing(&self, digest: &Digest) -> Error {
        failed(self.layout.name(), ErrorCode::MissingBlobs, format!("the export of {} lacks {digest}", self.snapshot))
    }

    /// Nodes.
    pub(crate) async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        let found = |item: &Item| {
            let document = self.documents.get(&item.digest).ok_or_else(|| self.missing(&item.digest))?;
            // The node that lists it says how to read it.
            Ok(Document { kind: item.kind, ..document.clone() })
        };
        items.iter().map(found).collect()
    }

    /// Frames of these blobs, in order, with an end mark, as they lie in the packs.
    pub(crate) fn frames(&self, digests: Vec<Digest>) -> BoxStream<'static, Result<Bytes>> {
        let count = digests.len() as u64;
        let mut extents: Vec<Spot> = Vec::new();
        for digest in &digests {
            let Some(spot) = self.spots.get(digest).copied() else {
                return stream::iter([Err(self.missing(digest))]).boxed();
            };
            match extents.last_mut() {
                Some(last) if last.layer == spot.layer && last.offset + last.len == spot.offset && last.len + spot.len <= EXTENT => {
                    last.len += spot.len;
                }
                _ => extents.push(spot),
            }
        }
        let (layout, layers) = (Arc::clone(&self.layout), self.layers.clone());
        let frames = stream::iter(extents).map(move |extent| {
            let layer = layers.get(extent.layer as usize).map(|layer| layer.digest);
            layer.map_or_else(
                || stream::iter([Err(Error::Internal("a frame in no pack".into()))]).boxed(),
                |digest| layout.read(digest, extent.offset..extent.offset + extent.len),
            )
        });
        frames.flatten().chain(stream::iter([Ok(Bytes::from(end_mark(count)))])).boxed()
    }
}

/// Refuses more bytes of documents than an import has in memory. An export asks too, so that none
/// is written that cannot be read.
pub(super) fn check_documents(found: u64) -> std::result::Result<(), FormatError> {
    match found > DOCUMENTS {
        true => Err(FormatError::TooLarge { what: "the documents of an export in bytes", found, limit: DOCUMENTS }),
        false => Ok(()),
    }
}

/// The nodes in the first pack, verified: first all of the pack, then each of them.
async fn documents(layout: &Arc<dyn Layout>, layer: &Layer, entries: &[Entry]) -> Result<HashMap<Digest, Document>> {
    let wrong = || malformed(layout.name(), &format!("its pack {}", layer.digest));
    let nodes = entries.iter().filter(|entry| entry.header.kind.is_container());
    let raw = nodes.fold(0_u64, |sum, entry| sum.saturating_add(entry.header.raw_len));
    check_documents(raw.max(layer.size)).map_err(wrong())?;
    let pack = bytes_of(layout, layer.digest, 0..layer.size).await?;
    let (name, digest, entries) = (Arc::clone(layout), layer.digest, entries.to_vec());
    let read = crate::error::blocking(move || {
        let hashed = Digest::sha256(&pack);
        if hashed != digest {
            return Err(damaged(&name, &digest, &format!("its bytes hash to {hashed}")));
        }
        let mut documents = HashMap::new();
        for Entry { offset, header } in entries.iter().filter(|entry| entry.header.kind.is_container()) {
            let begin = offset + Header::len(header.digest.algorithm()) as u64;
            let end = offset + header.frame_len() - CHECKSUM as u64;
            let (begin, end) = (usize::try_from(begin).unwrap_or(usize::MAX), usize::try_from(end).unwrap_or(usize::MAX));
            let stored = pack.get(begin..end).ok_or_else(|| damaged(&name, &digest, "a frame lies beyond its end"))?;
            let what = format!("its document {}", header.digest);
            let bytes = codec::decode(header.codec, stored, header.raw_len).map_err(malformed(name.name(), &what))?;
            if Digest::of(header.digest.algorithm(), &bytes) != header.digest {
                return Err(damaged(&name, &header.digest, "its bytes are others"));
            }
            documents.insert(header.digest, Document { digest: header.digest, kind: header.kind, bytes });
        }
        Ok(documents)
    });
    read.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_documents_than_an_import_reads_are_refused() {
        assert!(check_documents(DOCUMENTS).is_ok());
        let error = malformed("./backup", "the export")(check_documents(DOCUMENTS + 1).unwrap_err());
        assert_eq!(error.code(), ErrorCode::TooLarge, "{error}");
    }
}
