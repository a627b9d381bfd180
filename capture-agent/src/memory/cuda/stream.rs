//! Streams, events, buffers on the device, and the launches of the kernels.
//!
//! Everything here is used while the device's context is current ([`Device::enter`]); destructors
//! make it current themselves.

use super::super::MemoryError;
use super::driver::{Device, check, log};
use super::plan::sha256_grid;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::Arc;

/// Memory on the device, ours.
#[derive(Debug)]
pub(super) struct Buffer {
    device: Arc<Device>,
    at: u64,
}

impl Buffer {
    /// `bytes`, not cleared.
    pub(super) fn new(device: &Arc<Device>, bytes: u64) -> Result<Self, MemoryError> {
        let _current = device.enter()?;
        let mut at = 0;
        // SAFETY: the context is current; one address is written. Nothing of zero bytes can be
        // allocated, so it is one at least.
        let answer = unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes.max(1) as usize) };
        if answer == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(MemoryError::NoRoom { what: "GPU memory", needed: bytes, free: device.free()? });
        }
        check("allocate GPU memory", answer)?;
        Ok(Self { device: device.clone(), at })
    }

    /// Its address.
    pub(super) fn at(&self) -> u64 {
        self.at
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated in this context and freed once; every user of a buffer drains its
            // stream before the drop.
            log("free GPU memory", unsafe { sys::cuMemFree_v2(self.at) });
        }
    }
}

/// A point in a stream; of ours, or another process's opened by its handle.
pub(super) struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

impl Event {
    fn new(device: &Arc<Device>) -> Result<Self, MemoryError> {
        // A waiting thread sleeps: the agent's cores have other work.
        let flags = sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32 | sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current (a rule of this module); one handle is written.
        check("make an event", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Another process's event.
    pub(super) fn open(device: &Arc<Device>, handle: &[u8; 64]) -> Result<Self, MemoryError> {
        let handle = sys::CUipcEventHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the driver checks the handle, which is passed by value.
        check("open the engine's event", unsafe { sys::cuIpcOpenEventHandle(&raw mut raw, handle) })?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Waits until the device has come here.
    pub(super) fn wait(&self) -> Result<(), MemoryError> {
        // SAFETY: the event lives; the context is current.
        check("wait for the GPU", unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made once, destroyed once; the driver keeps what streams still need of it.
            log("destroy an event", unsafe { sys::cuEventDestroy_v2(self.raw) });
        }
    }
}

/// Pages in flat arrays on the device, as the kernels take them: addresses.
pub(super) struct PageTable {
    /// Addresses of segments, then their lengths.
    pub(super) ptrs: u64,
    pub(super) lens: u64,
    /// First segment of each page, then the numbers of segments.
    pub(super) first: u64,
    pub(super) count: u64,
    /// How many pages.
    pub(super) pages: u32,
}

/// A queue of work on the device. Dropping it waits for all that was begun: declare it so that it
/// is dropped before what it uses.
pub(super) struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
}

impl Stream {
    /// One that does not wait for the default stream.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, MemoryError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; one handle is written.
        check("make a stream", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Begins a copy from the device.
    ///
    /// # Safety
    /// `bytes` at `from` are device memory that outlives the stream or its next `finish`; `to`
    /// likewise, writable and untouched until then.
    pub(super) unsafe fn copy_out(&self, to: *mut u8, from: u64, bytes: u64) -> Result<(), MemoryError> {
        // SAFETY: the caller's promise; the context is current.
        check("copy from the GPU", unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes as usize, self.raw) })
    }

    /// Begins a copy to the device.
    ///
    /// # Safety
    /// As [`Stream::copy_out`], the other way round; `from` is not changed until then.
    pub(super) unsafe fn copy_in(&self, to: u64, from: *const u8, bytes: u64) -> Result<(), MemoryError> {
        // SAFETY: the caller's promise; the context is current.
        check("copy to the GPU", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes as usize, self.raw) })
    }

    /// # Safety
    /// `parameters` point to values of the kernel's parameters, in order and of their types; what
    /// they name on the device outlives the stream or its next `finish`, and the grid keeps to the
    /// kernel's bounds.
    unsafe fn launch(&self, kernel: sys::CUfunction, grid: (u32, u32), parameters: &mut [*mut c_void]) -> Result<(), MemoryError> {
        let (blocks, threads) = grid;
        let parameters = parameters.as_mut_ptr();
        // SAFETY: the caller's promise; the driver copies the parameters before it returns; the
        // context is current.
        let answer = unsafe { sys::cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, self.raw, parameters, std::ptr::null_mut()) };
        check("start a kernel", answer)
    }

    /// Begins hashing pages with SHA-256; `out` gets 32 bytes a page.
    ///
    /// # Safety
    /// The tables and every segment in them are device memory, as is `out`; all outlive the stream
    /// or its next `finish`.
    pub(super) unsafe fn sha256(&self, table: &PageTable, out: u64) -> Result<(), MemoryError> {
        let PageTable { mut ptrs, mut lens, mut first, mut count, mut pages } = *table;
        let mut out = out;
        let grid = sha256_grid(pages, self.device.multiprocessors);
        let parameters = &mut [
            (&raw mut ptrs).cast(),
            (&raw mut lens).cast(),
            (&raw mut first).cast(),
            (&raw mut count).cast(),
            (&raw mut pages).cast(),
            (&raw mut out).cast(),
        ];
        // SAFETY: five addresses and one u32 in the kernel's order; at most 32 threads; the rest is
        // the caller's promise.
        unsafe { self.launch(self.device.kernels.sha256, grid, parameters) }
    }

    /// Begins copying `runs` runs between their places and `base`: `table` holds their addresses,
    /// lengths and offsets from `base`, `runs` u64 each. With `gather` towards `base`, else from
    /// it.
    ///
    /// # Safety
    /// As [`Stream::sha256`]; no two runs have a byte of the target in common.
    pub(super) unsafe fn copy_runs(&self, gather: bool, table: u64, runs: u32, base: u64) -> Result<(), MemoryError> {
        let (mut ptrs, mut lens, mut at) = (table, table + u64::from(runs) * 8, table + u64::from(runs) * 16);
        let (mut runs, mut base) = (runs, base);
        let parameters =
            &mut [(&raw mut ptrs).cast(), (&raw mut lens).cast(), (&raw mut at).cast(), (&raw mut runs).cast(), (&raw mut base).cast()];
        let kernel = if gather { self.device.kernels.gather } else { self.device.kernels.scatter };
        let blocks = runs.min(self.device.multiprocessors * 8).max(1);
        // SAFETY: three addresses, one u32 and one u64 in the kernels' order; 256 threads; the rest
        // is the caller's promise.
        unsafe { self.launch(kernel, (blocks, 256), parameters) }
    }

    /// Work that begins from now on waits for the event.
    pub(super) fn after(&self, event: &Event) -> Result<(), MemoryError> {
        // SAFETY: both live; the context is current.
        check("wait for the engine's event", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// An event behind all that was begun.
    pub(super) fn mark(&self) -> Result<Event, MemoryError> {
        let event = Event::new(&self.device)?;
        // SAFETY: both live; the context is current.
        check("record an event", unsafe { sys::cuEventRecord(event.raw, self.raw) })?;
        Ok(event)
    }

    /// Waits for all that was begun.
    pub(super) fn finish(&self) -> Result<(), MemoryError> {
        // SAFETY: the stream lives; the context is current.
        check("wait for the GPU", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made once, destroyed once, and drained first, so that nothing it uses is
            // freed under it.
            unsafe {
                log("drain a stream", sys::cuStreamSynchronize(self.raw));
                log("destroy a stream", sys::cuStreamDestroy_v2(self.raw));
            }
        }
    }
}
