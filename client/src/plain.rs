//! Marks frames as plain blobs, also if the source stores them as nodes. An attachment may
//! equal some node byte for byte, and a node frame would make the receiver demand its
//! children.

use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::frame::{Event, Header, Parser};
use pfr_schema::{Kind, Limits};

/// The same frames, each with the header of a plain blob. Payloads are not copied. A malformed
/// stream stays malformed, so that its reader reports it.
pub(crate) fn as_blobs<E: Send + 'static>(
    frames: BoxStream<'static, Result<Bytes, E>>,
    limits: &Limits,
) -> BoxStream<'static, Result<Bytes, E>> {
    let plain = Plain { parser: Parser::new(limits.clone()), held: Bytes::new(), at: 0, malformed: false };
    let pieces = stream::try_unfold((frames, plain), |(mut frames, mut plain)| async move {
        let ready = match frames.try_next().await? {
            Some(piece) => plain.pass(piece),
            // The stream was cut.
            None if plain.held.is_empty() => return Ok(None),
            None => vec![std::mem::take(&mut plain.held)],
        };
        let ready = stream::iter(ready.into_iter().filter(|piece| !piece.is_empty()).map(Ok::<_, E>));
        Ok::<_, E>(Some((ready, (frames, plain))))
    });
    pieces.try_flatten().boxed()
}

struct Plain {
    parser: Parser,
    /// The beginning of a header or checksum that is not complete yet.
    held: Bytes,
    /// Where in the stream `held` begins.
    at: u64,
    malformed: bool,
}

impl Plain {
    fn pass(&mut self, piece: Bytes) -> Vec<Bytes> {
        let (mut headers, held) = (Vec::new(), std::mem::take(&mut self.held));
        self.parser.push(piece.clone());
        while !self.malformed {
            let at = self.parser.position();
            match self.parser.next() {
                Ok(Some(Event::Begin(header))) if header.kind.is_container() => {
                    headers.push((at, Header { kind: Kind::Blob, ..header }.to_bytes()));
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => self.malformed = true,
            }
        }
        let begin = self.at;
        let len = held.len() + piece.len();
        let whole = if self.malformed { len } else { usize::try_from(self.parser.position() - begin).unwrap_or(len).min(len) };
        self.at += whole as u64;
        let mut parts = vec![held, piece];
        if !headers.is_empty() {
            let mut joined: BytesMut = parts.concat().as_slice().into();
            for (at, header) in headers {
                let from = usize::try_from(at - begin).unwrap_or(len);
                if let Some(place) = joined.get_mut(from..from + header.len()) {
                    place.copy_from_slice(&header);
                }
            }
            parts = vec![joined.freeze()];
        }
        // The incomplete rest is at the end of the last part, except for pieces of a few bytes.
        let rest = len - whole;
        match parts.last_mut() {
            Some(last) if last.len() >= rest => self.held = last.split_off(last.len() - rest),
            _ => self.held = Bytes::from(parts.drain(..).flatten().collect::<Vec<u8>>()),
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Digest;
    use pfr_schema::codec::Codec;
    use pfr_schema::frame::{encode, end_mark};
    use std::convert::Infallible;

    fn frames(as_is: bool) -> Vec<u8> {
        let mut all = Vec::new();
        for (i, kind) in [Kind::Blob, Kind::Checkpoint, Kind::Manifest, Kind::Blob, Kind::Tree].into_iter().enumerate() {
            let payload = vec![i as u8; 40 * i];
            let len = payload.len() as u64;
            let kind = if as_is { kind } else { Kind::Blob };
            all.extend(encode(
                &Header { codec: Codec::Raw, kind, digest: Digest::sha256(&payload), raw_len: len, stored_len: len },
                &payload,
            ));
        }
        all.extend(end_mark(5));
        all
    }

    async fn passed(bytes: &[u8], size: usize) -> Vec<u8> {
        let pieces: Vec<Result<Bytes, Infallible>> = bytes.chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        let out: Vec<Bytes> = as_blobs(stream::iter(pieces).boxed(), &Limits::default()).try_collect().await.expect("no error");
        out.concat()
    }

    #[tokio::test]
    async fn every_frame_is_a_plain_blob_however_the_stream_is_cut_up() {
        for size in 1..700 {
            assert_eq!(passed(&frames(true), size).await, frames(false), "pieces of {size}");
        }
    }

    #[tokio::test]
    async fn what_is_cut_or_malformed_passes_as_it_is() {
        let mut whole = frames(false);
        for size in [1, 7, 100, 1000] {
            for end in 0..whole.len() {
                assert_eq!(passed(&whole[..end], size).await, whole[..end], "cut at {end}, pieces of {size}");
            }
        }
        whole[200] ^= 1;
        for size in [1, 7, 100, 1000] {
            assert_eq!(passed(&whole, size).await, whole, "pieces of {size}");
        }
    }
}
