//! Pages and state tensors that are put together from those of other ranks. Sources pass one after
//! another: memory holds the result and one of them.

use super::blobs::Blobs;
use crate::error::{Error, Result, blocking};
use bytes::Bytes;
use pfr_schema::checkpoint::{Mirror, Recut, Tensor};
use pfr_schema::shards::Piece;
use pfr_schema::{Algorithm, Digest, ErrorCode};
use std::sync::Arc;

/// How one component of a page is put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageCut {
    /// Bytes of each source.
    pub sources: Vec<u64>,
    /// Bytes of the result. The strips cover each byte once.
    pub bytes: u64,
    pub strips: Vec<Strip>,
}

/// Bytes that are copied `times` times, each time a stride further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strip {
    pub source: usize,
    pub from: u64,
    pub from_stride: u64,
    pub to: u64,
    pub to_stride: u64,
    pub bytes: u64,
    pub times: u64,
}

impl PageCut {
    /// Number of sources.
    pub fn sources(&self) -> usize {
        self.sources.len()
    }

    /// Whether the result is the only source, byte for byte.
    pub fn is_whole(&self) -> bool {
        let stays = |strip: &Strip| strip.from == strip.to && (strip.times == 1 || strip.from_stride == strip.to_stride);
        self.sources[..] == [self.bytes] && self.strips.iter().all(stays)
    }

    /// Copies what one source gives.
    pub fn take(&self, source: usize, blob: &[u8], out: &mut [u8]) -> Result<()> {
        if blob.len() as u64 != self.sources[source] {
            let expected = format!("{} bytes", self.sources[source]);
            return Err(Error::mismatch(ErrorCode::GeometryMismatch, "a page that is cut", expected, blob.len()));
        }
        for Strip { from, from_stride, to, to_stride, bytes, times, .. } in self.strips.iter().filter(|strip| strip.source == source) {
            for n in 0..*times {
                let (from, to) = ((from + n * from_stride) as usize, (to + n * to_stride) as usize);
                out[to..to + *bytes as usize].copy_from_slice(&blob[from..from + *bytes as usize]);
            }
        }
        Ok(())
    }
}

/// How a state tensor is put together: from each tensor some units.
#[derive(Clone, Debug)]
pub(super) struct StateCut {
    pub recut: Recut,
    pub sources: Vec<(Tensor, Vec<Piece>)>,
}

impl StateCut {
    /// The payloads of the sources.
    pub fn blobs(&self) -> impl Iterator<Item = Digest> + '_ {
        self.sources.iter().map(|(tensor, _)| tensor.payload_hash)
    }
}

/// Puts a page together. `blobs` gives its sources next. Returns the digest of its bytes too.
pub(super) async fn page(cut: &Arc<PageCut>, sources: &[Digest], blobs: &mut Blobs) -> Result<(Digest, Bytes)> {
    let mut out = vec![0; cut.bytes as usize];
    for (number, digest) in sources.iter().enumerate() {
        let (blob, cut) = (blobs.next(digest).await?, Arc::clone(cut));
        out = blocking("cutting", move || cut.take(number, &blob, &mut out).map(|()| out)).await?;
    }
    let algorithm = sources.first().map_or(Algorithm::Sha256, Digest::algorithm);
    blocking("hashing", move || Ok::<_, Error>((Digest::of(algorithm, &out), Bytes::from(out)))).await
}

/// Looks for a source whose units are not those of what was `made`. `blobs` gives their payloads
/// next. Memory holds the result twice, and one source.
pub(super) async fn other_replica(cut: &Arc<StateCut>, made: Bytes, blobs: &mut Blobs) -> Result<Option<Digest>> {
    for number in 0..cut.sources.len() {
        let digest = cut.sources[number].0.payload_hash;
        let (payload, cut, made) = (blobs.next(&digest).await?, Arc::clone(cut), made.clone());
        let is_same = move || {
            let (tensor, pieces) = &cut.sources[number];
            let mut out = made.to_vec();
            cut.recut.take(tensor, &payload, pieces, &mut out)?;
            Ok::<_, Error>(out[..] == made[..])
        };
        if !blocking("comparing", is_same).await? {
            return Ok(Some(digest));
        }
    }
    Ok(None)
}

/// Puts a state tensor together, from sources whose values are verified. `blobs` gives their
/// payloads next.
pub(super) async fn state(cut: &Arc<StateCut>, blobs: &mut Blobs) -> Result<Mirror> {
    let mut out = cut.recut.begin();
    for number in 0..cut.sources.len() {
        let (payload, cut) = (blobs.next(&cut.sources[number].0.payload_hash).await?, Arc::clone(cut));
        let take = move || {
            let (tensor, pieces) = &cut.sources[number];
            tensor.check_payload(&payload)?;
            cut.recut.take(tensor, &payload, pieces, &mut out).map(|()| out)
        };
        out = blocking("cutting", take).await?;
    }
    let cut = Arc::clone(cut);
    blocking("proving", move || cut.recut.finish(out)).await
}
