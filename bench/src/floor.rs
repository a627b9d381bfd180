//! The floor: what the machine can do with the same bytes. One program, no network, no metadata:
//! every byte is read once from the page cache, hashed once with SHA-256, blobs side by side,
//! compared, and written into 64 MiB files that are on disk when it returns.
//!
//! Each thread reads blobs into its buffer, hashes them while they are in the cache of its core,
//! and writes the buffer. There are more threads than cores: while one waits for the disk, another
//! one hashes. Files are written past the page cache (`O_DIRECT`) where [`Plan::direct`] says so;
//! which is better depends on the disk, and `pf-bench floor` finds out.

use crate::Result;
use crate::pack::{Groups, Lanes, Piece, Promise, Source, split};
use std::fs::File;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

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
        Self { threads: 4 * crate::machine::cores(), buffer: Lanes::AsPf.buffer(), direct, hash: true }
    }
}

/// Copies `pieces` into files in `out`, in runs of consecutive pieces; returns where they now are.
pub fn copy(pieces: &[Piece], out: &Path, plan: Plan) -> Result<Vec<Piece>> {
    std::fs::create_dir_all(out)?;
    let runs: Vec<&[Piece]> = split(pieces);
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..plan.threads)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    let mut groups = Groups::new(plan.buffer, plan.hash.then_some(Lanes::AsPf));
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some(run) = runs.get(number) else { return Ok(()) };
                        let promised: Vec<Promise> = run.iter().map(|piece| piece.promise).collect();
                        let mut source = Source::default();
                        let copied = groups.pack(&out.join(format!("{number:06}")), &promised, plan.direct, &mut |range, place| {
                            source.read(&run[range], place)
                        })?;
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
