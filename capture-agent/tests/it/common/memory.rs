//! Memory of a synthetic engine: keeps a journal of what is done to it, and fails when told to.

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use pfr_agent::memory::{Available, Deliver, HostMemory, MemoryError, Page, PageMemory, Ring, Span};
use pfr_schema::{Algorithm, Digest};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What happened, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A call of the agent, by name.
    Call(&'static str),
    /// Pages hashed in the engine's memory.
    Hash(usize),
    /// Pages read from the engine's memory.
    Read(usize),
    /// Pages set aside.
    SetAside(usize),
    /// Pages hashed in a copy.
    HashAside(usize),
    /// Pages read from a copy.
    ReadAside(usize),
    /// Pages written.
    Write(usize),
}

/// How the engine or its memory misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Bytes change between hash and read.
    Torn,
    /// Likewise, of what was set aside.
    TornAside,
    PanicInHash,
    PanicInRead,
    PanicInSetAside,
    ReadFails,
    HashFails,
    /// Writes flip a bit.
    WritesLie,
    WriteFails,
    PanicInWrite,
    /// Memory for what is set aside is short.
    NoRoom,
    /// This call is never answered.
    Silent(&'static str),
    /// This call is refused.
    Refuses(&'static str),
    /// The engine goes on by itself after this call, as if the pause had lasted too long.
    GoesOnAfter(&'static str),
    /// The member leaves at this call.
    Leaves(&'static str),
    /// The table has a block too many.
    BlockTooMany,
    /// The table has a block too few.
    BlockTooFew,
    /// A block that does not exist.
    BlockOutOfRange,
    /// A null block where one is needed.
    NullBlock,
    /// Other logits than the state gives.
    OtherLogits,
}

#[derive(Debug, Default)]
pub struct Watch {
    pub journal: Mutex<Vec<Event>>,
    pub faults: Mutex<BTreeSet<Fault>>,
    writes: Mutex<Writes>,
    released: Condvar,
    reads_held: Mutex<bool>,
    reads_released: Condvar,
}

/// Reads wait until this is dropped.
pub struct HeldReads(Arc<Watch>);

impl Drop for HeldReads {
    fn drop(&mut self) {
        *self.0.reads_held.lock() = false;
        self.0.reads_released.notify_all();
    }
}

#[derive(Debug, Default)]
struct Writes {
    held: bool,
    in_flight: usize,
}

/// A write is in flight.
struct InFlight<'a>(&'a Watch);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.writes.lock().in_flight -= 1;
    }
}

impl Watch {
    pub fn note(&self, event: Event) {
        self.journal.lock().push(event);
    }

    pub fn has(&self, fault: Fault) -> bool {
        self.faults.lock().contains(&fault)
    }

    /// Writes wait, half done, until they are released.
    pub fn hold_writes(&self) {
        self.writes.lock().held = true;
    }

    pub fn release_writes(&self) {
        self.writes.lock().held = false;
        self.released.notify_all();
    }

    pub fn is_writing(&self) -> bool {
        self.writes.lock().in_flight > 0
    }

    /// Reads wait once they are noted, until the guard is dropped.
    #[must_use]
    pub fn hold_reads(self: &Arc<Self>) -> HeldReads {
        *self.reads_held.lock() = true;
        HeldReads(Arc::clone(self))
    }

    /// Notes a read, and waits while reads are held.
    pub fn read_begins(&self, event: Event) {
        self.note(event);
        let mut held = self.reads_held.lock();
        while *held {
            self.reads_released.wait(&mut held);
        }
    }

    fn write_begins(&self, pages: usize) -> InFlight<'_> {
        let mut writes = self.writes.lock();
        writes.in_flight += 1;
        self.note(Event::Write(pages));
        while writes.held {
            self.released.wait(&mut writes);
        }
        InFlight(self)
    }
}

#[derive(Debug)]
pub struct TestMemory {
    inner: Box<dyn PageMemory>,
    aside: bool,
    watch: Arc<Watch>,
}

impl TestMemory {
    pub fn new(bytes: u64, ring: Ring, watch: Arc<Watch>) -> Arc<Self> {
        let inner = Box::new(HostMemory::new(vec![0; bytes as usize], ring, Available::new(|| u64::MAX)));
        Arc::new(Self { inner, aside: false, watch })
    }

    /// The engine's own look at its memory, not noted.
    pub fn get(&self, span: Span) -> Vec<u8> {
        let mut out = Vec::new();
        let mut take = |_: usize, bytes: Bytes| {
            out.extend_from_slice(&bytes);
            true
        };
        self.inner.read(&[Page { spans: vec![span] }], &mut take).unwrap();
        out
    }

    pub fn put(&self, offset: u64, bytes: Vec<u8>) {
        let page = Page { spans: vec![Span { offset, bytes: bytes.len() as u64 }] };
        self.inner.write(&[(page, bytes.into())], None).unwrap();
    }

    fn failed(&self, fault: Fault) -> Result<(), MemoryError> {
        if self.watch.has(fault) {
            return Err(MemoryError::Unreachable { what: "test", reason: format!("{fault:?}") });
        }
        Ok(())
    }
}

impl PageMemory for TestMemory {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn turn(&self) -> Option<&tokio::sync::Mutex<()>> {
        self.inner.turn()
    }

    fn preflight(&self, aside: u64, largest: u64) -> Result<(), MemoryError> {
        if self.watch.has(Fault::NoRoom) {
            return Err(MemoryError::NoRoom { what: "test memory", needed: aside, free: 0 });
        }
        self.inner.preflight(aside, largest)
    }

    fn hash(&self, algorithm: Algorithm, pages: &[Page]) -> Result<Vec<Digest>, MemoryError> {
        self.watch.note(if self.aside { Event::HashAside(pages.len()) } else { Event::Hash(pages.len()) });
        assert!(!self.watch.has(Fault::PanicInHash), "asked to panic");
        self.failed(Fault::HashFails)?;
        let digests = self.inner.hash(algorithm, pages)?;
        let (fault, torn) = if self.aside { (Fault::TornAside, pages) } else { (Fault::Torn, &pages[..pages.len().min(1)]) };
        if self.watch.has(fault) {
            for span in torn.iter().filter_map(|page| page.spans.first()) {
                let flipped = self.get(Span { offset: span.offset, bytes: 1 })[0] ^ 1;
                self.put(span.offset, vec![flipped]);
            }
        }
        Ok(digests)
    }

    fn read(&self, pages: &[Page], deliver: &mut Deliver<'_>) -> Result<(), MemoryError> {
        self.watch.read_begins(if self.aside { Event::ReadAside(pages.len()) } else { Event::Read(pages.len()) });
        self.failed(Fault::ReadFails)?;
        let panics = self.watch.has(Fault::PanicInRead);
        let mut pass = |at: usize, bytes: Bytes| {
            assert!(!panics, "asked to panic");
            deliver(at, bytes)
        };
        self.inner.read(pages, &mut pass)
    }

    fn set_aside(&self, pages: &[Page]) -> Result<Box<dyn PageMemory>, MemoryError> {
        self.watch.note(Event::SetAside(pages.len()));
        assert!(!self.watch.has(Fault::PanicInSetAside), "asked to panic");
        let inner = self.inner.set_aside(pages)?;
        Ok(Box::new(Self { inner, aside: true, watch: Arc::clone(&self.watch) }))
    }

    fn write(&self, pages: &[(Page, Bytes)], after: Option<&[u8; 64]>) -> Result<(), MemoryError> {
        if self.aside {
            return self.inner.write(pages, after);
        }
        let begun = self.watch.write_begins(pages.len());
        assert!(!self.watch.has(Fault::PanicInWrite), "asked to panic");
        self.failed(Fault::WriteFails)?;
        self.inner.write(pages, after)?;
        drop(begun);
        if self.watch.has(Fault::WritesLie)
            && let Some(span) = pages.first().and_then(|(page, _)| page.spans.first())
        {
            let flipped = self.get(Span { offset: span.offset, bytes: 1 })[0] ^ 1;
            self.put(span.offset, vec![flipped]);
        }
        Ok(())
    }
}
