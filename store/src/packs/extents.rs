//! Frames where they lie: located in metadata, read as ranges of packs, looked up again if
//! compaction moved them in between.

use super::READ;
use super::checks::header_of;
use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{Health, Location};
use bytes::{Bytes, BytesMut};
use pfr_schema::{Digest, Kind, Limits};
use std::ops::Range;

/// Frames that lie back to back in one pack.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    pub(crate) pack: String,
    pub(crate) range: Range<u64>,
    /// Where each frame begins within the range, and what it is.
    pub(crate) frames: Vec<(u64, Digest)>,
}

impl Extent {
    /// Its bytes.
    pub(crate) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn digests(&self) -> Vec<Digest> {
        self.frames.iter().map(|(_, digest)| *digest).collect()
    }

    fn corrupt(&self, reason: String) -> Error {
        match self.frames.first() {
            Some((_, digest)) => Error::Corrupt { digest: *digest, reason },
            None => Error::Internal("an extent without frames".into()),
        }
    }

    /// The first of its frames that an altered byte of the pack damages; other errors as they are.
    fn blame(&self, error: Error) -> Error {
        let Error::Altered { byte, found, .. } = error else { return error };
        let from = byte.saturating_sub(self.range.start);
        let first = self.frames.partition_point(|(start, _)| *start <= from).saturating_sub(1);
        let reason = format!("pack {}, byte {byte}: expected what was encrypted there, found {found}", self.pack);
        match self.frames.get(first) {
            Some((_, digest)) => Error::Corrupt { digest: *digest, reason },
            None => self.corrupt(reason),
        }
    }

    fn cut(&self) -> Error {
        self.corrupt(format!("pack {} ends before byte {}", self.pack, self.range.end))
    }

    /// Checks that each frame that begins in `bytes` (position `from` of the extent) has the
    /// expected header: a cheap guard against wrong offsets. The reader verifies the payload.
    fn check_headers(&self, from: u64, bytes: &Bytes, limits: &Limits) -> Result<()> {
        let first = self.frames.partition_point(|(start, _)| *start < from);
        for (start, digest) in self.frames[first..].iter().take_while(|(start, _)| *start < from + bytes.len() as u64) {
            let in_pack = self.range.start + start;
            let frame = usize::try_from(*start - from).ok().and_then(|at| bytes.get(at..));
            if frame.is_none_or(|frame| header_of(frame, in_pack, digest, limits).is_err()) {
                return Err(Error::Corrupt {
                    digest: *digest,
                    reason: format!("pack {}, byte {in_pack}: no frame of it there", self.pack),
                });
            }
        }
        Ok(())
    }
}

/// Where blobs lie, in the order of `digests`.
///
/// # Errors
/// [`Error::BlobUnknown`]; [`Error::Corrupt`] for what is quarantined.
pub(crate) async fn locate(store: &Store, digests: &[Digest]) -> Result<Vec<(Digest, Location)>> {
    locate_as(store, digests, Kind::Blob).await
}

/// The same of blobs of this kind. One of another kind is unknown, damaged or not: the error must
/// not say that it is there.
pub(crate) async fn locate_as(store: &Store, digests: &[Digest], kind: Kind) -> Result<Vec<(Digest, Location)>> {
    let locations = store.metadata.locate(digests.to_vec()).await?;
    digests
        .iter()
        .zip(locations)
        .map(|(digest, location)| {
            let location = location.filter(|location| location.kind.satisfies(kind));
            let location = location.ok_or(Error::BlobUnknown { digest: *digest, kind })?;
            if location.health == Health::Damaged {
                return Err(Error::Corrupt { digest: *digest, reason: "it was found bad before and is quarantined".into() });
            }
            Ok((*digest, location))
        })
        .collect()
}

/// Joins frames that lie back to back.
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

/// Reads ranges of an extent that follow each other, each into memory of its own, and checks the
/// headers in them: none may lie in two ranges.
///
/// # Errors
/// [`Error::Corrupt`] if metadata name a pack that is not there or ends too early, or if something
/// else lies there; [`Error::BlobUnknown`] for what was collected meanwhile;
/// [`Error::Unavailable`].
pub(crate) async fn read_extent(store: &Store, extent: &Extent, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
    let base = extent.range.start;
    let in_pack: Vec<Range<u64>> = ranges.iter().map(|range| base + range.start..base + range.end).collect();
    let pieces = match store.read_pack_in_pieces(&extent.pack, &in_pack).await.map_err(|e| extent.blame(e))? {
        Some(pieces) => pieces,
        None => read_moved(store, extent, ranges).await?,
    };
    if !pieces.iter().map(|piece| piece.len() as u64).eq(ranges.iter().map(|range| range.end - range.start)) {
        return Err(extent.cut());
    }
    for (range, piece) in ranges.iter().zip(&pieces) {
        extent.check_headers(range.start, piece, &store.options.limits)?;
    }
    Ok(pieces)
}

/// Compaction moved the frames between the look and the read: look again. They are the same bytes
/// wherever they lie. A pack that metadata names and that is not there the second time either is
/// damage.
async fn read_moved(store: &Store, extent: &Extent, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
    let (mut parts, mut at) = (Vec::new(), 0);
    for part in plan(locate(store, &extent.digests()).await?) {
        let covered = at..at + part.len();
        at = covered.end;
        parts.push((covered, part));
    }
    let mut pieces = Vec::with_capacity(ranges.len());
    for range in ranges {
        let mut piece = BytesMut::new();
        for (covered, part) in &parts {
            let (from, to) = (range.start.max(covered.start), range.end.min(covered.end));
            if from >= to {
                continue;
            }
            let base = part.range.start;
            let bytes = store.read_pack(&part.pack, base + from - covered.start..base + to - covered.start).await;
            let bytes = bytes.map_err(|e| part.blame(e))?;
            let bytes = bytes.ok_or_else(|| part.corrupt(format!("pack {} is not there", part.pack)))?;
            if (bytes.len() as u64) < to - from {
                return Err(part.cut());
            }
            piece.extend_from_slice(&bytes);
        }
        pieces.push(piece.freeze());
    }
    Ok(pieces)
}
