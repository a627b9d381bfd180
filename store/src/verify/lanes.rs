//! Frames of one length that are decoded and hashed side by side, a few blocks of each at a time.
//!
//! So what is decoded is hashed while it is in the core's own cache. Whole pages of all lanes would
//! not fit there. Where raw bytes are not kept, the next ones are written over them.

use super::Whole;
use pfr_schema::codec::{Codec, Decoder, decode_into};
use pfr_schema::digest::SideBySide;
use pfr_schema::frame::Header;

/// Raw bytes of each lane that are decoded, and then hashed, at a time. A lane may have a block of
/// its codec more.
const STEP: usize = 16 << 10;

/// Whether each frame of a group is right. All are of one raw length, and have their payload in one
/// piece. With `keep`, the raw bytes of those that are encoded lie in `memory` afterwards.
///
/// `false` says nothing about the reason, nor which of them is wrong.
pub(super) fn are_right<'a>(group: &'a [Whole], memory: impl Iterator<Item = &'a mut Vec<u8>>, keep: bool) -> bool {
    let lanes = group.iter().zip(memory).map(|(whole, decoded)| Lane::new(whole, decoded, keep));
    lanes.collect::<Option<Vec<Lane>>>().and_then(|lanes| hash(group, lanes)).is_some()
}

fn hash(group: &[Whole], mut lanes: Vec<Lane<'_>>) -> Option<()> {
    if lanes.len() != group.len() {
        return None;
    }
    let mut hasher = SideBySide::new(lanes.len());
    loop {
        lanes.iter_mut().try_for_each(Lane::decode)?;
        let least = lanes.iter().map(|lane| lane.ready().len()).min()?;
        if lanes.iter().all(Lane::is_at_end) {
            let ends: Vec<&[u8]> = lanes.iter().map(Lane::ready).collect();
            if ends.iter().any(|end| end.len() != least) {
                // One is shorter than it says.
                return None;
            }
            let found = hasher.finish(&ends);
            lanes.into_iter().try_for_each(Lane::finish)?;
            return found.iter().zip(group).all(|(found, whole)| *found == whole.header.digest).then_some(());
        }
        let step = SideBySide::whole_blocks(least);
        if step == 0 {
            // One is shorter than it says.
            return None;
        }
        hasher.update(&lanes.iter().map(|lane| &lane.ready()[..step]).collect::<Vec<_>>());
        lanes.iter_mut().for_each(|lane| lane.pass(step));
    }
}

/// A frame of a group.
struct Lane<'a> {
    whole: &'a Whole,
    /// Payload that was not decoded yet; of a raw one, not hashed.
    stored: &'a [u8],
    checksum: u32,
    is_raw: bool,
    decoder: Option<Decoder>,
    /// Nothing more will be decoded.
    ended: bool,
    /// What was decoded: with `keep`, all of it.
    decoded: &'a mut Vec<u8>,
    keep: bool,
    /// Bytes of it that are hashed.
    hashed: usize,
}

impl<'a> Lane<'a> {
    fn new(whole: &'a Whole, decoded: &'a mut Vec<u8>, keep: bool) -> Option<Self> {
        let [stored] = &whole.payload[..] else { return None };
        let Header { codec, raw_len, .. } = whole.header;
        decoded.clear();
        let decoder = match codec {
            Codec::Raw => None,
            // At once: a decoder may take megabytes, and there is to be one of them at a time.
            Codec::Zstd => {
                decode_into(codec, stored, raw_len, decoded).ok()?;
                None
            }
            codec => Some(Decoder::new(codec, raw_len).ok()?),
        };
        let ended = codec == Codec::Zstd;
        Some(Self { whole, stored, checksum: 0, is_raw: codec == Codec::Raw, decoder, ended, decoded, keep, hashed: 0 })
    }

    /// Decodes until [`STEP`] bytes are ready, or all that are left.
    fn decode(&mut self) -> Option<()> {
        while let Some(decoder) = &mut self.decoder
            && self.decoded.len() < self.hashed + STEP
        {
            let before = self.decoded.len();
            let most = self.hashed + STEP - before;
            let used = decoder.update_some(self.stored, most, self.decoded).ok()?;
            self.take(used);
            if used == 0 && self.decoded.len() == before {
                self.ended = true;
                break;
            }
        }
        Some(())
    }

    /// Takes bytes of the payload into the checksum.
    fn take(&mut self, bytes: usize) {
        let (taken, left) = self.stored.split_at(bytes);
        self.checksum = crc32c::crc32c_append(self.checksum, taken);
        self.stored = left;
    }

    /// The next raw bytes.
    fn ready(&self) -> &[u8] {
        if self.is_raw { &self.stored[..self.stored.len().min(STEP)] } else { &self.decoded[self.hashed..] }
    }

    /// Whether all raw bytes that are left are ready.
    fn is_at_end(&self) -> bool {
        self.ended || (self.is_raw && self.stored.len() <= STEP)
    }

    /// So many raw bytes are hashed.
    fn pass(&mut self, bytes: usize) {
        if self.is_raw {
            return self.take(bytes);
        }
        self.hashed += bytes;
        // Not each time: another lane may be slow, and much may lie behind.
        if !self.keep && 2 * self.hashed >= self.decoded.len() {
            self.decoded.drain(..self.hashed);
            self.hashed = 0;
        }
    }

    /// All raw bytes are hashed.
    fn finish(mut self) -> Option<()> {
        self.take(self.stored.len());
        let right = self.checksum == self.whole.checksum;
        let ended = self.decoder.is_none_or(|decoder| decoder.finish().is_ok());
        (right && ended).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Check;
    use super::*;
    use bytes::Bytes;
    use pfr_schema::codec::{encode_document, encode_tensor};
    use pfr_schema::{Digest, Kind};
    use proptest::prelude::*;

    const CODECS: [Codec; 5] = [Codec::Raw, Codec::Zstd, Codec::Bf16Bitmaps, Codec::Bf16Huffman, Codec::Fp8Huffman];

    /// What is wrong with a frame.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fault {
        None,
        Digest,
        Checksum,
        /// A byte of the payload, under the checksum of what it is now.
        Payload(usize),
        /// Bytes that the payload lacks, under its checksum.
        Short(usize),
        /// Bytes behind the payload, under its checksum.
        Long(usize),
    }

    /// Words of few exponents, with runs of zeros and of noise: each has blocks of its own.
    fn bytes(number: usize, len: usize) -> Vec<u8> {
        let part = 1 + 1500 * (number % 9);
        let byte = |at: usize| match (at / part + number) % 4 {
            0 => 0,
            1 => (at as u64 ^ 0x9e37).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0],
            _ if at % 2 == 1 => 0x3f,
            _ => (at.wrapping_mul(31).wrapping_add(number) >> (number % 5)) as u8,
        };
        (0..len).map(byte).collect()
    }

    fn frame(number: usize, len: usize, codec: Codec, fault: Fault) -> Whole {
        let raw = bytes(number, len);
        let (codec, payload) = match codec {
            Codec::Raw => (codec, (&raw).into()),
            Codec::Zstd => encode_document(&raw),
            codec => encode_tensor(codec, &raw),
        };
        let (mut payload, mut digest) = (payload.into_owned(), Digest::sha256(&raw));
        match fault {
            Fault::Digest => digest = Digest::sha256(b"other"),
            Fault::Payload(at) if !payload.is_empty() => {
                let at = at % payload.len();
                payload[at] ^= 0x11;
            }
            Fault::Short(by) => payload.truncate(payload.len().saturating_sub(1 + by)),
            Fault::Long(by) => payload.extend(bytes(7, 1 + by)),
            _ => {}
        }
        let checksum = crc32c::crc32c(&payload) ^ u32::from(fault == Fault::Checksum);
        let header = Header { codec, kind: Kind::Blob, digest, raw_len: len as u64, stored_len: payload.len() as u64 };
        Whole { header, payload: vec![Bytes::from(payload)], checksum, position: 0, raw: None, _permit: None }
    }

    /// Whether a frame is right by itself: by `sha2`, in one go.
    fn alone(whole: &Whole) -> bool {
        let mut check = Check::new(&whole.header, 0).unwrap();
        check.update(&whole.payload[0]).and_then(|()| check.finish(whole.checksum)).is_ok()
    }

    /// Often less than the header of a codec's block: only [`Decoder::finish`] finds such bytes.
    fn bytes_of_fault() -> impl Strategy<Value = usize> {
        prop_oneof![0..4_usize, 0..20_000_usize]
    }

    fn fault() -> impl Strategy<Value = Fault> {
        prop_oneof![
            40 => Just(Fault::None),
            1 => Just(Fault::Digest),
            1 => Just(Fault::Checksum),
            1 => any::<usize>().prop_map(Fault::Payload),
            1 => bytes_of_fault().prop_map(Fault::Short),
            1 => bytes_of_fault().prop_map(Fault::Long),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn a_group_is_right_if_each_frame_is_right_alone_and_gives_its_bytes(
            len in prop_oneof![0..300_usize, 8000..9000_usize, 16_300..16_500_usize, Just(32_768), Just(100_000), Just(180_224)],
            frames in prop::collection::vec((prop::sample::select(CODECS.to_vec()), fault()), 1..20),
            keep: bool
        ) {
            let group: Vec<Whole> = frames.iter().enumerate().map(|(number, (codec, fault))| frame(number, len, *codec, *fault)).collect();
            // Memory that is used again still has what was in it.
            let mut memory = vec![vec![0xA5; 100]; group.len()];
            let found = are_right(&group, memory.iter_mut(), keep);
            prop_assert_eq!(found, group.iter().all(alone));
            if found && keep {
                for (number, (whole, memory)) in group.iter().zip(memory).enumerate() {
                    let encoded = whole.header.codec != Codec::Raw;
                    prop_assert!(memory == if encoded { bytes(number, len) } else { Vec::new() }, "{} of {}", number, group.len());
                }
            }
        }
    }

    #[test]
    fn what_nobody_wants_takes_no_memory_of_whole_pages() {
        for codec in [Codec::Raw, Codec::Bf16Bitmaps] {
            let group: Vec<Whole> = (0..16).map(|number| frame(number, 180_224, codec, Fault::None)).collect();
            let mut memory = vec![Vec::new(); 16];
            assert!(are_right(&group, memory.iter_mut(), false));
            // A block of the codec more, and the room that a vector takes when it grows.
            assert!(memory.iter().all(|memory| memory.capacity() <= 4 * STEP), "{codec:?}");
        }
    }
}
