//! Makes raw frames, with true or false claims in their headers.

use bytes::Bytes;
use pfr_schema::codec::{Codec, TensorEncoder, encode_document};
use pfr_schema::frame::{self, Header};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind};

/// A raw frame that claims this kind and this digest.
#[must_use]
pub fn claiming(kind: Kind, digest: Digest, raw: &[u8]) -> Bytes {
    let len = raw.len() as u64;
    frame::encode(&Header { codec: Codec::Raw, kind, digest, raw_len: len, stored_len: len }, raw).into()
}

/// A raw frame of a plain blob.
#[must_use]
pub fn blob(raw: &[u8]) -> Bytes {
    claiming(Kind::Blob, Digest::sha256(raw), raw)
}

/// A frame of a plain blob in a tensor codec, which must make it smaller.
#[must_use]
pub fn encoded(codec: Codec, raw: &[u8]) -> Bytes {
    let mut encoder = TensorEncoder::new(codec).unwrap();
    of_payload(codec, raw, encoder.encode(raw).expect("it becomes smaller"))
}

/// A frame of a plain blob that zstd must make smaller.
#[must_use]
pub fn zstd(raw: &[u8]) -> Bytes {
    let (codec, payload) = encode_document(raw);
    assert_eq!(codec, Codec::Zstd, "it becomes smaller");
    of_payload(codec, raw, &payload)
}

fn of_payload(codec: Codec, raw: &[u8], payload: &[u8]) -> Bytes {
    let (digest, raw_len, stored_len) = (Digest::sha256(raw), raw.len() as u64, payload.len() as u64);
    frame::encode(&Header { codec, kind: Kind::Blob, digest, raw_len, stored_len }, payload).into()
}

/// A raw frame of a document.
#[must_use]
pub fn of(document: &Document) -> Bytes {
    claiming(document.kind, document.digest, &document.bytes)
}

/// Frames and an end mark.
#[must_use]
pub fn stream(frames: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Vec<u8> {
    let (mut out, mut count) = (Vec::new(), 0);
    for frame in frames {
        out.extend_from_slice(frame.as_ref());
        count += 1;
    }
    out.extend_from_slice(&frame::end_mark(count));
    out
}
