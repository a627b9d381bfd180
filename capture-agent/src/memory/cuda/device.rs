//! Pages in GPU memory: hashed by kernels, set aside on the device, copied through the ring.

use super::super::{Deliver, Location, MemoryError, Object, Page, PageMemory};
use super::driver::Device;
use super::mapped::Mapped;
use super::pinned::PinnedRing;
use super::plan::{self, Run};
use super::stream::{Buffer, PageTable, Stream};
use super::{ipc, transfer, vmm};
use bytes::Bytes;
use pfr_schema::{Algorithm, Digest};
use std::sync::Arc;

/// Tells how many bytes of GPU memory can still be allocated.
pub trait FreeMemory: Send + Sync + std::fmt::Debug {
    /// Bytes.
    ///
    /// # Errors
    /// [`MemoryError::Unreachable`] if the device does not say.
    fn bytes(&self) -> Result<u64, MemoryError>;
}

impl FreeMemory for Device {
    fn bytes(&self) -> Result<u64, MemoryError> {
        self.free()
    }
}

/// What keeps the memory mapped.
#[derive(Debug)]
#[expect(dead_code, reason = "held, not read")]
pub(super) enum Owner {
    /// Another process's, by handle.
    Ipc(ipc::Mapping),
    /// Another process's, by descriptor.
    Vmm(vmm::Mapping),
    /// Set aside by us.
    Aside(Buffer),
}

/// A range of GPU memory.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    mapped: Mapped,
    free: Arc<dyn FreeMemory>,
    owner: Owner,
}

/// A table or result in host memory while a stream uses it.
enum Kept {
    Device(#[expect(dead_code, reason = "held until the stream is drained")] Buffer),
    Host(#[expect(dead_code, reason = "held until the stream is drained")] Vec<u8>),
}

/// One piece of work and all that it uses. Fields are dropped in order: the stream is drained
/// before anything is freed.
struct Job {
    stream: Stream,
    kept: Vec<Kept>,
    device: Arc<Device>,
}

impl Job {
    fn new(device: &Arc<Device>) -> Result<Self, MemoryError> {
        Ok(Self { stream: Stream::new(device)?, kept: Vec::new(), device: device.clone() })
    }

    /// A buffer of its own; its address.
    fn buffer(&mut self, bytes: u64) -> Result<u64, MemoryError> {
        let buffer = Buffer::new(&self.device, bytes)?;
        let at = buffer.at();
        self.kept.push(Kept::Device(buffer));
        Ok(at)
    }

    /// A table on the device; its address.
    fn upload(&mut self, bytes: Vec<u8>) -> Result<u64, MemoryError> {
        let at = self.buffer(bytes.len() as u64)?;
        let (from, length) = (bytes.as_ptr(), bytes.len() as u64);
        self.kept.push(Kept::Host(bytes));
        if length > 0 {
            // SAFETY: the buffer has as many bytes; both are kept, unchanged, until the stream is
            // drained (moving a vector does not move its bytes).
            unsafe { self.stream.copy_in(at, from, length)? };
        }
        Ok(at)
    }

    /// Bytes of the device, when everything before is done.
    fn download(&self, at: u64, bytes: usize) -> Result<Vec<u8>, MemoryError> {
        let mut out = vec![0; bytes];
        // SAFETY: `at` has as many bytes, kept by `self`; `out` outlives the stream's draining,
        // which follows whatever happens.
        let begun = unsafe { self.stream.copy_out(out.as_mut_ptr(), at, bytes as u64) };
        let done = self.stream.finish();
        begun.and(done).map(|()| out)
    }
}

fn little_endian(values: impl Iterator<Item = u64>) -> Vec<u8> {
    values.flat_map(u64::to_le_bytes).collect()
}

impl DeviceMemory {
    /// `size` bytes at `at`, mapped as long as `owner` lives.
    pub(super) fn new(device: Arc<Device>, owner: Owner, at: u64, size: u64, ring: Arc<PinnedRing>) -> Self {
        Self { free: device.clone(), mapped: Mapped { device, ring, at, size }, owner }
    }

    fn table(&self, job: &mut Job, pages: &[Page]) -> Result<PageTable, MemoryError> {
        let many =
            |n: usize| u32::try_from(n).map_err(|e| MemoryError::Unsupported { what: "hashing so many pages", reason: e.to_string() });
        let mut segments: Vec<Run> = Vec::new();
        let (mut first, mut count) = (Vec::with_capacity(pages.len()), Vec::with_capacity(pages.len()));
        for page in pages {
            let runs = plan::runs(page.spans.iter().copied());
            first.push(many(segments.len())?);
            count.push(many(runs.len())?);
            segments.extend(runs);
        }
        many(segments.len())?;
        let ptrs = segments.iter().map(|run| self.mapped.at + run.at);
        let bytes = job.upload(little_endian(ptrs.chain(segments.iter().map(|run| run.bytes))))?;
        let places = job.upload(first.iter().chain(&count).flat_map(|n: &u32| n.to_le_bytes()).collect())?;
        Ok(PageTable {
            ptrs: bytes,
            lens: bytes + segments.len() as u64 * 8,
            first: places,
            count: places + pages.len() as u64 * 4,
            pages: many(pages.len())?,
        })
    }
}

impl PageMemory for DeviceMemory {
    fn size(&self) -> u64 {
        self.mapped.size
    }

    /// The driver gives one address for one IPC handle, however often it is opened. Imports of one
    /// descriptor get an address each.
    fn location(&self) -> Location {
        Location { object: Object::Gpu(self.mapped.device.number()), offset: self.mapped.at }
    }

    fn is_located(&self) -> bool {
        !matches!(self.owner, Owner::Vmm(_))
    }

    fn turn(&self) -> Option<&tokio::sync::Mutex<()>> {
        Some(self.mapped.ring.turn())
    }

    fn preflight(&self, aside: u64, largest: u64) -> Result<(), MemoryError> {
        plan::preflight(self.mapped.ring.total(), self.free.bytes()?, aside, largest)
    }

    fn hash(&self, algorithm: Algorithm, pages: &[Page]) -> Result<Vec<Digest>, MemoryError> {
        if algorithm != Algorithm::Sha256 {
            let reason = format!("there is a kernel for sha256, not for {}", algorithm.name());
            return Err(MemoryError::Unsupported { what: "this digest of pages in GPU memory", reason });
        }
        plan::check(self.mapped.size, pages.iter())?;
        if pages.is_empty() {
            return Ok(Vec::new());
        }
        let _current = self.mapped.device.enter()?;
        let mut job = Job::new(&self.mapped.device)?;
        let table = self.table(&mut job, pages)?;
        let out = job.buffer(pages.len() as u64 * 32)?;
        // SAFETY: the job keeps tables and result; the segments lie in this memory (checked above),
        // which `self` keeps.
        unsafe { job.stream.sha256(&table, out)? };
        let raw = job.download(out, pages.len() * 32)?;
        let digest = |bytes: &[u8]| {
            Digest::from_bytes(algorithm, bytes).map_err(|e| MemoryError::Unreachable { what: "hash on the GPU", reason: e.to_string() })
        };
        raw.chunks_exact(32).map(digest).collect()
    }

    fn read(&self, pages: &[Page], deliver: &mut Deliver<'_>) -> Result<(), MemoryError> {
        transfer::read(&self.mapped, pages, deliver)
    }

    fn set_aside(&self, pages: &[Page]) -> Result<Box<dyn PageMemory>, MemoryError> {
        plan::check(self.mapped.size, pages.iter())?;
        let sum = pages.iter().try_fold(0u64, |sum, page| sum.checked_add(page.bytes()));
        let free = self.free.bytes()?;
        let total = sum.ok_or(MemoryError::NoRoom { what: "GPU memory", needed: u64::MAX, free })?;
        plan::preflight(self.mapped.ring.total(), free, total, 0)?;
        let _current = self.mapped.device.enter()?;
        let copy = Buffer::new(&self.mapped.device, total)?;
        let spans = pages.iter().flat_map(|page| page.spans.iter().copied());
        let pieces: Vec<Run> = plan::cut(&plan::runs(spans), plan::PIECE).collect();
        if !pieces.is_empty() {
            let mut job = Job::new(&self.mapped.device)?;
            let runs = u32::try_from(pieces.len())
                .map_err(|e| MemoryError::Unsupported { what: "setting so many pieces aside", reason: e.to_string() })?;
            let table = job.upload(transfer::table(self.mapped.at, &pieces, 0))?;
            // SAFETY: the job keeps the table, `copy` outlives it; sources lie in this memory
            // (checked above), targets one after another in `copy`, which has room for all.
            unsafe { job.stream.copy_runs(true, table, runs, copy.at())? };
            job.stream.finish()?;
        }
        let at = copy.at();
        Ok(Box::new(Self::new(self.mapped.device.clone(), Owner::Aside(copy), at, total, self.mapped.ring.clone())))
    }

    fn write(&self, pages: &[(Page, Bytes)], after: Option<&[u8; 64]>) -> Result<(), MemoryError> {
        transfer::write(&self.mapped, pages, after)
    }
}
