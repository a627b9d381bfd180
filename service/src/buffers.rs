//! Memory for bytes on their way that is used again.
//!
//! A megabyte from the allocator is a fresh mapping: the system clears each of its pages when it is
//! touched, which costs more than to copy the bytes. In a transfer that is every megabyte. So
//! buffers of one size go back to a pool, which keeps a few of them.

use bytes::Bytes;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// Buffers of one size, of which a few are kept. Use it as a `static`.
#[derive(Debug)]
pub struct Pool {
    size: usize,
    keep: usize,
    free: Mutex<Vec<Vec<u8>>>,
}

impl Pool {
    /// A pool of buffers of `size` bytes that keeps up to `keep` of them.
    #[must_use]
    pub const fn new(size: usize, keep: usize) -> Self {
        Self { size, keep, free: Mutex::new(Vec::new()) }
    }

    /// Bytes of a buffer.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// An empty buffer with room for [`Self::size`] bytes.
    #[must_use]
    pub fn take(&'static self) -> Buffer {
        let kept = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Buffer { bytes: kept.unwrap_or_else(|| Vec::with_capacity(self.size)), pool: self }
    }

    /// A buffer of other memory, which does not go to the pool.
    #[must_use]
    pub fn hold(&'static self, bytes: Vec<u8>) -> Buffer {
        Buffer { bytes, pool: self }
    }

    fn give_back(&self, mut bytes: Vec<u8>) {
        // One that has grown would hold more memory than its pool says.
        if bytes.capacity() != self.size {
            return;
        }
        bytes.clear();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.keep {
            free.push(bytes);
        }
    }
}

/// Bytes in memory of a pool. It goes back when the buffer is dropped; after [`Self::freeze`],
/// with the last slice of the bytes.
#[derive(Debug)]
pub struct Buffer {
    bytes: Vec<u8>,
    pool: &'static Pool,
}

impl Buffer {
    /// The bytes, to be shared.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// Bytes that fit before the buffer grows.
    #[must_use]
    pub fn room(&self) -> usize {
        self.bytes.capacity() - self.bytes.len()
    }
}

impl Deref for Buffer {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_once_the_last_slice_is_gone() {
        static POOL: Pool = Pool::new(1 << 10, 2);
        let mut buffer = POOL.take();
        buffer.extend_from_slice(b"of a page");
        let place = buffer.as_ptr();
        let bytes = buffer.freeze();
        let slice = bytes.slice(3..);
        drop(bytes);
        let other = POOL.take();
        assert_ne!(other.as_ptr(), place, "a slice is left");
        assert_eq!(&slice[..], b"a page");
        drop(slice);
        let again = POOL.take();
        assert_eq!((again.as_ptr(), again.len(), again.room()), (place, 0, 1 << 10));
    }

    #[test]
    fn a_pool_keeps_a_few_buffers_of_its_size() {
        static POOL: Pool = Pool::new(1 << 10, 2);
        let mut all: Vec<Buffer> = (0..4).map(|_| POOL.take()).collect();
        all[0].reserve(1 << 20);
        drop(all);
        assert_eq!(POOL.free.lock().unwrap().len(), 2);
        assert!(POOL.free.lock().unwrap().iter().all(|bytes| bytes.capacity() == POOL.size()));
    }
}
