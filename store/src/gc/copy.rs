//! Copying frames from pack to pack, verified by header and checksum, not decoded.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{Damage, Health, Moved, PackId, PackRow, Packed};
use crate::packs::{PackWriter, READ, another, header_of};
use bytes::Bytes;
use futures::future::join_all;
use futures::{Stream, StreamExt as _};
use pfr_schema::Limits;
use pfr_schema::frame::{CHECKSUM, Header};
use std::collections::BTreeSet;
use std::ops::Range;

/// Dead bytes between two frames that are read along rather than asked around.
const GAP: u64 = 128 << 10;

/// Packs that are read at a time.
const AHEAD: usize = 8;

/// What went wrong while copying.
pub(crate) enum Fault {
    /// Reading: frames that were copied before are good.
    Source(Error),
    /// Writing: the new pack is lost.
    Target(Error),
}

/// The live frames of a pack that are not known to be bad, and the bytes that are copied first.
pub(crate) struct Source {
    contents: Vec<Packed>,
    ahead: Option<Bytes>,
}

/// A pack that frames are copied into.
pub(crate) struct Target {
    pub writer: PackWriter,
    /// Whether it merges small packs.
    pub merges: bool,
    pub moved: Vec<Moved>,
    /// Packs from which something was copied.
    pub sources: BTreeSet<PackId>,
    /// Bytes of the frames that were copied.
    pub bytes: u64,
}

impl Target {
    async fn begin(store: &Store) -> Result<Self> {
        let writer = PackWriter::begin(store, None).await?;
        Ok(Self { writer, merges: false, moved: Vec::new(), sources: BTreeSet::new(), bytes: 0 })
    }

    /// One that small packs are merged into.
    pub(crate) async fn merging(store: &Store) -> Result<Self> {
        let target = Self::begin(store).await?;
        Ok(Self { writer: target.writer.above_the_floor(), merges: true, ..target })
    }

    async fn frame(&mut self, from: PackId, frame: &Packed, header: Header, rest: Bytes) -> Result<()> {
        self.note(from, frame);
        self.writer.header(header, None).await?;
        self.writer.append(rest).await
    }

    /// Notes that the next frame of the new pack is this one.
    fn note(&mut self, from: PackId, frame: &Packed) {
        self.moved.push(Moved { object: frame.object, from, offset: self.writer.len() });
        self.sources.insert(from);
        self.bytes += frame.frame_len;
    }
}

impl Store {
    /// The live frames of each of these packs, in their order. [`AHEAD`] of them are read at a
    /// time: small packs on a bucket cost a round trip each. The tables are asked about one after
    /// the other, so that a collection has one connection to the database at a time.
    pub(crate) fn sources(&self, packs: Vec<PackRow>) -> impl Stream<Item = (PackRow, Result<Source>)> + Send + Unpin {
        let chunks: Vec<Vec<PackRow>> = packs.chunks(AHEAD).map(<[PackRow]>::to_vec).collect();
        let read = futures::stream::iter(chunks).then(move |chunk| async move {
            let mut looked_up = Vec::with_capacity(chunk.len());
            for pack in chunk {
                let contents = self.contents(&pack).await;
                looked_up.push((pack, contents));
            }
            let read = async |(pack, contents): (PackRow, Result<Vec<Packed>>)| {
                let source = match contents {
                    Ok(contents) => self.begin_source(&pack, contents).await,
                    Err(error) => Err(error),
                };
                (pack, source)
            };
            join_all(looked_up.into_iter().map(read)).await
        });
        Box::pin(read.flat_map(futures::stream::iter))
    }

    /// The live frames of a pack, and the first bytes of it.
    pub(crate) async fn source(&self, pack: &PackRow) -> Result<Source> {
        let contents = self.contents(pack).await?;
        self.begin_source(pack, contents).await
    }

    async fn contents(&self, pack: &PackRow) -> Result<Vec<Packed>> {
        let mut contents = self.metadata.pack_contents(pack.id).await?;
        contents.retain(|frame| frame.health != Health::Damaged);
        Ok(contents)
    }

    async fn begin_source(&self, pack: &PackRow, contents: Vec<Packed>) -> Result<Source> {
        let first = extents(&contents).into_iter().next().and_then(|extent| span(&contents[extent]));
        let ahead = match first {
            Some(range) if range.end - range.start <= READ => self.read_source(pack, range).await?,
            _ => None,
        };
        Ok(Source { contents, ahead })
    }

    /// Copies the live frames of a pack to `target`, which is begun if there is none. Returns the
    /// frames that were found bad now: they stay.
    pub(crate) async fn copy_live(
        &self,
        pack: &PackRow,
        source: Source,
        target: &mut Option<Target>,
    ) -> std::result::Result<Vec<Damage>, Fault> {
        let Source { contents, mut ahead } = source;
        let mut damage = Vec::new();
        let bad = |frame: &Packed, reason: String| Damage { digest: frame.digest, pack: pack.key.clone(), reason };
        for extent in extents(&contents) {
            let frames = &contents[extent];
            let Some(range) = span(frames) else { continue };
            if let [frame] = frames
                && frame.frame_len > READ
            {
                if let Err(reason) = self.copy_large(pack, frame, target).await? {
                    damage.push(bad(frame, reason));
                }
                continue;
            }
            let base = range.start;
            let read = match ahead.take() {
                Some(bytes) => Some(bytes),
                None => self.read_source(pack, range).await.map_err(Fault::Source)?,
            };
            let Some(bytes) = read else { return Ok(damage) };
            for frame in frames {
                match check(frame, &bytes, base, &self.options.limits) {
                    Ok((header, rest)) => {
                        let target = begun(self, target).await?;
                        target.frame(pack.id, frame, header, rest).await.map_err(Fault::Target)?;
                    }
                    Err(reason) => damage.push(bad(frame, reason)),
                }
            }
            // What lies between these frames is in the same memory, which may be much more.
            let dead = (bytes.len() as u64).saturating_sub(frames.iter().map(|frame| frame.frame_len).sum());
            if let Some(target) = target.as_mut() {
                target.writer.leave_out(dead);
            }
        }
        Ok(damage)
    }

    /// Copies a frame that is not held in memory: read once to verify it, and once more to copy it.
    async fn copy_large(
        &self,
        pack: &PackRow,
        frame: &Packed,
        target: &mut Option<Target>,
    ) -> std::result::Result<std::result::Result<(), String>, Fault> {
        let header_len = Header::len(frame.digest.algorithm()) as u64;
        let end = frame.offset + frame.frame_len;
        let Some(bytes) = self.read_source(pack, frame.offset..frame.offset + header_len).await.map_err(Fault::Source)? else {
            return Ok(Ok(()));
        };
        let header = match check_header(frame, &bytes, &self.options.limits) {
            Ok(header) => header,
            Err(reason) => return Ok(Err(reason)),
        };
        let payload = frame.offset + header_len..end - CHECKSUM as u64;
        let mut crc = 0;
        for part in parts(payload.clone()) {
            let Some(bytes) = self.read_source(pack, part).await.map_err(Fault::Source)? else { return Ok(Ok(())) };
            crc = crc32c::crc32c_append(crc, &bytes);
        }
        let Some(stored) = self.read_source(pack, payload.end..end).await.map_err(Fault::Source)? else { return Ok(Ok(())) };
        if stored[..] != crc.to_le_bytes() {
            return Ok(Err("the payload's checksum is wrong".into()));
        }
        let target = begun(self, target).await?;
        target.note(pack.id, frame);
        target.writer.header(header, None).await.map_err(Fault::Target)?;
        let mut copied = 0;
        for part in parts(payload) {
            let gone = || Error::Unavailable { what: "packs", reason: format!("pack {} went while it was copied", pack.key) };
            // Half a frame is written: whatever happens now, the new pack is lost.
            let bytes = self.read_source(pack, part).await.map_err(Fault::Target)?.ok_or_else(|| Fault::Target(gone()))?;
            copied = crc32c::crc32c_append(copied, &bytes);
            target.writer.append(bytes).await.map_err(Fault::Target)?;
        }
        if copied != crc {
            let reason = format!("pack {} reads differently the second time", pack.key);
            return Err(Fault::Target(Error::Unavailable { what: "packs", reason }));
        }
        target.writer.checksum(crc).await.map_err(Fault::Target)?;
        Ok(Ok(()))
    }

    /// Reads from a pack; `None` if another run has emptied and deleted it in the meantime.
    async fn read_source(&self, pack: &PackRow, range: Range<u64>) -> Result<Option<Bytes>> {
        let read = self.read_pack_to_check(&pack.key, range).await?;
        if read.is_none() && !self.metadata.pack_contents(pack.id).await?.is_empty() {
            return Err(Error::Unavailable {
                what: "packs",
                reason: format!("pack {} is not there, and objects lie in it: scrub", pack.key),
            });
        }
        Ok(read)
    }
}

async fn begun<'t>(store: &Store, target: &'t mut Option<Target>) -> std::result::Result<&'t mut Target, Fault> {
    if target.is_none() {
        *target = Some(Target::begin(store).await.map_err(Fault::Target)?);
    }
    target.as_mut().ok_or_else(|| Fault::Target(Error::Internal("no pack is open".into())))
}

/// Groups frames that lie near each other, as positions in `contents`; a frame larger than a read
/// is alone.
fn extents(contents: &[Packed]) -> Vec<Range<usize>> {
    let mut extents: Vec<Range<usize>> = Vec::new();
    for (at, frame) in contents.iter().enumerate() {
        if let Some(extent) = extents.last_mut() {
            let (first, last) = (&contents[extent.start], &contents[extent.end - 1]);
            let near = frame.offset <= last.offset + last.frame_len + GAP;
            if near && frame.offset + frame.frame_len - first.offset <= READ {
                extent.end = at + 1;
                continue;
            }
        }
        extents.push(at..at + 1);
    }
    extents
}

/// From the first byte of the first of these frames to the last byte of the last.
fn span(frames: &[Packed]) -> Option<Range<u64>> {
    let last = frames.last()?;
    Some(frames.first()?.offset..last.offset + last.frame_len)
}

fn parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range.step_by(usize::try_from(READ).unwrap_or(usize::MAX)).map(move |start| start..end.min(start + READ))
}

/// Reads the header at the start of `bytes` and checks that it belongs to `frame`. A node's copy
/// gets the node's kind even if the old frame had another: a rebuild recognises nodes by the kind
/// in their frames.
fn check_header(frame: &Packed, bytes: &[u8], limits: &Limits) -> std::result::Result<Header, String> {
    let header = header_of(bytes, frame.offset, &frame.digest, limits)?;
    if header.frame_len() != frame.frame_len {
        return Err(another(frame.offset, &header));
    }
    let kind = if frame.kind.is_container() { frame.kind } else { header.kind };
    Ok(Header { kind, ..header })
}

/// A frame within `bytes`, which begin at `base` in its pack: header, and what follows it.
fn check(frame: &Packed, bytes: &Bytes, base: u64, limits: &Limits) -> std::result::Result<(Header, Bytes), String> {
    let start = usize::try_from(frame.offset - base).map_err(|e| e.to_string())?;
    let len = usize::try_from(frame.frame_len).map_err(|e| e.to_string())?;
    if bytes.len() < start + len {
        return Err("the pack ends before it".into());
    }
    let whole = bytes.slice(start..start + len);
    let header = check_header(frame, &whole, limits)?;
    let rest = whole.slice(Header::len(frame.digest.algorithm())..);
    let (payload, checksum) = rest.split_at(rest.len() - CHECKSUM);
    if crc32c::crc32c(payload).to_le_bytes() != checksum {
        return Err("the payload's checksum is wrong".into());
    }
    Ok((header, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Options;
    use pfr_schema::codec::Codec;
    use pfr_schema::frame::{encode, end_mark};
    use pfr_schema::{Digest, Kind};
    use std::convert::Infallible;

    #[tokio::test]
    async fn a_few_frames_do_not_keep_all_that_was_read_with_them_in_memory() {
        const FRAMES: u32 = 3000;
        let store = Store::open_in_memory(Options::default()).await.unwrap();
        let push = store.open_push(&"team".parse().unwrap()).await.unwrap().id;
        let mut stream = Vec::new();
        for number in 0..FRAMES {
            let raw = [&number.to_le_bytes()[..], &[7_u8; 4092][..]].concat();
            let (digest, len) = (Digest::sha256(&raw), raw.len() as u64);
            let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest, raw_len: len, stored_len: len };
            stream.extend(encode(&header, &raw));
        }
        stream.extend(end_mark(u64::from(FRAMES)));
        let pieces: Vec<Bytes> = stream.chunks(1 << 20).map(Bytes::copy_from_slice).collect();
        store.ingest(&push, futures::stream::iter(pieces.into_iter().map(Ok::<_, Infallible>))).await.unwrap();
        let pack = store.metadata.packs(None, 1).await.unwrap().pop().unwrap();
        // One of thirty is alive, and they lie near enough to be read together.
        let (mut source, mut at) = (store.source(&pack).await.unwrap(), 0);
        source.ahead = None;
        source.contents.retain(|_| {
            at += 1;
            at % 30 == 0
        });
        assert_eq!(source.contents.len(), 100);
        let mut target = None;
        let Ok(damage) = store.copy_live(&pack, source, &mut target).await else { panic!("it is not copied") };
        assert!(damage.is_empty());
        let pieces = target.unwrap().writer.pieces();
        assert!(pieces < 100, "{pieces} pieces hold the memory of all that was read");
    }
}
