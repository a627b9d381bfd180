//! The CUDA back ends on a real GPU, across processes. Run with `PF_HAS_GPU=1`; without it each
//! test says by name that it was not run.
//!
//! This process plays the engine: it owns the memory. The same binary, started again, plays the
//! agent (`agent_side`), as an IPC handle is opened by another process than the one that made it.

use bytes::Bytes;
use cudarc::driver::sys;
use pfr_agent::memory::{MemoryError, Page, PageMemory, Span, cuda};
use pfr_schema::{Algorithm, Digest};
use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

/// Bytes of the engine's memory: several batches and rings.
const SIZE: u64 = 48 << 20;
/// Where the shared part begins in the allocation.
const OFFSET: u64 = 4096;
const RING: u64 = 6 << 20;

fn gpu(test: &str) -> bool {
    let there = std::env::var_os("PF_HAS_GPU").is_some_and(|value| value == "1");
    if !there {
        pfr_testkit::run::skip("gpu", &format!("{test} needs a CUDA device and PF_HAS_GPU=1"));
    }
    there
}

fn ok(answer: sys::CUresult) {
    assert_eq!(answer, sys::CUresult::CUDA_SUCCESS);
}

fn pattern(length: u64, seed: u64) -> Vec<u8> {
    let word = |i: u64| (i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (0..length.div_ceil(8)).flat_map(|i| word(i).to_le_bytes()).take(length as usize).collect()
}

/// Pages of every kind: large, small, odd, of many short runs, empty.
fn pages() -> Vec<Page> {
    let span = |offset, bytes| Span { offset, bytes };
    let mut pages: Vec<Page> = (0..100).map(|i| Page { spans: vec![span(i * 180_224, 180_224)] }).collect();
    pages.extend((0..64).map(|i| Page { spans: (0..44).map(|layer| span(20_000_000 + layer * 262_144 + i * 4096, 4096)).collect() }));
    pages.extend((0..300).map(|i| Page { spans: vec![span(i * 1001 + 7, i * 13 + 1), span(40_000_003 + i * 501, 333)] }));
    pages.push(Page::default());
    pages.push(Page { spans: vec![span(3, RING - 64)] });
    pages
}

fn bytes_of(memory: &[u8], page: &Page) -> Vec<u8> {
    page.spans.iter().flat_map(|span| &memory[span.offset as usize..(span.offset + span.bytes) as usize]).copied().collect()
}

/// Everything the agent does with an engine's memory, which holds `pattern(SIZE, 1)`.
fn exercise(memory: &dyn PageMemory, after: Option<&[u8; 64]>) {
    let (mut expected, pages) = (pattern(SIZE, 1), pages());
    memory.preflight(1 << 20, RING).unwrap();
    assert!(matches!(memory.preflight(1 << 50, 1), Err(MemoryError::NoRoom { what: "GPU memory", .. })), "more than any GPU has");
    assert!(matches!(memory.preflight(0, RING + 1024), Err(MemoryError::NoRoom { what: "ring", .. })));
    let outside = [Page { spans: vec![Span { offset: SIZE - 1, bytes: 2 }] }];
    assert!(matches!(memory.hash(Algorithm::Sha256, &outside), Err(MemoryError::OutOfBounds { .. })));
    check(memory, &expected, &pages);

    let aside = memory.set_aside(&pages).unwrap();
    let new: Vec<(Page, Bytes)> = (0..40u64)
        .map(|i| {
            let spans = (0..if i < 20 { 1 } else { 50 }).map(|k| Span { offset: i * 1_000_003 + k * 7001, bytes: 6000 + i });
            let page = Page { spans: spans.collect() };
            let bytes = Bytes::from(pattern(page.bytes(), 1000 + i));
            (page, bytes)
        })
        .collect();
    for (page, bytes) in &new {
        let mut at = 0;
        for span in &page.spans {
            let (begin, length) = (span.offset as usize, span.bytes as usize);
            expected[begin..begin + length].copy_from_slice(&bytes[at..at + length]);
            at += length;
        }
    }
    memory.write(&new, after).unwrap();
    check(memory, &expected, &pages);

    // The bytes that were set aside are still the state before the write, packed.
    let (old, mut offset) = (pattern(SIZE, 1), 0);
    let mut packed = Vec::new();
    let places = pages.iter().map(|page| {
        let place = Page { spans: vec![Span { offset, bytes: page.bytes() }] };
        packed.extend(bytes_of(&old, page));
        offset += page.bytes();
        place
    });
    let places: Vec<Page> = places.collect();
    assert_eq!(aside.size(), packed.len() as u64);
    check(aside.as_ref(), &packed, &places);

    // A reader that gives up in the middle, then one that must find the whole ring again.
    let stopped = memory.read(&pages, &mut |i, _| i < 3);
    assert!(matches!(stopped, Err(MemoryError::Stopped)));
    check(memory, &expected, &pages);
}

fn check(memory: &dyn PageMemory, expected: &[u8], pages: &[Page]) {
    let found = memory.hash(Algorithm::Sha256, pages).unwrap();
    for (i, page) in pages.iter().enumerate() {
        assert_eq!(found[i], Digest::sha256(&bytes_of(expected, page)), "page {i}");
    }
    assert!(matches!(memory.hash(Algorithm::Blake3, pages), Err(MemoryError::Unsupported { .. })));
    let mut next = 0;
    memory
        .read(pages, &mut |i, bytes| {
            assert_eq!(i, next);
            next += 1;
            assert!(bytes == bytes_of(expected, &pages[i]), "page {i} read");
            true
        })
        .unwrap();
    assert_eq!(next, pages.len());
}

/// The engine's context on its first GPU; returns the GPU's number.
fn engine() -> sys::CUdevice {
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // SAFETY: `PF_HAS_GPU` says that there is a driver; each call writes one value.
    unsafe {
        ok(sys::cuInit(0));
        ok(sys::cuDeviceGet(&raw mut device, 0));
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok(sys::cuCtxSetCurrent(context));
    }
    device
}

fn fill(at: u64) {
    let bytes = pattern(SIZE, 1);
    // SAFETY: the allocation has OFFSET + SIZE bytes; the copy is done when the synchronisation
    // returns.
    unsafe {
        ok(sys::cuMemcpyHtoD_v2(at + OFFSET, bytes.as_ptr().cast(), bytes.len()));
        ok(sys::cuCtxSynchronize());
    }
}

/// Starts this binary again as the agent.
fn agent(kind: &str, set: impl FnOnce(&mut Command)) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "agent_side", "--nocapture"]).env("PF_GPU_AGENT", kind);
    command.env("PF_GPU_UUID", &cuda::devices().unwrap()[0]);
    set(&mut command);
    assert!(command.status().unwrap().success(), "the agent's process failed; its output is above");
}

fn text(bytes: impl IntoIterator<Item = std::ffi::c_char>) -> String {
    bytes.into_iter().map(|byte| format!("{:02x}", byte as u8)).collect()
}

fn handle(name: &str) -> [u8; 64] {
    let text = std::env::var(name).unwrap();
    std::array::from_fn(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
}

/// The agent's side of the tests below; does nothing when it is not started by one of them.
#[test]
fn agent_side() {
    let Ok(kind) = std::env::var("PF_GPU_AGENT") else {
        eprintln!("agent_side: nothing to do: it is the other process of the tests beside it");
        return;
    };
    let uuid = std::env::var("PF_GPU_UUID").unwrap();
    if kind == "vmm" {
        let number = std::env::var("PF_GPU_FD").unwrap().parse().unwrap();
        // SAFETY: the parent left this descriptor open for us alone.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        let memory = cuda::open_vmm(fd, OFFSET, SIZE, &uuid, RING).unwrap();
        return exercise(memory.as_ref(), None);
    }
    let memory = handle("PF_GPU_MEMORY");
    let open = |offset, bytes| cuda::open_ipc(memory, offset, bytes, &uuid, RING);
    assert!(matches!(open(OFFSET, 1 << 45), Err(MemoryError::OutOfBounds { .. })));
    let (first, second) = (open(OFFSET, SIZE).unwrap(), open(OFFSET, SIZE).unwrap());
    // One handle, two memories: the other's end does not close it. Calls may come from any thread.
    drop(second);
    std::thread::scope(|scope| {
        scope.spawn(|| exercise(first.as_ref(), Some(&handle("PF_GPU_EVENT")))).join().unwrap();
    });
    drop(first);
    assert_eq!(open(OFFSET, SIZE).unwrap().size(), SIZE, "opened again after it was closed");
}

#[test]
fn memory_shared_by_ipc_handle() {
    if !gpu("memory_shared_by_ipc_handle") {
        return;
    }
    engine();
    let (mut at, mut event) = (0, std::ptr::null_mut());
    let mut memory = sys::CUipcMemHandle { reserved: [0; 64] };
    let mut signal = sys::CUipcEventHandle { reserved: [0; 64] };
    let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32 | sys::CUevent_flags_enum::CU_EVENT_INTERPROCESS as u32;
    // SAFETY: the context is current; each call writes one value.
    unsafe {
        ok(sys::cuMemAlloc_v2(&raw mut at, (OFFSET + SIZE) as usize));
        fill(at);
        ok(sys::cuEventCreate(&raw mut event, flags));
        ok(sys::cuEventRecord(event, std::ptr::null_mut()));
        ok(sys::cuIpcGetMemHandle(&raw mut memory, at));
        ok(sys::cuIpcGetEventHandle(&raw mut signal, event));
    }
    agent("ipc", |command| {
        command.env("PF_GPU_MEMORY", text(memory.reserved)).env("PF_GPU_EVENT", text(signal.reserved));
    });
    // The engine sees what the agent wrote.
    let mut seen = vec![0u8; 6000];
    // SAFETY: inside the allocation, into a vector of as many bytes.
    unsafe {
        ok(sys::cuMemcpyDtoH_v2(seen.as_mut_ptr().cast::<c_void>(), at + OFFSET, seen.len()));
        ok(sys::cuEventDestroy_v2(event));
        ok(sys::cuMemFree_v2(at));
    }
    assert!(seen == pattern(6000, 1000));
}

#[test]
fn memory_shared_by_descriptor() {
    if !gpu("memory_shared_by_descriptor") {
        return;
    }
    let device = engine();
    let kind = sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let location = sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    let least = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let flags = sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let (mut granularity, mut memory, mut at, mut fd) = (0, 0, 0, -1i32);
    // SAFETY: the context is current; each call writes one value; the descriptions are plain C
    // structures.
    let (fd, size) = unsafe {
        let mut wanted: sys::CUmemAllocationProp = std::mem::zeroed();
        wanted.type_ = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.requestedHandleTypes = kind;
        wanted.location = location;
        ok(sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const wanted, least));
        let size = ((OFFSET + SIZE) as usize).next_multiple_of(granularity);
        ok(sys::cuMemCreate(&raw mut memory, size, &raw const wanted, 0));
        ok(sys::cuMemAddressReserve(&raw mut at, size, 0, 0, 0));
        ok(sys::cuMemMap(at, size, 0, memory, 0));
        let access = sys::CUmemAccessDesc { location, flags };
        ok(sys::cuMemSetAccess(at, size, &raw const access, 1));
        fill(at);
        ok(sys::cuMemExportToShareableHandle((&raw mut fd).cast(), memory, kind, 0));
        (OwnedFd::from_raw_fd(fd), size)
    };
    // A copy of the descriptor that the child inherits: the original is closed on exec.
    let inherited = rustix::io::dup(&fd).unwrap();
    agent("vmm", |command| {
        command.env("PF_GPU_FD", inherited.as_raw_fd().to_string());
    });
    // SAFETY: made above, freed once.
    unsafe {
        ok(sys::cuMemUnmap(at, size));
        ok(sys::cuMemRelease(memory));
        ok(sys::cuMemAddressFree(at, size));
    }
}
