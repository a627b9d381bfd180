//! Giving out frames: located in metadata, read as ranges of packs, sent as they lie.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{Health, Location};
use crate::pack_writer::path;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::ObjectStoreExt as _;
use pfr_schema::codec;
use pfr_schema::frame::{CHECKSUM, Header, end_mark};
use pfr_schema::{Digest, FormatError, Kind, Limits};
use std::ops::Range;

/// A stream of frames with an end mark. An error ends it without one.
pub type BoxFrames = BoxStream<'static, Result<Bytes>>;

/// Bytes read from a pack at a time; frames that lie back to back are read together.
pub(crate) const READ: u64 = 4 << 20;
/// Reads in flight besides the one being sent.
pub(crate) const AHEAD: usize = 2;

/// Frames that lie back to back in one pack.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    pub(crate) pack: String,
    pub(crate) range: Range<u64>,
    /// Where each frame begins within the range, and what it is.
    pub(crate) frames: Vec<(u64, Digest)>,
}

pub(crate) async fn frames(store: &Store, digests: Vec<Digest>) -> Result<BoxFrames> {
    let extents = plan(locate(store, &digests).await?);
    let count = digests.len() as u64;
    let permit = std::sync::Arc::clone(&store.reads).acquire_owned().await.map_err(|e| Error::Internal(e.to_string()))?;
    let reader = store.clone();
    let body = stream::iter(extents)
        .map(move |extent| {
            let store = reader.clone();
            async move { read_extent(&store, extent).await }
        })
        .buffered(AHEAD)
        .try_flatten();
    let end = stream::once(async move {
        drop(permit);
        Ok(Bytes::from(end_mark(count)))
    });
    Ok(body.chain(end).boxed())
}

pub(crate) async fn locate(store: &Store, digests: &[Digest]) -> Result<Vec<(Digest, Location)>> {
    let locations = store.metadata.locate(digests.to_vec()).await?;
    digests
        .iter()
        .zip(locations)
        .map(|(digest, location)| {
            let location = location.ok_or(Error::BlobUnknown { digest: *digest, kind: Kind::Blob })?;
            if location.health == Health::Damaged {
                return Err(Error::Corrupt { digest: *digest, reason: "it was found bad before and is quarantined".into() });
            }
            Ok((*digest, location))
        })
        .collect()
}

pub(crate) fn plan(located: Vec<(Digest, Location)>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for (digest, location) in located {
        let end = location.offset + location.frame_len;
        match extents.last_mut() {
            Some(extent) if extent.pack == location.pack && extent.range.end == location.offset && end - extent.range.start <= READ => {
                extent.frames.push((location.offset - extent.range.start, digest));
                extent.range.end = end;
            }
            _ => extents.push(Extent { pack: location.pack, range: location.offset..end, frames: vec![(0, digest)] }),
        }
    }
    extents
}

/// The bytes of an extent: at once if it is small, part by part if it is one large frame.
async fn read_extent(store: &Store, extent: Extent) -> Result<BoxFrames> {
    let len = extent.range.end - extent.range.start;
    if len <= 2 * READ {
        let bytes = read_range(store, extent).await?;
        return Ok(stream::once(async move { Ok(bytes) }).boxed());
    }
    let starts = (0..len).step_by(usize::try_from(READ).unwrap_or(usize::MAX));
    let store = store.clone();
    let parts = stream::iter(starts).map(move |start| {
        let (store, extent) = (store.clone(), extent.clone());
        async move { read_part(&store, &extent, start..len.min(start + READ)).await }
    });
    Ok(parts.buffered(AHEAD).boxed())
}

/// A part of one large frame, relative to its beginning: the same bytes wherever the frame lies.
async fn read_part(store: &Store, extent: &Extent, part: Range<u64>) -> Result<Bytes> {
    let shifted = |base: u64| base + part.start..base + part.end;
    let bytes = match store.packs.get_range(&path(&extent.pack), shifted(extent.range.start)).await {
        Err(object_store::Error::NotFound { .. }) => {
            let digests: Vec<Digest> = extent.frames.iter().map(|(_, digest)| *digest).collect();
            let moved = plan(locate(store, &digests).await?).pop().ok_or_else(|| Error::Internal("an extent without frames".into()))?;
            match store.packs.get_range(&path(&moved.pack), shifted(moved.range.start)).await {
                Ok(bytes) => bytes,
                Err(error) => return Err(gone(store, &moved, error).await),
            }
        }
        Ok(bytes) => bytes,
        Err(error) => return Err(cut(store, extent, error).await),
    };
    check_length(extent, &bytes, part.end - part.start)?;
    if part.start == 0 {
        check_headers(extent, 0, &bytes, &store.options.limits)?;
    }
    Ok(bytes)
}

async fn read_range(store: &Store, extent: Extent) -> Result<Bytes> {
    let bytes = match store.packs.get_range(&path(&extent.pack), extent.range.clone()).await {
        Ok(bytes) => bytes,
        Err(object_store::Error::NotFound { .. }) => {
            // Compaction moved it between the look and the read: look again, frame by frame.
            let digests: Vec<Digest> = extent.frames.iter().map(|(_, digest)| *digest).collect();
            let mut joined = Vec::new();
            for part in plan(locate(store, &digests).await?) {
                let bytes = match store.packs.get_range(&path(&part.pack), part.range.clone()).await {
                    Ok(bytes) => bytes,
                    Err(error) => return Err(gone(store, &part, error).await),
                };
                check_length(&part, &bytes, part.range.end - part.range.start)?;
                check_headers(&part, 0, &bytes, &store.options.limits)?;
                joined.extend_from_slice(&bytes);
            }
            return Ok(joined.into());
        }
        Err(error) => return Err(cut(store, &extent, error).await),
    };
    check_length(&extent, &bytes, extent.range.end - extent.range.start)?;
    check_headers(&extent, 0, &bytes, &store.options.limits)?;
    Ok(bytes)
}

/// What a read that failed means: a pack that ends before its frames do is damage, and not a storage that is out of reach.
pub(crate) async fn cut(store: &Store, extent: &Extent, error: object_store::Error) -> Error {
    match (store.packs.head(&path(&extent.pack)).await, extent.frames.first()) {
        (Ok(found), Some((_, digest))) if found.size < extent.range.end => short(*digest, extent),
        _ => Error::packs(error),
    }
}

fn check_length(extent: &Extent, bytes: &Bytes, expected: u64) -> Result<()> {
    match extent.frames.first() {
        Some((_, digest)) if (bytes.len() as u64) < expected => Err(short(*digest, extent)),
        _ => Ok(()),
    }
}

pub(crate) fn short(digest: Digest, extent: &Extent) -> Error {
    Error::Corrupt { digest, reason: format!("pack {} ends before byte {}", extent.pack, extent.range.end) }
}

/// A pack that metadata names and that is not there (twice) is damage, not absence; unless the storage itself is not there.
pub(crate) async fn gone(store: &Store, extent: &Extent, error: object_store::Error) -> Error {
    match (error, extent.frames.first()) {
        (object_store::Error::NotFound { .. }, Some((_, digest))) => match store.storage_is_there().await {
            Ok(()) => Error::Corrupt { digest: *digest, reason: format!("pack {} is not there", extent.pack) },
            Err(error) => error,
        },
        (error, _) => cut(store, extent, error).await,
    }
}

/// That each frame that begins in `bytes`, which lie at `from` of the extent, is the one meant: a cheap guard against wrong offsets. The payload is
/// the reader's to verify.
pub(crate) fn check_headers(extent: &Extent, from: u64, bytes: &Bytes, limits: &Limits) -> Result<()> {
    let first = extent.frames.partition_point(|(start, _)| *start < from);
    for (start, digest) in extent.frames[first..].iter().take_while(|(start, _)| *start < from + bytes.len() as u64) {
        let at = usize::try_from(*start - from).unwrap_or(usize::MAX);
        let header = bytes.get(at..at.saturating_add(Header::len(digest.algorithm())));
        let found = header.map(|h| Header::parse_exact(h, extent.range.start + start, limits));
        if !matches!(&found, Some(Ok(header)) if header.digest == *digest) {
            return Err(Error::Corrupt {
                digest: *digest,
                reason: format!("pack {}, byte {}: no frame of it there", extent.pack, extent.range.start + start),
            });
        }
    }
    Ok(())
}

pub(crate) async fn read(store: &Store, digest: &Digest) -> Result<Bytes> {
    let (_, location) = locate(store, &[*digest]).await?.pop().ok_or_else(|| Error::Internal("one digest has one location".into()))?;
    let limit = store.options.limits.document_bytes;
    if location.raw_len > limit {
        return Err(FormatError::TooLarge { what: "a blob to be read whole, in bytes", found: location.raw_len, limit }.into());
    }
    let extent = plan(vec![(*digest, location)]).pop().ok_or_else(|| Error::Internal("one location has one extent".into()))?;
    let frame = read_range(store, extent).await?;
    let (digest, limits) = (*digest, store.options.limits.clone());
    tokio::task::spawn_blocking(move || decode(&digest, &frame, &limits)).await.map_err(|e| Error::Internal(e.to_string()))?
}

/// The raw bytes of a whole frame, verified.
pub(crate) fn decode(digest: &Digest, frame: &Bytes, limits: &Limits) -> Result<Bytes> {
    let corrupt = |reason: String| Error::Corrupt { digest: *digest, reason };
    let header_len = Header::len(digest.algorithm());
    let header = Header::parse_exact(&frame[..header_len], 0, limits).map_err(|e| corrupt(e.to_string()))?;
    let payload = frame.slice(header_len..frame.len() - CHECKSUM);
    let raw: Bytes = match header.codec {
        codec::Codec::Raw => payload,
        codec => codec::decode(codec, &payload, header.raw_len).map_err(|e| corrupt(e.to_string()))?.into(),
    };
    let found = Digest::of(digest.algorithm(), &raw);
    if found == *digest { Ok(raw) } else { Err(corrupt(format!("it hashes to {found}"))) }
}
