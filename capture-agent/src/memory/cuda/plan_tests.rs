use super::*;
use proptest::prelude::*;

fn page(spans: &[(u64, u64)]) -> Page {
    Page { spans: spans.iter().map(|&(offset, bytes)| Span { offset, bytes }).collect() }
}

#[test]
fn spans_beyond_the_memory_are_refused_however_they_wrap() {
    check(100, [page(&[(0, 100), (100, 0), (99, 1)])].iter()).unwrap();
    for spans in [[(0, 101)], [(100, 1)], [(u64::MAX, 1)], [(1, u64::MAX)], [(101, 0)]] {
        assert!(matches!(check(100, [page(&spans)].iter()), Err(MemoryError::OutOfBounds { size: 100, .. })), "{spans:?}");
    }
    assert!(check(u64::MAX, [page(&[(0, u64::MAX), (0, u64::MAX)])].iter()).is_err(), "more bytes than can be counted");
}

#[test]
fn neighbours_become_one_run() {
    let spans = page(&[(10, 5), (15, 0), (15, 5), (40, 2), (0, 10)]).spans;
    let run = |at, bytes, to| Run { at, bytes, to };
    assert_eq!(runs(spans.into_iter()), [run(10, 10, 0), run(40, 2, 10), run(0, 10, 12)]);
}

#[test]
fn room_is_judged_before_anything_is_begun() {
    preflight(1 << 20, RESERVE + 10, 10, 1 << 20).unwrap();
    assert!(matches!(preflight(1 << 20, RESERVE + 10, 11, 1), Err(MemoryError::NoRoom { what: "GPU memory", .. })));
    assert!(matches!(preflight(1 << 20, u64::MAX, 0, (1 << 20) + 1), Err(MemoryError::NoRoom { what: "ring", .. })));
    assert!(matches!(preflight(1, u64::MAX - 1, u64::MAX, 1), Err(MemoryError::NoRoom { .. })), "no wrapping");
    assert!(matches!(preflight(1, RESERVE - 1, 0, 1), Err(MemoryError::NoRoom { .. })), "tables and stages need room, too");
}

#[test]
fn grids_fit_the_launch_bounds_and_cover_every_page() {
    for pages in [1, 31, 1000, 1056, 38_619, 1 << 24, u32::MAX] {
        let (blocks, threads) = sha256_grid(pages, 132);
        assert!((1..=128).contains(&threads) && blocks <= i32::MAX as u32);
        assert!(u64::from(blocks) * u64::from(threads) >= u64::from(pages));
    }
}

proptest! {
    /// However runs are cut and grouped, every byte of every span is copied once, to its place.
    #[test]
    fn every_byte_goes_to_its_place(spans in proptest::collection::vec((0u64..500, 0u64..300), 0..40), limit in 1u64..100) {
        let page = page(&spans);
        let wanted: Vec<u64> = page.spans.iter().flat_map(|span| span.offset..span.offset + span.bytes).collect();
        let runs = runs(page.spans.iter().copied());
        let pieces: Vec<Run> = cut(&runs, limit).collect();
        prop_assert!(pieces.iter().all(|piece| piece.bytes > 0 && piece.bytes <= limit));
        let mut found = Vec::new();
        for stage in stages(&pieces) {
            prop_assert_eq!(stage[0].to, found.len() as u64);
            for piece in stage {
                prop_assert_eq!(piece.to, found.len() as u64);
                found.extend(piece.at..piece.at + piece.bytes);
            }
        }
        prop_assert_eq!(found, wanted);
    }

    /// Groups keep to both limits.
    #[test]
    fn stages_keep_to_their_limits(lengths in proptest::collection::vec(1u64..PIECE + 1, 0..600), many in any::<bool>()) {
        let mut to = 0;
        let mut pieces = Vec::new();
        for bytes in lengths.iter().cycle().take(if many { 40_000.min(lengths.len() * 100) } else { lengths.len() }) {
            pieces.push(Run { at: to * 2, bytes: *bytes, to });
            to += bytes;
        }
        let groups = stages(&pieces);
        prop_assert_eq!(groups.iter().map(|group| group.len()).sum::<usize>(), pieces.len());
        for group in groups {
            prop_assert!(!group.is_empty() && group.len() <= STAGE_RUNS && group.iter().map(|piece| piece.bytes).sum::<u64>() <= STAGE);
        }
    }

    /// A batch has a page, and more only within the limit.
    #[test]
    fn batches_make_progress(lengths in proptest::collection::vec(0u64..1000, 1..50), limit in 0u64..5000) {
        let (count, total) = batch(lengths.iter().copied(), limit);
        prop_assert!(count >= 1 && total == lengths[..count].iter().sum::<u64>() && (count == 1 || total <= limit));
        prop_assert!(count == lengths.len() || total + lengths[count] > limit);
    }
}
