//! Hashing, reading and writing pages of memories that a CPU can load and store.

use super::{Available, Deliver, HostMemory, Location, MemoryError, Page, PageMemory, Ring, Span};
use bytes::Bytes;
use pfr_schema::digest::Hasher;
use pfr_schema::{Algorithm, Digest};

/// Bytes loaded at a time while hashing: enough to hash at full speed, little enough to stay in the
/// cache.
const STEP: usize = 64 << 10;
/// Largest page that is hashed beside others: they are in the buffer together.
const BESIDE: u64 = 1 << 20;
/// Bytes for each further thread.
const THREAD_BYTES: u64 = 4 << 20;

/// Memory whose bytes a CPU can load and store.
pub trait Bytewise: Send + Sync + std::fmt::Debug {
    /// Bytes.
    fn size(&self) -> u64;
    /// The budget of pages in flight, and the memory that copies may take.
    fn budget(&self) -> (&Ring, &Available);
    /// As [`PageMemory::location`].
    fn location(&self) -> Location {
        Location::own(self)
    }
    /// Called before a batch: whether the memory is still there.
    fn reachable(&self) -> Result<(), MemoryError>;
    /// Copies `into.len()` bytes from `offset`; the range was checked.
    ///
    /// # Errors
    /// [`MemoryError`], of memory that is a file.
    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError>;
    /// Copies `from` to `offset`; the range was checked.
    ///
    /// # Errors
    /// As [`Bytewise::load`].
    fn store(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError>;
}

impl<M: Bytewise> PageMemory for M {
    fn size(&self) -> u64 {
        Bytewise::size(self)
    }

    fn location(&self) -> Location {
        Bytewise::location(self)
    }

    fn turn(&self) -> Option<&tokio::sync::Mutex<()>> {
        Some(self.budget().0.turn())
    }

    fn preflight(&self, aside: u64, largest: u64) -> Result<(), MemoryError> {
        let (ring, available) = self.budget();
        ring.fits(largest)?;
        available.check(aside)
    }

    fn hash(&self, algorithm: Algorithm, pages: &[Page]) -> Result<Vec<Digest>, MemoryError> {
        hash(self, algorithm, pages)
    }

    /// Copies pages out through the ring.
    fn read(&self, pages: &[Page], deliver: &mut Deliver<'_>) -> Result<(), MemoryError> {
        check(self, pages.iter())?;
        for (i, page) in pages.iter().enumerate() {
            let mut slot = self.budget().0.acquire(page.bytes())?;
            self.reachable()?;
            load_page(self, page, slot.buffer())?;
            if !deliver(i, slot.freeze()) {
                return Err(MemoryError::Stopped);
            }
        }
        Ok(())
    }

    fn set_aside(&self, pages: &[Page]) -> Result<Box<dyn PageMemory>, MemoryError> {
        let (ring, available) = self.budget();
        available.check(pages.iter().map(Page::bytes).sum())?;
        Ok(Box::new(HostMemory::new(gather(self, pages)?, ring.clone(), available.clone())))
    }

    fn write(&self, pages: &[(Page, Bytes)], after: Option<&[u8; 64]>) -> Result<(), MemoryError> {
        write(self, pages, after)
    }
}

fn check<'a>(memory: &impl Bytewise, pages: impl Iterator<Item = &'a Page>) -> Result<(), MemoryError> {
    let size = Bytewise::size(memory);
    for Span { offset, bytes } in pages.flat_map(|page| page.spans.iter().copied()) {
        let end = offset.saturating_add(bytes);
        if end > size {
            return Err(MemoryError::OutOfBounds { offset, end, size });
        }
    }
    memory.reachable()
}

fn load_page(memory: &impl Bytewise, page: &Page, into: &mut [u8]) -> Result<(), MemoryError> {
    let mut rest = into;
    for span in &page.spans {
        let (now, later) = rest.split_at_mut(span.bytes as usize);
        memory.load(span.offset, now)?;
        rest = later;
    }
    Ok(())
}

/// Digests of pages, computed on several threads if there are enough bytes.
fn hash(memory: &impl Bytewise, algorithm: Algorithm, pages: &[Page]) -> Result<Vec<Digest>, MemoryError> {
    check(memory, pages.iter())?;
    let bytes: u64 = pages.iter().map(Page::bytes).sum();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = cores.min(usize::try_from(bytes / THREAD_BYTES).unwrap_or(usize::MAX)).clamp(1, pages.len().max(1));
    let one = |pages: &[Page]| hash_in_order(memory, algorithm, pages);
    if threads == 1 {
        return one(pages);
    }
    std::thread::scope(|scope| {
        let parts: Vec<_> = pages.chunks(pages.len().div_ceil(threads)).map(|part| scope.spawn(move || one(part))).collect();
        let mut digests = Vec::with_capacity(pages.len());
        for part in parts {
            let part = part.join().map_err(|_| MemoryError::Unreachable { what: "hash", reason: "a hashing thread panicked".into() })?;
            digests.extend(part?);
        }
        Ok(digests)
    })
}

/// Digests of pages, of as many neighbours of one length at a time as makes hashing fast.
fn hash_in_order(memory: &impl Bytewise, algorithm: Algorithm, pages: &[Page]) -> Result<Vec<Digest>, MemoryError> {
    let mut digests = Vec::with_capacity(pages.len());
    let mut buffer = vec![0; STEP];
    let mut left = pages;
    while let Some(first) = left.first() {
        let bytes = first.bytes();
        let most = if algorithm == Algorithm::Sha256 { Digest::side_by_side(bytes) } else { 1 };
        let together = left.iter().take(most).take_while(|page| page.bytes() == bytes).count();
        match &left[..together] {
            pages if pages.len() > 1 && (1..=BESIDE).contains(&bytes) => {
                buffer.resize(buffer.len().max(pages.len() * bytes as usize), 0);
                for (page, into) in pages.iter().zip(buffer.chunks_exact_mut(bytes as usize)) {
                    load_page(memory, page, into)?;
                }
                let blobs: Vec<&[u8]> = buffer.chunks_exact(bytes as usize).take(pages.len()).collect();
                digests.extend(Digest::of_each(algorithm, &blobs));
                left = &left[pages.len()..];
            }
            _ => {
                digests.push(hash_page(memory, algorithm, first, &mut buffer[..STEP])?);
                left = &left[1..];
            }
        }
    }
    Ok(digests)
}

fn hash_page(memory: &impl Bytewise, algorithm: Algorithm, page: &Page, buffer: &mut [u8]) -> Result<Digest, MemoryError> {
    let mut hasher = Hasher::new(algorithm);
    for span in &page.spans {
        let (mut at, end) = (span.offset, span.offset + span.bytes);
        while at < end {
            let now = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            memory.load(at, &mut buffer[..now])?;
            hasher.update(&buffer[..now]);
            at += now as u64;
        }
    }
    Ok(hasher.finish())
}

/// All pages one after another.
fn gather(memory: &impl Bytewise, pages: &[Page]) -> Result<Vec<u8>, MemoryError> {
    check(memory, pages.iter())?;
    let bytes: u64 = pages.iter().map(Page::bytes).sum();
    let mut out = vec![0; usize::try_from(bytes).map_err(|_| MemoryError::NoRoom { what: "host memory", needed: bytes, free: 0 })?];
    let mut at = 0;
    for page in pages {
        let end = at + page.bytes() as usize;
        load_page(memory, page, &mut out[at..end])?;
        at = end;
    }
    Ok(out)
}

/// Writes pages.
fn write(memory: &impl Bytewise, pages: &[(Page, Bytes)], after: Option<&[u8; 64]>) -> Result<(), MemoryError> {
    if after.is_some() {
        return Err(MemoryError::Unsupported { what: "waiting for a CUDA event", reason: "this memory is the host's".into() });
    }
    if let Some((page, bytes)) = pages.iter().find(|(page, bytes)| page.bytes() != bytes.len() as u64) {
        let (end, size) = (page.bytes(), bytes.len() as u64);
        return Err(MemoryError::OutOfBounds { offset: 0, end, size });
    }
    check(memory, pages.iter().map(|(page, _)| page))?;
    for (page, bytes) in pages {
        let mut rest = &bytes[..];
        for span in &page.spans {
            let (now, later) = rest.split_at(span.bytes as usize);
            memory.store(span.offset, now)?;
            rest = later;
        }
    }
    Ok(())
}
