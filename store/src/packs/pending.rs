//! Bytes of a pack that were not handed to its storage yet.

use bytes::{Bytes, BytesMut};

/// Shorter pieces are copied together: the checksum of a frame and the header of the next one are
/// one piece, and not two of a few bytes each.
const SHORT: usize = 1 << 10;
/// Bytes of the memory that short pieces share.
const JOINED: usize = 16 << 10;

/// Pieces in their order. Those that are not short are kept as they are, without a copy.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pieces: Vec<Bytes>,
    /// Short pieces, behind all of these.
    joined: BytesMut,
    bytes: usize,
}

impl Pending {
    /// Bytes in all.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Pieces, each of which may hold memory of others.
    #[cfg(test)]
    pub(super) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Adds a piece.
    pub(super) fn push(&mut self, piece: Bytes) {
        if piece.len() < SHORT {
            return self.copy(&piece);
        }
        self.close();
        self.bytes += piece.len();
        self.pieces.push(piece);
    }

    /// Adds a copy of a few bytes.
    pub(super) fn copy(&mut self, few: &[u8]) {
        if self.joined.capacity() - self.joined.len() < few.len() {
            self.close();
            self.joined = BytesMut::with_capacity(JOINED.max(few.len()));
        }
        self.joined.extend_from_slice(few);
        self.bytes += few.len();
    }

    /// Takes the first `count` bytes out, or all if there are fewer.
    pub(super) fn take(&mut self, count: usize) -> Vec<Bytes> {
        self.close();
        let mut pieces = std::mem::take(&mut self.pieces);
        let (mut whole, mut bytes) = (0, 0);
        while let Some(piece) = pieces.get(whole).filter(|piece| bytes + piece.len() <= count) {
            bytes += piece.len();
            whole += 1;
        }
        self.pieces = pieces.split_off(whole);
        if let Some(first) = self.pieces.first_mut().filter(|_| bytes < count) {
            pieces.push(first.split_to(count - bytes));
            bytes = count;
        }
        self.bytes -= bytes;
        pieces
    }

    /// Copies all into memory of their own. A piece may be a small part of the memory that it
    /// holds.
    pub(super) fn copy_out(&mut self) {
        let all = self.take(usize::MAX).concat();
        self.bytes = all.len();
        if !all.is_empty() {
            self.pieces.push(all.into());
        }
    }

    /// Makes one piece of the short ones.
    fn close(&mut self) {
        if !self.joined.is_empty() {
            self.pieces.push(self.joined.split().freeze());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn headers_and_checksums_are_joined_and_payloads_are_not_copied() {
        let payload = Bytes::from(vec![7; 4096]);
        let mut pending = Pending::default();
        for _ in 0..100 {
            pending.copy(&[1; 60]);
            pending.push(payload.clone());
            pending.copy(&[2; 4]);
        }
        assert_eq!(pending.bytes(), 100 * (60 + 4096 + 4));
        let pieces = pending.take(usize::MAX);
        assert_eq!((pieces.len(), pending.bytes()), (201, 0));
        assert!(pieces.iter().skip(1).step_by(2).all(|piece| piece.as_ptr() == payload.as_ptr()));
        assert!(pending.take(usize::MAX).is_empty());
    }

    #[test]
    fn bytes_that_were_copied_out_hold_no_memory_of_others() {
        let mut pending = Pending::default();
        pending.copy_out();
        let memory = Bytes::from(vec![7; 1 << 20]);
        pending.push(memory.slice(..4096));
        pending.copy(&[1; 4]);
        assert!(!memory.is_unique());
        pending.copy_out();
        assert!(memory.is_unique());
        assert_eq!(pending.bytes(), 4100);
        assert_eq!(pending.take(usize::MAX).concat(), [vec![7_u8; 4096], vec![1; 4]].concat());
    }

    proptest! {
        #[test]
        fn the_bytes_come_out_as_they_went_in_wherever_they_are_cut(
            pieces in prop::collection::vec((0..5000_usize, any::<bool>()), 0..60),
            cuts in prop::collection::vec(0..20_000_usize, 1..20),
        ) {
            let (mut pending, mut expected, mut found) = (Pending::default(), Vec::new(), Vec::new());
            let mut cuts = cuts.into_iter().cycle();
            for (number, (length, copied)) in pieces.into_iter().enumerate() {
                let piece = vec![number as u8; length];
                expected.extend_from_slice(&piece);
                if copied { pending.copy(&piece) } else { pending.push(piece.into()) }
                let cut = cuts.next().unwrap_or(0);
                if pending.bytes() >= cut {
                    let taken = pending.take(cut).concat();
                    prop_assert_eq!(taken.len(), cut);
                    found.extend(taken);
                }
            }
            prop_assert_eq!(pending.bytes(), expected.len() - found.len());
            found.extend(pending.take(usize::MAX).concat());
            prop_assert_eq!(found, expected);
        }
    }
}
