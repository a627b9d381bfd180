//! One behaviour for every kind of memory that this machine has.

use bytes::Bytes;
use pfr_agent::memory::{Available, HostMemory, MemoryError, Page, PageMemory, Ring, ShmMemory, Span};
use pfr_schema::{Algorithm, Digest};
use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;

fn memfd(bytes: &[u8]) -> OwnedFd {
    let fd = rustix::fs::memfd_create("pf-memory-test", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes.len() as u64).unwrap();
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&fd, &bytes[at..], at as u64).unwrap();
    }
    fd
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect()
}

fn page(spans: &[(u64, u64)]) -> Page {
    Page { spans: spans.iter().map(|(offset, bytes)| Span { offset: *offset, bytes: *bytes }).collect() }
}

fn plenty() -> Available {
    Available::new(|| u64::MAX)
}

/// Every kind of memory over the same bytes.
fn kinds(bytes: &[u8], ring: &Ring, available: &Available) -> Vec<(&'static str, Arc<dyn PageMemory>)> {
    let mut shifted = vec![0xAA; 4096 + 100];
    shifted.extend_from_slice(bytes);
    let size = bytes.len() as u64;
    vec![
        ("host", Arc::new(HostMemory::new(bytes.to_vec(), ring.clone(), available.clone()))),
        ("shm", ShmMemory::map(memfd(bytes), 0, size, ring.clone(), available.clone()).unwrap()),
        ("shm at an offset", ShmMemory::map(memfd(&shifted), 4096 + 100, size, ring.clone(), available.clone()).unwrap()),
    ]
}

fn read(memory: &dyn PageMemory, pages: &[Page]) -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    let mut take = |at: usize, bytes: Bytes| {
        assert_eq!(at, out.len(), "in order");
        out.push(bytes.to_vec());
        true
    };
    memory.read(pages, &mut take).unwrap();
    out
}

fn expected(bytes: &[u8], page: &Page) -> Vec<u8> {
    page.spans.iter().flat_map(|span| bytes[span.offset as usize..(span.offset + span.bytes) as usize].to_vec()).collect()
}

#[test]
fn pages_are_hashed_read_set_aside_and_written() {
    let bytes = content(100_000);
    let pages = vec![page(&[(0, 10)]), page(&[(500, 70_000), (3, 1), (99_999, 1)]), page(&[]), page(&[(0, 100_000)])];
    let wanted: Vec<Vec<u8>> = pages.iter().map(|page| expected(&bytes, page)).collect();
    for (kind, memory) in kinds(&bytes, &Ring::new(1 << 20), &plenty()) {
        assert_eq!(memory.size(), 100_000, "{kind}");
        for algorithm in [Algorithm::Sha256, Algorithm::Blake3] {
            let digests: Vec<Digest> = wanted.iter().map(|bytes| Digest::of(algorithm, bytes)).collect();
            assert_eq!(memory.hash(algorithm, &pages).unwrap(), digests, "{kind}");
        }
        assert_eq!(read(&*memory, &pages), wanted, "{kind}");

        let aside = memory.set_aside(&pages).unwrap();
        let (first, second) = (page(&[(10, 70_002)]), page(&[(70_012, 100_000)]));
        memory.write(&[(page(&[(500, 3), (40, 2)]), Bytes::from_static(b"abcde"))], None).unwrap();
        assert_eq!(
            read(&*memory, &[page(&[(499, 5), (40, 2)])])[0],
            [&bytes[499..500], b"abc", &bytes[503..504], b"de"].concat(),
            "{kind}"
        );
        assert_eq!(read(&*aside, &[first, second]), [wanted[1].clone(), wanted[3].clone()], "{kind}: the copy is its own");
    }
}

#[test]
fn many_pages_are_hashed_on_several_threads_in_order() {
    let bytes = content(24 << 20);
    let pages: Vec<Page> = (0..3000_u64).map(|i| page(&[(i * 8000, 8000)])).collect();
    for (kind, memory) in kinds(&bytes, &Ring::new(1 << 20), &plenty()) {
        let digests = memory.hash(Algorithm::Sha256, &pages).unwrap();
        for (page, digest) in pages.iter().zip(&digests) {
            assert_eq!(Digest::sha256(&expected(&bytes, page)), *digest, "{kind} {page:?}");
        }
        assert_eq!(digests.len(), 3000);
    }
}

#[test]
fn pages_of_one_length_beside_others_are_hashed_in_order() {
    let bytes = content(4 << 20);
    let alike = |count: u64, length: u64| (0..count).map(move |i| page(&[(i * 1000, length / 3), (i * 77, length - length / 3)]));
    let mut pages: Vec<Page> = alike(5, 70_000).chain(alike(3, 10)).chain(alike(4, 0)).chain(alike(9, 64)).collect();
    pages.extend(alike(4, 1 << 20).chain(alike(5, (1 << 20) + 1)).chain(alike(4, 100_000)).chain(alike(1, 5)));
    for (kind, memory) in kinds(&bytes, &Ring::new(4 << 20), &plenty()) {
        for algorithm in [Algorithm::Sha256, Algorithm::Blake3] {
            let wanted: Vec<Digest> = pages.iter().map(|page| Digest::of(algorithm, &expected(&bytes, page))).collect();
            assert_eq!(memory.hash(algorithm, &pages).unwrap(), wanted, "{kind}");
        }
    }
}

#[test]
fn a_span_outside_of_the_memory_touches_nothing() {
    let bytes = content(1000);
    for (kind, memory) in kinds(&bytes, &Ring::new(1 << 20), &plenty()) {
        for bad in [page(&[(0, 1001)]), page(&[(1000, 1)]), page(&[(u64::MAX, 2)]), page(&[(0, 1), (999, 2)])] {
            let pages = [page(&[(0, 4)]), bad.clone()];
            let refused =
                |result: Result<(), MemoryError>| assert!(matches!(result, Err(MemoryError::OutOfBounds { .. })), "{kind} {bad:?}");
            refused(memory.hash(Algorithm::Sha256, &pages).map(drop));
            refused(memory.read(&pages, &mut |_, _| panic!("delivered")));
            refused(memory.set_aside(&pages).map(drop));
            let zeros = Bytes::from(vec![0; bad.bytes().min(2000) as usize]);
            refused(memory.write(&[(page(&[(0, 4)]), Bytes::from_static(&[0; 4])), (bad.clone(), zeros)], None));
        }
        refused_length(&*memory);
        assert_eq!(read(&*memory, &[page(&[(0, 1000)])])[0], bytes, "{kind}");
    }
}

fn refused_length(memory: &dyn PageMemory) {
    assert!(memory.write(&[(page(&[(0, 4)]), Bytes::from_static(&[0; 3]))], None).is_err());
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_begun() {
    let bytes = content(1000);
    for (kind, memory) in kinds(&bytes, &Ring::new(100), &Available::new(|| 500)) {
        memory.preflight(500, 100).unwrap();
        assert!(matches!(memory.preflight(501, 100), Err(MemoryError::NoRoom { what: "host memory", needed: 501, free: 500 })), "{kind}");
        assert!(matches!(memory.preflight(0, 101), Err(MemoryError::NoRoom { what: "ring", needed: 101, free: 100 })), "{kind}");
        assert!(matches!(memory.set_aside(&[page(&[(0, 501)])]), Err(MemoryError::NoRoom { .. })), "{kind}");
        let read = memory.read(&[page(&[(0, 101)])], &mut |_, _| panic!("delivered"));
        assert!(matches!(read, Err(MemoryError::NoRoom { .. })), "{kind}");
    }
    assert!((1 << 20..1 << 60).contains(&Available::system().bytes()), "{:?}", Available::system());
}

#[test]
fn reading_stops_without_a_receiver_and_never_holds_more_than_the_ring() {
    let (bytes, ring) = (content(1000), Ring::new(100));
    let pages: Vec<Page> = (0..100_u64).map(|i| page(&[(i * 10, 10)])).collect();
    for (kind, memory) in kinds(&bytes, &ring, &plenty()) {
        let (tell, told) = std::sync::mpsc::sync_channel::<Bytes>(1000);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| memory.read(&pages, &mut |_, bytes| tell.send(bytes).is_ok()));
            // All ten slots are out; the eleventh page waits for one.
            let mut held: Vec<Bytes> = told.iter().take(10).collect();
            assert_eq!(ring.used(), 100, "{kind}");
            assert_eq!(told.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty), "{kind}");
            held.clear();
            assert_eq!(told.iter().take(90).count(), 90, "{kind}");
            reader.join().unwrap().unwrap();
        });
        assert_eq!(ring.used(), 0, "{kind}");
        let mut left = 3;
        let stopped = memory.read(&pages, &mut |_, _| {
            left -= 1;
            left > 0
        });
        assert!(matches!(stopped, Err(MemoryError::Stopped)) && left == 0, "{kind}");
    }
}

#[test]
fn the_engine_sees_what_is_written_and_the_agent_what_the_engine_writes() {
    let fd = memfd(&content(8192));
    let memory = ShmMemory::map(fd.try_clone().unwrap(), 0, 8192, Ring::new(1 << 20), plenty()).unwrap();
    memory.write(&[(page(&[(4000, 5)]), Bytes::from_static(b"agent"))], None).unwrap();
    let mut seen = [0; 5];
    rustix::io::pread(&fd, &mut seen, 4000).unwrap();
    assert_eq!(&seen, b"agent");
    rustix::io::pwrite(&fd, b"engine", 4000).unwrap();
    assert_eq!(read(&*memory, &[page(&[(4000, 6)])])[0], b"engine");
    assert!(matches!(memory.write(&[], Some(&[0; 64])), Err(MemoryError::Unsupported { .. })));
}

#[test]
fn memory_that_was_cut_is_not_touched() {
    let fd = memfd(&content(3 * 4096));
    assert!(matches!(
        ShmMemory::map(fd.try_clone().unwrap(), 4096, 2 * 4096 + 1, Ring::new(1 << 20), plenty()),
        Err(MemoryError::OutOfBounds { size: 12_288, .. })
    ));
    let memory = ShmMemory::map(fd.try_clone().unwrap(), 0, 3 * 4096, Ring::new(1 << 20), plenty()).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    let pages = [page(&[(2 * 4096, 10)])];
    let gone = |result: Result<(), MemoryError>| assert!(matches!(result, Err(MemoryError::Unreachable { .. })), "{result:?}");
    gone(memory.hash(Algorithm::Sha256, &pages).map(drop));
    gone(memory.read(&pages, &mut |_, _| true));
    gone(memory.set_aside(&pages).map(drop));
    gone(memory.write(&[(pages[0].clone(), Bytes::from_static(&[0; 10]))], None));
}

proptest! {
    #[test]
    fn any_spans_are_read_as_they_lie_or_refused(spans in proptest::collection::vec((0_u64..1200, 0_u64..400), 0..6)) {
        let bytes = content(1000);
        let page = page(&spans);
        let inside = spans.iter().all(|(offset, bytes)| offset + bytes <= 1000);
        for (_, memory) in kinds(&bytes, &Ring::new(1 << 20), &plenty()) {
            let digest = memory.hash(Algorithm::Sha256, std::slice::from_ref(&page));
            prop_assert_eq!(digest.is_ok(), inside);
            if inside {
                prop_assert_eq!(digest.unwrap()[0], Digest::sha256(&expected(&bytes, &page)));
                prop_assert_eq!(read(&*memory, std::slice::from_ref(&page)), vec![expected(&bytes, &page)]);
            }
        }
    }
}
