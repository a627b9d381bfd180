//! The GPU kernels without a GPU: the same source, compiled by a C++ compiler, agrees with another
//! implementation of the digest.

use pfr_schema::Digest;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

type Hash = unsafe extern "C" fn(u32, u32, *const u64, *const u64, *const u32, *const u32, u32, *mut u32);
type Copy = unsafe extern "C" fn(u32, u32, *const u64, *const u64, *const u64, u32, u64);

struct Kernels {
    sha256: Hash,
    gather: Copy,
    scatter: Copy,
}

/// The kernels, compiled once per test process and never unloaded.
fn kernels() -> &'static Kernels {
    static KERNELS: OnceLock<Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/shim.cpp");
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libkernels.so");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fno-strict-aliasing"])
            .args(["-shared", "-fPIC", "-pthread", "-o"])
            .arg(&library)
            .arg(&source)
            .output()
            .unwrap_or_else(|e| panic!("{compiler} cannot be run ({e}): a C++ compiler is needed. On Debian: apt-get install g++"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: a library just built of our own source, without initialisers; the signatures are
        // those of shim.cpp.
        unsafe {
            let library = Box::leak(Box::new(libloading::Library::new(&library).unwrap()));
            Kernels {
                sha256: *library.get(b"shim_sha256_pages\0").unwrap(),
                gather: *library.get(b"shim_gather\0").unwrap(),
                scatter: *library.get(b"shim_scatter\0").unwrap(),
            }
        }
    })
}

/// A small generator: the same bytes in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }
}

/// Pages as the kernels take them.
#[derive(Default)]
struct Batch {
    ptrs: Vec<u64>,
    lens: Vec<u64>,
    first: Vec<u32>,
    count: Vec<u32>,
    expected: Vec<Vec<u8>>,
}

impl Batch {
    fn add(&mut self, segments: &[&[u8]]) {
        self.first.push(self.ptrs.len() as u32);
        self.count.push(segments.len() as u32);
        for segment in segments {
            self.ptrs.push(segment.as_ptr() as u64);
            self.lens.push(segment.len() as u64);
        }
        self.expected.push(segments.concat());
    }

    fn check(&self, blocks: u32, threads: u32) {
        let pages = self.first.len();
        // Words that no kernel may leave as they are.
        let mut out = vec![0xdead_beef_u32; pages * 8];
        let (ptrs, lens, first, count) = (self.ptrs.as_ptr(), self.lens.as_ptr(), self.first.as_ptr(), self.count.as_ptr());
        // SAFETY: the arrays have the lengths that the kernel is told; segments live as long as the
        // batch's borrower.
        unsafe { (kernels().sha256)(blocks, threads, ptrs, lens, first, count, pages as u32, out.as_mut_ptr()) };
        for (i, (bytes, words)) in self.expected.iter().zip(out.chunks(8)).enumerate() {
            let found: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let expected = Digest::sha256(bytes);
            let lens = &self.lens[self.first[i] as usize..(self.first[i] + self.count[i]) as usize];
            assert_eq!(found, expected.as_bytes(), "page {i} of {} bytes in {lens:?}, {blocks}×{threads}", bytes.len());
        }
    }
}

#[test]
fn digests_agree_at_every_length_to_4096_and_every_alignment() {
    let bytes = Random(1).bytes(4096 + 32);
    let aligned = bytes.as_ptr().align_offset(16);
    let mut batch = Batch::default();
    for length in 0..=4096 {
        // All 16 alignments near the ends of blocks and chunks, one of them in turn elsewhere.
        let near = [0, 1, 8, 9, 55, 56].contains(&(length % 64)) && (length < 256 || length % 1024 < 64);
        for align in if near { 0..16 } else { length % 16..length % 16 + 1 } {
            batch.add(&[&bytes[aligned + align..aligned + align + length]]);
        }
    }
    let pages = batch.first.len() as u32;
    batch.check(pages, 1);
}

#[test]
fn digests_agree_on_large_pages_of_any_cut() {
    let mut random = Random(2);
    let bytes = random.bytes((1 << 20) + 4096);
    let mut batch = Batch::default();
    for round in 0..24 {
        let length = if round == 0 { 1 << 20 } else { random.below(1 << 20) };
        let begin = random.below(4096);
        let mut segments = Vec::new();
        let mut rest = &bytes[begin..begin + length];
        while !rest.is_empty() {
            // Odd lengths, empty ones, some shorter than a block, some longer than a chunk.
            let most = [1, 3, 64, 65, 1024, 5000, 200_000][random.below(7)];
            let (now, later) = rest.split_at(random.below(most + 1).min(rest.len()));
            segments.push(now);
            rest = later;
        }
        segments.push(&[]);
        // Segments come in any order in memory, as layers do.
        if round % 2 == 1 {
            segments.reverse();
        }
        batch.add(&segments);
    }
    batch.add(&[]);
    batch.add(&[&[], &bytes[..1], &[], &[]]);
    batch.check(batch.first.len() as u32, 1);
}

#[test]
fn any_number_of_threads_hashes_every_page_once() {
    let mut random = Random(3);
    let bytes = random.bytes(600_000);
    let mut batch = Batch::default();
    for chunks in (1..=40).chain([63, 64, 65, 176, 255, 256, 257, 511, 513]) {
        let length = chunks * 1024 - random.below(1024);
        let (a, b) = bytes[random.below(1000)..][..length].split_at(random.below(length));
        batch.add(&[a, b]);
    }
    let pages = batch.first.len() as u32;
    for threads in [3, 32, 128] {
        // More threads than pages: those too many must write nothing.
        batch.check(pages.div_ceil(threads) + 1, threads);
    }
}

#[test]
fn gathered_and_scattered_bytes_come_back_and_nothing_else_is_touched() {
    let mut random = Random(4);
    for (blocks, threads) in [(1, 1), (5, 1), (2, 64), (3, 256)] {
        let memory = random.bytes(300_000);
        let (mut segments, mut at, mut from) = (Vec::new(), 0, 0);
        loop {
            from += random.below(40);
            let most = [2, 17, 300, 9000][random.below(4)];
            let length = random.below(most);
            if from + length > memory.len() {
                break;
            }
            segments.push((from, length, at));
            from += length;
            // Gaps, so that both sides have every alignment and a byte too many shows.
            at += length + random.below(3);
        }
        let lens: Vec<u64> = segments.iter().map(|s| s.1 as u64).collect();
        let offsets: Vec<u64> = segments.iter().map(|s| s.2 as u64).collect();
        let ptrs = |base: *const u8| segments.iter().map(|s| base as u64 + s.0 as u64).collect::<Vec<u64>>();
        let mut staging = vec![0xa5; at + 16];
        let mut expected = staging.clone();
        for (from, length, at) in &segments {
            expected[*at..at + length].copy_from_slice(&memory[*from..from + length]);
        }
        let count = segments.len() as u32;
        let base = staging.as_mut_ptr() as u64;
        let table = ptrs(memory.as_ptr());
        // SAFETY: every segment lies in `memory`, every target in `staging`, the tables have
        // `count` entries.
        unsafe { (kernels().gather)(blocks, threads, table.as_ptr(), lens.as_ptr(), offsets.as_ptr(), count, base) };
        assert!(staging == expected, "gather, {blocks}×{threads}");

        let mut back = vec![0x5a; memory.len()];
        let mut expected = back.clone();
        for (from, length, _) in &segments {
            expected[*from..from + length].copy_from_slice(&memory[*from..from + length]);
        }
        let table = ptrs(back.as_mut_ptr());
        // SAFETY: as above, the other way round.
        unsafe { (kernels().scatter)(blocks, threads, table.as_ptr(), lens.as_ptr(), offsets.as_ptr(), count, base) };
        assert!(back == expected, "scatter, {blocks}×{threads}");
    }
}
