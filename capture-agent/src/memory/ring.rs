//! The ring: a budget of bytes for pages in flight. A reader waits until enough bytes are free.

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

use super::MemoryError;

/// A budget of bytes. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Ring(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    total: u64,
    used: Mutex<u64>,
    freed: Condvar,
    turn: tokio::sync::Mutex<()>,
}

impl Ring {
    /// A ring of `total` bytes.
    #[must_use]
    pub fn new(total: u64) -> Self {
        Self(Arc::new(Inner { total, used: Mutex::new(0), freed: Condvar::new(), turn: tokio::sync::Mutex::default() }))
    }

    /// Bytes of the whole ring.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.total
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        *self.0.used.lock()
    }

    /// As [`super::PageMemory::turn`].
    pub(crate) fn turn(&self) -> &tokio::sync::Mutex<()> {
        &self.0.turn
    }

    /// Whether something of `bytes` fits at all.
    ///
    /// # Errors
    /// [`MemoryError::NoRoom`].
    pub fn fits(&self, bytes: u64) -> Result<(), MemoryError> {
        if bytes > self.0.total {
            return Err(MemoryError::NoRoom { what: "ring", needed: bytes, free: self.0.total });
        }
        Ok(())
    }

    /// A zeroed buffer of `bytes`. Blocks until as many bytes are free.
    ///
    /// # Errors
    /// [`MemoryError::NoRoom`] if it is larger than the ring: it would wait for ever.
    pub fn acquire(&self, bytes: u64) -> Result<Slot, MemoryError> {
        self.fits(bytes)?;
        let len = usize::try_from(bytes).map_err(|_| MemoryError::NoRoom { what: "ring", needed: bytes, free: self.0.total })?;
        {
            let mut used = self.0.used.lock();
            while *used + bytes > self.0.total {
                self.0.freed.wait(&mut used);
            }
            *used += bytes;
        }
        let permit = Permit { ring: self.clone(), bytes };
        Ok(Slot { buffer: vec![0; len], _permit: permit })
    }
}

/// A buffer whose bytes count against the ring until it, or the [`Bytes`] made of it, is dropped.
#[derive(Debug)]
pub struct Slot {
    buffer: Vec<u8>,
    _permit: Permit,
}

#[derive(Debug)]
struct Permit {
    ring: Ring,
    bytes: u64,
}

impl Slot {
    /// The bytes, to be filled.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// The filled bytes.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *self.ring.0.used.lock() -= self.bytes;
        self.ring.0.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_count_until_the_last_clone_is_dropped() {
        let ring = Ring::new(100);
        let bytes = ring.acquire(60).unwrap().freeze();
        let clone = bytes.slice(10..20);
        drop(bytes);
        assert_eq!(ring.used(), 60);
        drop(clone);
        assert_eq!(ring.used(), 0);
    }

    #[test]
    fn who_wants_more_waits_until_others_let_go() {
        let ring = Ring::new(100);
        let first = ring.acquire(60).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let waits = ring.clone();
            let waiter = scope.spawn(move || {
                let slot = waits.acquire(60).unwrap();
                tell.send(()).unwrap();
                drop(slot);
            });
            assert_eq!(told.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
            assert_eq!(ring.used(), 60);
            drop(first);
            told.recv().unwrap();
            waiter.join().unwrap();
        });
        assert_eq!(ring.used(), 0);
    }

    #[test]
    fn what_can_never_fit_is_refused_at_once() {
        let ring = Ring::new(100);
        assert!(matches!(ring.acquire(101), Err(MemoryError::NoRoom { needed: 101, free: 100, .. })));
    }
}
