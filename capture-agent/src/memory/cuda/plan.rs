//! Plans of copies and kernels, made without a GPU: bounds, runs of bytes, batches, grids, room.

use super::super::{MemoryError, Page, Span};

/// Bytes of one batch on its way between device and ring: enough to keep the bus busy for longer
/// than a batch takes to issue.
pub(super) const BATCH: u64 = 8 << 20;
/// Bytes of the device buffer that collects small runs, one for each of the two streams.
pub(super) const STAGE: u64 = 8 << 20;
/// Runs of a stage at most; bounds its table.
pub(super) const STAGE_RUNS: usize = 16 << 10;
/// Runs that are on average shorter are collected by a kernel first: issuing one copy costs about
/// two microseconds, in which the bus moves this much.
pub(super) const SHORT_RUN: u64 = 128 << 10;
/// Bytes that one block of threads copies: longer runs are cut, so that few long ones keep the
/// whole device busy.
pub(super) const PIECE: u64 = 32 << 10;
/// Device memory for tables and stages of the calls that may run at once.
pub(super) const RESERVE: u64 = 128 << 20;

/// A run of bytes: `bytes` at `at` in the memory, `to` in the packed form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) at: u64,
    pub(super) bytes: u64,
    pub(super) to: u64,
}

/// Whether `bytes` from `offset` lie in `size`.
pub(super) fn within(offset: u64, bytes: u64, size: u64) -> Result<(), MemoryError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= size => Ok(()),
        end => Err(MemoryError::OutOfBounds { offset, end: end.unwrap_or(u64::MAX), size }),
    }
}

/// Whether every span lies in a memory of `size` bytes, and every page's bytes can be counted.
pub(super) fn check<'a>(size: u64, pages: impl Iterator<Item = &'a Page>) -> Result<(), MemoryError> {
    for page in pages {
        let mut total = 0u64;
        for span in &page.spans {
            within(span.offset, span.bytes, size)?;
            let more = total.checked_add(span.bytes);
            total = more.ok_or(MemoryError::OutOfBounds { offset: span.offset, end: u64::MAX, size })?;
        }
    }
    Ok(())
}

/// Spans packed one after another, as few runs as possible.
pub(super) fn runs(spans: impl Iterator<Item = Span>) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::new();
    let mut to = 0;
    for span in spans.filter(|span| span.bytes > 0) {
        match out.last_mut() {
            Some(last) if last.at + last.bytes == span.offset => last.bytes += span.bytes,
            _ => out.push(Run { at: span.offset, bytes: span.bytes, to }),
        }
        to += span.bytes;
    }
    out
}

/// Runs cut into pieces of at most `limit` bytes.
pub(super) fn cut(runs: &[Run], limit: u64) -> impl Iterator<Item = Run> {
    runs.iter().flat_map(move |run| {
        (0..run.bytes).step_by(limit as usize).map(move |done| Run {
            at: run.at + done,
            bytes: (run.bytes - done).min(limit),
            to: run.to + done,
        })
    })
}

/// Whether runs are copied one by one rather than collected first.
pub(super) fn directly(runs: &[Run]) -> bool {
    runs.iter().map(|run| run.bytes).sum::<u64>() >= SHORT_RUN * runs.len() as u64
}

/// Groups pieces in order so that none has more than [`STAGE`] bytes or [`STAGE_RUNS`] pieces. Each
/// group is contiguous when packed.
pub(super) fn stages(pieces: &[Run]) -> Vec<&[Run]> {
    let mut out = Vec::new();
    let mut begin = 0;
    let mut bytes = 0;
    for (i, piece) in pieces.iter().enumerate() {
        if i > begin && (bytes + piece.bytes > STAGE || i - begin == STAGE_RUNS) {
            out.push(&pieces[begin..i]);
            (begin, bytes) = (i, 0);
        }
        bytes += piece.bytes;
    }
    if begin < pieces.len() {
        out.push(&pieces[begin..]);
    }
    out
}

/// How many of these lengths make one batch: at least one, and no more than `limit` bytes
/// otherwise.
pub(super) fn batch(lengths: impl Iterator<Item = u64>, limit: u64) -> (usize, u64) {
    let (mut count, mut total) = (0, 0u64);
    for bytes in lengths {
        if count > 0 && total.saturating_add(bytes) > limit {
            break;
        }
        count += 1;
        total += bytes;
    }
    (count, total)
}

/// Blocks and threads per block for one page a thread. A page is a chain of blocks that cannot be
/// split, and about eight warps keep a multiprocessor busy: with few pages warps are left partly
/// empty rather than multiprocessors idle.
pub(super) fn sha256_grid(pages: u32, multiprocessors: u32) -> (u32, u32) {
    let threads = pages.div_ceil(multiprocessors.max(1) * 8).clamp(1, 32);
    (pages.div_ceil(threads).max(1), threads)
}

/// Whether `aside` bytes of device memory can be taken and pages of `largest` bytes copied out,
/// before anything is begun.
pub(super) fn preflight(ring: u64, free: u64, aside: u64, largest: u64) -> Result<(), MemoryError> {
    if largest > ring {
        return Err(MemoryError::NoRoom { what: "ring", needed: largest, free: ring });
    }
    let needed = aside.saturating_add(RESERVE);
    if needed > free {
        return Err(MemoryError::NoRoom { what: "GPU memory", needed, free });
    }
    Ok(())
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
