//! Blobs that are decoded once, while they are verified: for a reader that wants their raw bytes,
//! and for a store that takes them in behind it without hashing them again.

use super::{For, Incoming, Step, Verifier, Whole};
use crate::error::{Error, Result};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use pfr_schema::codec::Codecs;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, Kind, Limits};

/// A blob, decoded and verified. Only [`opened_frames`] makes one.
#[derive(Debug)]
pub struct Opened {
    pub(crate) header: Header,
    /// As it came; for codec `raw` the same bytes as `raw`.
    pub(crate) payload: Vec<Bytes>,
    pub(crate) checksum: u32,
    raw: Bytes,
}

impl Opened {
    fn new(whole: Whole) -> Result<Self> {
        let Whole { header, payload, checksum, raw, .. } = whole;
        let raw = raw.ok_or_else(|| Error::Internal("a blob that was not decoded".into()))?;
        Ok(Self { header: Header { kind: Kind::Blob, ..header }, payload, checksum, raw })
    }

    /// Its digest, which its bytes have.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.header.digest
    }

    /// Bytes of its frame.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        self.header.frame_len()
    }

    /// Its raw bytes.
    #[must_use]
    pub fn raw(&self) -> &Bytes {
        &self.raw
    }
}

/// Decodes and verifies a stream of frames that ends with an end mark. Yields the blobs in order,
/// those before an error too. Nodes are taken for plain blobs.
///
/// Holds the frames that arrived and were not yielded: its caller bounds what the stream brings. A
/// blob of more than `largest` raw bytes ends it with an error before any of it is held.
pub fn opened_frames<S>(stream: S, limits: Limits, largest: u64) -> impl Stream<Item = Result<Opened>> + Send
where
    S: Stream<Item = Result<Bytes>> + Send + Unpin,
{
    let state = (Verifier::new(limits, Codecs::ALL, For::Reader { largest }), stream);
    futures::stream::try_unfold(state, |(mut verifier, mut stream)| async move {
        loop {
            match verifier.step().await? {
                Step::Item(Incoming::Whole(whole)) => return Ok(Some((Opened::new(whole)?, (verifier, stream)))),
                Step::Item(_) | Step::Large => return Err(Error::Internal("a blob of a reader that is not whole".into())),
                Step::Input => verifier.read(stream.next().await),
                Step::End => return Ok(None),
            }
        }
    })
}
