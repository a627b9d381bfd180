//! The ring: pinned host memory that copies to and from the device go through. A copy waits until
//! enough bytes are free.

use super::super::MemoryError;
use super::driver::{Device, check, log};
use super::extents::Extents;
use bytes::Bytes;
use cudarc::driver::sys;
use parking_lot::{Condvar, Mutex};
use std::ptr::NonNull;
use std::sync::Arc;

/// Regions begin at multiples of this, and the ring ends at one: what the bus likes.
const ALIGN: u64 = 256;

/// Pinned memory, handed out in regions.
pub(super) struct PinnedRing {
    device: Arc<Device>,
    base: NonNull<u8>,
    total: u64,
    free: Mutex<Extents>,
    freed: Condvar,
    turn: tokio::sync::Mutex<()>,
}

// SAFETY: `base` is memory of this process that any thread may touch; regions of it are handed out
// so that each byte has one owner.
unsafe impl Send for PinnedRing {}
// SAFETY: as above; shared fields are behind a lock.
unsafe impl Sync for PinnedRing {}

impl std::fmt::Debug for PinnedRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedRing({} bytes)", self.total)
    }
}

impl PinnedRing {
    /// Pins `bytes`, rounded up.
    pub(super) fn new(device: &Arc<Device>, bytes: u64) -> Result<Arc<Self>, MemoryError> {
        let _current = device.enter()?;
        let refused = || MemoryError::NoRoom { what: "pinned host memory", needed: bytes, free: 0 };
        let total = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or_else(refused)?;
        let mut base = std::ptr::null_mut();
        // Not write-combining: the host reads it.
        // SAFETY: the context is current; one address is written.
        let answer = unsafe { sys::cuMemHostAlloc(&raw mut base, total as usize, sys::CU_MEMHOSTALLOC_PORTABLE) };
        if answer == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(refused());
        }
        check("pin host memory", answer)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(refused)?;
        let free = Mutex::new(Extents::new(total));
        let (freed, turn) = (Condvar::new(), tokio::sync::Mutex::default());
        Ok(Arc::new(Self { device: device.clone(), base, total, free, freed, turn }))
    }

    /// Bytes of the ring: the largest page that can pass.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// As [`PageMemory::turn`](super::super::PageMemory::turn).
    pub(super) fn turn(&self) -> &tokio::sync::Mutex<()> {
        &self.turn
    }

    /// A region of `bytes`, if there is one now.
    pub(super) fn try_take(self: &Arc<Self>, bytes: u64) -> Option<Region> {
        let reserved = bytes.checked_next_multiple_of(ALIGN)?;
        let at = self.free.lock().take(reserved, ALIGN)?;
        Some(Region { ring: self.clone(), at, reserved, bytes })
    }

    /// A region of `bytes`; waits until as many bytes are free.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Result<Region, MemoryError> {
        if bytes > self.total {
            return Err(MemoryError::NoRoom { what: "ring", needed: bytes, free: self.total });
        }
        let reserved = bytes.next_multiple_of(ALIGN);
        let mut free = self.free.lock();
        loop {
            if let Some(at) = free.take(reserved, ALIGN) {
                return Ok(Region { ring: self.clone(), at, reserved, bytes });
            }
            self.freed.wait(&mut free);
        }
    }
}

impl Drop for PinnedRing {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated once, freed once; every region holds the ring, so none is left, and
            // no copy runs on it.
            log("free pinned memory", unsafe { sys::cuMemFreeHost(self.base.as_ptr().cast()) });
        }
    }
}

/// A part of the ring, ours alone until it is dropped.
#[derive(Debug)]
pub(super) struct Region {
    ring: Arc<PinnedRing>,
    at: u64,
    reserved: u64,
    bytes: u64,
}

impl Region {
    /// Where it begins.
    pub(super) fn pointer(&mut self) -> *mut u8 {
        // SAFETY: `at` lies in the ring, or at its end for an empty region.
        unsafe { self.ring.base.as_ptr().add(self.at as usize) }
    }

    /// Fills a part of it.
    pub(super) fn fill(&mut self, to: u64, bytes: &[u8]) {
        assert!(to.checked_add(bytes.len() as u64).is_some_and(|end| end <= self.bytes), "a batch has room for its pieces");
        // SAFETY: inside the region (asserted above), which is ours alone; `bytes` is other memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer().add(to as usize), bytes.len()) }
    }

    /// The filled region as pages of these lengths, one after another, each giving its own part
    /// back when it is dropped.
    ///
    /// # Safety
    /// Every byte was written, and no copy runs on it any more.
    pub(super) unsafe fn split(mut self, lengths: impl ExactSizeIterator<Item = u64>) -> Vec<Bytes> {
        let count = lengths.len();
        let mut out = Vec::with_capacity(count);
        for (i, bytes) in lengths.enumerate() {
            assert!(bytes <= self.bytes, "pages are those the region was taken for");
            let reserved = if i + 1 == count { self.reserved } else { bytes };
            out.push(Bytes::from_owner(Filled(Self { ring: self.ring.clone(), at: self.at, reserved, bytes })));
            self.at += reserved;
            self.reserved -= reserved;
            self.bytes -= bytes;
        }
        out
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.ring.free.lock().give(self.at, self.reserved);
        self.ring.freed.notify_all();
    }
}

/// A region whose bytes are all there.
struct Filled(Region);

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        let Region { ring, at, bytes, .. } = &self.0;
        // SAFETY: inside the ring, ours alone, every byte written, and no thread writes while this
        // lives (the contract of `split`).
        unsafe { std::slice::from_raw_parts(ring.base.as_ptr().add(*at as usize), *bytes as usize) }
    }
}
