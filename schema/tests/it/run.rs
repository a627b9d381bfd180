use crate::common::{Random, assert_refused, cases, digest, mutate};
use pfr_schema::ErrorCode::{InvalidDocument, TooLarge};
use pfr_schema::run::{MAX_PAGES, MIN_PAGES, Run, cut};
use pfr_schema::{Algorithm, Digest, Limits};
use proptest::prelude::*;

fn unmarked(number: u64) -> Digest {
    let mut raw = [1; 32];
    raw[..8].copy_from_slice(&number.to_le_bytes());
    Digest::from_bytes(Algorithm::Sha256, &raw).unwrap()
}

fn marked(number: u64) -> Digest {
    let mut raw = *unmarked(number).as_bytes().first_chunk::<32>().unwrap();
    raw[31] = 0;
    Digest::from_bytes(Algorithm::Sha256, &raw).unwrap()
}

/// The runs of a list of pages, as slices.
fn runs(pages: &[Digest]) -> Vec<&[Digest]> {
    let mut rest = pages;
    cut(pages)
        .into_iter()
        .map(|length| {
            let (run, after) = rest.split_at(length);
            rest = after;
            run
        })
        .collect()
}

/// Runs of `after` that `before` does not have.
fn rewritten(before: &[Digest], after: &[Digest]) -> usize {
    let known: std::collections::HashSet<_> = runs(before).into_iter().collect();
    runs(after).into_iter().filter(|run| !known.contains(run)).count()
}

#[test]
fn no_pages_make_no_runs() {
    assert_eq!(cut(&[]), [] as [usize; 0]);
}

#[test]
fn a_mark_ends_a_run_only_from_the_64th_page_on() {
    let mut pages: Vec<_> = (0..200).map(unmarked).collect();
    assert_eq!(cut(&pages), [200]);
    pages[62] = marked(62);
    assert_eq!(cut(&pages), [200], "the 63rd page is too early");
    pages[63] = marked(63);
    assert_eq!(cut(&pages), [64, 136]);
    pages[199] = marked(199);
    assert_eq!(cut(&pages), [64, 136], "a mark on the last page leaves no empty run");
}

#[test]
fn a_run_without_marks_ends_at_1024_pages() {
    let pages: Vec<_> = (0..2049).map(unmarked).collect();
    assert_eq!(cut(&pages[..1024]), [1024]);
    assert_eq!(cut(&pages), [1024, 1024, 1]);
}

#[test]
fn pages_that_are_all_marked_make_runs_of_64() {
    let pages: Vec<_> = (0..130).map(marked).collect();
    assert_eq!(cut(&pages), [64, 64, 2]);
}

#[test]
fn every_refusal_of_a_run_names_the_byte() {
    let limits = Limits::default();
    let run = Run::new(2, 4096, vec![digest("a"), digest("b"), digest("c"), digest("d")]).unwrap();
    let good = run.to_bytes();
    assert_eq!(good.len(), 20 + 4 * 32);
    let with = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        bad
    };
    let table: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "page run: at byte 0: expected a header that starts with PFRN, found 0 bytes that start with []"),
        (
            "magic",
            with(0, b"QF"),
            "page run: at byte 0: expected a header that starts with PFRN, found 148 bytes that start with [51, 46, 52, 4e]",
        ),
        (
            "short header",
            good[..19].to_vec(),
            "page run: at byte 0: expected a header that starts with PFRN, found 19 bytes that start with [50, 46, 52, 4e]",
        ),
        ("version", with(4, &[2]), "page run: at byte 4: expected version 1, found 2"),
        ("algorithm", with(5, &[9]), "page run: at byte 5: expected a known digest algorithm, found 9"),
        (
            "wider digests",
            with(5, &[3]),
            "page run: at byte 16: expected as many digests as the header says, found 2 pages, 128 bytes of digests",
        ),
        (
            "no components",
            with(6, &[0]),
            "page run: at byte 16: expected as many digests as the header says, found 2 pages, 128 bytes of digests",
        ),
        (
            "components",
            with(6, &[4]),
            "page run: at byte 16: expected as many digests as the header says, found 2 pages, 128 bytes of digests",
        ),
        ("reserved", with(7, &[1]), "page run: at byte 7: expected 0, found 1"),
        ("no bytes", with(8, &[0; 8]), "page run: at byte 8: expected a positive number of bytes, found 0"),
        (
            "more pages",
            with(16, &[3]),
            "page run: at byte 16: expected as many digests as the header says, found 3 pages, 128 bytes of digests",
        ),
        (
            "4 billion pages",
            with(16, &[255; 4]),
            "page run: at byte 16: expected as many digests as the header says, found 4294967295 pages, 128 bytes of digests",
        ),
        (
            "cut",
            good[..147].to_vec(),
            "page run: at byte 16: expected as many digests as the header says, found 2 pages, 127 bytes of digests",
        ),
        (
            "trailing byte",
            [&good[..], &[0]].concat(),
            "page run: at byte 16: expected as many digests as the header says, found 2 pages, 129 bytes of digests",
        ),
        ("no pages", with(16, &[0])[..20].to_vec(), "page run: at byte 16: expected 1 to 1024 whole pages, found 0 digests"),
    ];
    for (what, bytes, message) in table {
        assert_refused(what, Run::parse(&bytes, &limits), message, InvalidDocument);
    }
    let huge = with(8, &[255; 8]);
    assert_refused(
        "huge page",
        Run::parse(&huge, &limits),
        "a page in bytes is too large: 18446744073709551615, the limit is 268435456",
        TooLarge,
    );
}

#[test]
fn three_components_are_refused_even_where_the_lengths_add_up() {
    let mut bytes = Run::new(1, 10, vec![digest("a"), digest("b"), digest("c")]).unwrap().to_bytes();
    bytes[6] = 3;
    bytes[16] = 1;
    assert_refused(
        "three",
        Run::parse(&bytes, &Limits::default()),
        "page run: at byte 6: expected 1 or 2 components, found 3",
        InvalidDocument,
    );
}

#[test]
fn a_run_that_could_not_be_read_back_cannot_be_made() {
    let digests = |count: usize| Random(1).digests(count);
    assert!(Run::new(2, 1, digests(2 * MAX_PAGES)).is_ok());
    for (what, result) in [
        ("too many pages", Run::new(2, 1, digests(2 * MAX_PAGES + 2))),
        ("half a page", Run::new(2, 1, digests(3))),
        ("no pages", Run::new(2, 1, vec![])),
        ("no components", Run::new(0, 1, digests(2))),
        ("three components", Run::new(3, 1, digests(3))),
        ("empty pages", Run::new(2, 0, digests(2))),
        ("mixed algorithms", Run::new(1, 1, vec![digest("a"), Digest::of(Algorithm::Blake3, b"b")])),
    ] {
        assert_eq!(result.unwrap_err().code(), InvalidDocument, "{what}");
    }
}

/// What appending and replacing guarantee, always.
#[test]
fn appending_rewrites_the_last_run_only_and_replacing_an_unmarked_page_one_run_only() {
    let mut random = Random(7);
    for _ in 0..100 {
        let count = 1 + random.below(4000);
        let pages = random.digests(count);
        let mut longer = pages.clone();
        longer.push(random.digest());
        assert_eq!(rewritten(&pages, &longer), 1);

        let mut replaced = pages.clone();
        let at = random.below(count);
        let is_marked = |d: &Digest| d.as_bytes()[31] == 0;
        replaced[at] = unmarked(random.next());
        if !is_marked(&pages[at]) {
            assert_eq!(rewritten(&pages, &replaced), 1);
            assert_eq!(cut(&pages), cut(&replaced));
        }
    }
}

/// What a single edit in the middle costs. There is no bound for every list: an edit shifts what
/// follows until a mark ends a run both before and after it, and a list without marks has none. For
/// digests as hashes give them this is how it comes out; the figures are in `docs/formats.md`.
#[test]
fn a_single_edit_in_the_middle_rewrites_few_runs_of_a_hashed_list() {
    let mut random = Random(42);
    let mut histogram = [0_u32; 32];
    let trials = 600;
    for trial in 0..trials {
        let pages = random.digests(5000);
        let at = random.below(pages.len());
        let mut edited = pages.clone();
        match trial % 3 {
            0 => edited[at] = random.digest(),
            1 => edited.insert(at, random.digest()),
            _ => drop(edited.remove(at)),
        }
        histogram[rewritten(&pages, &edited).min(31)] += 1;
    }
    let at_most = |n: usize| histogram[..=n].iter().sum::<u32>();
    assert!(at_most(1) * 100 >= trials * 90, "{histogram:?}");
    assert!(at_most(3) * 100 >= trials * 99, "{histogram:?}");
    assert_eq!(at_most(8), trials, "{histogram:?}");
}

/// The opposite case. It shows that there is no bound for every list.
#[test]
fn an_insertion_into_a_list_without_marks_shifts_every_later_run() {
    let pages: Vec<_> = (0..10_000).map(unmarked).collect();
    let mut edited = pages.clone();
    edited.insert(0, unmarked(1 << 40));
    assert_eq!(rewritten(&pages, &edited), runs(&edited).len());
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn runs_add_up_and_stay_within_their_bounds(seed in any::<u64>(), count in 0_usize..6000, one_in in 1_usize..600) {
        let mut random = Random(seed);
        let pages: Vec<_> = (0..count as u64).map(|n| if random.below(one_in) == 0 { marked(n) } else { unmarked(n) }).collect();
        let lengths = cut(&pages);
        prop_assert_eq!(lengths.iter().sum::<usize>(), count);
        if let Some((last, others)) = lengths.split_last() {
            prop_assert!(others.iter().all(|l| (MIN_PAGES..=MAX_PAGES).contains(l)));
            prop_assert!((1..=MAX_PAGES).contains(last));
        }
    }

    /// History independence: only the pages decide, so runs before an edit stay, and from the first
    /// cut that both lists share on everything is the same again.
    #[test]
    fn an_edit_leaves_what_is_before_it_and_what_follows_a_shared_cut(
        seed in any::<u64>(), count in 1_usize..5000, one_in in 50_usize..400, kind in 0..3
    ) {
        let mut random = Random(seed);
        let pages: Vec<_> = (0..count as u64).map(|n| if random.below(one_in) == 0 { marked(n) } else { unmarked(n) }).collect();
        let at = random.below(count);
        let new = if random.below(3) == 0 { marked(1 << 40) } else { unmarked(1 << 40) };
        let mut edited = pages.clone();
        match kind {
            0 => edited[at] = new,
            1 => edited.insert(at, new),
            _ => drop(edited.remove(at)),
        }
        // Cuts, counted from the end, so that they compare behind the edit.
        let ends = |list: &[Digest]| -> Vec<usize> {
            cut(list).iter().scan(0, |sum, length| { *sum += length; Some(*sum) }).collect()
        };
        let (before, after) = (ends(&pages), ends(&edited));
        let untouched = |list: &[usize]| list.iter().copied().filter(|end| *end <= at).collect::<Vec<_>>();
        prop_assert_eq!(untouched(&before), untouched(&after));
        let from_end = |list: &[usize], total: usize| -> Vec<usize> {
            list.iter().filter(|end| **end > at + 1).map(|end| total - end).collect()
        };
        let (before, after) = (from_end(&before, pages.len()), from_end(&after, edited.len()));
        if let Some(shared) = before.iter().find(|end| after.contains(end)) {
            let rest = |list: &[usize]| list.iter().copied().filter(|end| end <= shared).collect::<Vec<_>>();
            prop_assert_eq!(rest(&before), rest(&after));
        }
    }

    #[test]
    fn a_run_is_read_back_as_it_was_written(
        seed in any::<u64>(), pages in 1_usize..=MAX_PAGES, components in 1_u8..=2, which in 0_usize..3, page_bytes in 1_u64..=256 << 20
    ) {
        let algorithm = Algorithm::ALL[which];
        let mut random = Random(seed);
        let digests: Vec<_> = (0..pages * usize::from(components))
            .map(|_| Digest::from_bytes(algorithm, &random.bytes(algorithm.len())).unwrap())
            .collect();
        let run = Run::new(components, page_bytes, digests).unwrap();
        let bytes = run.to_bytes();
        prop_assert_eq!(&Run::parse(&bytes, &Limits::default()).unwrap(), &run);
        for _ in 0..20 {
            let bad = mutate(&bytes, &mut random);
            if let Ok(run) = Run::parse(&bad, &Limits::default()) {
                prop_assert_eq!(run.to_bytes(), bad);
            }
        }
    }
}
