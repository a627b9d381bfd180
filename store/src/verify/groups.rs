//! Hashing of frames that are complete, on a thread of its own: in groups of one length where there
//! are such.
//!
//! For a reader or a sink, encoded frames are decoded into memory that is used again: behind one
//! another, and a page of 128 to 256 KiB into a buffer of its own. A group that is not right is
//! looked at again, frame by frame, with `sha2`: only that refuses a frame.

use super::batch::{PAGE, SHARED, freeze, memory};
use super::{Sink, Wanted, Whole, lanes};
use crate::error::{Error, Result};
use bytes::Bytes;
use pfr_schema::codec::{self, Codec};
use pfr_schema::frame::Header;
use pfr_schema::{Algorithm, Digest};
use pfr_service::buffers::Buffer;
use std::ops::Range;

/// Frames in a group that are so small that all of them fit into memory that frames share.
const SMALL: usize = 16;

/// The frames up to the first that is wrong, and what is wrong with it.
pub(super) type Outcome = (Vec<Whole>, Option<Error>);

/// Verifies frames, as long as they are wanted. With `keep`, each that is right has its raw bytes.
/// A sink gets these too; a frame that it refuses is wrong.
pub(super) fn verify(frames: Vec<Whole>, keep: bool, sink: Option<&Sink>, wanted: &Wanted) -> Outcome {
    let mut opening = Opening { frames, right: 0, keep, sink, memory: memory(0), inside: Vec::new(), scratch: Vec::new() };
    let mut fault = None;
    while fault.is_none() && opening.right < opening.frames.len() && wanted.go_on() {
        let group = opening.group();
        let together = if group == 0 { Ok(false) } else { opening.are_right(group) };
        fault = match together {
            Ok(true) => None,
            Ok(false) => (0..group.max(1)).try_for_each(|_| opening.one()).err(),
            Err(error) => Some(error),
        };
    }
    opening.seal();
    let Opening { mut frames, right, .. } = opening;
    frames.truncate(right);
    (frames, fault)
}

struct Opening<'a> {
    frames: Vec<Whole>,
    /// How many of them are right so far.
    right: usize,
    keep: bool,
    sink: Option<&'a Sink>,
    memory: Buffer,
    /// Frames whose raw bytes lie in `memory`, by their number.
    inside: Vec<(usize, Range<usize>)>,
    /// Decoded bytes on their way to the hash function, where they are not kept.
    scratch: Vec<Vec<u8>>,
}

impl Opening<'_> {
    /// How many of the next frames are hashed together: none, or more than one.
    fn group(&self) -> usize {
        let left = &self.frames[self.right..];
        let Some(first) = left.first() else { return 0 };
        let small = first.header.raw_len.saturating_mul(SMALL as u64) <= SHARED.size() as u64;
        let most = if small { SMALL } else { Digest::side_by_side(first.header.raw_len) };
        match left.iter().take(most).take_while(|whole| is_lane(whole, first)).count() {
            1 => 0,
            alike => alike,
        }
    }

    /// Whether all frames of a group are right. If one is not, a look at each says why.
    ///
    /// # Errors
    /// That of the sink.
    fn are_right(&mut self, group: usize) -> Result<bool> {
        let range = self.right..self.right + group;
        if !self.keep && self.sink.is_none() {
            self.scratch.resize_with(self.scratch.len().max(group), Vec::new);
            let are_right = lanes::are_right(&self.frames[range], self.scratch.iter_mut(), false);
            self.right += if are_right { group } else { 0 };
            return Ok(are_right);
        }
        if (PAGE.size() as u64 / 2..=PAGE.size() as u64).contains(&self.frames[self.right].header.raw_len) {
            let raw = |whole: &Whole| whole.header.codec == Codec::Raw;
            let page = |whole: &Whole| if raw(whole) { PAGE.hold(Vec::new()) } else { PAGE.take() };
            let mut pages: Vec<Buffer> = self.frames[range.clone()].iter().map(page).collect();
            if !lanes::are_right(&self.frames[range], pages.iter_mut().map(|page| &mut **page), true) {
                return Ok(false);
            }
            pages.into_iter().try_for_each(|page| self.pass_page(page))?;
            return Ok(true);
        }
        let encoded = self.frames[range.clone()].iter().filter(|whole| whole.header.codec != Codec::Raw);
        let needed: u64 = encoded.map(|whole| whole.header.raw_len).sum();
        self.make_room(needed);
        let before = self.memory.len();
        let Some(places) = open(&self.frames[range], &mut self.memory) else {
            self.memory.truncate(before);
            return Ok(false);
        };
        places.into_iter().try_for_each(|place| self.pass(place))?;
        Ok(true)
    }

    /// Verifies the next frame by itself, with `sha2`: its error says what is wrong.
    fn one(&mut self) -> Result<()> {
        let Header { codec, raw_len, .. } = self.frames[self.right].header;
        let keep = (self.keep || self.sink.is_some()) && codec != Codec::Raw;
        if keep {
            self.make_room(raw_len);
        }
        let (before, memory) = (self.memory.len(), &mut self.memory);
        let mut sink = |raw: &[u8]| {
            if keep {
                memory.extend_from_slice(raw);
            }
        };
        self.frames[self.right].verify(&mut sink)?;
        self.pass(before..self.memory.len())
    }

    /// The next frame is right. If it is encoded, its raw bytes lie at `place`.
    fn pass(&mut self, place: Range<usize>) -> Result<()> {
        let whole = &mut self.frames[self.right];
        hand_on(whole, &self.memory[place.clone()], self.sink)?;
        if self.keep && whole.header.codec == Codec::Raw {
            whole.raw = Some(only_piece(whole));
        } else if self.keep {
            self.inside.push((self.right, place));
        }
        self.right += 1;
        Ok(())
    }

    /// The next frame is right. If it is encoded, its raw bytes are all that is in `page`.
    fn pass_page(&mut self, page: Buffer) -> Result<()> {
        let whole = &mut self.frames[self.right];
        hand_on(whole, &page, self.sink)?;
        if self.keep {
            whole.raw = Some(if whole.header.codec == Codec::Raw { only_piece(whole) } else { freeze(page) });
        }
        self.right += 1;
        Ok(())
    }

    /// Memory for so many bytes behind those that are kept.
    fn make_room(&mut self, bytes: u64) {
        if !self.keep {
            self.memory.clear();
        }
        if (self.memory.room() as u64) < bytes {
            self.seal();
            self.memory = memory(bytes);
        }
    }

    /// Gives the frames their raw bytes out of the memory that is in use.
    fn seal(&mut self) {
        let bytes = freeze(std::mem::replace(&mut self.memory, memory(0)));
        for (number, place) in self.inside.drain(..) {
            self.frames[number].raw = Some(bytes.slice(place));
        }
    }
}

/// Gives a frame that is right to the sink. `decoded` are its raw bytes if it is encoded.
fn hand_on(whole: &Whole, decoded: &[u8], sink: Option<&Sink>) -> Result<()> {
    let Some(sink) = sink else { return Ok(()) };
    match whole.header.codec {
        Codec::Raw => sink(&whole.header, &whole.raw()?),
        _ => sink(&whole.header, decoded),
    }
}

/// The payload of a reader's frame: it lies in one piece, but for one without a byte.
fn only_piece(whole: &Whole) -> Bytes {
    whole.payload.first().cloned().unwrap_or_default()
}

/// Whether a frame can be hashed beside another.
fn is_lane(whole: &Whole, first: &Whole) -> bool {
    let Header { codec, digest, raw_len, .. } = whole.header;
    let fits = codec == Codec::Raw || raw_len <= Digest::SIDE_BY_SIDE_MAX / 4;
    digest.algorithm() == Algorithm::Sha256 && raw_len == first.header.raw_len && fits && whole.payload.len() == 1
}

/// Decodes a group behind what is in `memory` and hashes it. Returns where its raw bytes lie if all
/// frames are right: an empty place for one that is not encoded.
fn open(group: &[Whole], memory: &mut Vec<u8>) -> Option<Vec<Range<usize>>> {
    // Each is decoded as soon as its checksum was computed, while it is in the processor's cache.
    let places: Vec<Range<usize>> = group.iter().map(|whole| decode(whole, memory)).collect::<Option<_>>()?;
    let memory = &memory[..];
    let lanes = group.iter().zip(&places).map(|(whole, place)| match whole.header.codec {
        Codec::Raw => &whole.payload[0][..],
        _ => &memory[place.clone()],
    });
    let blobs: Vec<&[u8]> = lanes.collect();
    let found = Digest::of_each(Algorithm::Sha256, &blobs);
    found.iter().zip(group).all(|(found, whole)| *found == whole.header.digest).then_some(places)
}

fn decode(whole: &Whole, memory: &mut Vec<u8>) -> Option<Range<usize>> {
    let Whole { header, payload, checksum, .. } = whole;
    let [stored] = &payload[..] else { return None };
    if crc32c::crc32c(stored) != *checksum {
        return None;
    }
    let from = memory.len();
    if header.codec != Codec::Raw {
        codec::decode_into(header.codec, stored, header.raw_len, memory).ok()?;
    }
    Some(from..memory.len())
}

#[cfg(test)]
mod tests {
    use super::super::Owner;
    use super::*;
    use bytes::Bytes;
    use pfr_schema::codec::{encode_document, encode_tensor};
    use pfr_schema::{FormatError, Kind};
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    /// How a frame of a test is encoded.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum As {
        Raw,
        Document,
        Tensor,
    }

    const AS: [As; 3] = [As::Raw, As::Document, As::Tensor];

    /// Bytes that every codec makes smaller, if they are not few.
    fn bytes(number: usize, len: usize) -> Vec<u8> {
        let byte = |at: usize| if at % 2 == 1 { 0x3f } else { (at.wrapping_mul(31).wrapping_add(number) >> (number % 5)) as u8 };
        (0..len).map(byte).collect()
    }

    /// A frame of these bytes under this digest.
    fn claiming(digest: Digest, raw: &[u8], kind: As) -> Whole {
        let (codec, payload) = match kind {
            As::Raw => (Codec::Raw, raw.into()),
            As::Document => encode_document(raw),
            As::Tensor => encode_tensor(Codec::Bf16Bitmaps, raw),
        };
        let header = Header { codec, kind: Kind::Blob, digest, raw_len: raw.len() as u64, stored_len: payload.len() as u64 };
        let (checksum, payload) = (crc32c::crc32c(&payload), Bytes::copy_from_slice(&payload));
        let payload = if payload.is_empty() { Vec::new() } else { vec![payload] };
        Whole { header, payload, checksum, position: 0, raw: None, _permit: None }
    }

    fn frame(algorithm: Algorithm, number: usize, len: usize, kind: As) -> Whole {
        let raw = bytes(number, len);
        claiming(Digest::of(algorithm, &raw), &raw, kind)
    }

    fn right(number: usize, len: usize, kind: As) -> Whole {
        frame(Algorithm::Sha256, number, len, kind)
    }

    /// As the tasks of a stream whose reader is there do it.
    fn verify(frames: Vec<Whole>, keep: bool, sink: Option<&Sink>) -> Outcome {
        super::verify(frames, keep, sink, &Owner::default().wanted())
    }

    /// What readers get of frames that must all be right.
    fn opened(frames: Vec<Whole>) -> Vec<Bytes> {
        let (count, (right, fault)) = (frames.len(), verify(frames, true, None));
        assert!(fault.is_none() && right.len() == count, "{fault:?}");
        right.into_iter().map(|whole| whole.raw.expect("it is kept")).collect()
    }

    #[test]
    fn a_wrong_digest_is_found_at_each_place_of_a_group() {
        let other = Digest::sha256(b"other");
        for kind in AS {
            for (place, keep) in (0..9).flat_map(|place| [(place, false), (place, true)]) {
                let mut frames: Vec<Whole> = (0..9).map(|number| right(number, 4096, kind)).collect();
                frames[place] = claiming(other, &bytes(place, 4096), kind);
                let (found, fault) = verify(frames, keep, None);
                let wrong = matches!(
                    &fault,
                    Some(Error::Frame { digest, source: FormatError::DigestMismatch { .. }, .. }) if *digest == other
                );
                assert!(wrong, "{fault:?} at {place} as {kind:?}");
                assert_eq!(found.len(), place, "those before it are right");
                for (number, whole) in found.iter().enumerate() {
                    assert_eq!(whole.raw.is_some(), keep);
                    assert_eq!(whole.raw().unwrap(), bytes(number, 4096), "{number} of {place} as {kind:?}");
                }
            }
        }
    }

    #[test]
    fn a_damaged_payload_is_found_at_each_place_of_a_group() {
        for (place, kind) in (0..6).flat_map(|place| AS.map(|kind| (place, kind))) {
            let mut frames: Vec<Whole> = (0..6).map(|number| right(number, 4096, kind)).collect();
            let mut payload = frames[place].payload[0].to_vec();
            let at = payload.len() / 2;
            payload[at] ^= 1;
            frames[place].payload = vec![payload.into()];
            let digest = frames[place].header.digest;
            let (found, fault) = verify(frames, true, None);
            assert!(matches!(&fault, Some(Error::Frame { digest: named, .. }) if *named == digest), "{fault:?}");
            assert_eq!(found.len(), place);
        }
    }

    #[test]
    fn frames_that_nothing_waits_for_any_more_are_not_hashed() {
        let owner = Owner::default();
        let (wanted, given) = (owner.wanted(), Arc::new(AtomicUsize::new(0)));
        let (owner, count) = (Mutex::new(Some(owner)), Arc::clone(&given));
        // The reader leaves while the first group is handed on.
        let sink: Sink = Arc::new(move |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
            owner.lock().unwrap().take();
            Ok(())
        });
        let frames = (0..200).map(|number| right(number, 4096, As::Document)).collect();
        let (found, fault) = super::verify(frames, false, Some(&sink), &wanted);
        assert!(fault.is_none() && found.len() == given.load(Ordering::Relaxed), "{fault:?}");
        assert!((1..=SMALL).contains(&found.len()), "{} of 200 frames were hashed", found.len());
    }

    #[test]
    fn what_a_group_refuses_a_look_at_each_accepts() {
        // As if the side-by-side kernel had erred: frames in two pieces are in no group.
        for kind in AS {
            let mut frames: Vec<Whole> = (0..4).map(|number| right(number, 4096, kind)).collect();
            for whole in &mut frames {
                let payload = whole.payload.remove(0);
                whole.payload = vec![payload.slice(..9), payload.slice(9..)];
            }
            assert!(open(&frames, &mut Vec::new()).is_none());
            let (found, fault) = verify(frames, false, None);
            assert!(fault.is_none() && found.len() == 4, "{fault:?}");
        }
    }

    #[test]
    fn blobs_without_a_byte_are_opened_among_others() {
        let lengths = [0, 0, 0, 0, 0, 4096, 4096, 0, 4096, 4096];
        let frames = lengths.iter().enumerate().map(|(number, len)| right(number, *len, AS[number % 3])).collect();
        for (number, (len, raw)) in lengths.iter().zip(opened(frames)).enumerate() {
            assert_eq!(raw, bytes(number, *len));
        }
        // A frame of zstd that stands for nothing has a payload.
        let empty = zstd_of_nothing();
        assert!(!empty.payload.is_empty());
        assert_eq!(opened(vec![empty]), [Bytes::new()]);
    }

    #[test]
    fn blobs_of_other_digests_are_opened_among_others() {
        for (number, algorithm) in Algorithm::ALL.into_iter().enumerate() {
            let make = |place: usize| frame(if place == number { algorithm } else { Algorithm::Sha256 }, place, 4096, AS[place % 3]);
            assert_eq!(opened((0..9).map(make).collect())[number], bytes(number, 4096));
            let all = |place: usize| frame(algorithm, place, 4096, AS[place % 3]);
            assert_eq!(opened((0..9).map(all).collect())[8], bytes(8, 4096));
            let other = Digest::of(algorithm, b"other");
            let (found, fault) = verify((0..9).map(all).chain([claiming(other, &bytes(9, 4096), As::Raw)]).collect(), true, None);
            assert!(matches!(&fault, Some(Error::Frame { digest, .. }) if *digest == other), "{fault:?}");
            assert_eq!(found.len(), 9);
        }
    }

    fn zstd_of_nothing() -> Whole {
        // A frame header with a content size of 0, and one last raw block without a byte.
        let payload = Bytes::from_static(&[0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x00, 0x01, 0x00, 0x00]);
        let header =
            Header { codec: Codec::Zstd, kind: Kind::Blob, digest: Digest::sha256(b""), raw_len: 0, stored_len: payload.len() as u64 };
        let checksum = crc32c::crc32c(&payload);
        Whole { header, payload: vec![payload], checksum, position: 0, raw: None, _permit: None }
    }

    #[test]
    fn blobs_of_any_size_keep_their_bytes_while_memory_is_used_again() {
        let lengths = [180_224, 180_224, 180_224, 180_224, 1 << 20, (4 << 20) + 2, (4 << 20) + 2, (2 << 20) + 2];
        let all: Vec<Vec<Bytes>> = (0..3)
            .map(|round| opened(lengths.iter().enumerate().map(|(number, len)| right(number + round, *len, AS[number % 3])).collect()))
            .collect();
        for (round, found) in all.iter().enumerate() {
            for (number, (raw, len)) in found.iter().zip(lengths).enumerate() {
                assert!(*raw == bytes(number + round, len), "{number} of {round}");
            }
        }
    }

    #[test]
    fn encoded_frames_are_encoded() {
        // The tests above prove nothing otherwise.
        assert_eq!(right(1, 4096, As::Document).header.codec, Codec::Zstd);
        assert_eq!(right(1, 4096, As::Tensor).header.codec, Codec::Bf16Bitmaps);
    }

    proptest! {
        #[test]
        fn a_frame_is_opened_alike_alone_and_among_others(
            frames in prop::collection::vec(
                (
                    prop::sample::select(Algorithm::ALL.to_vec()),
                    prop::sample::select(vec![0_usize, 100, 4096, 4096, 4096, 9000]),
                    prop::sample::select(AS.to_vec()),
                    prop::bool::weighted(0.05),
                ),
                0..40,
            ),
            keep: bool
        ) {
            let make = |(number, (algorithm, len, kind, is_wrong)): (usize, &(Algorithm, usize, As, bool))| {
                let raw = bytes(number, *len);
                claiming(Digest::of(*algorithm, if *is_wrong { b"other" } else { &raw }), &raw, *kind)
            };
            let all = || frames.iter().enumerate().map(make);
            let (found, fault) = verify(all().collect(), keep, None);
            prop_assert_eq!(found.len(), frames.iter().position(|(.., is_wrong)| *is_wrong).unwrap_or(frames.len()));
            prop_assert_eq!(fault.is_some(), found.len() < frames.len());
            for (number, (together, alone)) in found.iter().zip(all()).enumerate() {
                let (alone, fault) = verify(vec![alone], keep, None);
                prop_assert!(fault.is_none());
                prop_assert_eq!(&together.raw, &alone[0].raw);
                prop_assert_eq!(together.raw().unwrap(), bytes(number, frames[number].1));
            }
        }
    }
}
