//! Raw bytes of one blob, for readers that know no frames.

use super::BoxFrames;
use super::serve::from_within;
use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::packs::{Extent, header_of, locate, read_extent};
use bytes::{Buf as _, Bytes};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::{Codec, Codecs, Decoder};
use pfr_schema::frame::{Event, Header, Parser};
use pfr_schema::{Digest, FormatError};
use std::ops::Range;

/// Raw bytes that are decoded at a time, about.
const PIECE: usize = 256 << 10;
/// Encoded bytes that are decoded at a time: of zeros they stand for at most 16 MiB.
const SIP: usize = 512;

impl Store {
    /// Bytes of a blob, in pieces as [`Store::serve`] gives them. `range` lies within the blob. The
    /// reader verifies them.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`], [`Error::Corrupt`] before the first byte; later errors end the
    /// stream early.
    #[boxed]
    pub async fn raw(&self, digest: &Digest, range: Range<u64>) -> Result<BoxFrames> {
        let located = locate(self, std::slice::from_ref(digest)).await?.pop();
        let (_, location) = located.ok_or_else(|| Error::Internal("one digest has one frame".into()))?;
        if range.is_empty() {
            return Ok(futures::stream::empty().boxed());
        }
        let head = Header::len(digest.algorithm()) as u64;
        let frame = |end| Extent { pack: location.pack.clone(), range: location.offset..end, frames: vec![(0, *digest)] };
        let whole = frame(location.offset + location.frame_len);
        let bytes = read_extent(self, &whole, std::slice::from_ref(&(0..head))).await?.pop().unwrap_or_default();
        let header = header_of(&bytes, location.offset, digest, &self.options.limits);
        let header = header.map_err(|reason| Error::Corrupt { digest: *digest, reason })?;
        if header.codec == Codec::Raw {
            return Ok(from_within(self, frame(location.offset + head + range.end), head + range.start));
        }
        // A codec has no way into the middle: what comes before is decoded and left out.
        let frames = self.serve(vec![*digest], Codecs::ALL).await?.pieces;
        let parser = Parser::new(self.options.limits.clone());
        let unpacking = Unpacking { digest: *digest, frames, parser, decoding: None, skip: range.start, left: range.end - range.start };
        let pieces = futures::stream::try_unfold(unpacking, |mut unpacking| async move {
            Ok::<_, Error>(unpacking.next().await?.map(|piece| (piece, unpacking)))
        });
        Ok(pieces.boxed())
    }
}

/// A frame that is being decoded.
struct Unpacking {
    digest: Digest,
    frames: BoxFrames,
    parser: Parser,
    /// The decoder and the bytes for it, until nothing comes out any more.
    decoding: Option<(Box<Decoder>, Bytes, bool)>,
    /// Raw bytes before the range, and within it.
    skip: u64,
    left: u64,
}

impl Unpacking {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        while self.left > 0 {
            let Some(mut raw) = self.decoded().await? else {
                return Err(Error::Corrupt { digest: self.digest, reason: "its frame ends early".into() });
            };
            let skipped = self.skip.min(raw.len() as u64);
            self.skip -= skipped;
            raw.advance(usize::try_from(skipped).unwrap_or(usize::MAX));
            raw.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
            self.left -= raw.len() as u64;
            if !raw.is_empty() {
                return Ok(Some(raw));
            }
        }
        Ok(None)
    }

    /// The next raw bytes; none at the end.
    async fn decoded(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some((mut decoder, mut stored, _)) = self.decoding.take_if(|(.., goes_on)| *goes_on) {
                let step = move || step(&mut decoder, &mut stored).map(|raw| (decoder, stored, raw));
                let (decoder, stored, raw) = pfr_service::task::spawn_blocking(step).await??;
                self.decoding = Some((decoder, stored, !raw.is_empty()));
                if !raw.is_empty() {
                    return Ok(Some(raw.into()));
                }
            }
            match self.parser.next()? {
                Some(Event::Begin(header)) => {
                    self.decoding = Some((Box::new(Decoder::new(header.codec, header.raw_len)?), Bytes::new(), false));
                }
                Some(Event::Payload(piece)) => {
                    if let Some((_, stored, goes_on)) = &mut self.decoding {
                        (*stored, *goes_on) = (piece, true);
                    }
                }
                Some(Event::Finish { .. }) => {}
                Some(Event::End) => return Ok(None),
                None => match self.frames.try_next().await? {
                    Some(piece) => self.parser.push(piece),
                    None => return Ok(None),
                },
            }
        }
    }
}

/// Some raw bytes; none once there are none without more of the payload.
fn step(decoder: &mut Decoder, stored: &mut Bytes) -> std::result::Result<Vec<u8>, FormatError> {
    let mut raw = Vec::new();
    while raw.len() < PIECE {
        let before = raw.len();
        let used = decoder.update_some(&stored[..stored.len().min(SIP)], PIECE, &mut raw)?;
        stored.advance(used);
        if used == 0 && raw.len() == before {
            break;
        }
    }
    Ok(raw)
}
