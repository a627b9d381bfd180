//! Downloads of frames: located in metadata, read as ranges of packs, sent as they are.

mod codecs;
mod outputs;
mod ranges;
mod raw;
mod serve;

pub use codecs::in_codecs;
pub(crate) use outputs::Outputs;
pub use ranges::PackRange;
pub use serve::Served;

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::packs::{Extent, READ, header_of, locate, locate_as, plan, read_extent};
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec;
use pfr_schema::frame::{CHECKSUM, Header, end_mark};
use pfr_schema::{Digest, FormatError, Kind, Limits};
use std::ops::Range;
use std::sync::Arc;

/// A stream of frames with an end mark. An error ends it without one.
pub type BoxFrames = BoxStream<'static, Result<Bytes>>;

/// Reads in flight besides the one being sent.
const AHEAD: usize = 2;
/// A blob of at most so many bytes is decoded on the thread that read it. To move it to another
/// thread and back costs about as much.
const HERE: u64 = 32 << 10;

impl Store {
    /// Frames of `digests` in that order, with an end mark, as they are in packs: the reader
    /// verifies them.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`] before the first byte; later errors end the stream without an end
    /// mark.
    #[boxed]
    pub async fn frames(&self, digests: Vec<Digest>) -> Result<BoxFrames> {
        let extents = plan(locate(self, &digests).await?);
        let count = digests.len() as u64;
        let permit = Arc::clone(&self.reads).acquire_owned().await?;
        let store = self.clone();
        let reads = extents.into_iter().map(Arc::new).flat_map(|extent| parts(&extent).map(move |part| (Arc::clone(&extent), part)));
        let body = stream::iter(reads)
            .map(move |(extent, part)| {
                let store = store.clone();
                async move { read_extent(&store, &extent, &[part]).await }
            })
            .buffered(AHEAD)
            .map_ok(|pieces| stream::iter(pieces.into_iter().map(Ok)))
            .try_flatten();
        let end = stream::once(async move {
            drop(permit);
            Ok(Bytes::from(end_mark(count)))
        });
        Ok(body.chain(end).boxed())
    }

    /// Reads a whole blob, verified. For documents: blobs over the document limit are refused.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`], [`Error::Corrupt`].
    #[boxed]
    pub async fn read(&self, digest: &Digest) -> Result<Bytes> {
        self.read_as(digest, Kind::Blob).await
    }

    /// Reads a whole blob of this kind, verified. One of another kind gives the same error as a
    /// missing one.
    pub(crate) async fn read_as(&self, digest: &Digest, kind: Kind) -> Result<Bytes> {
        let located = locate_as(self, &[*digest], kind).await?;
        let limit = self.options.limits.document_bytes;
        if let Some((_, location)) = located.first().filter(|(_, location)| location.raw_len > limit) {
            return Err(FormatError::TooLarge { what: "a blob to be read whole, in bytes", found: location.raw_len, limit }.into());
        }
        let is_small = located.first().is_some_and(|(_, location)| location.raw_len.max(location.frame_len) <= HERE);
        let none = || Error::Internal("one digest has one frame".into());
        let extent = plan(located).pop().ok_or_else(none)?;
        let of_kind = |error| match error {
            Error::BlobUnknown { digest, .. } => Error::BlobUnknown { digest, kind },
            other => other,
        };
        let whole = 0..extent.len();
        // It may be collected between the look and the read.
        let frame = read_extent(self, &extent, std::slice::from_ref(&whole)).await.map_err(of_kind)?.pop().ok_or_else(none)?;
        if is_small {
            return decode(digest, &frame, &self.options.limits);
        }
        let (digest, limits) = (*digest, self.options.limits.clone());
        pfr_service::task::spawn_blocking(move || decode(&digest, &frame, &limits)).await?
    }
}

/// The ranges in which an extent is read: one for a small extent, several for one large frame.
fn parts(extent: &Extent) -> impl Iterator<Item = Range<u64>> + Send + use<> {
    let len = extent.len();
    let part = if len <= 2 * READ { 2 * READ } else { READ };
    (0..len).step_by(usize::try_from(part).unwrap_or(usize::MAX)).map(move |start| start..len.min(start + part))
}

/// The raw bytes of a whole frame, verified.
pub(crate) fn decode(digest: &Digest, frame: &Bytes, limits: &Limits) -> Result<Bytes> {
    let corrupt = |reason: String| Error::Corrupt { digest: *digest, reason };
    let header = header_of(frame, 0, digest, limits).map_err(corrupt)?;
    let begin = Header::len(digest.algorithm());
    let end = frame.len().checked_sub(CHECKSUM).filter(|end| *end >= begin);
    let payload = frame.slice(begin..end.ok_or_else(|| corrupt("its frame is too short".into()))?);
    let raw: Bytes = match header.codec {
        codec::Codec::Raw => payload,
        codec => codec::decode(codec, &payload, header.raw_len).map_err(|e| corrupt(e.to_string()))?.into(),
    };
    let found = Digest::of(digest.algorithm(), &raw);
    if found == *digest { Ok(raw) } else { Err(corrupt(format!("it hashes to {found}"))) }
}
