//! Measures the CUDA back end as the agent uses it: another process owns the memory.
//! `bench/gpu/run` runs it and keeps the result.
//!
//! Prints one JSON document; rates are GB/s (10⁹ bytes), medians of several runs. Ends with an
//! error where there is no GPU.

use bytes::Bytes;
use cudarc::driver::sys;
use pfr_agent::memory::{MemoryError, Page, PageMemory, Span, cuda};
use pfr_schema::Algorithm;
use std::error::Error;
use std::io::Write;
use std::time::Instant;

/// Bytes of the engine's memory.
const SIZE: u64 = 4 << 30;
const RING: u64 = 1 << 30;
const RUNS: usize = 7;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn check(what: &'static str, answer: sys::CUresult) -> Outcome<()> {
    if answer == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{what}: {answer:?}").into()) }
}

fn main() -> Outcome<()> {
    match std::env::var("PF_GPU_BENCH") {
        Ok(handle) => agent(&handle),
        Err(_) => engine(),
    }
}

/// Owns the memory, fills it, and starts this program again as the agent.
fn engine() -> Outcome<()> {
    let uuids = cuda::devices().map_err(|e| format!("no CUDA driver here: {e}"))?;
    let uuid = uuids.first().ok_or("no CUDA driver here: it shows no GPU")?;
    let at = allocate()?;
    let seed: Vec<u8> = (0..64u64 << 20).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the context is current (`allocate`); every copy stays in the allocation of SIZE
    // bytes, a multiple of the seed's.
    unsafe {
        for done in (0..SIZE).step_by(seed.len()) {
            check("fill", sys::cuMemcpyHtoD_v2(at + done, seed.as_ptr().cast(), seed.len()))?;
        }
        check("synchronise", sys::cuCtxSynchronize())?;
        check("share", sys::cuIpcGetMemHandle(&raw mut handle, at))?;
    }
    let text: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    let status = std::process::Command::new(std::env::current_exe()?).env("PF_GPU_BENCH", text).env("PF_GPU_UUID", uuid).status()?;
    if status.success() { Ok(()) } else { Err("the measuring process failed".into()) }
}

fn allocate() -> Outcome<u64> {
    let (mut device, mut context, mut at) = (0, std::ptr::null_mut(), 0);
    // SAFETY: `cuda::devices` has found the driver; each call writes one value.
    unsafe {
        check("start", sys::cuInit(0))?;
        check("find the GPU", sys::cuDeviceGet(&raw mut device, 0))?;
        check("open the GPU", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        check("open the GPU", sys::cuCtxSetCurrent(context))?;
        check("allocate", sys::cuMemAlloc_v2(&raw mut at, SIZE as usize))?;
    }
    Ok(at)
}

/// The median rate of `work` over `bytes`, after one run that does not count.
fn rate(bytes: u64, mut work: impl FnMut() -> Result<(), MemoryError>) -> Result<f64, MemoryError> {
    work()?;
    let mut seconds = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let begun = Instant::now();
        work()?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(bytes as f64 / seconds[RUNS / 2] / 1e9)
}

/// Every second page of `bytes`, so that no two are neighbours, each cut into `spans`.
fn pages(bytes: u64, spans: u64) -> Vec<Page> {
    let span = bytes / spans;
    let page = |i: u64| Page { spans: (0..spans).map(|k| Span { offset: 2 * i * bytes + 2 * k * span, bytes: span }).collect() };
    (0..SIZE / (2 * bytes)).map(page).collect()
}

fn agent(handle: &str) -> Outcome<()> {
    let mut raw = [0u8; 64];
    for (i, byte) in raw.iter_mut().enumerate() {
        *byte = u8::from_str_radix(handle.get(2 * i..2 * i + 2).ok_or("a handle has 64 bytes")?, 16)?;
    }
    let memory = cuda::open_ipc(raw, 0, SIZE, &std::env::var("PF_GPU_UUID")?, RING)?;
    let mut results = serde_json::Map::new();
    results.insert("pinned_copy_ceiling".into(), ceiling()?.into());
    for (name, bytes, spans) in [("180224", 180_224, 1), ("65536", 65_536, 1), ("65536_in_16", 65_536, 16)] {
        let pages = pages(bytes, spans);
        results.insert(format!("page_{name}"), measure(memory.as_ref(), &pages)?);
    }
    let report = serde_json::json!({
        "unit": "GB/s", "memory_bytes": SIZE, "ring_bytes": RING, "runs": RUNS, "driver": driver()?, "gpu": gpu()?, "results": results,
    });
    writeln!(std::io::stdout(), "{report:#}")?;
    Ok(())
}

fn measure(memory: &dyn PageMemory, pages: &[Page]) -> Outcome<serde_json::Value> {
    let bytes: u64 = pages.iter().map(Page::bytes).sum();
    let write: Vec<(Page, Bytes)> = pages.iter().map(|page| (page.clone(), Bytes::from(vec![7; page.bytes() as usize]))).collect();
    Ok(serde_json::json!({
        "bytes": bytes,
        "sha256": rate(bytes, || memory.hash(Algorithm::Sha256, pages).map(drop))?,
        "read": rate(bytes, || memory.read(pages, &mut |_, _| true))?,
        "set_aside": rate(bytes, || memory.set_aside(pages).map(drop))?,
        "write": rate(bytes, || memory.write(&write, None))?,
    }))
}

/// One large copy into pinned memory: as fast as the bus goes.
fn ceiling() -> Outcome<f64> {
    const BYTES: usize = 512 << 20;
    let (mut device, mut context, mut at, mut host) = (0, std::ptr::null_mut(), 0, std::ptr::null_mut());
    // SAFETY: the driver was used before; each call writes one value, and the copies stay in the
    // two allocations of BYTES bytes.
    unsafe {
        check("find the GPU", sys::cuDeviceGet(&raw mut device, 0))?;
        check("open the GPU", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        check("open the GPU", sys::cuCtxSetCurrent(context))?;
        check("allocate", sys::cuMemAlloc_v2(&raw mut at, BYTES))?;
        check("pin", sys::cuMemHostAlloc(&raw mut host, BYTES, 0))?;
    }
    let copy = || {
        // SAFETY: as above; the call returns when the copy is done.
        let answer = unsafe { sys::cuMemcpyDtoH_v2(host, at, BYTES) };
        let failed = || MemoryError::Unreachable { what: "copy", reason: format!("{answer:?}") };
        (answer == sys::CUresult::CUDA_SUCCESS).then_some(()).ok_or_else(failed)
    };
    let rate = rate(BYTES as u64, copy)?;
    // SAFETY: allocated above, freed once.
    unsafe {
        check("free", sys::cuMemFreeHost(host))?;
        check("free", sys::cuMemFree_v2(at))?;
    }
    Ok(rate)
}

fn driver() -> Outcome<String> {
    let mut version = 0;
    // SAFETY: one integer is written.
    check("version", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
}

fn gpu() -> Outcome<String> {
    let mut name = [0u8; 256];
    // SAFETY: the driver writes at most 256 bytes, NUL-terminated.
    check("name", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, 0) })?;
    Ok(std::ffi::CStr::from_bytes_until_nul(&name)?.to_string_lossy().into_owned())
}
