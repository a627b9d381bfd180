//! An engine's memory as the agent sees it: pages are hashed where they lie, copied out through a
//! bounded ring, and written.
//!
//! One trait, three back ends: POSIX shared memory (`shm`), a CUDA allocation shared by IPC handle
//! (`cuda::ipc`), and one shared by a descriptor of CUDA's virtual memory management (`cuda::vmm`).
//! A page is a list of spans; its bytes are theirs, one after another.

pub mod cuda;
pub mod host;
pub mod ring;
pub mod shm;

mod pages;

pub use host::{Available, HostMemory};
pub(crate) use pages::Bytewise;
pub use ring::Ring;
pub use shm::ShmMemory;

use bytes::Bytes;
use pfr_schema::{Algorithm, Digest};

/// Bytes in a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where they begin.
    pub offset: u64,
    /// How many there are.
    pub bytes: u64,
}

/// A page or a state tensor: its spans in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The spans, all of one memory.
    pub spans: Vec<Span>,
}

impl Page {
    /// Bytes of the page.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.bytes).sum()
    }
}

/// Where a memory begins on this machine. Two memories that map the same bytes have locations in
/// one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// What the bytes are part of.
    pub object: Object,
    /// Where the memory begins in it, in bytes.
    pub offset: u64,
}

impl Location {
    /// Of a memory that no other memory maps.
    fn own<M: ?Sized>(memory: &M) -> Self {
        Self { object: Object::Own(std::ptr::from_ref(memory).cast::<()>().addr()), offset: 0 }
    }
}

/// What bytes are part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// A file or shared memory: device and inode.
    File(u64, u64),
    /// The addresses of a GPU, by its number.
    Gpu(i32),
    /// A memory that no other one maps, by the address of its object here.
    Own(usize),
}

/// What goes wrong with memory.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages explain the fields")]
pub enum MemoryError {
    /// The engine described memory that is not there.
    #[error("bytes {offset}..{end} of a memory of {size} bytes")]
    OutOfBounds { offset: u64, end: u64, size: u64 },
    /// Not enough of a resource; nothing was changed.
    #[error("{what}: {needed} bytes needed, {free} free")]
    NoRoom {
        /// Of what: `ring`, `GPU memory` …
        what: &'static str,
        needed: u64,
        free: u64,
    },
    /// The memory cannot be mapped or reached (any more).
    #[error("{what}: {reason}")]
    Unreachable {
        /// What was tried: `map shared memory`, `open IPC handle` …
        what: &'static str,
        reason: String,
    },
    /// A file that stands for memory.
    #[error("{what}: {source}")]
    File { what: &'static str, source: std::io::Error },
    /// This build or machine cannot do it.
    #[error("{what} is not supported here: {reason}")]
    Unsupported { what: &'static str, reason: String },
    /// The reader of the bytes stopped.
    #[error("stopped")]
    Stopped,
}

/// Takes a page's bytes as they come out of the ring; `false` stops the copying with
/// [`MemoryError::Stopped`].
pub type Deliver<'a> = dyn FnMut(usize, Bytes) -> bool + 'a;

/// An engine's memory. Calls block; the agent makes them on threads of their own.
pub trait PageMemory: Send + Sync + std::fmt::Debug {
    /// Bytes.
    fn size(&self) -> u64;

    /// Where it begins. By default it is taken for a memory of its own, which no other memory maps.
    fn location(&self) -> Location {
        Location::own(self)
    }

    /// Whether every memory that maps these bytes has a location in one object with it. If not,
    /// another memory of this object may be the same bytes under another offset.
    fn is_located(&self) -> bool {
        true
    }

    /// The lock for moving a batch of pages through the ring of this memory. Two batches in one
    /// ring could wait for each other's slots for ever. `None`, the default: the agent's ring.
    fn turn(&self) -> Option<&tokio::sync::Mutex<()>> {
        None
    }

    /// Whether `bytes` more can be set aside ([`PageMemory::set_aside`]) and pages of `largest`
    /// bytes can be copied out.
    ///
    /// # Errors
    /// [`MemoryError::NoRoom`].
    fn preflight(&self, aside: u64, largest: u64) -> Result<(), MemoryError>;

    /// Digests of pages, computed where they lie.
    ///
    /// # Errors
    /// [`MemoryError`].
    fn hash(&self, algorithm: Algorithm, pages: &[Page]) -> Result<Vec<Digest>, MemoryError>;

    /// Copies pages out, in order, each delivered whole with its position. Memory in flight is
    /// bounded by the ring: a page's slot is free again when the delivered bytes are dropped.
    ///
    /// # Errors
    /// [`MemoryError`]; [`MemoryError::NoRoom`] if a page is larger than the ring.
    fn read(&self, pages: &[Page], deliver: &mut Deliver<'_>) -> Result<(), MemoryError>;

    /// Copies pages within the memory's own device, quickly, so that the engine may overwrite them;
    /// the copy is a memory of its own in which page `i` is one span after page `i − 1`.
    ///
    /// # Errors
    /// [`MemoryError::NoRoom`].
    fn set_aside(&self, pages: &[Page]) -> Result<Box<dyn PageMemory>, MemoryError>;

    /// Writes pages; when it returns they lie in memory. `after` is a CUDA IPC event to wait for
    /// first.
    ///
    /// # Errors
    /// [`MemoryError`]; a page and its bytes must have one length.
    fn write(&self, pages: &[(Page, Bytes)], after: Option<&[u8; 64]>) -> Result<(), MemoryError>;
}
