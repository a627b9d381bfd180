//! A node's children in one column: sorted ids as varint differences.

use super::ObjectId;
use crate::error::{Error, Result};

/// Packs ids; sorts them and drops duplicates.
pub(crate) fn pack(mut ids: Vec<ObjectId>) -> Vec<u8> {
    ids.sort_unstable();
    ids.dedup();
    let mut out = Vec::with_capacity(ids.len() * 2);
    let mut previous = 0;
    for id in ids {
        let mut difference = (id - previous).unsigned_abs();
        while difference >= 0x80 {
            out.push((difference & 0x7f) as u8 | 0x80);
            difference >>= 7;
        }
        out.push(difference as u8);
        previous = id;
    }
    out
}

/// Unpacks ids.
///
/// # Errors
/// [`Error::Internal`]: unknown children are never taken for none.
pub(crate) fn unpack(packed: &[u8]) -> Result<Vec<ObjectId>> {
    let damaged = || Error::Internal("the children of a node cannot be read".into());
    // A list that grows step by step takes longer than the unpacking. Each id has one last byte.
    let mut ids = Vec::with_capacity(packed.iter().filter(|byte| **byte & 0x80 == 0).count());
    let (mut previous, mut difference, mut shift) = (0_i64, 0_u64, 0_u32);
    for byte in packed {
        if shift > 56 {
            return Err(damaged());
        }
        difference |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            previous = i64::try_from(difference).ok().and_then(|d| previous.checked_add(d)).ok_or_else(damaged)?;
            ids.push(previous);
            (difference, shift) = (0, 0);
        }
    }
    if shift == 0 { Ok(ids) } else { Err(damaged()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packing_keeps_every_id_once(ids in proptest::collection::vec(1_i64..1 << 40, 0..200)) {
            let mut expected = ids.clone();
            expected.sort_unstable();
            expected.dedup();
            prop_assert_eq!(unpack(&pack(ids)).expect("just packed"), expected);
        }

        #[test]
        fn damaged_lists_are_refused_or_read_but_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            drop(unpack(&bytes));
        }
    }

    #[test]
    fn a_list_cut_inside_a_number_is_refused() {
        let packed = pack(vec![1, 1 << 20]);
        assert!(unpack(&packed[..packed.len() - 1]).is_err());
    }
}
