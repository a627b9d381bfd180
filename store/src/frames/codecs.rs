//! Frames for readers that do not know every codec: what is in another one becomes raw.

use crate::error::{Error, Result};
use crate::metadata::Location;
use bytes::{Buf as _, Bytes};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::{Codec, Codecs, Decoder};
use pfr_schema::frame::{Event, Header, Parser, end_mark};
use pfr_schema::{Digest, FormatError, Limits};

/// Raw bytes that are decoded at a time, about.
const PIECE: usize = 256 << 10;

/// The same frames, each in one of `codecs`: a frame in another codec is decoded, off the async
/// threads, and passed on raw. Its bytes are not hashed here: the reader verifies them. A malformed
/// frame ends the stream with an error; a stream that is cut stays cut.
pub fn in_codecs<E: From<Error> + Send + 'static>(
    frames: BoxStream<'static, std::result::Result<Bytes, E>>,
    codecs: Codecs,
    limits: &Limits,
) -> BoxStream<'static, std::result::Result<Bytes, E>> {
    if codecs == Codecs::ALL {
        return frames;
    }
    let translator = Translator { parser: Parser::new(limits.clone()), codecs, frames: 0, decoding: None };
    let pieces = stream::try_unfold((frames, translator), |(mut frames, mut translator)| async move {
        loop {
            if let Some(piece) = translator.next().await? {
                return Ok(Some((piece, (frames, translator))));
            }
            match frames.try_next().await? {
                Some(piece) => translator.parser.push(piece),
                None => return Ok::<_, E>(None),
            }
        }
    });
    pieces.boxed()
}

/// Whether some of these frames are in another codec.
pub(super) fn are_in_others(located: &[(Digest, Location)], codecs: Codecs) -> bool {
    located.iter().any(|(_, location)| !codecs.contains(location.codec))
}

struct Translator {
    parser: Parser,
    codecs: Codecs,
    /// Frames that have begun.
    frames: u64,
    /// The frame that becomes raw.
    decoding: Option<Box<Decoding>>,
}

impl Translator {
    /// The next bytes; none if more of the stream is needed.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(mut decoding) = self.decoding.take_if(|decoding| decoding.goes_on) {
                let step = move || decoding.step().map(|piece| (decoding, piece));
                let (decoding, piece) = pfr_service::task::spawn_blocking(step).await??;
                self.decoding = Some(decoding);
                if piece.is_some() {
                    return Ok(piece);
                }
            }
            let position = self.parser.position();
            match self.parser.next()? {
                None => return Ok(None),
                Some(Event::Begin(header)) => {
                    self.frames += 1;
                    if self.codecs.contains(header.codec) {
                        return Ok(Some(header.to_bytes().into()));
                    }
                    self.decoding = Some(Box::new(Decoding::new(&header, position)?));
                }
                Some(Event::Payload(piece)) => match &mut self.decoding {
                    None => return Ok(Some(piece)),
                    Some(decoding) => (decoding.stored, decoding.goes_on) = (piece, true),
                },
                Some(Event::Finish { checksum }) => {
                    return Ok(Some(match self.decoding.take() {
                        None => Bytes::copy_from_slice(&checksum.to_le_bytes()),
                        Some(decoding) => decoding.finish(checksum)?,
                    }));
                }
                Some(Event::End) => return Ok(Some(end_mark(self.frames).into())),
            }
        }
    }
}

/// A frame that becomes raw.
struct Decoding {
    digest: Digest,
    position: u64,
    decoder: Decoder,
    /// The header, until raw bytes follow it.
    head: Vec<u8>,
    /// Of the payload as it came, and of the raw bytes.
    checksums: (u32, u32),
    /// Bytes of the payload that are not decoded yet.
    stored: Bytes,
    /// Whether decoding may give more bytes without more of the payload.
    goes_on: bool,
}

impl Decoding {
    fn new(header: &Header, position: u64) -> Result<Self> {
        let decoder = Decoder::new(header.codec, header.raw_len)?;
        let head = Header { codec: Codec::Raw, stored_len: header.raw_len, ..*header }.to_bytes();
        Ok(Self { digest: header.digest, position, decoder, head, checksums: (0, 0), stored: Bytes::new(), goes_on: false })
    }

    /// Some bytes of the raw frame; none once there are none without more of the payload.
    fn step(&mut self) -> Result<Option<Bytes>> {
        let before = self.head.len();
        let mut raw = std::mem::take(&mut self.head);
        let used = self.decoder.update_some(&self.stored, PIECE, &mut raw);
        let used = used.map_err(|source| self.error(source))?;
        self.checksums.0 = crc32c::crc32c_append(self.checksums.0, &self.stored[..used]);
        self.stored.advance(used);
        self.goes_on = raw.len() > before;
        if !self.goes_on {
            self.head = raw;
            return Ok(None);
        }
        self.checksums.1 = crc32c::crc32c_append(self.checksums.1, &raw[before..]);
        Ok(Some(raw.into()))
    }

    /// The end of the raw frame.
    fn finish(self: Box<Self>, checksum: u32) -> Result<Bytes> {
        let Self { digest, position, decoder, mut head, checksums, .. } = *self;
        let error = |source| Error::Frame { position, digest, source };
        if checksums.0 != checksum {
            let reason = "the payload does not match its checksum: it was damaged on the disk or on the way".into();
            return Err(error(FormatError::Frame { position, reason }));
        }
        decoder.finish().map_err(error)?;
        head.extend_from_slice(&checksums.1.to_le_bytes());
        Ok(head.into())
    }

    fn error(&self, source: FormatError) -> Error {
        Error::Frame { position: self.position, digest: self.digest, source }
    }
}
