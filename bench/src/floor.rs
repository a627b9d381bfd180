//! The floor: what the machine can do with the same bytes. One program, no network, no metadata:
//! every byte is read once from the page cache, hashed once with SHA-256, compared, and written
//! into 64 MiB files that are on disk when it returns.
//!
//! Each thread reads a blob into its buffer, hashes it while it is in the cache of its core, and
//! writes the buffer when it is full. There are more threads than cores: while one waits for the
//! disk, another one hashes. Files are written past the page cache (`O_DIRECT`) where
//! [`Plan::direct`] says so; which is better depends on the disk, and `pf-bench floor` finds out.

use crate::Result;
use crate::workload::Blob;
use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of an output file.
pub const FILE: usize = 64 << 20;
/// Direct writes start and end at multiples of this.
const ALIGN: usize = 4096;

/// How the floor works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Threads, each with a buffer and a file of its own.
    pub threads: usize,
    /// Bytes of a thread's buffer.
    pub buffer: usize,
    /// Whether files are written past the page cache.
    pub direct: bool,
    /// Whether bytes are hashed. Without hashing it measures the disk alone.
    pub hash: bool,
}

impl Plan {
    /// The plan that `pf-bench floor` most often found to be the fastest.
    pub fn on(direct: bool) -> Self {
        Self { threads: 4 * crate::machine::cores(), buffer: 1 << 20, direct, hash: true }
    }
}

/// Where one blob's bytes are.
#[derive(Clone, Debug)]
pub struct Piece {
    file: PathBuf,
    offset: u64,
    len: usize,
    digest: [u8; 32],
}

impl Piece {
    /// A blob in a file of its own.
    pub fn of(blob: &Blob) -> Self {
        Self { file: blob.path.clone(), offset: 0, len: blob.len, digest: blob.digest }
    }
}

/// Copies `pieces` into files in `out`, in runs of consecutive pieces; returns where they now are.
pub fn copy(pieces: &[Piece], out: &Path, plan: Plan) -> Result<Vec<Piece>> {
    std::fs::create_dir_all(out)?;
    // Consecutive pieces stay together, so that the copy is read sequentially too.
    let runs: Vec<&[Piece]> = split(pieces);
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..plan.threads)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    let mut buffer = Buffer::new(plan.buffer);
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some(run) = runs.get(number) else { return Ok(()) };
                        let path = out.join(format!("{number:06}"));
                        let copied = copy_run(run, &path, &mut buffer, plan)?;
                        done.lock().map_err(|_| "a worker panicked")?.push((number, copied));
                    }
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a worker panicked")?)
    })?;
    File::open(out)?.sync_all()?;
    let mut done = done.into_inner().map_err(|_| "a worker panicked")?;
    done.sort_by_key(|(number, _)| *number);
    Ok(done.into_iter().flat_map(|(_, pieces)| pieces).collect())
}

/// Runs that fill a file each.
fn split(pieces: &[Piece]) -> Vec<&[Piece]> {
    let mut runs = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, piece) in pieces.iter().enumerate() {
        bytes += piece.len;
        if bytes >= FILE {
            runs.push(&pieces[start..=i]);
            (start, bytes) = (i + 1, 0);
        }
    }
    if start < pieces.len() {
        runs.push(&pieces[start..]);
    }
    runs
}

fn copy_run(run: &[Piece], path: &Path, buffer: &mut Buffer, plan: Plan) -> Result<Vec<Piece>> {
    let flags = if plan.direct { OFlags::DIRECT.bits() } else { 0 };
    let file = OpenOptions::new().write(true).create_new(true).custom_flags(flags.cast_signed()).open(path)?;
    let (mut written, mut filled, mut placed) = (0, 0, Vec::with_capacity(run.len()));
    let mut source: Option<(&Path, File)> = None;
    for piece in run {
        if source.as_ref().is_none_or(|(open, _)| *open != piece.file) {
            source = Some((&piece.file, File::open(&piece.file)?));
        }
        let (_, input) = source.as_ref().ok_or("no source")?;
        if filled + piece.len > buffer.len() {
            written += flush(&file, buffer, &mut filled, written, plan)?;
        }
        let place = buffer.bytes(filled, piece.len).ok_or("a blob is larger than the buffer")?;
        if piece.offset == 0 {
            let mut input = input;
            input.read_exact(place)?;
        } else {
            input.read_exact_at(place, piece.offset)?;
        }
        if plan.hash && Sha256::digest(&*place)[..] != piece.digest {
            return Err(format!("{} is not what its name says", hex::encode(piece.digest)).into());
        }
        placed.push(Piece { file: path.to_owned(), offset: written + filled as u64, len: piece.len, digest: piece.digest });
        filled += piece.len;
    }
    flush(&file, buffer, &mut filled, written, plan)?;
    file.sync_all()?;
    Ok(placed)
}

/// Writes the buffer; the last block of a direct write is padded.
fn flush(file: &File, buffer: &mut Buffer, filled: &mut usize, at: u64, plan: Plan) -> Result<u64> {
    let len = if plan.direct { filled.next_multiple_of(ALIGN) } else { *filled };
    file.write_all_at(buffer.bytes(0, len).ok_or("the buffer is full")?, at)?;
    *filled = 0;
    Ok(len as u64)
}

/// Memory that direct writes accept.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Self {
        let memory = vec![0; len + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN);
        Self { memory, start, len }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&mut self, offset: usize, len: usize) -> Option<&mut [u8]> {
        self.memory[self.start..self.start + self.len].get_mut(offset..offset + len)
    }
}
