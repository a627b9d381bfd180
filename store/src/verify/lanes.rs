//! Frames of one length whose raw bytes nobody wants: decoded and hashed side by side, a few blocks
//! of each at a time.
//!
//! What is decoded stays in the nearest cache of the core until it is hashed, and is written to no
//! memory behind it. Whole pages of all lanes would not fit there.

use super::Whole;
use pfr_schema::codec::{Codec, Decoder};
use pfr_schema::digest::SideBySide;

/// Raw bytes of each lane that are decoded, and then hashed, at a time. A lane may have a block of
/// its codec more.
const STEP: usize = 16 << 10;

/// Memory for the decoded bytes of lanes that is used again.
#[derive(Default)]
pub(super) struct Memory(Vec<Vec<u8>>);

/// Whether each frame of a group is right. All are of one raw length, and have their payload in one
/// piece. `false` says nothing about the reason, nor which of them is wrong.
pub(super) fn are_right(group: &[Whole], memory: &mut Memory) -> bool {
    memory.0.resize_with(memory.0.len().max(group.len()), Vec::new);
    let lanes = group.iter().zip(&mut memory.0).map(|(whole, decoded)| Lane::new(whole, decoded));
    lanes.collect::<Option<Vec<Lane>>>().and_then(|lanes| hash(group, lanes)).is_some()
}

fn hash(group: &[Whole], mut lanes: Vec<Lane<'_>>) -> Option<()> {
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
    decoder: Option<Decoder>,
    /// Nothing more will be decoded.
    ended: bool,
    /// What was decoded and not hashed.
    decoded: &'a mut Vec<u8>,
}

impl<'a> Lane<'a> {
    fn new(whole: &'a Whole, decoded: &'a mut Vec<u8>) -> Option<Self> {
        let [stored] = &whole.payload[..] else { return None };
        let decoder = match whole.header.codec {
            Codec::Raw => None,
            codec => Some(Decoder::new(codec, whole.header.raw_len).ok()?),
        };
        decoded.clear();
        Some(Self { whole, stored, checksum: 0, decoder, ended: false, decoded })
    }

    /// Decodes until [`STEP`] bytes are ready, or all that are left.
    fn decode(&mut self) -> Option<()> {
        while let Some(decoder) = &mut self.decoder
            && self.decoded.len() < STEP
        {
            let (before, most) = (self.decoded.len(), STEP - self.decoded.len());
            let used = decoder.update_some(self.stored, most, &mut |raw| self.decoded.extend_from_slice(raw)).ok()?;
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
        match &self.decoder {
            Some(_) => self.decoded,
            None => &self.stored[..self.stored.len().min(STEP)],
        }
    }

    /// Whether all raw bytes that are left are ready.
    fn is_at_end(&self) -> bool {
        self.ended || (self.decoder.is_none() && self.stored.len() <= STEP)
    }

    /// So many raw bytes are hashed.
    fn pass(&mut self, bytes: usize) {
        match &self.decoder {
            Some(_) => drop(self.decoded.drain(..bytes)),
            None => self.take(bytes),
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
