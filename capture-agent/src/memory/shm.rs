//! Memory that an engine shares by descriptor: POSIX shared memory or a memfd, mapped here.
//!
//! Another process writes these bytes while we read them. So the agent never makes a reference to
//! them. It copies them by pointer into buffers of its own; a torn copy does not match its digest.

use super::pages::Bytewise;
use super::{Available, Location, MemoryError, Object, PageMemory, Ring};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Mapped shared memory.
#[derive(Debug)]
pub struct ShmMemory {
    /// Start of the mapping, which begins with the descriptor's first byte.
    base: NonNull<u8>,
    mapped: usize,
    offset: usize,
    size: u64,
    object: Object,
    fd: OwnedFd,
    ring: Ring,
    available: Available,
}

// SAFETY: the mapping belongs to this value alone and stays until it is dropped; its bytes are only
// copied by pointer (never referenced), which any number of threads may do at a time just as the
// engine's process does.
unsafe impl Send for ShmMemory {}
// SAFETY: as above.
unsafe impl Sync for ShmMemory {}

impl ShmMemory {
    /// Maps `bytes` bytes from `offset` of `fd`, readable and writable.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] if the descriptor has fewer bytes, [`MemoryError::Unreachable`]
    /// if it cannot be mapped.
    pub fn map(fd: OwnedFd, offset: u64, bytes: u64, ring: Ring, available: Available) -> Result<Arc<dyn PageMemory>, MemoryError> {
        let what = "map shared memory";
        let unreachable = |reason: String| MemoryError::Unreachable { what, reason };
        let stat = rustix::fs::fstat(&fd).map_err(|e| unreachable(e.to_string()))?;
        let (size, object) = (u64::try_from(stat.st_size).unwrap_or(0), Object::File(stat.st_dev, stat.st_ino));
        let end = offset.checked_add(bytes).filter(|end| *end <= size && bytes > 0);
        let Some(end) = end else {
            return Err(MemoryError::OutOfBounds { offset, end: offset.saturating_add(bytes), size });
        };
        let mapped = usize::try_from(end).map_err(|e| unreachable(e.to_string()))?;
        // SAFETY: a null hint lets the system choose the place, so nothing of ours is mapped over.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) };
        let base = base.map_err(|e| unreachable(e.to_string()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| unreachable("mapped at address 0".into()))?;
        Ok(Arc::new(Self { base, mapped, offset: offset as usize, size: bytes, object, fd, ring, available }))
    }
}

impl Drop for ShmMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `map` mapped, and nothing borrows from it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) } {
            tracing::error!(%error, bytes = self.mapped, "cannot unmap shared memory");
        }
    }
}

fn size_of(fd: &OwnedFd) -> rustix::io::Result<u64> {
    Ok(u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0))
}

impl Bytewise for ShmMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn budget(&self) -> (&Ring, &Available) {
        (&self.ring, &self.available)
    }

    fn location(&self) -> Location {
        Location { object: self.object, offset: self.offset as u64 }
    }

    /// Reading a mapping beyond the end of its file kills the process, so the length is checked
    /// before each batch. An engine that shrinks its memory during a batch can still kill the
    /// agent.
    fn reachable(&self) -> Result<(), MemoryError> {
        let what = "read shared memory";
        let size = size_of(&self.fd).map_err(|e| MemoryError::Unreachable { what, reason: e.to_string() })?;
        if size < self.mapped as u64 {
            let reason = format!("the engine cut it from {} to {size} bytes", self.mapped);
            return Err(MemoryError::Unreachable { what, reason });
        }
        Ok(())
    }

    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        assert!(offset + into.len() as u64 <= self.size, "checked by the caller");
        // SAFETY: the source lies inside the mapping (asserted above), `into` is memory of ours, so
        // they do not overlap. The engine may write the source meanwhile; bytes have no invalid
        // values, and torn ones are caught by their digest.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr().add(self.offset + offset as usize), into.as_mut_ptr(), into.len()) }
        Ok(())
    }

    fn store(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        assert!(offset + from.len() as u64 <= self.size, "checked by the caller");
        // SAFETY: the destination lies inside the mapping (asserted above), which is writable;
        // `from` is memory of ours.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.base.as_ptr().add(self.offset + offset as usize), from.len()) }
        Ok(())
    }
}
