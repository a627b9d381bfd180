//! Whole frames that are verified together.
//!
//! Their payloads are copied, each in one piece, into memory that is used again: so blobs of one
//! length are hashed side by side, which takes half the time, the buffers of the connection are
//! free at once, and no fresh memory is touched.

use super::{WHOLE_MAX, Whole, is_large};
use bytes::Bytes;
use pfr_schema::Digest;
use pfr_schema::frame::Header;
use pfr_service::buffers::{Buffer, Pool};
use std::ops::Range;

/// Payload bytes per hashing task: enough to be worth a task, little enough for two cores to share.
const BATCH: u64 = 1 << 20;
/// Payload bytes of a batch that is not extended for the sake of a whole group.
const MOST: u64 = 12 << 20;
/// Memory for frames that share it, as they came or decoded.
pub(super) static SHARED: Pool = Pool::new(2 << 20, 20);
/// Memory for one frame that does not fit there, or for one group of decoded ones.
static LARGE: Pool = Pool::new(WHOLE_MAX as usize, 6);
/// Memory for one decoded page: of at least half this size.
pub(super) static PAGE: Pool = Pool::new(256 << 10, 64);
/// Bytes that are reserved at once for a blob that fits into neither: its length may be false.
const RESERVED: usize = 64 << 20;

/// Memory that begins with room for so many bytes, up to [`RESERVED`].
pub(super) fn memory(bytes: u64) -> Buffer {
    match usize::try_from(bytes).unwrap_or(usize::MAX) {
        0 => SHARED.hold(Vec::new()),
        bytes if bytes <= SHARED.size() => SHARED.take(),
        bytes if bytes <= LARGE.size() => LARGE.take(),
        bytes => LARGE.hold(Vec::with_capacity(bytes.min(RESERVED))),
    }
}

/// The bytes, to be shared. A few of them are copied: the client may be slow, or the only one of
/// its batch may be kept for long, and each would hold megabytes.
pub(super) fn freeze(memory: Buffer) -> Bytes {
    if memory.len() < memory.capacity() / 4 { Bytes::copy_from_slice(&memory) } else { memory.freeze() }
}

/// Frames that came since the last hashing task began, and the one that is coming.
#[derive(Default)]
pub(super) struct Batch {
    /// Complete frames in full memory.
    wholes: Vec<Whole>,
    memory: Option<Buffer>,
    /// Complete frames in `memory`.
    inside: Vec<Inside>,
    bytes: u64,
    coming: Option<Coming>,
}

struct Inside {
    header: Header,
    position: u64,
    range: Range<usize>,
    checksum: u32,
}

struct Coming {
    header: Header,
    position: u64,
    /// Where in the memory its payload begins.
    from: usize,
}

impl Batch {
    /// Begins a frame.
    pub(super) fn begin(&mut self, header: Header, position: u64) {
        let needed = usize::try_from(header.stored_len).unwrap_or(usize::MAX);
        if self.memory.as_ref().is_some_and(|memory| memory.room() < needed) {
            self.seal();
        }
        let memory = self.memory.get_or_insert_with(|| memory(header.stored_len));
        self.coming = Some(Coming { header, position, from: memory.len() });
    }

    /// The next bytes of its payload.
    pub(super) fn append(&mut self, piece: &[u8]) {
        let (Some(coming), Some(held)) = (&mut self.coming, &mut self.memory) else { return };
        if held.room() < piece.len() && coming.header.stored_len <= WHOLE_MAX {
            // Its bytes were set aside: see `set_aside`.
            let mut whole = memory(coming.header.stored_len);
            whole.extend_from_slice(&held[coming.from..]);
            coming.from = 0;
            *held = whole;
        }
        held.extend_from_slice(piece);
    }

    /// Completes the frame. Returns whether all should be hashed now: in whole groups, if the
    /// frames are not too large for that.
    pub(super) fn finish(&mut self, checksum: u32) -> bool {
        let (Some(coming), Some(memory)) = (self.coming.take(), &self.memory) else { return false };
        let Coming { header, position, from } = coming;
        // An entry costs memory, however short the frame.
        self.bytes += header.stored_len + 256;
        self.inside.push(Inside { header, position, range: from..memory.len(), checksum });
        let frames = self.wholes.len() + self.inside.len();
        is_large(&header) || self.bytes >= MOST || (self.bytes >= BATCH && frames.is_multiple_of(Digest::side_by_side(header.raw_len)))
    }

    /// Adds a frame that is complete in memory of its own.
    pub(super) fn add(&mut self, whole: Whole) {
        self.seal();
        self.bytes += whole.header.stored_len + 256;
        self.wholes.push(whole);
    }

    /// Payload bytes of the frame that is coming.
    pub(super) fn partial(&self) -> u64 {
        match (&self.coming, &self.memory) {
            (Some(coming), Some(memory)) => (memory.len() - coming.from) as u64,
            _ => 0,
        }
    }

    /// The header of the frame that is coming.
    pub(super) fn coming(&self) -> Option<&Header> {
        self.coming.as_ref().map(|coming| &coming.header)
    }

    /// The complete frames and their bytes. The one that is coming stays.
    pub(super) fn take(&mut self) -> (Vec<Whole>, u64) {
        if !self.inside.is_empty() {
            let rest = self.set_aside();
            self.seal();
            self.memory = rest;
        }
        (std::mem::take(&mut self.wholes), std::mem::take(&mut self.bytes))
    }

    /// Leaves the frame that is coming in memory of its size: its client may be slow.
    pub(super) fn shrink(&mut self) {
        if self.inside.is_empty() {
            self.memory = self.set_aside();
        }
    }

    /// The bytes of the frame that is coming, taken out of the memory.
    fn set_aside(&mut self) -> Option<Buffer> {
        let (coming, memory) = (self.coming.as_mut()?, self.memory.as_mut()?);
        let bytes = SHARED.hold(memory[coming.from..].to_vec());
        memory.truncate(coming.from);
        coming.from = 0;
        Some(bytes)
    }

    /// Takes the frames out of the memory that is in use. No frame is coming.
    fn seal(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let bytes = freeze(memory);
        let whole = |inside: Inside| {
            let Inside { header, position, range, checksum } = inside;
            let payload: Vec<Bytes> = if range.is_empty() { Vec::new() } else { vec![bytes.slice(range)] };
            Whole { header, payload, checksum, position, raw: None, _permit: None }
        };
        self.wholes.extend(self.inside.drain(..).map(whole));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{For, Incoming, Sink, Step, Verifier, verified_frames_into};
    use super::*;
    use crate::error::{Error, Result};
    use futures::StreamExt as _;
    use pfr_schema::codec::{Codec, Codecs, encode_document};
    use pfr_schema::frame::{encode, end_mark};
    use pfr_schema::{Kind, Limits};
    use proptest::prelude::*;
    use std::sync::{Arc, Mutex};
    use tokio::sync::Semaphore;

    /// A frame of `len` bytes, encoded if it is `even`: then it is of zeros, but for a few bytes.
    fn frame(len: usize, number: usize, even: bool) -> (Digest, Vec<u8>) {
        let byte = |at: usize| if even && at >= 8 { 0 } else { (at.wrapping_mul(31).wrapping_add(number) >> (number % 5)) as u8 };
        let raw: Vec<u8> = (0..len).map(byte).collect();
        let (codec, stored) = if even { encode_document(&raw) } else { (Codec::Raw, raw.as_slice().into()) };
        let digest = Digest::sha256(&raw);
        let header = Header { codec, kind: Kind::Blob, digest, raw_len: len as u64, stored_len: stored.len() as u64 };
        (digest, encode(&header, &stored))
    }

    /// Pushes a stream in pieces of `cut` bytes, and settles before each `rest`-th of them. Returns
    /// the digests of the frames that were verified.
    async fn verified(stream: &[u8], cut: usize, rest: usize) -> (Vec<Digest>, Result<()>) {
        let mut verifier = Verifier::new(Limits::default(), Codecs::ALL, For::Store);
        let (mut pieces, mut found) = (stream.chunks(cut).enumerate(), Vec::new());
        loop {
            match verifier.step().await {
                Ok(Step::Item(Incoming::Whole(whole))) => {
                    assert_eq!(Digest::sha256(&whole.raw().unwrap()), whole.header.digest);
                    found.push(whole.header.digest);
                }
                Ok(Step::Input) => match pieces.next() {
                    Some((number, piece)) => {
                        if number % rest == rest - 1 {
                            verifier.settle();
                            // A client that is slow holds memory of its bytes only.
                            let held = verifier.batch.memory.as_ref().map_or(0, |memory| memory.capacity() as u64);
                            assert!(held <= verifier.partial().next_power_of_two().max(8), "{held} for {}", verifier.partial());
                        }
                        verifier.push(Bytes::copy_from_slice(piece));
                    }
                    None => verifier.end(Ok(())),
                },
                Ok(Step::End) => return (found, Ok(())),
                Ok(_) => panic!("no large frame was sent"),
                Err(error) => return (found, Err(error)),
            }
        }
    }

    /// Sends `stream` through a sink that refuses the frame `bad`. Returns what the sink got and
    /// what was yielded.
    async fn given(stream: Vec<u8>, bad: Option<Digest>) -> (Vec<(Digest, Vec<u8>)>, Vec<Digest>, Result<()>) {
        let got = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&got);
        let sink: Sink = Arc::new(move |header: &Header, raw: &[u8]| {
            if Some(header.digest) == bad {
                return Err(Error::Input("the sink is full".into()));
            }
            into.lock().unwrap().push((header.digest, raw.to_vec()));
            Ok(())
        });
        let pieces: Vec<Result<Bytes>> = stream.chunks(300_000).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        let large = Arc::new(Semaphore::new(1));
        let mut frames = Box::pin(verified_frames_into(futures::stream::iter(pieces), Limits::default(), large, sink));
        let (mut yielded, mut result) = (Vec::new(), Ok(()));
        while let Some(next) = frames.next().await {
            match next {
                Ok(Incoming::Whole(whole)) => {
                    assert!(got.lock().unwrap().iter().any(|(digest, _)| *digest == whole.header.digest), "it was yielded too early");
                    yielded.push(whole.header.digest);
                }
                Ok(_) => panic!("no large frame was sent"),
                Err(error) => result = Err(error),
            }
        }
        // After the end no task has the sink, so nothing is given to it any more.
        drop(frames);
        let got = Arc::into_inner(got).expect("a task still has the sink").into_inner().unwrap();
        (got, yielded, result)
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap()
    }

    /// Lengths of which many are alike, and some encoded.
    fn lengths() -> impl Strategy<Value = Vec<(usize, bool)>> {
        let alike = (prop::sample::select(vec![0, 1, 4096, 180_224, 700_000]), any::<bool>());
        let any = (0..3_000_000_usize, any::<bool>());
        prop::collection::vec(prop_oneof![6 => alike, 1 => any], 1..24)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn frames_come_out_as_they_went_in_however_they_are_cut(lengths in lengths(), cut in 1000..400_000_usize, rest in 1..40_usize) {
            let frames: Vec<_> = lengths.iter().enumerate().map(|(number, (len, even))| frame(*len, number, *even)).collect();
            let mut stream: Vec<u8> = frames.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
            stream.extend(end_mark(frames.len() as u64));
            let (found, result) = runtime().block_on(verified(&stream, cut, rest));
            result.unwrap();
            prop_assert_eq!(found, frames.iter().map(|(digest, _)| *digest).collect::<Vec<_>>());
        }

        #[test]
        fn a_sink_gets_the_raw_bytes_of_every_frame_before_it_is_yielded(lengths in lengths()) {
            let frames: Vec<_> = lengths.iter().enumerate().map(|(number, (len, even))| frame(*len, number, *even)).collect();
            let mut stream: Vec<u8> = frames.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
            stream.extend(end_mark(frames.len() as u64));
            let (got, yielded, result) = runtime().block_on(given(stream, None));
            result.unwrap();
            prop_assert_eq!(&yielded, &frames.iter().map(|(digest, _)| *digest).collect::<Vec<_>>());
            prop_assert_eq!(got.len(), frames.len());
            prop_assert!(got.iter().all(|(digest, raw)| *digest == Digest::sha256(raw)));
        }

        #[test]
        fn the_frame_that_is_wrong_is_named_in_whatever_group_it_is(count in 1..20_usize, wrong in 0..20_usize, even: bool, last: bool) {
            let wrong = wrong % count;
            let mut frames: Vec<_> = (0..count).map(|number| frame(180_224, number, even)).collect();
            let (digest, bytes) = &mut frames[wrong];
            // The checksum of the payload, or its last byte.
            let at = bytes.len() - if last { 1 } else { 5 };
            bytes[at] ^= 1;
            let digest = *digest;
            let stream: Vec<u8> = frames.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
            let (found, result) = runtime().block_on(verified(&stream, 300_000, 1000));
            prop_assert_eq!(found, frames[..wrong].iter().map(|(digest, _)| *digest).collect::<Vec<_>>());
            prop_assert!(matches!(&result, Err(Error::Frame { digest: named, .. }) if *named == digest), "{result:?}");
        }
    }

    #[test]
    fn a_few_bytes_that_were_taken_out_hold_no_megabytes() {
        for (len, is_copied) in [(2000, true), (500_000, true), (600_000, false)] {
            let raw = vec![7_u8; len];
            let digest = Digest::sha256(&raw);
            let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest, raw_len: len as u64, stored_len: len as u64 };
            let mut batch = Batch::default();
            batch.begin(header, 0);
            batch.append(&raw);
            let place = batch.memory.as_ref().unwrap().as_ptr();
            batch.finish(crc32c::crc32c(&raw));
            let (wholes, _) = batch.take();
            assert_eq!(wholes[0].payload, [raw]);
            assert_eq!(wholes[0].payload[0].as_ptr() != place, is_copied, "{len}");
        }
    }

    #[test]
    fn no_wrong_frame_is_given_to_a_sink_and_its_errors_end_the_stream() {
        for wrong in [0, 5, 18] {
            let mut frames: Vec<_> = (0..20).map(|number| frame(180_224, number, false)).collect();
            let whole: Vec<u8> = frames.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
            let digest = frames[wrong].0;
            let (got, yielded, result) = runtime().block_on(given([whole, end_mark(20)].concat(), Some(digest)));
            assert!(matches!(&result, Err(Error::Input(_))), "{result:?}");
            assert!(yielded.len() <= wrong && got.iter().all(|(found, _)| *found != digest));
            let bytes = &mut frames[wrong].1;
            let last = bytes.len() - 5;
            bytes[last] ^= 1;
            let damaged: Vec<u8> = frames.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
            let (got, yielded, result) = runtime().block_on(given([damaged, end_mark(20)].concat(), None));
            assert!(matches!(&result, Err(Error::Frame { digest: named, .. }) if *named == digest), "{result:?}");
            assert!(yielded.len() <= wrong && got.iter().all(|(found, raw)| *found != digest && *found == Digest::sha256(raw)));
        }
    }
}
