//! Whether a state tensor that is converted or cut shares bytes with another state of its group.

use crate::engines::Group;
use crate::error::{Error, Result};
use crate::memory::{Location, PageMemory};
use pfr_schema::ErrorCode;
use pfr_schema::engine::{Part, State};
use std::sync::Arc;

/// Where the blocks of a state lie on this machine. An engine may describe one memory under two
/// names, so names say nothing.
struct Extent<'a> {
    location: Location,
    is_located: bool,
    mapping: *const (),
    part: &'a Part,
}

impl<'a> Extent<'a> {
    fn of(group: &Group, state: &'a State) -> Self {
        let (memory, _) = group.state(state, 0);
        Self::new(&memory, &state.part)
    }

    fn new(memory: &Arc<dyn PageMemory>, part: &'a Part) -> Self {
        Self { location: memory.location(), is_located: memory.is_located(), mapping: Arc::as_ptr(memory).cast(), part }
    }
}

/// Refuses a state that shares bytes with another one: a state that is made anew has zeros
/// between its elements.
pub(super) fn alone(group: &Group, state: &State, rank: u32) -> Result<()> {
    let (one, blocks) = (Extent::of(group, state), group.layout.blocks);
    let mut others = group.layout.states.iter().filter(|other| other.name != state.name);
    let Some(other) = others.find(|other| shares(&one, &Extent::of(group, other), blocks)) else { return Ok(()) };
    let what = format!("state {:?} of rank {rank}: layout", state.name);
    let expected = format!("that of the snapshot, because it shares bytes with state {:?},", other.name);
    Err(Error::mismatch(ErrorCode::GeometryMismatch, what, expected, "another one"))
}

/// Whether any block of one state has bytes in common with any block of the other: blocks belong to
/// different sequences. Parts of different strides count as sharing if the ranges of all their
/// blocks meet, and two mappings on one device if it is unknown where they lie.
fn shares(one: &Extent<'_>, two: &Extent<'_>, blocks: u32) -> bool {
    if one.location.object != two.location.object {
        return false;
    }
    if one.mapping != two.mapping && !(one.is_located && two.is_located) {
        return true;
    }
    let at = |extent: &Extent<'_>| i128::from(extent.location.offset) + i128::from(extent.part.offset);
    let (last, distance) = (i128::from(blocks.saturating_sub(1)), at(two) - at(one));
    let (one_bytes, two_bytes) = (i128::from(one.part.bytes), i128::from(two.part.bytes));
    let (one_stride, two_stride) = (i128::from(one.part.block_stride), i128::from(two.part.block_stride));
    if one_stride != two_stride || one_stride == 0 {
        return distance < last * one_stride + one_bytes && -distance < last * two_stride + two_bytes;
    }
    // Blocks k apart meet if -two_bytes < distance + k * stride < one_bytes.
    let least = (-two_bytes - distance).div_euclid(one_stride) + 1;
    let most = (one_bytes - distance - 1).div_euclid(one_stride);
    least.max(-last) <= most.min(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Available, HostMemory, Object, Ring, ShmMemory};
    use std::os::fd::OwnedFd;

    fn part(offset: u64, block_stride: u64, bytes: u64) -> Part {
        Part { memory: "kv".into(), offset, block_stride, bytes, share: None }
    }

    #[test]
    fn parts_share_bytes_if_any_of_their_blocks_do() {
        let memory: Arc<dyn PageMemory> = Arc::new(HostMemory::new(Vec::new(), Ring::new(4096), Available::system()));
        let shares = |one: &Part, two: &Part, blocks| shares(&Extent::new(&memory, one), &Extent::new(&memory, two), blocks);
        let conv = part(0, 200, 100);
        assert!(!shares(&conv, &part(100, 200, 100), 8), "beside it, in each block");
        assert!(shares(&conv, &part(99, 200, 1), 8) && shares(&part(99, 200, 1), &conv, 8), "its last byte");
        assert!(!shares(&conv, &part(1600, 200, 100), 8), "behind all of its blocks");
        assert!(shares(&part(0, 200, 180), &part(350, 200, 30), 8), "the second block of one, the first of the other");
        assert!(!shares(&part(0, 200, 180), &part(350, 200, 30), 1), "there is no second block");
        assert!(!shares(&part(0, 200, 150), &part(350, 200, 50), 8), "in the gaps");
        assert!(shares(&conv, &part(150, 100, 50), 2), "in the second block");
        assert!(!shares(&conv, &part(150, 100, 50), 1), "there is no second block");
    }

    #[test]
    fn two_names_of_one_memory_are_one() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(8192).expect("its length");
        let map = |offset| {
            let fd: OwnedFd = file.try_clone().expect("a descriptor").into();
            ShmMemory::map(fd, offset, 4096, Ring::new(4096), Available::system()).expect("a mapping")
        };
        let (one, two, later) = (map(0), map(0), map(512));
        let meet = |one: (&Arc<dyn PageMemory>, Part), two: (&Arc<dyn PageMemory>, Part)| {
            shares(&Extent::new(one.0, &one.1), &Extent::new(two.0, &two.1), 4)
        };
        assert!(meet((&one, part(600, 100, 50)), (&two, part(600, 100, 50))), "another mapping");
        assert!(meet((&one, part(600, 100, 50)), (&later, part(88, 100, 50))), "a mapping that begins later");
        assert!(!meet((&one, part(600, 100, 50)), (&later, part(138, 100, 50))), "beside it");
        let other: Arc<dyn PageMemory> = Arc::new(HostMemory::new(Vec::new(), Ring::new(4096), Available::system()));
        assert!(!meet((&one, part(600, 100, 50)), (&other, part(600, 100, 50))), "another memory");
    }

    #[test]
    fn imports_of_one_device_count_as_sharing() {
        let part = part(0, 100, 50);
        let (a, b) = (0_u8, 0_u8);
        let import = |mapping: &u8, offset, is_located| Extent {
            location: Location { object: Object::Gpu(0), offset },
            is_located,
            mapping: std::ptr::from_ref(mapping).cast(),
            part: &part,
        };
        assert!(shares(&import(&a, 0, false), &import(&b, 1 << 20, false), 4), "two addresses, perhaps of the same bytes");
        assert!(!shares(&import(&a, 0, false), &import(&a, 1 << 20, false), 4), "one mapping");
        assert!(!shares(&import(&a, 0, true), &import(&b, 1 << 20, true), 4), "two allocations");
    }
}
