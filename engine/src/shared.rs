//! POSIX shared memory: pages that a capture agent in another process can read and fill.

use crate::cache::PageMemory;
use crate::error::EngineError;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// A mapped piece of shared memory and its descriptor.
///
/// A process that gets the descriptor may write at any time. By the protocol it writes only blocks
/// that are allocated and not yet active, and no code here reads those.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    bytes: usize,
    descriptor: OwnedFd,
}

// SAFETY: the mapping belongs to this value alone within the process and is reached through `&self`
// and `&mut self` only, as with a boxed slice.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; `&self` only reads.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New memory of `bytes` bytes, zero, taken from the system when first touched. It cannot
    /// shrink or grow any more.
    ///
    /// # Errors
    /// [`EngineError::Memory`] if `bytes` is 0 or the system refuses.
    pub fn new(name: &str, bytes: usize) -> Result<Self, EngineError> {
        let failed = |what: &'static str| move |errno: rustix::io::Errno| EngineError::Memory { what, source: errno.into() };
        let descriptor = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed("create shared memory"))?;
        ftruncate(&descriptor, bytes as u64).map_err(failed("size shared memory"))?;
        // Access to a mapping beyond the file's end would kill the process.
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed("seal shared memory"))?;
        Self::map(descriptor)
    }

    /// Maps all of the memory behind a descriptor.
    ///
    /// # Errors
    /// [`EngineError::Memory`] if it is empty or cannot be mapped.
    pub fn map(descriptor: OwnedFd) -> Result<Self, EngineError> {
        let failed = |errno: rustix::io::Errno| EngineError::Memory { what: "map shared memory", source: errno.into() };
        let bytes = usize::try_from(fstat(&descriptor).map_err(failed)?.st_size).unwrap_or(0);
        // SAFETY: a new mapping at an address of the system's choice touches no memory of ours; the
        // file has `bytes` bytes.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &descriptor, 0) };
        let start = NonNull::new(start.map_err(failed)?.cast()).ok_or_else(|| failed(rustix::io::Errno::NOMEM))?;
        Ok(Self { start, bytes, descriptor })
    }

    /// The descriptor, to be sent to another process.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl PageMemory for SharedMemory {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `bytes` long and lives as long as `self`; any byte is a valid
        // `u8`. Other processes write only blocks that nothing here reads (see the type).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only slice in the process.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: start and length are those of the mapping, and no slice outlives `self`. Failing
        // leaves it mapped: harmless.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_memory_see_each_other() {
        let mut here = SharedMemory::new("test", 10_000).unwrap();
        let mut there = SharedMemory::map(here.descriptor().try_clone_to_owned().unwrap()).unwrap();
        assert!(here.bytes().len() == 10_000 && here.bytes().iter().all(|b| *b == 0));
        here.bytes_mut()[9_999] = 7;
        there.bytes_mut()[0] = 9;
        assert_eq!((there.bytes()[9_999], here.bytes()[0]), (7, 9));
        drop(here);
        assert_eq!(there.bytes()[9_999], 7);
        assert!(ftruncate(there.descriptor(), 1).is_err(), "sealed");
    }

    #[test]
    fn empty_memory_is_an_error() {
        assert!(matches!(SharedMemory::new("test", 0), Err(EngineError::Memory { .. })));
    }
}
