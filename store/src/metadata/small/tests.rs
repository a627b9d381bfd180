//! Which packs are merged: bounds, and a day of small pushes.

use super::*;
use crate::metadata::PackState;
use proptest::prelude::*;

const FULL: FullPack = FullPack { bytes: 64 << 20, frames: 32 << 10 };
/// The maximum number of packs that tiers leave.
const LEFT: usize = (FACTOR as usize - 1) * TIERS as usize;

fn pack(id: PackId, bytes: u64, frames: u64) -> PackRow {
    PackRow {
        id,
        key: String::new(),
        state: PackState::Live,
        bytes: bytes + frames * ENTRY + 40,
        frame_bytes: bytes,
        live_bytes: bytes,
        keep_until: 0,
        draining_since: None,
        claimed_until: 0,
    }
}

/// One pack with the live frames of several.
fn merged(id: PackId, packs: &[PackRow]) -> PackRow {
    let frames = packs.iter().map(|pack| (pack.bytes - pack.frame_bytes) / ENTRY).sum();
    pack(id, packs.iter().map(|pack| pack.live_bytes).sum(), frames)
}

fn is_small(pack: &PackRow) -> bool {
    pack.frame_bytes < FULL.bytes / 2 && pack.bytes - pack.frame_bytes < FULL.frames / 2 * ENTRY
}

proptest! {
    #[test]
    fn a_merge_lifts_what_it_copies_and_few_packs_are_left(
        sizes in proptest::collection::vec((8_u32..26, 0_u64..1 << 20, 1_u64..600), 0..300),
    ) {
        let packs = sizes.iter().zip(1..).map(|((log, more, frames), id)| pack(id, (1 << log) + more, *frames));
        let mut small: Vec<PackRow> = packs.filter(is_small).collect();
        small.sort_by_key(|pack| (pack.frame_bytes, pack.id));
        let mut next = 10_000;
        loop {
            let taken = take(&mut small, FULL, 0);
            if taken.is_empty() {
                break;
            }
            prop_assert!(taken.len() >= 3, "{taken:?}");
            let into = merged(next, &taken);
            let of_sources = taken.iter().map(|pack| FULL.tier(FULL.weight(pack))).min();
            if is_small(&into) {
                let lifted = Some(FULL.tier(FULL.weight(&into)));
                prop_assert!(lifted < of_sources || of_sources == Some(TIERS - 1), "{taken:?}");
                small.push(into);
                small.sort_by_key(|pack| (pack.frame_bytes, pack.id));
            } else {
                prop_assert!(into.frame_bytes < FULL.bytes * 3 / 2);
            }
            next += 1;
        }
        prop_assert!(small.len() <= LEFT, "{}", small.len());
        prop_assert!(small.iter().map(|pack| FULL.weight(pack)).sum::<u64>() < FULL.bytes);
    }
}

#[test]
fn small_packs_that_are_a_day_old_become_one_and_one_is_left_alone() {
    let mut packs = vec![pack(1, 1000, 1), pack(2, 3 << 20, 700)];
    assert!(take(&mut packs, FULL, REST_MS - 1).is_empty());
    assert_eq!(packs.len(), 2);
    assert_eq!(take(&mut packs, FULL, REST_MS).len(), 2);
    assert!(take(&mut vec![pack(1, 1000, 1)], FULL, REST_MS).is_empty());
}

#[test]
fn a_pack_that_is_full_of_tiny_frames_is_not_small() {
    // Nine with a third of the frames of a full one: three fill one, whatever their bytes.
    let packs: Vec<PackRow> = (1..10).map(|id| pack(id, 2 << 20, FULL.frames / 3 + 1)).collect();
    let mut small = packs.clone();
    let taken = take(&mut small, FULL, 0);
    assert_eq!((taken.len(), small.len()), (3, 6));
    assert!(!is_small(&merged(10, &taken)));
}

/// The result of a hundred thousand small pushes.
struct Day {
    /// Packs at the end, and what they would be if each was full.
    packs: usize,
    ideal: usize,
    /// The most small packs after a run.
    most_small: usize,
    /// Bytes written for each byte pushed, the push itself included.
    written: f64,
}

/// A hundred thousand pushes of 4 to 364 KiB, by the seventh power of a random number: 49 KiB on
/// average. Small ones are by far the most.
fn day(pushes_between_runs: usize) -> Day {
    let mut random = 1_u64;
    let mut size = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let share = (random >> 11) as f64 / (1_u64 << 53) as f64;
        (4 << 10) + (share.powi(7) * f64::from(360 << 10)) as u64
    };
    let (mut small, mut pushed, mut copied, mut full, mut most_small) = (Vec::new(), 0, 0, 0, 0);
    for push in 0..100_000 {
        let bytes = size();
        pushed += bytes;
        small.push(pack(push, bytes, bytes / 4096 + 3));
        if !((push + 1) as usize).is_multiple_of(pushes_between_runs) {
            continue;
        }
        small.sort_by_key(|pack| (pack.frame_bytes, pack.id));
        let mut written = Vec::new();
        loop {
            let taken = take(&mut small, FULL, 0);
            if taken.is_empty() {
                break;
            }
            let into = merged(push, &taken);
            copied += into.frame_bytes;
            if is_small(&into) { written.push(into) } else { full += 1 }
        }
        // The next run finds what this one wrote.
        small.append(&mut written);
        most_small = most_small.max(small.len());
    }
    let ideal = pushed.div_ceil(FULL.bytes) as usize + 1;
    Day { packs: full + small.len(), ideal, most_small, written: (pushed + copied) as f64 / pushed as f64 }
}

/// The numbers of docs/decisions/0031: run with `--nocapture`, and with another `FACTOR` and
/// `TIERS`.
#[test]
fn a_day_of_small_pushes_leaves_at_most_twice_the_packs_that_are_needed() {
    for (pushes_between_runs, most_written) in [(1, 5.0), (10, 4.0), (100, 3.5), (1000, 2.5)] {
        let Day { packs, ideal, most_small, written } = day(pushes_between_runs);
        println!("{pushes_between_runs}: {packs} packs, ideal {ideal}, at most {most_small} small, {written:.2} bytes written a byte");
        assert!(packs <= 2 * ideal, "{packs} packs where {ideal} would do");
        assert!(written <= most_written, "{written}");
        assert!(most_small <= LEFT + 1, "{most_small}");
    }
}
