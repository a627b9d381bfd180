//! Copies between device and host: batches through the ring on two streams, so that one is filled
//! while the other is on the bus.
//!
//! Long runs are copied one by one. Many short ones would keep the bus waiting for the host: a
//! kernel packs them on the device first (or spreads them afterwards), and the packed form is
//! copied at once.

use super::super::{Deliver, MemoryError, Page, Span};
use super::driver::Device;
use super::mapped::Mapped;
use super::pinned::Region;
use super::plan::{self, BATCH, PIECE, Run, STAGE, STAGE_RUNS};
use super::stream::{Buffer, Event, Stream};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;

/// Batches under way: one on each stream, and one behind each.
const FLYING: usize = 4;

/// A stream, and where runs are packed for it.
struct Lane {
    /// The first field: drained before the stage is freed.
    stream: Stream,
    /// [`STAGE`] bytes and a table of [`STAGE_RUNS`]; made when first needed.
    stage: Option<Buffer>,
}

/// A batch on its way.
struct Batch {
    done: Event,
    region: Region,
    /// Tables, in use until `done`.
    _tables: Vec<Vec<u8>>,
    /// Pages in it.
    count: usize,
}

/// Everything under way. Fields are dropped in order: both streams are drained before any region
/// goes back to the ring.
struct Flight<'a> {
    lanes: [Lane; 2],
    flying: VecDeque<Batch>,
    begun: usize,
    memory: &'a Mapped,
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

impl<'a> Flight<'a> {
    fn new(memory: &'a Mapped) -> Result<Self, MemoryError> {
        let lane = |device: &Arc<Device>| Ok::<_, MemoryError>(Lane { stream: Stream::new(device)?, stage: None });
        let lanes = [lane(&memory.device)?, lane(&memory.device)?];
        Ok(Self { lanes, flying: VecDeque::new(), begun: 0, memory })
    }

    /// Begins copying `runs` between the memory and `region`, where they lie packed.
    fn begin(&mut self, way: Way, runs: &[Run], mut region: Region, count: usize) -> Result<(), MemoryError> {
        let lane = &mut self.lanes[self.begun % 2];
        self.begun += 1;
        let mut tables = Vec::new();
        let begun = lane.copy(way, self.memory, runs, &mut region, &mut tables);
        let done = begun.and_then(|()| lane.stream.mark());
        match done {
            Ok(done) => {
                self.flying.push_back(Batch { done, region, _tables: tables, count });
                Ok(())
            }
            Err(error) => {
                // The part that was begun must end before the region and the tables go.
                drop(lane.stream.finish());
                Err(error)
            }
        }
    }

    /// The oldest batch, when it has arrived; `None` if none is under way.
    fn land(&mut self) -> Result<Option<Batch>, MemoryError> {
        if let Some(oldest) = self.flying.front() {
            // On an error it stays where it is: its region is free only when the streams are
            // drained.
            oldest.done.wait()?;
        }
        Ok(self.flying.pop_front())
    }
}

impl Lane {
    fn copy(&mut self, way: Way, memory: &Mapped, runs: &[Run], region: &mut Region, tables: &mut Vec<Vec<u8>>) -> Result<(), MemoryError> {
        let host = region.pointer();
        if plan::directly(runs) {
            for run in runs {
                // SAFETY: the caller keeps the region until the batch is done; the run's packed
                // place lies in it, its bytes lie in the memory (checked when the call began),
                // which outlives the call.
                unsafe { self.one(way, memory.at + run.at, host.add(run.to as usize), run.bytes)? };
            }
            return Ok(());
        }
        if self.stage.is_none() {
            self.stage = Some(Buffer::new(&memory.device, STAGE + STAGE_RUNS as u64 * 24)?);
        }
        let Some(stage) = self.stage.as_ref().map(Buffer::at) else { return Ok(()) };
        let pieces: Vec<Run> = plan::cut(runs, PIECE).collect();
        for group in plan::stages(&pieces) {
            let begin = group.first().map_or(0, |run| run.to);
            let bytes = group.iter().map(|run| run.bytes).sum();
            let table = self::table(memory.at, group, begin);
            let at = stage + STAGE;
            // SAFETY: the group has at most STAGE bytes and STAGE_RUNS runs, for which the stage
            // has room, and the packed form lies in the region; stage and region outlive the
            // stream's work, the table is kept by the caller. One stage serves group after group
            // because a stream does one thing after another.
            unsafe {
                self.stream.copy_in(at, table.as_ptr(), table.len() as u64)?;
                tables.push(table);
                if way == Way::Out {
                    self.stream.copy_runs(true, at, group.len() as u32, stage)?;
                    self.one(way, stage, host.add(begin as usize), bytes)?;
                } else {
                    self.one(way, stage, host.add(begin as usize), bytes)?;
                    self.stream.copy_runs(false, at, group.len() as u32, stage)?;
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// `bytes` at both places, which outlive the stream's work.
    unsafe fn one(&self, way: Way, device: u64, host: *mut u8, bytes: u64) -> Result<(), MemoryError> {
        // SAFETY: the caller's promise.
        unsafe {
            match way {
                Way::Out => self.stream.copy_out(host, device, bytes),
                Way::In => self.stream.copy_in(device, host, bytes),
            }
        }
    }
}

/// The table of a copy kernel: addresses, lengths, offsets in the packed form from `begin`.
pub(super) fn table(at: u64, pieces: &[Run], begin: u64) -> Vec<u8> {
    let ptrs = pieces.iter().map(|run| at + run.at);
    let lens = pieces.iter().map(|run| run.bytes);
    let offsets = pieces.iter().map(|run| run.to - begin);
    ptrs.chain(lens).chain(offsets).flat_map(u64::to_le_bytes).collect()
}

/// Bytes of a batch. Most of a small ring stays free for pages that readers have not dropped yet.
fn limit(memory: &Mapped) -> u64 {
    BATCH.min(memory.ring.total() / 4)
}

/// Copies pages out.
pub(super) fn read(memory: &Mapped, pages: &[Page], deliver: &mut Deliver<'_>) -> Result<(), MemoryError> {
    plan::check(memory.size, pages.iter())?;
    if let Some(needed) = pages.iter().map(Page::bytes).find(|bytes| *bytes > memory.ring.total()) {
        return Err(MemoryError::NoRoom { what: "ring", needed, free: memory.ring.total() });
    }
    let _current = memory.device.enter()?;
    let mut flight = Flight::new(memory)?;
    let (mut next, mut landed) = (0, 0);
    loop {
        if next < pages.len() && flight.flying.len() < FLYING {
            let (mut count, bytes) = plan::batch(pages[next..].iter().map(Page::bytes), limit(memory));
            let mut region = memory.ring.try_take(bytes);
            // Never wait while our own batches occupy the ring: that could block for ever. Without
            // any, wait for readers to drop pages.
            if region.is_none() && flight.flying.is_empty() {
                count = 1;
                region = Some(memory.ring.take(pages[next].bytes())?);
            }
            if let Some(region) = region {
                let spans = pages[next..next + count].iter().flat_map(|page| page.spans.iter().copied());
                flight.begin(Way::Out, &plan::runs(spans), region, count)?;
                next += count;
                continue;
            }
        }
        let Some(Batch { region, count, .. }) = flight.land()? else { return Ok(()) };
        let lengths = pages[landed..landed + count].iter().map(Page::bytes);
        // SAFETY: the runs of the pages cover the region, and their copies are done.
        for bytes in unsafe { region.split(lengths) } {
            if !deliver(landed, bytes) {
                return Err(MemoryError::Stopped);
            }
            landed += 1;
        }
    }
}

/// Writes pages. Where targets overlap, it is not said whose bytes stay.
pub(super) fn write(memory: &Mapped, pages: &[(Page, Bytes)], after: Option<&[u8; 64]>) -> Result<(), MemoryError> {
    plan::check(memory.size, pages.iter().map(|(page, _)| page))?;
    if let Some((page, bytes)) = pages.iter().find(|(page, bytes)| page.bytes() != bytes.len() as u64) {
        return Err(MemoryError::OutOfBounds { offset: 0, end: page.bytes(), size: bytes.len() as u64 });
    }
    let limit = limit(memory);
    let parts = parts(pages, limit);
    let _current = memory.device.enter()?;
    let event = after.map(|handle| Event::open(&memory.device, handle)).transpose()?;
    let mut flight = Flight::new(memory)?;
    if let Some(event) = &event {
        for lane in &flight.lanes {
            lane.stream.after(event)?;
        }
    }
    let mut next = 0;
    loop {
        if next < parts.len() && flight.flying.len() < FLYING {
            let (count, bytes) = plan::batch(parts[next..].iter().map(|(span, _)| span.bytes), limit);
            let region = match memory.ring.try_take(bytes) {
                None if flight.flying.is_empty() => Some(memory.ring.take(bytes)?),
                other => other,
            };
            if let Some(mut region) = region {
                let batch = &parts[next..next + count];
                let mut to = 0;
                for (span, bytes) in batch {
                    region.fill(to, bytes);
                    to += span.bytes;
                }
                flight.begin(Way::In, &plan::runs(batch.iter().map(|(span, _)| *span)), region, count)?;
                next += count;
                continue;
            }
        }
        if flight.land()?.is_none() {
            // Nothing is under way; this also tells what went wrong behind the last event.
            return flight.lanes.iter().try_for_each(|lane| lane.stream.finish());
        }
    }
}

/// The spans of all pages with their bytes, none longer than `limit`.
fn parts(pages: &[(Page, Bytes)], limit: u64) -> Vec<(Span, &[u8])> {
    let mut out = Vec::new();
    for (page, bytes) in pages {
        let mut rest = &bytes[..];
        for span in &page.spans {
            let (now, later) = rest.split_at(span.bytes as usize);
            let pieces = now.chunks(limit.max(1) as usize).scan(span.offset, |at, piece| {
                let offset = *at;
                *at += piece.len() as u64;
                Some((Span { offset, bytes: piece.len() as u64 }, piece))
            });
            out.extend(pieces);
            rest = later;
        }
    }
    out
}
